"""Relative positions against the papers' formulas, written out as loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.models.attention import attend
from bert_jax.models.model import Model
from bert_jax.models.positions import (
    distance_vectors,
    functional_table,
    shift,
    type_scores,
    xl_scores,
)
from bert_jax.parity import OUTPUT, excess
from tests.models.made import (
    NEZHA,
    TINY,
    TRANSFORMER_XL,
    XLNET,
    drawn_params,
    probe,
    quick_jit,
    random_tokens,
)

EXACT = dict(rtol=0, atol=1e-6)


# Transformer-XL and XLNet.


@pytest.mark.parametrize(
    ("length", "memory"), [(1, 0), (2, 0), (5, 0), (5, 3), (4, 9), (1, 4)]
)
def test_shift(length: int, memory: int):
    """Query i at place memory + i, key j: the score of their distance."""
    keys = memory + length
    by_distance = probe((2, 3, length, keys + length))
    found = shift(jnp.asarray(by_distance), keys, None)
    assert found.shape == (2, 3, length, keys)
    for i in range(length):
        for j in range(keys):
            distance = memory + i - j
            column = keys - distance  # the first one is the farthest: keys
            np.testing.assert_array_equal(
                found[:, :, i, j], by_distance[:, :, i, column]
            )


@pytest.mark.parametrize("memory", [0, 4])
def test_shift_at_some_places(memory: int):
    length, keys = 6, 6 + memory
    by_distance = probe((2, 3, 4, keys + length))
    where = np.array([[5, 0, 2, 2], [1, 3, 4, 0]])
    found = shift(jnp.asarray(by_distance), keys, jnp.asarray(where))
    for b in range(2):
        for n in range(4):
            for j in range(keys):
                column = keys - (memory + where[b, n] - j)
                np.testing.assert_array_equal(
                    found[b, :, n, j], by_distance[b, :, n, column]
                )


def test_shift_of_all_places_in_order():
    by_distance = jnp.asarray(probe((2, 3, 5, 13)))
    where = jnp.broadcast_to(jnp.arange(5), (2, 5))
    np.testing.assert_array_equal(
        shift(by_distance, 8, where), shift(by_distance, 8, None)
    )


def sinusoid(distance: int, width: int) -> list[float]:
    """Sines, then cosines."""
    rates = [1 / 10000 ** (2 * i / width) for i in range(width // 2)]
    sines = [math.sin(distance * rate) for rate in rates]
    return sines + [math.cos(distance * rate) for rate in rates]


@pytest.mark.parametrize("limit", [0, 3])
def test_distance_vectors(limit: int):
    """From the farthest key before to the farthest behind: none is missing."""
    arch = TINY.but(**TRANSFORMER_XL, max_distance=limit)
    found = distance_vectors(arch, asking=4, answering=7)
    distances = [7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3]
    if limit:
        distances = [3, 3, 3, 3, 3, 2, 1, 0, -1, -2, -3]
    expected = [sinusoid(distance, arch.width) for distance in distances]
    np.testing.assert_allclose(found, expected, **EXACT)


@pytest.mark.parametrize("where", [None, [[3, 0], [1, 4]]])
def test_xl_scores(where):
    """u·k_j + (q_i + v)·r_{i-j}, pair by pair."""
    B, S, M, H, K = 2, 5, 3, 2, 4
    keys = S + M
    places = np.tile(np.arange(S), (B, 1)) if where is None else np.array(where)
    q, k = probe((B, places.shape[1], H, K)), probe((B, keys, H, K), seed=1)
    r = probe((keys + S, H, K), seed=2)  # of distance `keys` first
    u, v = probe((H, K), seed=3), probe((H, K), seed=4)
    found = xl_scores(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(r),
        (jnp.asarray(u), jnp.asarray(v)),
        where=None if where is None else jnp.asarray(places),
    )
    assert found.shape == (B, H, places.shape[1], keys)
    for b, h, n, j in np.ndindex(found.shape):
        distance = M + places[b, n] - j
        expected = u[h] @ k[b, j, h] + (q[b, n, h] + v[h]) @ r[keys - distance, h]
        assert found[b, h, n, j] == pytest.approx(expected, abs=1e-5)


def test_type_scores():
    """(q_i + s)·t: t is another where the types differ."""
    q, bias, both = probe((2, 3, 2, 4)), probe((2, 4), seed=1), probe((2, 2, 4), seed=2)
    differs = np.random.default_rng(3).random((2, 3, 5)) < 0.5
    found = type_scores(
        jnp.asarray(q),
        (jnp.asarray(bias), jnp.asarray(both)),
        differs=jnp.asarray(differs),
    )
    for b, h, i, j in np.ndindex(found.shape):
        expected = (q[b, i, h] + bias[h]) @ both[int(differs[b, i, j]), h]
        assert found[b, h, i, j] == pytest.approx(expected, abs=1e-5)
    assert 0 < differs.sum() < differs.size


# NEZHA.


@pytest.mark.parametrize("limit", [2, 64])
def test_functional_table(limit: int):
    """Sine and cosine in turn, at the index 0..2M that the clipped distance has."""
    arch = TINY.but(**NEZHA | dict(max_distance=limit))
    found = np.asarray(functional_table(arch, 7))
    K = arch.head_size
    assert found.shape == (7, 7, K)
    for i in range(7):
        for j in range(7):
            index = min(max(j - i, -limit), limit) + limit
            for n in range(K // 2):
                angle = index / 10000 ** (2 * n / K)
                assert found[i, j, 2 * n] == pytest.approx(math.sin(angle), abs=1e-5)
                assert found[i, j, 2 * n + 1] == pytest.approx(
                    math.cos(angle), abs=1e-5
                )


def test_functional_table_depends_on_the_distance_only():
    found = np.asarray(functional_table(TINY.but(**NEZHA), 9))
    for i in range(8):
        np.testing.assert_array_equal(found[i, :-1], found[i + 1, 1:])
    # Beyond the limit of 3 all are one; before it no two are.
    for j in range(3, 9):
        np.testing.assert_array_equal(found[0, j], found[0, 3])
    rows = [found[4, j] for j in range(1, 8)]
    for a in range(7):
        for b in range(a):
            assert np.abs(rows[a] - rows[b]).max() > 0.1


def test_functional_attention():
    """softmax((q·k + q·a) / √K) (v + a), as loops, with a token that is hidden."""
    B, S, H, K = 2, 6, 2, 12
    q, k, v = (probe((B, S, H, K), seed=n) for n in range(3))
    a = functional_table(TINY.but(**NEZHA), S)
    seen = np.random.default_rng(4).random((B, S, S)) < 0.7
    seen[0, 2] = False  # sees nothing: zeros
    mixed, probabilities = attend(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(v),
        visible=jnp.asarray(seen),
        bias=jnp.einsum("bqhk,qsk->bhqs", q, a),
        relative=a,
    )
    a = np.asarray(a, np.float64)
    for b, i, h in np.ndindex(B, S, H):
        places = np.flatnonzero(seen[b, i])
        scores = [q[b, i, h] @ (k[b, j, h] + a[i, j]) / K**0.5 for j in places]
        exact = np.exp(scores) / max(np.exp(scores).sum(), 1e-30)
        values = [v[b, j, h] + a[i, j] for j in places]
        expected = sum((p * x for p, x in zip(exact, values, strict=True)), np.zeros(K))
        np.testing.assert_allclose(mixed[b, i, h], expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(
            probabilities[b, h, i, places], exact, rtol=0, atol=1e-6
        )
    np.testing.assert_array_equal(mixed[0, 2], 0.0)


# The whole model.


def attentions(arch, tokens, **options) -> np.ndarray:
    model, params = Model(arch), drawn_params(arch)
    run = quick_jit(
        lambda tokens: model.apply(
            {"params": params}, tokens, capture=("attentions",), **options
        )["attentions"]
    )
    return np.asarray(run(tokens))


@pytest.mark.parametrize("name", ["xl", "functional"])
def test_relative_positions_do_not_count_from_the_start(name: str):
    """A text after padding is the same text: only distances matter."""
    member = dict(xl=XLNET, functional=NEZHA)[name]
    arch = TINY.but(**member)
    assert arch.max_length is None
    model, params = Model(arch), drawn_params(arch)
    tokens = random_tokens(arch, 1, 8)
    moved = jax.tree.map(lambda x: jnp.roll(x, 5, axis=1), random_tokens(arch, 1, 13))
    moved = jax.tree.map(lambda x, y: x.at[:, 5:].set(y), moved, tokens)
    moved = moved.replace(group=moved.group.at[:, :5].set(0))
    run = quick_jit(lambda tokens: model.apply({"params": params}, tokens)["last"])
    assert excess(run(moved)[:, 5:], run(tokens), **OUTPUT) <= 1


def test_queries_stand_where_their_tokens_do():
    """In whichever order they are asked, they answer the same."""
    arch = TINY.but(**XLNET)
    model, params = Model(arch), drawn_params(arch)
    tokens = random_tokens(arch, 1, 8, rank=[2, 5, 0, 7, 1, 3, 6, 4])

    @quick_jit
    def ask(where):
        asks = dict(where=where, streams=2)
        return model.apply({"params": params}, tokens, **asks)["query"][0]

    found = ask(jnp.array([[0, 3, 6]]))
    assert (
        excess(ask(jnp.array([[6, 0, 3]])), found[jnp.array([2, 0, 1])], **OUTPUT) <= 1
    )
    assert np.abs(found[0] - found[1]).max() > 0.01


def test_functional_positions_beyond_the_table():
    """600 tokens, where the learned table of BERT ends at 512."""
    arch = TINY.but(**NEZHA, layers=1)
    found = attentions(arch, random_tokens(arch, 1, 600))
    np.testing.assert_allclose(found.sum(-1), 1.0, atol=1e-4)


@pytest.mark.parametrize("limit", [2, 5])
def test_clipped_distances_cannot_be_told_apart(limit: int):
    """The same piece at two places farther than the limit is seen alike."""
    arch = TINY.but(**TRANSFORMER_XL | dict(max_distance=limit), layers=1)
    tokens = random_tokens(arch, 1, 10)
    tokens = tokens.replace(ids=jnp.full_like(tokens.ids, 7))
    found = attentions(arch, tokens)[0, 0, :, 9]  # [H, S_k] of the last token
    far = found[:, : 10 - limit]
    np.testing.assert_allclose(far, far[:, :1].repeat(10 - limit, 1), rtol=1e-5)
    assert np.abs(np.diff(found[:, 9 - limit :], axis=1)).min() > 1e-5
