"""Flash attention for the whole family: memory linear in length, on a TPU.

A block of queries meets the keys block by block; what is kept of all that it met is its
largest score m, the sum of exp(score - m), and the values mixed by it. From L, the
logarithm of the whole sum, the backward pass finds each block's probabilities again:

    p = exp(q kᵀ / √K - L)      do = gradient of out      dv = dropout(p)ᵀ do
    ds = p (dropout(do vᵀ) - Σ do · out)      dq = ds k / √K      dk = dsᵀ q / √K

(Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691). Who sees whom is worked
out in each block from group and rank, and blocks in which nothing is seen are passed
by. Dropout has the bits that `attend` draws for the same row, head, query and key.

In the kernels scores stand with keys down and queries across, [S, Q], so that what is
kept of a query takes one lane. As many heads as fill the lanes go through together,
from arrays as the projections leave them, [B, S, H K]. Powers are those of 2, and what
dropout multiplies with is left to the ends of sums: the vector unit has the most to do.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.models.arch import Arch
from bert_jax.models.dropout import Noise, mix
from bert_jax.models.linear import keep
from bert_jax.models.tokens import Tokens
from bert_jax.placing import on_tpu, over_rows_and_heads

FLASH_FROM = 256  # tokens of a row that it takes less time for: docs/flash.md
LANES = 128
BLOCK = 512  # the most queries, and keys, of a block
QUERIES = 4096  # the most of one kernel: it keeps the gradients of all on the chip
LEAST = -1e9  # where m starts: any real score is more
HIDDEN = -1e30  # exp(HIDDEN - m) is exactly 0, also where nothing is seen
NOBODY = 2**30  # group and rank of keys that are padding
PLAIN = (((1,), (0,)), ((), ()))  # a b
BY_KEYS = (((0,), (0,)), ((), ()))  # aᵀ b
BY_SIZE = (((1,), (1,)), ((), ()))  # a bᵀ
product = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)


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

    @property
    def unit(self) -> float:
        """What q kᵀ is multiplied with for a score in powers of two."""
        return self.size**-0.5 * math.log2(math.e)


def takes_flash(arch: Arch, *, length: int) -> bool:
    """Whether rows of this length go through here."""
    if arch.attention != "auto":
        return arch.attention == "flash"
    return arch.position == "learned" and on_tpu() and length >= FLASH_FROM


def attend_flash(
    q: jax.Array,  # [B, Q, H, K]
    k: jax.Array,  # [B, S, H, K]
    v: jax.Array,
    *,
    asking: Tokens,  # [B, Q]
    answering: Tokens,  # [B, S]
    strict: bool = False,
    window: int | None = None,
    rate: float = 0.0,
    noise: Noise | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """The mixed values [B, Q, H, K] of `attend`, for what `visible` says."""
    (B, Q, H, K), S = q.shape, k.shape[1]
    bq, bk = (block_of(length, most=block) for length in (Q, S))
    asks = about(asking, rank=asking.rank - strict, padding=0, block=bq)
    answers = about(answering, rank=answering.rank, padding=NOBODY, block=bk)
    q, k, v = (
        fill(x.reshape(B, -1, H * K), axis=1, block=size)
        for x, size in zip((q, k, v), (bq, bk, bk), strict=True)
    )
    seeds = jnp.zeros((B, 2), jnp.uint32)
    if noise is None:
        rate = 0.0
    else:  # see dropout
        a, b = noise.seed
        seeds = jnp.stack([mix(noise.rows, a, b), mix(noise.rows, b, a)], axis=1)
    heads = jnp.arange(H, dtype=jnp.uint32)
    parts, most = [], max(1, QUERIES // bq) * bq
    for first in range(0, Q, most):
        there = slice(first, first + most)
        case = Case(Q, S, first, K, (bq, bk), window, rate, interpret=not on_tpu())
        asked = (asks[:, :, there], answers, q[:, there], k, v)
        parts.append(flash(case, seeds, heads, *asked))
    return jnp.concatenate(parts, axis=1)[:, :Q].reshape(B, Q, H, K)


def block_of(length: int, *, most: int) -> int:
    """The size of the blocks that a length is cut into: all alike, in whole lanes."""
    return pl.cdiv(pl.cdiv(length, pl.cdiv(length, most)), LANES) * LANES


def fill(x: jax.Array, *, axis: int, block: int, value: int = 0) -> jax.Array:
    """x, up to a whole number of blocks."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths, constant_values=value)


def about(tokens: Tokens, *, rank: jax.Array, padding: int, block: int) -> jax.Array:
    """What decides who sees whom, [B, 3, S]."""
    fields = jnp.stack([tokens.group, rank, tokens.positions], axis=1)
    real = (tokens.group > 0)[:, None]
    fields = jnp.where(real, fields, padding)
    return fill(fields, axis=2, block=block, value=padding)


def on_each_device(run, case: Case, arrays, takes, gives):
    sizes = {"b": arrays[0].shape[0], "h": arrays[1].shape[0]}
    split = over_rows_and_heads(partial(run, case), takes, gives, sizes=sizes)
    return split(*arrays)


# Axes of seeds, heads, asks, answers, q, k, v that a mesh splits: b rows, h heads.
TAKES = ("b.", "h", "b..", "b..", "b.h", "b.h", "b.h")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash(case: Case, *arrays: jax.Array) -> jax.Array:
    return flash_forward(case, *arrays)[0]


def flash_forward(case: Case, *arrays):
    out, log_sum = on_each_device(forward, case, arrays, TAKES, ("b.h", "bh."))
    out, log_sum = keep(out), keep(log_sum)  # else the backward pass runs it again
    return out, (arrays, out, log_sum)


def flash_backward(case: Case, saved, d_out):
    arrays, out, log_sum = saved
    H = log_sum.shape[1]
    # Σ over the size of each head, which the matrix unit takes the least time for.
    heads = jnp.repeat(jnp.eye(H, dtype=out.dtype), case.size, axis=1)  # [H, D]
    delta = jnp.einsum(
        "hd,bqd->bhq", heads, d_out * out, preferred_element_type=jnp.float32
    )
    delta = delta * (1.0 - case.rate)  # kernels scale at their ends
    arrays = (*arrays, log_sum, delta, d_out)
    takes, gives = (*TAKES, "bh.", "bh.", "b.h"), ("b.h", "b.h", "b.h")
    gradients = on_each_device(backward, case, arrays, takes, gives)
    return None, None, None, None, *gradients


flash.defvjp(flash_forward, flash_backward)


class Layout(NamedTuple):
    """How one device's arrays are cut: a place in the grid is a row, a group of heads,
    a block of queries and one of keys."""

    grid: tuple[int, int, int, int]
    together: int  # heads of a group: as few as fill the lanes
    blocks: dict[str, pl.BlockSpec]  # that belong to a place, by kind of array

    @classmethod
    def of(cls, case: Case, q: jax.Array, k: jax.Array, *, last: str) -> "Layout":
        """The blocks of `last`, queries or keys, change with each step."""
        (B, Q, D), S, K, (bq, bk) = q.shape, k.shape[1], case.size, case.blocks
        H = D // K
        full = (n for n in range(1, H) if H % n == 0 and n * K % LANES == 0)
        n = next(full, H)
        grid, turn = (B, H // n, Q // bq, S // bk), lambda place: place
        if last == "queries":
            grid = (B, H // n, S // bk, Q // bq)
            turn = lambda place: lambda b, h, j, i: place(b, h, i, j)  # noqa: E731
        kinds = {
            "asks": ((None, 3, bq), lambda b, h, i, j: (b, 0, i)),
            "answers": ((None, 3, bk), lambda b, h, i, j: (b, 0, j)),
            "q": ((None, bq, n * K), lambda b, h, i, j: (b, i, h)),
            "k": ((None, bk, n * K), lambda b, h, i, j: (b, j, h)),
            "sums": ((None, None, n, bq), lambda b, h, i, j: (b, h, 0, i)),
            "all q": ((None, Q, n * K), lambda b, h, i, j: (b, 0, h)),
        }
        blocks = {
            kind: pl.BlockSpec(shape, turn(place))
            for kind, (shape, place) in kinds.items()
        }
        return cls(grid, n, blocks | {"numbers": pl.BlockSpec(memory_space=pltpu.SMEM)})

    def specs(self, *kinds: str) -> tuple[pl.BlockSpec, ...]:
        return tuple(self.blocks[kind] for kind in kinds)


ARGUMENTS = ("numbers", "numbers", "asks", "answers", "q", "k", "k")


def forward(case: Case, seeds, heads, asks, answers, q, k, v):
    """On one device: out [B, Q, H K], and L [B, H, Q], to base 2."""
    layout = Layout.of(case, q, k, last="keys")
    (B, Q, D), n, bq = q.shape, layout.together, case.blocks[0]
    sums = jax.ShapeDtypeStruct((B, layout.grid[1], n, Q), jnp.float32)
    out, log_sum = pl.pallas_call(
        partial(forward_kernel, case),
        grid=layout.grid,
        in_specs=layout.specs(*ARGUMENTS),
        out_specs=layout.specs("q", "sums"),
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), sums),
        scratch_shapes=scratch((n, bq), (n, bq), (n, case.size, bq)),
        compiler_params=steps("parallel", "parallel", "parallel", "arbitrary"),
        cost_estimate=cost(case, q, k, products=2, moved=4),
        interpret=case.interpret,
        name="flash_forward",
    )(seeds, heads, asks, answers, q, k, v)
    return out, log_sum.reshape(B, D // case.size, Q)


def forward_kernel(case: Case, *refs):
    seeds, heads, asks, answers, q, k, v, out, log_sum, top, total, mixed = refs
    b, h, i, j = (pl.program_id(axis) for axis in range(4))

    @pl.when(j == 0)
    def begin():
        top[...] = jnp.full_like(top, LEAST)
        total[...] = jnp.zeros_like(total)
        mixed[...] = jnp.zeros_like(mixed)

    @pl.when(may_see(asks, answers))
    def meet():
        seen = sees(case, asks, answers)
        for n, lanes in enumerate(lanes_of(case, q)):
            s = scores(case, q[:, lanes], k[:, lanes], seen)  # [S, Q]
            one = slice(n, n + 1)
            m = jnp.maximum(top[one], s.max(0, keepdims=True) * case.unit)  # [1, Q]
            p, fade = jnp.exp2(s * case.unit - m), jnp.exp2(top[one] - m)
            top[one] = m
            total[one] = total[one] * fade + p.sum(0, keepdims=True)
            if case.rate:
                stays = kept(case, seeds, heads, b, h * top.shape[0] + n, i, j)
                p = jnp.where(stays, p, 0.0)
            there = product(v[:, lanes], p.astype(v.dtype), BY_KEYS)  # [K, Q]
            mixed[n] = mixed[n] * fade + there

    @pl.when(j == pl.num_programs(3) - 1)
    def end():
        real = total[...] > 0
        safe = jnp.where(real, total[...], 1.0)
        log_sum[...] = jnp.where(real, top[...] + jnp.log2(safe), 0.0)
        for n, lanes in enumerate(lanes_of(case, q)):
            scale = 1.0 / (safe[n : n + 1] * (1.0 - case.rate))
            out[:, lanes] = (mixed[n] * scale).T.astype(out.dtype)


def backward(case: Case, seeds, heads, asks, answers, q, k, v, log_sum, delta, d_out):
    """On one device: the gradients of q, k and v."""
    layout = Layout.of(case, q, k, last="queries")
    (B, Q, _), n, bk = q.shape, layout.together, case.blocks[1]
    log_sum, delta = (x.reshape(B, -1, n, Q) for x in (log_sum, delta))
    lanes = n * case.size
    return pl.pallas_call(
        partial(backward_kernel, case),
        grid=layout.grid,
        in_specs=layout.specs(*ARGUMENTS, "sums", "sums", "q"),
        out_specs=layout.specs("all q", "k", "k"),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)),
        scratch_shapes=scratch((Q, lanes), (bk, lanes), (bk, lanes)),
        compiler_params=steps("parallel", "parallel", "arbitrary", "arbitrary"),
        cost_estimate=cost(case, q, k, products=5, moved=7),
        interpret=case.interpret,
        name="flash_backward",
    )(seeds, heads, asks, answers, q, k, v, log_sum, delta, d_out)


def backward_kernel(case: Case, *refs):
    seeds, heads, asks, answers, q, k, v, log_sum, delta, d_out, *rest = refs
    dq, dk, dv, dq_sum, dk_sum, dv_sum = rest
    b, h, j, i = (pl.program_id(axis) for axis in range(4))
    scale = 1.0 / (1.0 - case.rate)
    here = pl.ds(pl.multiple_of(i * case.blocks[0], LANES), case.blocks[0])

    @pl.when(j == 0)
    def begin():
        dq_sum[here] = jnp.zeros_like(q, jnp.float32)

    @pl.when(i == 0)
    def begin_keys():
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when(may_see(asks, answers))
    def meet():
        seen = sees(case, asks, answers)
        for n, lanes in enumerate(lanes_of(case, q)):
            one = slice(n, n + 1)
            s = scores(case, q[:, lanes], k[:, lanes], seen)  # [S, Q]
            p = jnp.exp2(s * case.unit - log_sum[one])
            dp = product(v[:, lanes], d_out[:, lanes], BY_SIZE)
            dropped = p
            if case.rate:
                stays = kept(case, seeds, heads, b, h * log_sum.shape[0] + n, i, j)
                dropped, dp = jnp.where(stays, p, 0.0), jnp.where(stays, dp, 0.0)
            ds = (p * (dp - delta[one])).astype(q.dtype)
            dv_sum[:, lanes] += product(dropped.astype(q.dtype), d_out[:, lanes], PLAIN)
            dk_sum[:, lanes] += product(ds, q[:, lanes], PLAIN)
            dq_sum[here, lanes] += product(ds, k[:, lanes], BY_KEYS)

    @pl.when(i == pl.num_programs(3) - 1)
    def end_keys():
        dk[...] = (dk_sum[...] * scale * case.size**-0.5).astype(dk.dtype)
        dv[...] = (dv_sum[...] * scale).astype(dv.dtype)

    @pl.when(j == pl.num_programs(2) - 1)
    def end():
        dq[here] = (dq_sum[here] * scale * case.size**-0.5).astype(dq.dtype)


def may_see(asks, answers) -> jax.Array:
    """Whether any query of a block may see any of its keys: False only if none does."""
    (group, rank), (groups, ranks) = ((x[0:1], x[1:2]) for x in (asks, answers))
    together = (groups.min() <= group.max()) & (group.min() <= groups.max())
    return together & (ranks.min() <= rank.max())


def sees(case: Case, asks, answers) -> jax.Array:
    """bool [S, Q] of a block: as `visible`."""
    group, rank, place = (asks[n : n + 1] for n in range(3))  # [1, Q]
    answers = answers[...].T
    groups, ranks, places = (answers[:, n : n + 1] for n in range(3))  # [S, 1]
    seen = (groups == group) & (ranks <= rank)
    if case.window is not None:
        seen &= jnp.abs(places - place) <= case.window // 2
    return seen


def lanes_of(case: Case, q) -> list[slice]:
    """Where each head of a group stands."""
    return [slice(n, n + case.size) for n in range(0, q.shape[1], case.size)]


def scores(case: Case, q, k, seen) -> jax.Array:
    return jnp.where(seen, product(k, q, BY_SIZE), HIDDEN)


def kept(case: Case, seeds, heads, b, h, i, j) -> jax.Array:
    """Which of a block's probabilities dropout keeps, [S, Q]."""
    bq, bk = case.blocks
    query = case.first + i * bq + jax.lax.broadcasted_iota(jnp.int32, (1, bq), 1)
    key = j * bk + jax.lax.broadcasted_iota(jnp.int32, (bk, 1), 0)
    query += heads[h].astype(jnp.int32) * case.queries
    # The number of each in its row of the batch, and what `mix` adds to it first.
    start = (query * case.keys).astype(jnp.uint32) + seeds[b, 0]
    bits = mix(start + key.astype(jnp.uint32), jnp.uint32(0), seeds[b, 1])
    return bits >= jnp.uint32(round(case.rate * 2**32))


def scratch(*shapes: tuple[int, ...]) -> tuple:
    return tuple(pltpu.VMEM(shape, jnp.float32) for shape in shapes)


def steps(*kinds: str) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=kinds)


def cost(case: Case, q, k, *, products: int, moved: int) -> pl.CostEstimate:
    """For the compiler, and for bert_jax/estimate.py, if no block is passed by."""
    (B, Q, D), S = q.shape, k.shape[1]
    return pl.CostEstimate(
        flops=products * 2 * B * Q * S * D,
        transcendentals=B * Q * S * D // case.size,
        bytes_accessed=moved * B * (Q + S) // 2 * D * q.dtype.itemsize,
    )
