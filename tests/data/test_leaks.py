"""No prediction sees what it must not, on rows as training has them.

Each prediction of a corrupted row is differentiated with respect to the vector of every
token: exactly 0 outside of its own example, not 0 inside. Which example a token belongs
to is read off the plan by the slow oracle of test_rows.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.plans import KINDS
from bert_jax.data.rows import Rows
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, init_params
from bert_jax.models.tokens import Tokens
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.step import row_keys
from tests.data.made import joined
from tests.data.test_rows import slow_row

LENGTH = 64
ARCH = Arch(
    vocab_size=100,
    width=24,
    layers=2,
    heads=2,
    inner=40,
    max_positions=64,
    init_std=0.3,
)


@pytest.fixture(scope="module")
def influence():
    """A function: |d prediction / d vector| of a batch of one row, [P, S]."""
    model = Model(ARCH)
    params = init_params(model, jax.random.key(0), heads=("lm",))
    mix = jax.random.normal(jax.random.key(1), (100,))

    @jax.jit
    def jacobian(batch):
        def predictions(vectors):
            tokens = Tokens(
                *(batch[name] for name in ("ids", "types", "positions", "group")),
                rank=jnp.zeros_like(batch["ids"]),
                vectors=vectors,
            )
            out = model.apply(
                {"params": params}, tokens, where=batch["where"], heads=("lm",)
            )
            return out["lm"][0, :, :100] @ mix

        vectors = params["embed"]["token"][batch["ids"]]
        return jnp.abs(jax.jacrev(predictions)(vectors)[:, 0]).max(-1)

    return jacobian


def corrupted(objective: MaskedLM, batch: dict) -> dict:
    keys = row_keys(jax.random.key(0), jnp.arange(len(batch["ids"])))
    arrays = {name: jnp.asarray(column) for name, column in batch.items()}
    return jax.device_get(objective.corrupt(keys, arrays))


def objective_of(tokenizer, **changes) -> MaskedLM:
    settings = {"next_sentence": 0.0, **changes}
    return MaskedLM(100, tokenizer.mask_id, tokenizer.special_ids, **settings)


@pytest.mark.parametrize("across", ["attend", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prediction_sees_its_own_example(kind, across, corpus, encoded, influence):
    rows = Rows(corpus, kind, LENGTH, across=across)
    ids = joined(joined(encoded))
    begins = {"words": [True] * len(ids)}
    groups = [
        np.array(slow_row(rows, n, ids, begins)["group"]) for n in range(len(rows))
    ]
    # The rows with the most examples in them.
    chosen = sorted(range(len(rows)), key=lambda n: -groups[n].max())[:3]
    hidden = seen = 0
    for n in chosen:
        clean = rows.build([n], [rows.read(n, n + 1)], 1)
        batch = corrupted(objective_of(corpus.tokenizer), clean)
        found = influence(
            {k: batch[k] for k in ("ids", "types", "positions", "group", "where")}
        )
        for slot in np.flatnonzero(batch["weights"][0]):
            own = groups[n] == groups[n][batch["where"][0, slot]]
            assert (found[slot][~own] == 0).all()
            assert (found[slot][own] > 0).all()
            hidden, seen = hidden + (~own).sum(), seen + own.sum()
    assert seen > 50
    crosses = kind in ("full", "stream") and across == "attend"
    assert hidden > 50 or crosses or kind == "sentences"


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_does_not_show(kind, corpus):
    """With every target hidden, other targets leave the corrupted row as it is."""
    rows = Rows(corpus, kind, LENGTH)
    clean = rows.build(range(20), [rows.read(0, 20)] * 20, 20)
    objective = objective_of(corpus.tokenizer, hide=1.0, randomise=0.0)
    one = corrupted(objective, clean)
    other = {**clean, "ids": clean["ids"].copy()}
    for row, (where, weights) in enumerate(
        zip(one["where"], one["weights"], strict=True)
    ):
        places = where[weights > 0]
        other["ids"][row, places] = 5 + (other["ids"][row, places] - 4) % 95
    two = corrupted(objective, other)
    assert (one["targets"] != two["targets"])[one["weights"] > 0].all()
    np.testing.assert_array_equal(one["ids"], two["ids"])
