"""Who sees whom, as data: the whole theory of attention visibility.

Token q may look at token k if and only if they share a group and
rank[k] <= rank[q]. Rank 0 everywhere is BERT; rank = position is a left-to-right
model; group 0 is padding, which sees nothing and is seen by nothing.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Tokens:
    """A batch of rows. Every field is [B, S]."""

    ids: jax.Array  # int32, pieces
    types: jax.Array  # int32, sentence A or B
    positions: jax.Array  # int32, index into the position table
    group: jax.Array  # int32, equal groups share a packed example; 0 is padding
    rank: jax.Array  # int32, order of visibility inside a group
    # [B, S, D]: replaces the look-up of ids (leak tests, prompts).
    vectors: jax.Array | None = None


def plain(ids, *, types=None, real=None) -> Tokens:
    """One example a row, positions 0..S-1, every real token sees every other.

    `real` [B, S] is true at real tokens; without it all are.
    """
    ids = jnp.asarray(ids, jnp.int32)
    zeros = jnp.zeros_like(ids)
    return Tokens(
        ids=ids,
        types=zeros if types is None else jnp.asarray(types, jnp.int32),
        positions=jnp.broadcast_to(
            jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape
        ),
        group=zeros + 1 if real is None else jnp.asarray(real, jnp.int32),
        rank=zeros,
    )


def visible(q: Tokens, k: Tokens) -> jax.Array:
    """Which token of `k` each token of `q` may look at: bool [B, S_q, S_k]."""
    together = q.group[:, :, None] == k.group[:, None, :]
    real = q.group[:, :, None] > 0
    earlier = k.rank[:, None, :] <= q.rank[:, :, None]
    return together & real & earlier
