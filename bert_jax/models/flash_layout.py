"""How the arrays of flash attention are cut for its kernels.

A kernel runs once for each place of a grid: a row, a group of heads, a block of queries
and one of keys. What it takes and gives goes by names; the kind of each array says what
of it belongs to a place, and what a mesh splits.
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.models.products import LANES


class Case(NamedTuple):
    """What the kernels know when they are compiled."""

    queries: int  # Q and S of the row, as dropout counts them
    keys: int
    first: int  # number of the first query here
    size: int  # K
    blocks: tuple[int, int]  # queries and keys of a block
    window: int | None
    rate: float
    interpret: bool
    relative: bool = False  # positions, and
    types: bool = False
    numbered: bool = False  # queries bring the numbers that dropout counts them by

    @property
    def unit(self) -> float:
        """What q kᵀ is multiplied with for a score in powers of two."""
        return self.size**-0.5 * math.log2(math.e)


class Kind(NamedTuple):
    """Of an array of the kernels."""

    block: str  # what of it belongs to a place in the grid: see Layout
    axes: str  # those that a mesh splits: b rows, h heads


NUMBERS, HEADS = Kind("numbers", "b."), Kind("numbers", "h")
ASKS, ANSWERS = Kind("asks", "b.."), Kind("answers", "b..")
BY_QUERY, BY_KEY, SUMS = Kind("q", "b.h"), Kind("k", "b.h"), Kind("sums", "bh.")
ALL_QUERIES, R, LEARNED = Kind("all q", "b.h"), Kind("r", ".h"), Kind("learned", ".h")
# Added up over the rows of a device, of which there are as many as `b` has parts.
OF_R, OF_LEARNED = Kind("of r", "b.h"), Kind("of learned", "b.h")


def taken(case: Case) -> dict[str, Kind]:
    """What the forward kernel takes."""
    words = dict(seeds=NUMBERS, heads=HEADS, asks=ASKS, answers=ANSWERS)
    words |= dict(q=BY_QUERY, k=BY_KEY, v=BY_KEY)
    return words | (dict(r=R, learned=LEARNED) if case.relative else {})


def taken_back(case: Case) -> dict[str, Kind]:
    """What the backward kernel takes."""
    return taken(case) | dict(log_sum=SUMS, delta=SUMS, d_out=BY_QUERY)


GIVEN = dict(out=BY_QUERY, log_sum=SUMS)


def given_back(case: Case) -> dict[str, Kind]:
    """The gradients."""
    words = dict(dq=ALL_QUERIES, dk=BY_KEY, dv=BY_KEY)
    return words | (dict(dr=OF_R, d_learned=OF_LEARNED) if case.relative else {})


def axes(kinds: dict[str, Kind]) -> tuple[str, ...]:
    return tuple(kind.axes for kind in kinds.values())


class Layout(NamedTuple):
    """How one device's arrays are cut: a place in the grid is a row, a group of heads,
    a block of queries and one of keys. With relative positions the rows of a group of
    heads follow each other, and what is added up over them stays on the chip."""

    grid: tuple[int, int, int, int]
    together: int  # heads of a group: as few as fill the lanes
    blocks: dict[str, pl.BlockSpec]  # that belong to a place, by kind of array

    @classmethod
    def of(cls, case: Case, at: SimpleNamespace, *, last: str) -> "Layout":
        """The blocks of `last`, queries or keys, change with each step."""
        (B, Q, D), S, K, (bq, bk) = at.q.shape, at.k.shape[1], case.size, case.blocks
        H = D // K
        full = (n for n in range(1, H) if H % n == 0 and n * K % LANES == 0)
        n = next(full, H)
        grid, lanes = order_of(case, (B, H // n, Q // bq, S // bk), last=last), n * K
        turn = lambda place: lambda *steps: place(*order_of(case, steps, last=last))  # noqa: E731
        kinds = {
            "asks": ((None, at.asks.shape[1], bq), lambda b, h, i, j: (b, 0, i)),
            "answers": ((None, at.answers.shape[1], bk), lambda b, h, i, j: (b, 0, j)),
            "q": ((None, bq, lanes), lambda b, h, i, j: (b, i, h)),
            "k": ((None, bk, lanes), lambda b, h, i, j: (b, j, h)),
            "sums": ((None, None, n, bq), lambda b, h, i, j: (b, h, 0, i)),
            "all q": ((None, Q, lanes), lambda b, h, i, j: (b, 0, h)),
        }
        if case.relative:
            T, rows = len(at.r), len(at.learned)
            kinds |= {
                "r": ((T, lanes), lambda b, h, i, j: (0, h)),
                "learned": ((rows, lanes), lambda b, h, i, j: (0, h)),
                "of r": ((None, T, lanes), lambda b, h, i, j: (0, 0, h)),
                "of learned": ((None, rows, lanes), lambda b, h, i, j: (0, 0, h)),
            }
        blocks = {
            kind: pl.BlockSpec(shape, turn(place))
            for kind, (shape, place) in kinds.items()
        }
        if case.relative:  # it stays the same for long: nothing is copied ahead
            blocks["r"] = dataclasses.replace(blocks["r"], pipeline_mode=pl.Buffered(1))
        return cls(grid, n, blocks | {"numbers": pl.BlockSpec(memory_space=pltpu.SMEM)})

    def specs(self, kinds: dict[str, Kind]) -> tuple[pl.BlockSpec, ...]:
        return tuple(self.blocks[kind.block] for kind in kinds.values())


def order_of(case: Case, steps: tuple, *, last: str) -> tuple:
    """Row, heads, queries and keys in the order of the grid, and back again."""
    b, h, i, j = steps
    b, h = (h, b) if case.relative else (b, h)
    return (b, h, j, i) if last == "queries" else (b, h, i, j)


def scratch(*shapes: tuple[int, ...]) -> tuple:
    return tuple(pltpu.VMEM(shape, jnp.float32) for shape in shapes)


def steps(*kinds: str) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=kinds)


def cost(case: Case, q, k, *, products: int, slid: int, moved: int) -> pl.CostEstimate:
    """For the compiler, and for bert_jax/estimate.py, if no block is passed by. Those
    that are slid have 128 distances more than keys."""
    (B, Q, D), S = q.shape, k.shape[1]
    blocks = products * S
    if case.relative:
        blocks += slid * (S + LANES * (S // case.blocks[1]))
    return pl.CostEstimate(
        flops=2 * B * Q * blocks * D,
        transcendentals=B * Q * S * D // case.size,
        bytes_accessed=moved * B * (Q + S) // 2 * D * q.dtype.itemsize,
    )
