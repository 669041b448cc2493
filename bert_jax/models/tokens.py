"""Who sees whom, as data: the whole theory of attention visibility.

Token q may look at token k if and only if they share a group and rank[k] <= rank[q].
Group 0 is padding, which sees nothing and is seen by nothing.

    rank = 0 everywhere                   every token sees every other (BERT)
    rank = position                       left to right (GPT)
    rank = -position                      right to left
    rank = max(0, position - prefix + 1)  the prefix sees itself, the rest its past
                                          (UniLM, Dong et al. 2019, arXiv:1905.03197)
    rank = place in the order, -1 for     permutation language model (XLNet, Yang et
           words that are not predicted   al. 2019, arXiv:1906.08237); a query sees
                                          strictly smaller ranks, so not itself
    rank below all others                 memory of earlier text (Transformer-XL, Dai
                                          et al. 2019, arXiv:1901.02860)

A window (Longformer, Beltagy et al. 2020, arXiv:2004.05150) hides what is further away
than half of it, unless one of the two tokens is global (`reach` 1).
"""

import flax.struct
import jax
import jax.numpy as jnp

from bert_jax.errors import InputError, unknown

ORDERS = ("all", "causal", "backward", "prefix")
BELOW_ALL = -(2**30)  # the rank of memory


@flax.struct.dataclass
class Tokens:
    """A batch of rows. Every field but the last is [B, S]."""

    ids: jax.Array  # int32, pieces
    types: jax.Array  # int32, sentence A or B
    positions: jax.Array  # int32, place of the token in its example
    group: jax.Array  # int32, equal groups share a packed example; 0 is padding
    rank: jax.Array  # int32, order of visibility inside a group
    reach: jax.Array | None = None  # int32, 1 = sees and is seen beyond the window
    task: jax.Array | None = None  # int32, ERNIE's task
    # [B, S, E]: replaces the look-up of ids (leak tests, prompts).
    vectors: jax.Array | None = None

    def at(self, where: jax.Array) -> "Tokens":
        """The tokens at places where [B, P] of each row."""
        return jax.tree.map(lambda x: take(x, where), self.replace(vectors=None))


@flax.struct.dataclass
class Memory:
    """What the layers keep of tokens that were read before, without gradient: their
    inputs (Transformer-XL's recurrence), or the keys and values they made of them,
    where no token is to be read twice (generation)."""

    tokens: Tokens | None  # [B, M]
    states: jax.Array | None = None  # [N, B, M, D]
    k: jax.Array | None = None  # [N, B, M, H, K], and so is v
    v: jax.Array | None = None


def take(x: jax.Array, where: jax.Array) -> jax.Array:
    """x [B, S, ...] at places where [B, P] of each row: [B, P, ...]."""
    index = where.reshape(*where.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)


def after(before: jax.Array | None, here: jax.Array, *, axis: int = 1) -> jax.Array:
    """What stands along an axis, after what stood there before."""
    return here if before is None else jnp.concatenate([before, here], axis)


def plain(
    ids, *, types=None, real=None, order: str = "all", prefix=None, positions=None
) -> Tokens:
    """One example a row, every real token seeing what `order` says.

    `real` [B, S] is true at real tokens; without it all are. Positions are 0..S-1
    unless given. `prefix` [B] is the length of the part that is seen as a whole.
    """
    ids = jnp.asarray(ids, jnp.int32)
    zeros = jnp.zeros_like(ids)
    if positions is None:
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(jnp.asarray(positions, jnp.int32), ids.shape)
    return Tokens(
        ids=ids,
        types=zeros if types is None else jnp.asarray(types, jnp.int32),
        positions=positions,
        group=zeros + 1 if real is None else jnp.asarray(real, jnp.int32),
        rank=rank_of(order, positions, prefix=prefix),
    )


def rank_of(order: str, positions: jax.Array, *, prefix=None) -> jax.Array:
    """The rank of tokens at positions [B, S] for an order that has a name."""
    if order not in ORDERS:
        raise InputError(unknown("order", order, ORDERS))
    if order == "prefix" and prefix is None:
        raise InputError("order='prefix' needs the length of the prefix of each row")
    if order == "prefix":
        return jnp.maximum(0, positions - jnp.asarray(prefix)[:, None] + 1)
    return {"all": 0, "causal": 1, "backward": -1}[order] * positions


def counted(real) -> jax.Array:
    """Positions counted over real tokens only, [B, S]: RoBERTa's, wherever padding is.

    Padding has position -1 before the first real token.
    """
    real = jnp.asarray(real, jnp.int32)
    return jnp.cumsum(real, axis=1) * real - 1


def remember(
    tokens: Tokens, hidden: jax.Array, *, length: int, before: Memory | None = None
) -> Memory:
    """The memory for the next piece of text: the last `length` tokens read so far.

    `hidden` [N+1, B, S, D] is what the model captured. Memory has type 0, whatever the
    types were, as in XLNet's release, and keeps its group: it is seen by the same one.
    """
    states = after(before and before.states, hidden[:-1], axis=2)
    group = after(before and before.tokens.group, tokens.group)
    states = jax.lax.stop_gradient(states[:, :, max(0, states.shape[2] - length) :])
    return memory_of(states, group[:, group.shape[1] - states.shape[2] :])


def memory_of(states: jax.Array, group: jax.Array) -> Memory:
    """States [N, B, M, D] as a memory that tokens of its group [B, M] see."""
    M = group.shape[1]
    positions = jnp.broadcast_to(jnp.arange(-M, 0, dtype=jnp.int32), group.shape)
    blank = jnp.zeros_like(group)
    rank = jnp.full_like(group, BELOW_ALL)
    return Memory(Tokens(blank, blank, positions, group, rank), states)


def visible(
    q: Tokens, k: Tokens, *, strict: bool = False, window: int | None = None
) -> jax.Array:
    """Which token of `k` each token of `q` may look at: bool [B, S_q, S_k].

    `strict` is XLNet's query stream.
    """
    together = q.group[:, :, None] == k.group[:, None, :]
    real = q.group[:, :, None] > 0
    there, here = k.rank[:, None, :], q.rank[:, :, None]
    seen = together & real & (there < here if strict else there <= here)
    if window is None:
        return seen
    near = jnp.abs(q.positions[:, :, None] - k.positions[:, None, :]) <= window // 2
    if q.reach is not None:
        near |= (q.reach[:, :, None] > 0) | (k.reach[:, None, :] > 0)
    return seen & near
