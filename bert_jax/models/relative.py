"""Relative positions and types inside of flash attention (positions.py: "xl").

    score of query i and key j = (q + u)·k_j + (q + v)·r_{i-j} + e [types differ]
    e = (q + s)·(t₁ - t₀): what is the same for all keys, (q + s)·t₀, changes no softmax

(Dai et al. 2019, arXiv:1901.02860; Yang et al. 2019, arXiv:1906.08237). The vectors r
of all distances stand in a row, the farthest key before first, so that query i finds
key j in column Q - i + j: 128 queries and a block of keys need one stretch of them. Of
its scores, [128, keys + 128], row i is slid by i. That is a rotation of the lanes by
one step more in each row: nothing is gathered, and what the scores of all distances
would take never leaves the chip.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from bert_jax.models.products import BY_KEYS, BY_SIZE, LANES, PLAIN, product

BIASES = 3  # rows of what a layer has learned: u, v and s, and then
TABLE = slice(3, 5)  # t₀ and t₁, where there are types


class Relative(NamedTuple):
    """What a layer adds for distances and types."""

    r: jax.Array  # [S_k + S, H, K], projected sinusoids: see positions.py
    learned: jax.Array  # [2 or 5, H, K]

    @classmethod
    def of(cls, r: jax.Array, biases, types=None) -> "Relative":
        """Of u and v, and of s and t [2, H, K]: see positions.py."""
        rows = [row[None] for row in biases]
        if types is not None:
            rows += [types[0][None], types[1]]
        return cls(r, jnp.concatenate(rows))


class Asked(NamedTuple):
    """What the queries of a head ask of words, of places and of types, [Q, K]."""

    words: jax.Array
    places: jax.Array | None = None
    types: jax.Array | None = None

    @classmethod
    def by(cls, q: jax.Array, learned: jax.Array) -> "Asked":
        rows = [learned[n : n + 1] for n in range(min(BIASES, len(learned)))]
        asked = [(q + row).astype(q.dtype) for row in rows]
        return cls(*asked)


def stretches(i, j, *, queries: int, blocks: tuple[int, int]) -> list:
    """Of r, for each 128 queries of block i and the keys of block j."""
    bq, bk = blocks
    last = queries - i * bq + j * bk
    return [
        pl.ds(pl.multiple_of(last - n, LANES), bk + LANES)
        for n in range(LANES, bq + LANES, LANES)
    ]


def relative_scores(at, lanes: slice, asked: Asked, pairs) -> jax.Array:
    """[S, Q] of the head in these lanes."""
    s = product(at.k[:, lanes], asked.words, BY_SIZE)
    by_place = [
        slide(product(asked.places[rows], at.r[stretch, lanes], BY_SIZE)).T
        for rows, stretch in zip(tiles(len(asked.places)), pairs.there, strict=True)
    ]
    s += jnp.concatenate(by_place, axis=1)
    if asked.types is not None:
        table = at.learned[TABLE, lanes].astype(asked.types.dtype)
        same, other = jnp.split(product(table, asked.types, BY_SIZE), 2)  # [1, Q]
        s += jnp.where(pairs.differs, other - same, 0.0)
    return s


def relative_gradients(
    at, lanes: slice, asked: Asked, pairs, ds: jax.Array
) -> jax.Array:
    """That of q, [Q, K], from that of the scores, [S, Q]; adds those of r and of what
    is learned to their sums."""
    kind = asked.words.dtype
    by = [product(ds.astype(kind), at.k[:, lanes], BY_KEYS)]
    by_place = []
    for rows, stretch in zip(tiles(len(asked.places)), pairs.there, strict=True):
        back = unslide(ds[:, rows].T).astype(kind)  # [128, S + 128]
        by_place.append(product(back, at.r[stretch, lanes], PLAIN))
        at.dr[stretch, lanes] += product(back, asked.places[rows], BY_KEYS)
    by.append(jnp.concatenate(by_place, axis=0))
    if asked.types is not None:
        de = jnp.where(pairs.differs, ds, 0.0).sum(0, keepdims=True)  # [1, Q]
        de = jnp.concatenate([-de, de]).astype(kind)
        table = at.learned[TABLE, lanes].astype(kind)
        by.append(product(de, table, BY_KEYS))
        at.d_learned[TABLE, lanes] += product(de, asked.types, PLAIN)
    for n, part in enumerate(by):
        at.d_learned[n : n + 1, lanes] += part.sum(0, keepdims=True)
    return sum(by)


def tiles(length: int) -> list[slice]:
    return [slice(n, n + LANES) for n in range(0, length, LANES)]


def slide(x: jax.Array) -> jax.Array:
    """[128, n + 128] -> [128, n]: in column c of row i, column 128 + c - i of x."""
    here, before = x[:, LANES:], x[:, :-LANES]
    picked = jnp.where(stays(here.shape[1]), here, before)
    parts = [rotate(picked[:, lanes], 1) for lanes in tiles(here.shape[1])]
    return jnp.concatenate(parts, axis=1)


def unslide(x: jax.Array) -> jax.Array:
    """[128, n] -> [128, n + 128]: its transpose. What slid in from nowhere is 0."""
    back = [rotate(x[:, lanes], -1) for lanes in tiles(x.shape[1])]
    none = [jnp.zeros_like(back[0])]
    here, before = (jnp.concatenate(p, axis=1) for p in (none + back, back + none))
    return jnp.where(stays(here.shape[1]), here, before)


def stays(width: int) -> jax.Array:
    """Whether a row's rotation by its number keeps a lane within its 128."""
    row = jax.lax.broadcasted_iota(jnp.int32, (LANES, width), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, width), 1) % LANES
    return lane < LANES - row


def rotate(x: jax.Array, step: int) -> jax.Array:
    """[128, 128], row i by i lanes, to the right or (-1) to the left."""
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.take_along_axis(x, (lane - step * row) % LANES, axis=1)
