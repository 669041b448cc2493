"""Scaled dot-product attention, dense.

    attend(q, k, v) = dropout(softmax(q kᵀ / √K over visible tokens)) v

(Vaswani et al. 2017, arXiv:1706.03762). A token that sees nothing gets zeros,
never NaN; the softmax is computed in f32 whatever the inputs are.
"""

import jax
import jax.numpy as jnp

from bert_jax.models.dropout import Noise, dropout

HIDDEN = -1e9  # exp(HIDDEN - anything a real score reaches) is exactly 0 in f32


def attend(
    q: jax.Array,  # [B, S, H, K]
    k: jax.Array,
    v: jax.Array,
    *,
    visible: jax.Array,  # bool [B, S, S]
    rate: float = 0.0,
    noise: Noise | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The mixed values [B, S, H, K] and the probabilities [B, H, S, S]."""
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None], scores * q.shape[-1] ** -0.5, HIDDEN)
    sees = visible.any(-1)[:, None, :, None]  # [B, 1, S, 1]
    probabilities = jax.nn.softmax(scores) * sees
    dropped = dropout(probabilities, rate=rate, noise=noise).astype(v.dtype)
    return jnp.einsum("bhqs,bshk->bqhk", dropped, v), probabilities
