"""What hides things from the model, compiled for four chips: none asks another."""

import dataclasses

import numpy as np
import pytest

from bert_jax.data.similar import Similar
from bert_jax.objectives import OBJECTIVES
from tests.tpu import run_for_tpu

PROGRAM = """
import json
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from bert_jax.objectives import OBJECTIVES
from bert_jax.step import row_keys
from tests.objectives.test_tpu import CASES, decided
from tests.reference import collectives_in, shardings

topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
whole, split = shardings(topology.devices)
B, S, G = 16, 128, 8
shapes = dict.fromkeys(
    ("ids", "types", "positions", "group", "words", "phrases", "word_id"), (B, S)
)
shapes |= dict.fromkeys(("row_id", "epoch", "continues"), (B,))
shapes |= dict.fromkeys(("first", "next_sentence", "label"), (B, G))
shapes["tags"] = (B, S)
batch = {
    name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=split)
    for name, shape in shapes.items()
}
found = {}
for name, (kind, fields) in CASES.items():
    objective = OBJECTIVES[kind](**decided(kind), **fields)

    def corrupt(batch):
        return objective.corrupt(row_keys(jax.random.key(0), batch["row_id"]), batch)

    # Results that come with another placement would have to be moved.
    text = jax.jit(corrupt, out_shardings=split).lower(batch).compile().as_text()
    assert "num_partitions=4" in text
    found[name] = sorted(collectives_in(text))
print(json.dumps(found))
"""
CASES = {
    "tokens": ("masked_lm", {}),
    "words": ("masked_lm", {"choose": "word"}),
    "n-grams": ("masked_lm", {"choose": "ngram"}),
    "similar words": ("masked_lm", {"choose": "macbert", "replace": "similar"}),
    "spans": ("masked_lm", {"choose": "span", "replace": "run", "boundary": 1.0}),
    "phrases": ("masked_lm", {"choose": "word", "unit": "phrases"}),
    "replaced tokens": ("replaced_token", {}),
    "permutations": ("permuted_lm", {}),
    "backwards": ("causal_lm", {"direction": "backward"}),
    "unilm": ("unilm", {}),
    "capitals": ("capitalisation", {}),
    "again": ("token_document", {}),
    "reordering": ("sentence_reordering", {}),
    "distance": ("sentence_distance", {}),
}


def decided(kind: str) -> dict:
    """What the tokenizer decides, for an objective of that name."""
    table = None
    fields = {field.name for field in dataclasses.fields(OBJECTIVES[kind])}
    if kind == "masked_lm":
        words, near = 50, 4
        table = Similar(
            tokenizer="",
            words="spaces",
            names=("word",) * (words - 1),
            pieces=np.ones((words, 2), np.int32),
            sizes=np.ones(words, np.int32),
            near=np.ones((words, near), np.int32),
        )
    known = dict(vocab_size=1000, mask_id=4, special_ids=(0, 1, 2, 3, 4))
    small = tuple(n + 100 if 100 <= n < 200 else n for n in range(1000))
    known |= dict(small=small, table=table)
    return {name: value for name, value in known.items() if name in fields}


@pytest.mark.slow
def test_no_chip_asks_another():
    assert {kind for kind, _ in CASES.values()} == {*OBJECTIVES} - {
        *("classify", "tag", "discourse_relation", "ir_relevance")  # hide nothing
    }
    assert run_for_tpu(PROGRAM) == {name: [] for name in CASES}
