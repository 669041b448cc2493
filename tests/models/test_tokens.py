"""Visibility against the papers' words, pair by pair; and the memory of earlier text.

What is seen by the real model, and what is not, is in test_leaks.py.
"""

import itertools
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.models.tokens import (
    BELOW_ALL,
    ORDERS,
    Tokens,
    counted,
    plain,
    rank_of,
    remember,
    visible,
)
from bert_jax.parity import OUTPUT, excess
from tests.models import definitions as defined
from tests.models.made import (
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

S = 10
PLACES = np.arange(S)


def row(**fields) -> Tokens:
    """One row of S tokens."""
    return random_tokens(TINY, 1, S, **fields)


def seen(tokens: Tokens, **options) -> np.ndarray:
    return np.asarray(visible(tokens, tokens, **options))[0]


# Orders that have a name.


@pytest.mark.parametrize(
    ("order", "sees"),
    [
        ("all", defined.everything),
        ("causal", defined.causal),
        ("backward", defined.right_to_left),
    ],
)
def test_named_orders(order: str, sees):
    tokens = plain(np.ones((1, S)), order=order)
    np.testing.assert_array_equal(seen(tokens), defined.table(sees, S))


@pytest.mark.parametrize("length", [1, 4, 9, 10])
def test_prefix(length: int):
    tokens = plain(np.ones((1, S)), order="prefix", prefix=[length])
    np.testing.assert_array_equal(
        seen(tokens), defined.table(defined.prefix(length), S)
    )


def test_orders_that_are_not_known():
    with pytest.raises(InputError, match="unknown order 'casual'.*Did you mean causal"):
        plain(np.ones((1, S)), order="casual")
    with pytest.raises(InputError, match="order='prefix' needs the length"):
        plain(np.ones((1, S)), order="prefix")


def test_every_row_has_its_own_prefix():
    tokens = plain(np.ones((3, S)), order="prefix", prefix=np.array([2, 7, 10]))
    for n, length in enumerate((2, 7, 10)):
        expected = defined.table(defined.prefix(length), S)
        np.testing.assert_array_equal(visible(tokens, tokens)[n], expected)


def test_unilm_by_hand():
    """[CLS] a b c [SEP] d e [SEP]: three words, then two that are to be written."""
    tokens = plain(np.ones((1, 8)), order="prefix", prefix=[3 + 2])
    by_hand = """
        11111000
        11111000
        11111000
        11111000
        11111000
        11111100
        11111110
        11111111
    """
    expected = [[letter == "1" for letter in line] for line in by_hand.split()]
    np.testing.assert_array_equal(seen(tokens), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group", [[1] * 4 + [2] * 6, [1] * 3 + [2] * 4 + [0] * 3])
def test_packing(order: str, group: list[int]):
    """Positions begin again in each example; so do the ranks made of them."""
    places = [group[:i].count(group[i]) for i in range(S)]
    sees = {
        "all": defined.everything,
        "causal": defined.causal,
        "backward": defined.right_to_left,
        "prefix": defined.prefix(2),
    }[order]
    rank = rank_of(order, jnp.array([places]), prefix=jnp.array([2]))
    tokens = row(group=group, positions=places).replace(rank=rank)
    expected = defined.table(defined.packed(group, sees, places=places), S)
    np.testing.assert_array_equal(seen(tokens), expected)
    assert 0 < expected.sum() < S * S


# Permutations.


def permutation_rank(kinds: list[str], order: list[int], half: int) -> list[int]:
    """-1 for a word, else its place in the order; the second half above the first."""
    rank = [-1 if kind == "word" else n for kind, n in zip(kinds, order, strict=True)]
    return [r if i < half else half + 1 + r for i, r in enumerate(rank)]


def random_permutation(rng, half: int) -> tuple[list[str], list[int]]:
    """Two halves, the second one ending as XLNet's rows do: <sep> <cls>."""
    kinds = rng.choice(["word", "target"], 2 * half).tolist()
    kinds[rng.integers(half)] = "functional"
    kinds[-2:] = ["functional", "functional"]
    order = [*rng.permutation(half).tolist(), *rng.permutation(half).tolist()]
    return kinds, order


def permuted(kinds: list[str], order: list[int], half: int) -> Tokens:
    rank = permutation_rank(kinds, order, half)
    return plain(np.ones((1, 2 * half))).replace(rank=jnp.array([rank]))


def test_permutation():
    rng = np.random.default_rng(0)
    for _ in range(100):
        half = int(rng.integers(2, 6))
        kinds, order = random_permutation(rng, half)
        tokens = permuted(kinds, order, half)
        for stream, strict in (("content", False), ("query", True)):
            sees = defined.permutation(kinds, order, half, stream=stream)
            expected = defined.table(sees, 2 * half)
            asked = seen(tokens, strict=strict)
            # The query stream asks at targets only.
            rows = [stream == "content" or kind == "target" for kind in kinds]
            np.testing.assert_array_equal(asked[rows], expected[rows])


def test_all_orders_of_three():
    """One half of three tokens: every order and every choice of kinds."""
    kinds_of_three = itertools.product(["word", "target", "functional"], repeat=3)
    for first in kinds_of_three:
        for order in itertools.permutations(range(3)):
            kinds = [*first, *first]
            tokens = permuted(kinds, [*order, *order], 3)
            for stream, strict in (("content", False), ("query", True)):
                sees = defined.permutation(kinds, [*order, *order], 3, stream=stream)
                rows = [stream == "content" or kind == "target" for kind in kinds]
                np.testing.assert_array_equal(
                    seen(tokens, strict=strict)[rows], defined.table(sees, 6)[rows]
                )


def test_targets_see_each_other_one_way():
    """Of two targets exactly one sees the other: no circle, so no leak."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        kinds, order = random_permutation(rng, 5)
        asked = seen(permuted(kinds, order, 5), strict=True)
        targets = [i for i, kind in enumerate(kinds) if kind == "target"]
        for i, j in itertools.product(targets, targets):
            assert asked[i, j] + asked[j, i] == (i != j)


# Memory.


@pytest.mark.parametrize("order", ["all", "causal"])
def test_memory_is_below_all(order: str):
    before = [0, 0, 1, 1, 1, 1]
    memory = remember(
        plain(np.ones((1, 6)), real=[before]), jnp.zeros((3, 1, 6, 4)), length=6
    )
    tokens = plain(np.ones((1, S)), order=order)
    sees = {"all": defined.everything, "causal": defined.causal}[order]
    expected = defined.table(defined.remembering(before, sees), S, 6)
    for strict in (False, True):
        asked = visible(tokens, memory.tokens, strict=strict)[0]
        np.testing.assert_array_equal(asked, expected)


def test_what_is_remembered():
    hidden = jnp.arange(3 * 2 * 4 * 1.0).reshape(3, 2, 4, 1)
    tokens = random_tokens(TINY, 2, 4, group=[[1, 1, 1, 1], [0, 1, 1, 1]])
    first = remember(tokens, hidden, length=3)
    np.testing.assert_array_equal(first.states, hidden[:2, :, 1:])
    np.testing.assert_array_equal(first.tokens.group, [[1, 1, 1], [1, 1, 1]])
    np.testing.assert_array_equal(first.tokens.positions, [[-3, -2, -1]] * 2)
    np.testing.assert_array_equal(first.tokens.rank, BELOW_ALL)
    np.testing.assert_array_equal(first.tokens.types, 0)
    # Longer than a piece: what was there before comes first.
    second = remember(tokens, hidden + 100, length=6, before=first)
    both = jnp.concatenate([hidden[:2, :, 2:], hidden[:2] + 100], axis=2)
    np.testing.assert_array_equal(second.states, both)
    np.testing.assert_array_equal(
        second.tokens.group, [[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1]]
    )
    np.testing.assert_array_equal(second.tokens.positions, [range(-6, 0)] * 2)
    # No more than there is; and none.
    assert remember(tokens, hidden, length=9, before=first).states.shape[2] == 7
    assert remember(tokens, hidden, length=0).states.shape[2] == 0


def cut(tokens: Tokens, start: int, stop: int) -> Tokens:
    return jax.tree.map(lambda x: x[:, start:stop], tokens)


@lru_cache
def reader(arch: Arch):
    """(params, tokens, memory) -> hidden states."""
    model = Model(arch)
    return quick_jit(
        lambda params, piece, memory: model.apply(
            {"params": params}, piece, memory=memory, capture=("hidden",)
        )["hidden"]
    )


def in_pieces(arch: Arch, params: dict, tokens: Tokens, size: int, *, length: int = 0):
    """A row read piece by piece: the hidden states put together, and the memory."""
    memory, found = None, []
    for start in range(0, tokens.ids.shape[1], size):
        piece = cut(tokens, start, start + size)
        hidden = reader(arch)(params, piece, memory)
        if length:
            memory = remember(piece, hidden, length=length, before=memory)
        found.append(hidden)
    return jnp.concatenate(found, axis=2), memory


MEMBERS = {
    "layer": TRANSFORMER_XL,
    "shared": TRANSFORMER_XL | dict(position_biases="shared"),
    "clipped": TRANSFORMER_XL | dict(max_distance=4),
    "pre": TRANSFORMER_XL | dict(norm_place="pre"),
    "xlnet": XLNET | dict(order="causal"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_two_passes_equal_one(name: str):
    arch = TINY.but(**MEMBERS[name])
    params = drawn_params(arch)
    # Memory has type 0; what comes after it may have any.
    types = [0] * 6 + [0, 1, 1, 0, 1, 1]
    tokens = random_tokens(arch, 2, 12, types=types)
    whole, _ = in_pieces(arch, params, tokens, 12)
    found, _ = in_pieces(arch, params, tokens, 6, length=6)
    assert excess(found, whole, **OUTPUT) <= 1
    # Without the memory the second half is another.
    alone, _ = in_pieces(arch, params, tokens, 6)
    assert excess(alone[:, :, :6], whole[:, :, :6], **OUTPUT) <= 1
    assert np.abs(alone - whole)[1:, :, 6:].max((1, 2, 3)).min() > 0.01


def test_memory_longer_than_a_piece():
    arch = TINY.but(**TRANSFORMER_XL)
    params = drawn_params(arch)
    tokens = random_tokens(arch, 2, 12, group=[[1] * 12, [0] * 4 + [1] * 8])
    whole, _ = in_pieces(arch, params, tokens, 12)
    found, memory = in_pieces(arch, params, tokens, 4, length=8)
    real = np.asarray(tokens.group) > 0
    assert excess(found[:, real], whole[:, real], **OUTPUT) <= 1
    assert memory.states.shape == (2, 2, 8, arch.width)


def test_memory_that_is_cut():
    """With one layer, reading on with a memory of 5 is reading the last 5 again."""
    arch = TINY.but(**TRANSFORMER_XL, layers=1)
    params = drawn_params(arch)
    tokens = random_tokens(arch, 2, 12)
    found, _ = in_pieces(arch, params, tokens, 4, length=5)
    again, _ = in_pieces(arch, params, cut(tokens, 3, 12), 9)
    assert excess(found[:, :, 8:], again[:, :, 5:], **OUTPUT) <= 1


def test_queries_read_the_memory():
    """Two streams: the second half of a row in an order of its own, with memory."""
    arch = TINY.but(**XLNET)
    params, model = drawn_params(arch), Model(arch)
    kinds = ["target", "word", "word", "target", "functional", "target"]
    order = [4, 0, 5, 1, 3, 2]
    types = [0] * 6 + [0, 1, 0, 1, 1, 1]
    rank = permutation_rank(["word"] * 6 + kinds, [*range(6), *order], 6)
    tokens = random_tokens(arch, 2, 12, types=types, rank=rank)
    where = jnp.array([[0, 3, 5], [5, 0, 3]])

    @quick_jit
    def run(params):
        streams = dict(streams=2, capture=("hidden", "query"))
        whole = model.apply({"params": params}, tokens, where=where + 6, **streams)
        first, second = cut(tokens, 0, 6), cut(tokens, 6, 12)
        hidden = model.apply({"params": params}, first, capture=("hidden",))["hidden"]
        memory = remember(first, hidden, length=6)
        after = model.apply(
            {"params": params}, second, where=where, memory=memory, **streams
        )
        return whole, after

    whole, after = run(params)
    assert excess(after["query"], whole["query"], **OUTPUT) <= 1
    assert excess(after["hidden"], whole["hidden"][:, :, 6:], **OUTPUT) <= 1


@pytest.mark.parametrize("way", ["remember", "model"])
def test_memory_has_no_gradient(way: str):
    arch = TINY.but(**TRANSFORMER_XL)
    params, model = drawn_params(arch), Model(arch)
    tokens = random_tokens(arch, 1, 8)
    first, second = cut(tokens, 0, 4), cut(tokens, 4, 8)
    vectors = jnp.asarray(params["embed"]["token"])[tokens.ids]

    @quick_jit
    def gradients(vectors):
        def piece(part, vectors, memory=None):
            given = part.replace(vectors=vectors)
            return model.apply(
                {"params": params}, given, memory=memory, capture=("hidden",)
            )["hidden"]

        def in_two(vectors):
            hidden = piece(first, vectors[:, :4])
            memory = remember(first, hidden, length=4)
            if way == "model":  # it does not let one through, whoever made the memory
                memory = memory.replace(states=hidden[:-1])
            return jnp.sin(piece(second, vectors[:, 4:], memory)[-1]).sum()

        def in_one(vectors):
            return jnp.sin(piece(tokens, vectors)[-1, :, 4:]).sum()

        return jax.grad(in_two)(vectors), jax.grad(in_one)(vectors)

    two, one = (np.abs(g).max((0, 2)) for g in gradients(vectors))
    np.testing.assert_array_equal(two[:4], 0.0)
    assert two[4:].min() > 1e-4
    assert one.min() > 1e-4


def test_what_is_remembered_has_no_gradient():
    tokens = random_tokens(TINY, 1, 4)

    def total(hidden):
        return jnp.sin(remember(tokens, hidden, length=3).states).sum()

    hidden = jnp.asarray(probe((3, 1, 4, 24)))
    np.testing.assert_array_equal(jax.grad(total)(hidden), 0.0)


@pytest.mark.parametrize("choices", [{}, NEZHA, LONGFORMER])
def test_memory_needs_relative_positions(choices: dict):
    arch = TINY.but(**choices)
    tokens = random_tokens(arch, 1, 4)
    memory = remember(tokens, jnp.zeros((3, 1, 4, 24)), length=4)
    with pytest.raises(InputError, match="memory needs arch.position='xl'"):
        Model(arch).apply({"params": drawn_params(arch)}, tokens, memory=memory)


# Windows.


def test_window_and_global_tokens():
    rng = np.random.default_rng(2)
    for size in (2, 4, 6, 20):
        for _ in range(10):
            reach = (rng.random(S) < 0.2).astype(int).tolist()
            expected = defined.table(defined.window(size, reach), S)
            found = seen(row(reach=reach), window=size)
            np.testing.assert_array_equal(found, expected)


def test_window_without_global_tokens():
    expected = defined.table(defined.window(4, [0] * S), S)
    np.testing.assert_array_equal(seen(row(), window=4), expected)
    assert not expected.all()


def test_window_in_a_packed_row():
    """A global token reaches through its own example only."""
    group = [1, 1, 1, 1, 2, 2, 2, 2, 2, 0]
    reach = [1, 0, 0, 0, 0, 0, 1, 0, 0, 1]
    places = [0, 1, 2, 3, 0, 1, 2, 3, 4, 0]
    tokens = row(group=group, reach=reach, positions=places)
    sees = defined.packed(group, defined.window(2, reach))
    np.testing.assert_array_equal(seen(tokens, window=2), defined.table(sees, S))


def test_window_and_order():
    """Both hold: a causal window sees its past, and no more of it than half."""
    reach = [0, 1, 0, 0, 0, 0, 0, 1, 0, 0]
    tokens = row(reach=reach, rank=PLACES)
    near, past = (
        defined.table(sees, S) for sees in (defined.window(4, reach), defined.causal)
    )
    np.testing.assert_array_equal(seen(tokens, window=4), near & past)


# How rows are made.


def test_plain():
    tokens = plain([[7, 8, 9]])
    for name, expected in dict(
        ids=[7, 8, 9],
        types=[0, 0, 0],
        positions=[0, 1, 2],
        group=[1, 1, 1],
        rank=[0, 0, 0],
    ).items():
        field = getattr(tokens, name)
        np.testing.assert_array_equal(field, [expected])
        assert field.dtype == jnp.int32
    assert tokens.reach is tokens.task is tokens.vectors is None
    given = plain(
        [[7, 8, 9]],
        types=[[0, 1, 1]],
        real=[[True, True, False]],
        order="causal",
        positions=[4, 5, 6],
    )
    np.testing.assert_array_equal(given.types, [[0, 1, 1]])
    np.testing.assert_array_equal(given.group, [[1, 1, 0]])
    np.testing.assert_array_equal(given.rank, [[4, 5, 6]])


def test_counted():
    real = [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    found = counted(np.array(real) > 0)
    assert found[0, :3].tolist() == found[1, 2:].tolist() == [0, 1, 2]
    assert found[2].tolist() == [0, 1, 2, 3, 4]
    # Padding reads the row of padding: 2 - 1 in RoBERTa.
    np.testing.assert_array_equal(np.asarray(found)[np.array(real) == 0], -1)


def test_tokens_at_places():
    tokens = random_tokens(TINY, 2, S, reach=PLACES % 2)
    where = np.array([[3, 0, 9], [5, 5, 1]])
    some = tokens.at(jnp.asarray(where))
    for name in ("ids", "types", "positions", "reach"):
        field = np.asarray(getattr(tokens, name))
        expected = [field[b, where[b]] for b in range(2)]
        np.testing.assert_array_equal(getattr(some, name), expected)
    assert some.task is None
    # The vectors of a place are its content, which a query may not have.
    assert tokens.replace(vectors=jnp.zeros((2, S, 24))).at(where).vectors is None
