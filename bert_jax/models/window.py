"""Attention in a window, at linear cost: Longformer's kernel.

Token i sees token j if |i - j| <= w/2, or if one of the two is global. Global tokens
ask and are answered through projections of their own (q_g, k_g, v_g); other tokens see
them through the ordinary ones, in one softmax with the window (Beltagy et al. 2020,
arXiv:2004.05150).

The row is cut into blocks of w/2: a token's window lies within its own block and the
two beside it, so [S, 3w/2] scores are computed instead of [S, S]. The global tokens of
a row, at most G, are gathered into slots.
"""

import jax
import jax.numpy as jnp

from bert_jax.models.arch import Arch
from bert_jax.models.attention import attend
from bert_jax.models.dropout import Noise
from bert_jax.models.tokens import Tokens, take, visible

Triple = tuple[jax.Array, jax.Array, jax.Array]  # q, k, v [B, S, H, K]


def slotted_reach(tokens: Tokens, slots: int) -> jax.Array | None:
    """Which tokens are global: padding is not, nor is whom no slot is left for."""
    if tokens.reach is None:
        return None
    reach = jnp.where(tokens.group > 0, tokens.reach, 0)
    return jnp.where(jnp.cumsum(reach > 0, axis=1) <= slots, reach, 0)


def attend_window(
    near: Triple,
    far: Triple,
    *,
    tokens: Tokens,
    arch: Arch,
    rate: float = 0.0,
    noise: Noise | None = None,
) -> jax.Array:
    """The mixed values [B, S, H, K]."""
    q, k, v = near
    B, S, H, K = q.shape
    c = arch.window // 2
    n = -(-S // c)  # blocks

    def blocks(x: jax.Array) -> jax.Array:
        """[B, S, ...] -> [B n, c, ...]; what is filled up has group 0."""
        x = jnp.pad(x, [(0, 0), (0, n * c - S)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(B * n, c, *x.shape[2:])

    def neighbours(x: jax.Array) -> jax.Array:
        """[B, S, ...] -> [B n, 3c, ...]: each block with the two beside it."""
        x = jnp.pad(x, [(0, 0), (c, n * c - S + c)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(B, n + 2, c, *x.shape[2:])
        beside = jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], axis=2)
        return beside.reshape(B * n, 3 * c, *x.shape[3:])

    reach = tokens.reach  # no more than there are slots: see slotted_reach
    tokens = tokens.replace(reach=None, vectors=None)
    q_tokens, k_tokens = jax.tree.map(blocks, tokens), jax.tree.map(neighbours, tokens)
    seen = visible(q_tokens, k_tokens, window=arch.window)  # [Bn, c, 3c]
    k_near, v_near = neighbours(k), neighbours(v)
    if reach is not None:
        # A global token is seen through its slot, not a second time in the window.
        seen &= ~(neighbours(reach) > 0)[:, None, :]
        G = min(arch.global_slots, S)
        slots = jnp.argsort(reach <= 0, axis=1, stable=True)[:, :G]  # [B, G]
        filled = jnp.take_along_axis(reach, slots, axis=1) > 0
        at_slots = tokens.at(slots)
        at_slots = at_slots.replace(group=jnp.where(filled, at_slots.group, 0))

        def to_blocks(x: jax.Array) -> jax.Array:
            return jnp.repeat(x, n, axis=0)  # [B n, G, ...]

        slot_seen = visible(q_tokens, jax.tree.map(to_blocks, at_slots))
        seen = jnp.concatenate([seen, slot_seen], axis=2)
        k_near = jnp.concatenate([k_near, to_blocks(take(k, slots))], axis=1)
        v_near = jnp.concatenate([v_near, to_blocks(take(v, slots))], axis=1)
    drawn = noise and noise.replace(
        rows=(noise.rows[:, None] * n + jnp.arange(n, dtype=jnp.uint32)).reshape(-1)
    )
    mixed, _ = attend(blocks(q), k_near, v_near, visible=seen, rate=rate, noise=drawn)
    mixed = mixed.reshape(B, n * c, H, K)[:, :S]
    if reach is None:
        return mixed
    q_far, k_far, v_far = far
    wide_seen = visible(at_slots, tokens)  # [B, G, S]
    asked = noise and noise.at(1)
    widely, _ = attend(
        take(q_far, slots), k_far, v_far, visible=wide_seen, rate=rate, noise=asked
    )
    # Back to their places, by a product: a scatter over the batch makes devices talk.
    places = (slots[:, None, :] == jnp.arange(S)[None, :, None]) & filled[:, None, :]
    spread = jnp.einsum("bsg,bghk->bshk", places.astype(widely.dtype), widely)
    return jnp.where((reach > 0)[:, :, None, None], spread, mixed)
