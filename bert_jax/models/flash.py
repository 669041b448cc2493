"""Flash attention for the whole family: memory linear in length, on a TPU.

A block of queries meets the keys block by block; what is kept of all that it met is its
largest score m, the sum of exp(score - m), and the values mixed by it. From L, the
logarithm of the whole sum, the backward pass finds each block's probabilities again:

    p = exp(q kᵀ / √K - L)      do = gradient of out      dv = dropout(p)ᵀ do
    ds = p (dropout(do vᵀ) - Σ do · out)      dq = ds k / √K      dk = dsᵀ q / √K

(Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691). Who sees whom is worked
out in each block from group and rank, and blocks in which nothing is seen are passed
by. Dropout has the bits that `attend` draws for the same row, head, query and key.
What relative positions and types add to scores is in relative.py.

In the kernels scores stand with keys down and queries across, [S, Q], so that what is
kept of a query takes one lane. As many heads as fill the lanes go through together,
from arrays as the projections leave them, [B, S, H K]. Powers are those of 2, and what
dropout multiplies with is left to the ends of sums: the vector unit has the most to do.
"""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from bert_jax.models.arch import Arch
from bert_jax.models.dropout import Noise, mix
from bert_jax.models.flash_layout import (
    GIVEN,
    Case,
    Layout,
    axes,
    cost,
    given_back,
    order_of,
    scratch,
    steps,
    taken,
    taken_back,
)
from bert_jax.models.linear import keep
from bert_jax.models.products import BY_KEYS, BY_SIZE, LANES, PLAIN, product
from bert_jax.models.relative import (
    Asked,
    Relative,
    relative_gradients,
    relative_scores,
    stretches,
)
from bert_jax.models.slots import Slots
from bert_jax.models.tokens import Tokens
from bert_jax.placing import on_tpu, over_rows_and_heads

FLASH_FROM = 256  # tokens of a row that it takes less time for: docs/flash.md
XL_FROM = 128  # the least that was looked at with relative positions: docs/speed.md
BLOCK = 512  # the most queries, and keys, of a block
QUERIES = 4096  # the most of one kernel: it keeps the gradients of all on the chip
DISTANCES = 5120  # the same of keys and queries together, where positions are relative
LEAST = -1e9  # where m starts: any real score is more
HIDDEN = -1e30  # exp(HIDDEN - m) is exactly 0, also where nothing is seen
NOBODY = 2**30  # group and rank of keys that are padding


def takes_flash(arch: Arch, *, length: int, keys: int) -> bool:
    """Whether rows of this length go through here, with so many that answer."""
    if arch.attention != "auto":
        return arch.attention == "flash"
    if not on_tpu():
        return False
    if (
        arch.position == "xl"
    ):  # r and its gradient stay on the chip, a few heads' at once
        groups = range(1, arch.heads + 1)
        narrow = any(n * arch.head_size % LANES == 0 for n in groups)
        return narrow and length >= XL_FROM and keys <= DISTANCES - BLOCK
    return arch.position == "learned" and length >= FLASH_FROM


def attend_flash(
    q: jax.Array,  # [B, Q, H, K]
    k: jax.Array,  # [B, S, H, K]
    v: jax.Array,
    *,
    asking: Tokens,  # [B, Q]
    answering: Tokens,  # [B, S]
    window: int | None = None,
    rate: float = 0.0,
    noise: Noise | None = None,
    relative: Relative | None = None,
    slots: Slots | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """The mixed values [B, Q, H, K] of `attend`, for what `visible` says. Relative
    positions are for queries that are the last Q tokens of those that answer; with
    `slots` q is [B, P, H, K], and `asking` as `slots` says."""
    (B, P, H, K), Q, S = q.shape, asking.ids.shape[1], k.shape[1]
    if slots is not None:
        q = slots.put(q)
    bq, bk = (block_of(length, most=block) for length in (Q, S))
    types = relative is not None and len(relative.learned) > 2
    asks = about(asking, padding=0, block=bq, types=types)
    answers = about(answering, padding=NOBODY, block=bk, types=types)
    if slots is not None:
        number = fill(slots.number[:, None], axis=2, block=bq)
        asks = jnp.concatenate([asks, number], axis=1)
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
    if relative is not None:  # query i finds key j in column Q - i + j
        filled = ((q.shape[1] - Q, k.shape[1] - S), (0, 0))
        r = jnp.pad(relative.r.reshape(-1, H * K), filled)
        learned = relative.learned.reshape(-1, H * K)
    parts, most = [], QUERIES
    if relative is not None:
        most = min(most, DISTANCES - k.shape[1])
    most = max(1, most // bq) * bq
    for first in range(0, q.shape[1], most):
        there = slice(first, first + most)
        case = Case(
            queries=P,
            keys=S,
            first=first,
            size=K,
            blocks=(bq, bk),
            window=window,
            rate=rate,
            interpret=not on_tpu(),
            relative=relative is not None,
            types=types,
            numbered=slots is not None,
        )
        asked = [asks[:, :, there], answers, q[:, there], k, v]
        if relative is not None:
            last = q.shape[1] - first
            asked += [r[max(0, last - most) : last + k.shape[1]], learned]
        parts.append(flash(case, seeds, heads, *asked))
    mixed = jnp.concatenate(parts, axis=1)[:, :Q].reshape(B, Q, H, K)
    return mixed if slots is None else slots.take(mixed)


def block_of(length: int, *, most: int) -> int:
    """The size of the blocks that a length is cut into: all alike, in whole lanes."""
    return pl.cdiv(pl.cdiv(length, pl.cdiv(length, most)), LANES) * LANES


def fill(x: jax.Array, *, axis: int, block: int, value: int = 0) -> jax.Array:
    """x, up to a whole number of blocks."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths, constant_values=value)


def about(tokens: Tokens, *, padding: int, block: int, types: bool) -> jax.Array:
    """What decides who sees whom, [B, 3, S], and as whom, [B, 4, S]."""
    fields = [tokens.group, tokens.rank, tokens.positions] + [tokens.types] * types
    fields = jnp.stack(fields, axis=1)
    real = (tokens.group > 0)[:, None]
    fields = jnp.where(real, fields, padding)
    return fill(fields, axis=2, block=block, value=padding)


def on_each_device(run, case: Case, arrays, takes, gives):
    sizes = {"b": arrays[0].shape[0], "h": arrays[1].shape[0]}
    split = over_rows_and_heads(partial(run, case), takes, gives, sizes=sizes)
    return split(*arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash(case: Case, *arrays: jax.Array) -> jax.Array:
    return flash_forward(case, *arrays)[0]


def flash_forward(case: Case, *arrays):
    takes, gives = axes(taken(case)), axes(GIVEN)
    out, log_sum = on_each_device(forward, case, arrays, takes, gives)
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
    given = (*arrays, log_sum, delta, d_out)
    takes, gives = axes(taken_back(case)), axes(given_back(case))
    dq, dk, dv, *added = on_each_device(backward, case, given, takes, gives)
    scale = case.size**-0.5 / (1.0 - case.rate)
    whole = [  # over all devices
        (x.sum(0) * scale).astype(array.dtype)
        for x, array in zip(added, arrays[7:], strict=True)
    ]
    return None, None, None, None, dq, dk, dv, *whole


flash.defvjp(flash_forward, flash_backward)


def forward(case: Case, *arrays):
    """On one device: out [B, Q, H K], and L [B, H, Q], to base 2."""
    at = SimpleNamespace(**dict(zip(taken(case), arrays, strict=True)))
    layout = Layout.of(case, at, last="keys")
    (B, Q, D), n, bq = at.q.shape, layout.together, case.blocks[0]
    sums = jax.ShapeDtypeStruct((B, D // case.size // n, n, Q), jnp.float32)
    out, log_sum = pl.pallas_call(
        partial(forward_kernel, case),
        grid=layout.grid,
        in_specs=layout.specs(taken(case)),
        out_specs=layout.specs(GIVEN),
        out_shape=(jax.ShapeDtypeStruct(at.q.shape, at.q.dtype), sums),
        scratch_shapes=scratch((n, bq), (n, bq), (n, case.size, bq)),
        compiler_params=steps("parallel", "parallel", "parallel", "arbitrary"),
        cost_estimate=cost(case, at.q, at.k, products=2, slid=1, moved=4),
        interpret=case.interpret,
        name="flash_forward",
    )(*arrays)
    return out, log_sum.reshape(B, D // case.size, Q)


def forward_kernel(case: Case, *refs):
    names = (*taken(case), *GIVEN, "top", "total", "mixed")
    at = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    top, total, mixed = at.top, at.total, at.mixed
    place = tuple(pl.program_id(axis) for axis in range(4))
    b, h, i, j = order_of(case, place, last="keys")

    @pl.when(j == 0)
    def begin():
        top[...] = jnp.full_like(top, LEAST)
        total[...] = jnp.zeros_like(total)
        mixed[...] = jnp.zeros_like(mixed)

    @pl.when(may_see(at.asks, at.answers))
    def meet():
        pairs = Pairs.of(case, at, i, j, queries=pl.num_programs(2) * case.blocks[0])
        for n, lanes in enumerate(lanes_of(case, at.q)):
            s = scores(case, at, lanes, pairs, asked_by(case, at, lanes))  # [S, Q]
            one = slice(n, n + 1)
            m = jnp.maximum(top[one], s.max(0, keepdims=True) * case.unit)  # [1, Q]
            p, fade = jnp.exp2(s * case.unit - m), jnp.exp2(top[one] - m)
            top[one] = m
            total[one] = total[one] * fade + p.sum(0, keepdims=True)
            if case.rate:
                stays = kept(case, at, b, h * top.shape[0] + n, i, j)
                p = jnp.where(stays, p, 0.0)
            there = product(at.v[:, lanes], p.astype(at.v.dtype), BY_KEYS)  # [K, Q]
            mixed[n] = mixed[n] * fade + there

    @pl.when(j == pl.num_programs(3) - 1)
    def end():
        real = total[...] > 0
        safe = jnp.where(real, total[...], 1.0)
        at.log_sum[...] = jnp.where(real, top[...] + jnp.log2(safe), 0.0)
        for n, lanes in enumerate(lanes_of(case, at.q)):
            scale = 1.0 / (safe[n : n + 1] * (1.0 - case.rate))
            at.out[:, lanes] = (mixed[n] * scale).T.astype(at.out.dtype)


def backward(case: Case, *arrays):
    """On one device: the gradients of q, k and v, and, yet to be scaled, of r and of
    what is learned."""
    at = SimpleNamespace(**dict(zip(taken_back(case), arrays, strict=True)))
    layout = Layout.of(case, at, last="queries")
    (B, Q, _), n, bk = at.q.shape, layout.together, case.blocks[1]
    by_group = (x.reshape(B, -1, n, Q) for x in (at.log_sum, at.delta))
    lanes = n * case.size
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (at.q, at.k, at.v)]
    rows = "parallel"
    if case.relative:
        added = ((1, *x.shape) for x in (at.r, at.learned))
        shapes += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in added]
        rows = "arbitrary"
    return pl.pallas_call(
        partial(backward_kernel, case),
        grid=layout.grid,
        in_specs=layout.specs(taken_back(case)),
        out_specs=layout.specs(given_back(case)),
        out_shape=tuple(shapes),
        scratch_shapes=scratch((Q, lanes), (bk, lanes), (bk, lanes)),
        compiler_params=steps("parallel", rows, "arbitrary", "arbitrary"),
        cost_estimate=cost(case, at.q, at.k, products=5, slid=3, moved=7),
        interpret=case.interpret,
        name="flash_backward",
    )(*arrays[: len(taken(case))], *by_group, at.d_out)


def backward_kernel(case: Case, *refs):
    names = (*taken_back(case), *given_back(case), "dq_sum", "dk_sum", "dv_sum")
    at = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    place = tuple(pl.program_id(axis) for axis in range(4))
    b, h, i, j = order_of(case, place, last="queries")
    scale = 1.0 / (1.0 - case.rate)
    here = pl.ds(pl.multiple_of(i * case.blocks[0], LANES), case.blocks[0])

    if case.relative:

        @pl.when((b == 0) & (j == 0) & (i == 0))
        def begin_heads():
            at.dr[...] = jnp.zeros_like(at.dr)
            at.d_learned[...] = jnp.zeros_like(at.d_learned)

    @pl.when(j == 0)
    def begin():
        at.dq_sum[here] = jnp.zeros_like(at.q, jnp.float32)

    @pl.when(i == 0)
    def begin_keys():
        at.dk_sum[...] = jnp.zeros_like(at.dk_sum)
        at.dv_sum[...] = jnp.zeros_like(at.dv_sum)

    @pl.when(may_see(at.asks, at.answers))
    def meet():
        pairs = Pairs.of(case, at, i, j, queries=pl.num_programs(3) * case.blocks[0])
        for n, lanes in enumerate(lanes_of(case, at.q)):
            one = slice(n, n + 1)
            asked = asked_by(case, at, lanes)
            s = scores(case, at, lanes, pairs, asked)  # [S, Q]
            p = jnp.exp2(s * case.unit - at.log_sum[one])
            dp = product(at.v[:, lanes], at.d_out[:, lanes], BY_SIZE)
            dropped = p
            if case.rate:
                stays = kept(case, at, b, h * at.log_sum.shape[0] + n, i, j)
                dropped, dp = jnp.where(stays, p, 0.0), jnp.where(stays, dp, 0.0)
            wide = p * (dp - at.delta[one])
            ds = wide.astype(at.q.dtype)
            d_out = at.d_out[:, lanes]
            at.dv_sum[:, lanes] += product(dropped.astype(ds.dtype), d_out, PLAIN)
            at.dk_sum[:, lanes] += product(ds, asked.words, PLAIN)
            if case.relative:
                dq = relative_gradients(at, lanes, asked, pairs, wide)
            else:
                dq = product(ds, at.k[:, lanes], BY_KEYS)
            at.dq_sum[here, lanes] += dq

    @pl.when(i == pl.num_programs(3) - 1)
    def end_keys():
        at.dk[...] = (at.dk_sum[...] * scale * case.size**-0.5).astype(at.dk.dtype)
        at.dv[...] = (at.dv_sum[...] * scale).astype(at.dv.dtype)

    @pl.when(j == pl.num_programs(2) - 1)
    def end():
        dq = at.dq_sum[here] * scale * case.size**-0.5
        at.dq[here] = dq.astype(at.dq.dtype)


def may_see(asks, answers) -> jax.Array:
    """Whether any query of a block may see any of its keys: False only if none does."""
    (group, rank), (groups, ranks) = ((x[0:1], x[1:2]) for x in (asks, answers))
    together = (groups.min() <= group.max()) & (group.min() <= groups.max())
    return together & (ranks.min() <= rank.max())


class Pairs(NamedTuple):
    """The queries and keys of a block: what is the same for all heads."""

    seen: jax.Array  # bool [S, Q], as `visible`
    differs: jax.Array | None  # bool [S, Q]: of another type
    there: list | None  # their places in r

    @classmethod
    def of(cls, case: Case, at, i, j, *, queries: int) -> "Pairs":
        asks, answers = at.asks, at.answers[...].T
        group, rank, place = (asks[n : n + 1] for n in range(3))  # [1, Q]
        groups, ranks, places = (answers[:, n : n + 1] for n in range(3))  # [S, 1]
        seen = (groups == group) & (ranks <= rank)
        if case.window is not None:
            seen &= jnp.abs(places - place) <= case.window // 2
        differs = there = None
        if case.types:
            differs = answers[:, 3:4] != asks[3:4]
        if case.relative:
            there = stretches(i, j, queries=queries, blocks=case.blocks)
        return cls(seen, differs, there)


def lanes_of(case: Case, q) -> list[slice]:
    """Where each head of a group stands."""
    return [slice(n, n + case.size) for n in range(0, q.shape[1], case.size)]


def asked_by(case: Case, at, lanes: slice) -> Asked:
    if case.relative:
        return Asked.by(at.q[:, lanes], at.learned[:, lanes])
    return Asked(words=at.q[:, lanes])


def scores(case: Case, at, lanes: slice, pairs: Pairs, asked: Asked) -> jax.Array:
    if case.relative:
        s = relative_scores(at, lanes, asked, pairs)
    else:
        s = product(at.k[:, lanes], asked.words, BY_SIZE)
    return jnp.where(pairs.seen, s, HIDDEN)


def kept(case: Case, at, b, h, i, j) -> jax.Array:
    """Which of a block's probabilities dropout keeps, [S, Q]."""
    bq, bk = case.blocks
    if case.numbered:
        query = at.asks[at.asks.shape[0] - 1 :]
    else:
        query = case.first + i * bq + jax.lax.broadcasted_iota(jnp.int32, (1, bq), 1)
    key = j * bk + jax.lax.broadcasted_iota(jnp.int32, (bk, 1), 0)
    query += at.heads[h].astype(jnp.int32) * case.queries
    # The number of each in its row of the batch, and what `mix` adds to it first.
    start = (query * case.keys).astype(jnp.uint32) + at.seeds[b, 0]
    bits = mix(start + key.astype(jnp.uint32), jnp.uint32(0), at.seeds[b, 1])
    return bits >= jnp.uint32(round(case.rate * 2**32))
