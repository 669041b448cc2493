"""What can be learnt is learnt, and what cannot is not: hidden and replaced pieces."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest

from bert_jax.models.model import Model, init_params
from bert_jax.objectives.base import Objective
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.replaced_token import ReplacedToken
from bert_jax.step import TrainState, make_train_step
from tests.models.made import TINY, XL, quick_jit
from tests.objectives.made import counting

MASK = 20  # behind the twenty pieces of a text
VOCAB = (21, MASK, (MASK,))
ARCH = TINY.but(
    **XL,
    **dict(vocab_size=21, width=32, inner=64, layers=1, types=0, init_std=0.2),
    **dict(dropout=0.0, attention_dropout=0.0),
)
MASKED = dict(hide=1.0, randomise=0.0, next_sentence=0.0)
CASES = {  # and steps; two towers, of which one is to outwit the other, need more
    "token": (MaskedLM(*VOCAB, **MASKED), 100),
    "word": (MaskedLM(*VOCAB, **MASKED, choose="word"), 100),
    "span": (MaskedLM(*VOCAB, **MASKED, choose="span", boundary=1.0), 100),
    "replaced": (ReplacedToken(*VOCAB, hide=1.0, generator=0.25), 140),
}


def learnt(of: Objective, steps: int) -> list[dict[str, float]]:
    """The means of the last twenty steps of a short training: on rows that count, and
    on the same pieces in any order."""
    model, optimizer = Model(ARCH, towers=of.towers(ARCH)), optax.adam(1e-2)
    step = quick_jit(make_train_step(model, of, optimizer))
    fresh = init_params(model, jax.random.key(0), heads=of.heads)
    found = []
    for shuffled in (False, True):
        state = TrainState(jnp.int32(0), fresh, optimizer.init(fresh), jnp.uint32(0))
        last = []
        for number in range(steps):
            rows = counting(32, 16, seed=number, shuffled=shuffled)
            state, means = step(state, rows)
            last = [*last[-19:], means]
        sums = jax.tree.map(lambda *each: sum(each), *last)
        found.append({name: float(mean.value) for name, mean in sums.items()})
    return found


@pytest.mark.parametrize("name", CASES)
def test_counting_is_learnt_and_nothing_of_what_was_shuffled(name):
    """By every part of the loss; by chance it is 1 piece in 20, and none is found."""
    of, steps = CASES[name]
    counted, shuffled = learnt(of, steps)
    enough = 0.9
    if name == "replaced":  # its generator is narrow, and leaves something to find
        enough = 0.3
        assert counted["replaced_token_recall"] > 0.5
        assert counted["replaced_token_precision"] > 0.7
        assert shuffled["replaced_token_recall"] < 0.1
    for part in ("masked_lm", "boundary"):
        if f"{part}_loss" in of.weights:
            assert counted[f"{part}_accuracy"] > enough
            assert shuffled[f"{part}_accuracy"] < 0.1
            assert shuffled[f"{part}_loss"] > 0.97 * math.log(20)
