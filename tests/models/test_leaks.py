"""No token looks where it may not: exact zeros of the gradient, and a slow oracle.

The outputs at q are differentiated with respect to the vector of each token k. The
derivative is exactly 0 if k is not visible to q, and not 0 if it is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.models.tokens import Tokens, plain, visible
from tests.reference import QUICK, ours_from, reference_model

S = 9
ARCH = Arch(
    vocab_size=50, width=24, layers=2, heads=2, inner=40, max_positions=16, types=2
)
WHOLE = [1] * S
PREFIX = [max(0, place - 4 + 1) for place in range(S)]  # four words, then one by one
# name: (group, rank) of a row
LAYOUTS = {
    "bert": (WHOLE, [0] * S),
    "padding": ([1] * 6 + [0] * 3, [0] * S),
    "padding-left": ([0] * 2 + [1] * 7, [0] * S),
    "packed": ([1, 1, 1, 2, 2, 3, 3, 3, 3], [0] * S),
    "packed-and-padding": ([1, 1, 2, 2, 2, 2, 0, 0, 0], [0] * S),
    "groups-that-alternate": ([1, 2, 1, 2, 1, 2, 3, 3, 0], [0] * S),
    "only-padding": ([0] * S, [0] * S),
    "causal": (WHOLE, list(range(S))),
    "right-to-left": (WHOLE, [-place for place in range(S)]),
    "prefix": (WHOLE, PREFIX),
    "packed-causal": ([1, 1, 1, 1, 2, 2, 2, 0, 0], [0, 1, 2, 3, 0, 1, 2, 0, 1]),
    "permuted": ([1] * 8 + [0], [3, 1, 7, 0, 2, 6, 5, 4, -1]),
    "equal-ranks": (WHOLE, [0, 0, 2, 2, 2, 1, 1, 3, 3]),
}


def oracle(group: list[int], rank: list[int]) -> np.ndarray:
    """Read off the definition, pair by pair: bool [S_q, S_k]."""
    seen = np.zeros((S, S), bool)
    for q in range(S):
        for k in range(S):
            if group[q] != 0 and group[q] == group[k] and rank[k] <= rank[q]:
                seen[q, k] = True
    return seen


def reachable(seen: np.ndarray) -> np.ndarray:
    """Who can influence whom: through any number of layers, and each itself."""
    return seen | np.eye(S, dtype=bool)


def tokens_of(group: list[int], rank: list[int]) -> Tokens:
    rng = np.random.default_rng(0)
    return plain(rng.integers(5, 50, (1, S))).replace(
        group=jnp.array([group]), rank=jnp.array([rank])
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_visible_is_the_definition(name: str):
    tokens = tokens_of(*LAYOUTS[name])
    np.testing.assert_array_equal(visible(tokens, tokens)[0], oracle(*LAYOUTS[name]))


def test_visible_of_random_rows():
    rng = np.random.default_rng(1)
    for _ in range(50):
        group = rng.integers(0, 4, S).tolist()
        rank = rng.integers(-3, 4, S).tolist()
        tokens = tokens_of(group, rank)
        np.testing.assert_array_equal(visible(tokens, tokens)[0], oracle(group, rank))


def test_rank_orders_what_is_seen():
    """The definition gives what each named order is known for."""
    ones = np.ones((S, S), bool)
    assert (oracle(*LAYOUTS["causal"]) == np.tril(ones)).all()
    assert (oracle(*LAYOUTS["right-to-left"]) == np.triu(ones)).all()
    prefix = np.tril(ones)
    prefix[:4, :4] = True
    assert (oracle(*LAYOUTS["prefix"]) == prefix).all()
    assert oracle(*LAYOUTS["bert"]).all()


@pytest.fixture(scope="module")
def params() -> dict:
    return ours_from(reference_model(ARCH), ARCH)


@pytest.fixture(scope="module")
def derivative(params):
    """(group, rank) -> how much the outputs at q move with the vector of k: [q, k]."""
    model = Model(ARCH)
    mix = jax.random.normal(jax.random.key(0), (ARCH.vocab_size,))
    vectors = jax.random.normal(jax.random.key(1), (1, S, ARCH.width))

    def compute(params, tokens):
        def scores(vectors):
            given = tokens.replace(vectors=vectors)
            logits = model.apply({"params": params}, given, heads=("lm",))["lm"]
            return logits[0, :, : ARCH.vocab_size] @ mix  # [S_q]

        jacobian = jax.jacrev(scores)(vectors)  # [S_q, 1, S_k, D]
        return jnp.abs(jacobian[:, 0]).max(-1)

    compiled = jax.jit(compute, compiler_options=QUICK)
    return lambda group, rank: np.asarray(compiled(params, tokens_of(group, rank)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_derivative_is_zero_where_hidden_only(derivative, name: str):
    size = derivative(*LAYOUTS[name])
    may = reachable(oracle(*LAYOUTS[name]))
    assert np.isfinite(size).all()
    np.testing.assert_array_equal(size[~may], 0.0)
    assert size[may].min() > 1e-6


def test_a_leak_would_be_seen(derivative):
    """With the last token of a packed example put in the next group it is not 0."""
    group, rank = LAYOUTS["packed"]
    wrong = [*group[:2], 2, *group[3:]]
    may = reachable(oracle(group, rank))
    assert derivative(wrong, rank)[~may].max() > 1e-6


def test_vectors_replace_the_look_up(params):
    tokens = tokens_of(*LAYOUTS["packed"])
    table = jnp.asarray(params["embed"]["token"])
    given = tokens.replace(vectors=table[tokens.ids], ids=tokens.ids * 0)
    model = Model(ARCH)
    run = jax.jit(
        lambda p, t: model.apply({"params": p}, t)["last"], compiler_options=QUICK
    )
    np.testing.assert_array_equal(run(params, tokens), run(params, given))
    assert np.abs(
        run(params, tokens) - run(params, tokens.replace(ids=given.ids))
    ).max()
