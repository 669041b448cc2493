"""What hides things from the model, and what draws pieces to put in their place,
compiled for eight devices of this machine and for four chips: none asks another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.similar import Similar
from bert_jax.objectives import OBJECTIVES
from bert_jax.objectives.replaced_token import put, sample
from bert_jax.step import row_keys
from tests.reference import collectives_in, shardings
from tests.tpu import run_for_tpu

PROGRAM = """
import json
from jax.experimental import topologies
from tests.objectives.test_tpu import CASES, asked_of_others

devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
print(json.dumps({name: asked_of_others(name, devices) for name in CASES}))
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


def asked_of_others(name: str, devices: list) -> list[str]:
    """The collectives in what is compiled for these devices."""
    kind, fields = CASES[name]
    objective = OBJECTIVES[kind](**decided(kind), **fields)
    _, split = shardings(devices)
    B, S, G = 16, 128, 8
    shapes = dict.fromkeys(("ids", "types", "positions", "group", "tags"), (B, S))
    shapes |= dict.fromkeys(("words", "phrases", "word_id"), (B, S))
    shapes |= dict.fromkeys(("row_id", "epoch", "continues"), (B,))
    shapes |= dict.fromkeys(("first", "next_sentence", "label"), (B, G))
    batch = {
        column: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=split)
        for column, shape in shapes.items()
    }

    def corrupt(batch):
        out = objective.corrupt(row_keys(jax.random.key(0), batch["row_id"]), batch)
        if kind != "replaced_token":
            return out
        # A generator that is nearly sure of what is right.
        logits = 9.0 * jax.nn.one_hot(out["targets"], 1024)
        ids, replaced = put(sample(logits, out["draws"]), out)
        return {**out, "put": ids, "replaced": replaced}

    # Results that come with another placement would have to be moved.
    text = jax.jit(corrupt, out_shardings=split).lower(batch).compile().as_text()
    assert f"num_partitions={len(devices)}" in text
    return sorted(collectives_in(text))


@pytest.mark.parametrize("name", CASES)
def test_no_device_asks_another(name: str):
    assert asked_of_others(name, jax.devices()) == []


@pytest.mark.slow
def test_no_chip_asks_another():
    assert {kind for kind, _ in CASES.values()} == {*OBJECTIVES} - {
        *("classify", "tag", "discourse_relation", "ir_relevance")  # hide nothing
    }
    assert run_for_tpu(PROGRAM) == {name: [] for name in CASES}
