"""No token looks where it may not: exact zeros of the gradient, and a slow oracle.

The outputs at q are differentiated with respect to the vector of each token k. The
derivative is exactly 0 if k is not visible to q, and not 0 if it is.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.models.tokens import Tokens, plain, remember, visible
from tests.models import definitions as defined
from tests.models.made import (
    GPT2,
    LONGFORMER,
    NEZHA,
    TINY,
    TRANSFORMER_XL,
    XLNET,
    drawn_params,
    probe,
    quick_jit,
    random_tokens,
)
from tests.models.test_tokens import permutation_rank
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


# Members with rules of their own, and the queries of XLNet.


@lru_cache
def jacobian_of(arch: Arch, capture: tuple[str, ...], streams: int):
    """(tokens, where) -> how much each output at q moves with the vector of k."""
    model, params = Model(arch), drawn_params(arch)
    mix = jnp.asarray(probe((arch.width,), seed=1))

    @quick_jit
    def compute(tokens, where):
        def scores(vectors):
            given = tokens.replace(vectors=vectors)
            out = model.apply(
                {"params": params}, given, where=where, streams=streams, capture=capture
            )
            asked = set(out) - set(capture)
            return {name: jnp.sin(out[name][0]) @ mix for name in asked}

        vectors = jnp.asarray(probe((1, tokens.ids.shape[1], arch.table_width)))
        jacobian = jax.jacrev(scores)(vectors)  # each [S_q, 1, S_k, E]
        return jax.tree.map(lambda leaf: jnp.abs(leaf[:, 0]).max(-1), jacobian)

    return compute


def influence(
    arch: Arch, tokens: Tokens, *, where=None, capture: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Of the last state at q, and of the query at `where`: [S_q, S_k]."""
    streams = 1 if where is None else 2
    return jax.device_get(jacobian_of(arch, capture, streams)(tokens, where))


def assert_hears(size: np.ndarray, may: np.ndarray) -> None:
    assert np.isfinite(size).all()
    np.testing.assert_array_equal(size[~may], 0.0)
    assert size[may].min() > 1e-7


KINDS = ["word", "target", "functional", "target", "word"]
KINDS += ["target", "word", "target", "functional", "functional"]
ORDER = [3, 0, 2, 4, 1, 2, 0, 4, 1, 3]
TARGETS = [place for place, kind in enumerate(KINDS) if kind == "target"]
LEFT_TO_RIGHT = dict(
    gpt2=GPT2, nezha=NEZHA | dict(order="causal"), transformer_xl=TRANSFORMER_XL
)


@pytest.mark.parametrize("name", LEFT_TO_RIGHT)
def test_left_to_right(name: str):
    """Two texts in a row: learned, functional and relative positions, both norms."""
    arch = TINY.but(**LEFT_TO_RIGHT[name])
    group = [1] * 6 + [2] * 4
    places = [*range(6), *range(4)]
    tokens = random_tokens(arch, 1, 10, group=group, positions=places, rank=places)
    sees = defined.packed(group, defined.causal)
    may = defined.table(sees, 10) | np.eye(10, dtype=bool)
    assert_hears(influence(arch, tokens)["last"], may)


@pytest.fixture(scope="module")
def permuted() -> dict[str, np.ndarray]:
    """Half a row is 5 tokens; the rank is that of test_tokens.py."""
    arch = TINY.but(**XLNET, layers=3)
    rank = permutation_rank(KINDS, ORDER, 5)
    tokens = random_tokens(arch, 1, 10, rank=rank)
    return influence(arch, tokens, where=jnp.array([TARGETS]))


def test_permuted_content(permuted):
    sees = defined.permutation(KINDS, ORDER, 5, stream="content")
    assert_hears(permuted["last"], defined.table(sees, 10))


def test_permuted_queries(permuted):
    """A query hears what its target may see, and of the target itself nothing."""
    sees = defined.permutation(KINDS, ORDER, 5, stream="query")
    assert_hears(permuted["query"], defined.table(sees, 10)[TARGETS])
    for row, place in enumerate(TARGETS):
        assert permuted["query"][row, place] == 0.0
        assert permuted["last"][place, place] > 1e-3


def test_an_order_without_the_shift_would_leak():
    """Two halves with ranks of their own: the first hears the second."""
    arch = TINY.but(**XLNET, layers=3)
    rank = [r if r < 5 else r - 6 for r in permutation_rank(KINDS, ORDER, 5)]
    tokens = random_tokens(arch, 1, 10, rank=rank)
    size = influence(arch, tokens, where=jnp.array([TARGETS]))
    sees = defined.permutation(KINDS, ORDER, 5, stream="query")
    assert size["query"][~defined.table(sees, 10)[TARGETS]].max() > 1e-3


WINDOWS = {
    "near": dict(reach=[0] * 14),
    "global": dict(reach=[0] * 4 + [1] + [0] * 9),
    "packed": dict(
        reach=[0] * 8 + [1] + [0] * 5, group=[1] * 8 + [2] * 5 + [0], split=8
    ),
}


@pytest.mark.parametrize("kernel", ["window", "dense"])
@pytest.mark.parametrize("name", WINDOWS)
def test_window(name: str, kernel: str):
    """Two layers hear twice as far; through a global token, everything."""
    arch = TINY.but(**LONGFORMER | dict(window=4))
    fields = dict(group=[1] * 14, split=14) | WINDOWS[name]
    group, reach, split = fields["group"], fields["reach"], fields["split"]
    places = [*range(split), *range(14 - split)]
    tokens = random_tokens(arch, 1, 14, group=group, reach=reach, positions=places)
    seen = defined.table(defined.packed(group, defined.window(4, reach)), 14)
    may = defined.through_layers(seen, 2)
    assert name != "near" or (may & ~seen).any()
    capture = ("attentions",) if kernel == "dense" else ()
    assert_hears(influence(arch, tokens, capture=capture)["last"], may)


@pytest.mark.parametrize("order", ["all", "causal"])
def test_memory_is_heard_where_it_is_real(order: str):
    """It has no gradient, so each state is changed instead."""
    arch = TINY.but(**TRANSFORMER_XL | dict(order=order), layers=1)
    model, params = Model(arch), drawn_params(arch)
    before = [0, 0, 1, 1, 2]  # padding, this text, another
    group = [1, 1, 1, 2, 2, 0]
    tokens = random_tokens(arch, 1, 6, group=group)
    memory = remember(
        random_tokens(arch, 1, 5, group=before),
        jnp.asarray(probe((2, 1, 5, arch.width))),
        length=5,
    )
    read = quick_jit(
        lambda memory: model.apply({"params": params}, tokens, memory=memory)["last"]
    )
    plain_states = np.asarray(read(memory))[0]
    for k in range(5):
        states = memory.states.at[:, :, k].add(1.0)
        moved = np.asarray(read(memory.replace(states=states)))[0]
        change = np.abs(moved - plain_states).max(-1)  # [S_q]
        may = np.array([g > 0 and g == before[k] for g in group])
        np.testing.assert_array_equal(change[~may], 0.0)
        assert (change[may] > 1e-3).all()
