"""Scaled dot-product attention, dense.

    attend(q, k, v) = dropout(softmax((q kᵀ + bias) / √K over visible tokens)) v

(Vaswani et al. 2017, arXiv:1706.03762). A token that sees nothing gets zeros,
never NaN; the softmax is computed in f32 whatever the inputs are.
"""

import jax
import jax.numpy as jnp

from bert_jax.models.dropout import Noise, dropout

HIDDEN = -1e9  # exp(HIDDEN - anything a real score reaches) is exactly 0 in f32


def attend(
    q: jax.Array,  # [B, Q, H, K]
    k: jax.Array,  # [B, S, H, K]
    v: jax.Array,
    *,
    visible: jax.Array,  # bool [B, Q, S]
    bias: jax.Array | None = None,  # [B, H, Q, S], added to q kᵀ
    relative: jax.Array | None = None,  # [Q, S, K], added to each value
    rate: float = 0.0,
    noise: Noise | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The mixed values [B, Q, H, K] and the probabilities [B, H, Q, S]."""
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32)
    if bias is not None:
        scores += bias
    scores = jnp.where(visible[:, None], scores * q.shape[-1] ** -0.5, HIDDEN)
    sees = visible.any(-1)[:, None, :, None]  # [B, 1, Q, 1]
    probabilities = jax.nn.softmax(scores) * sees
    dropped = dropout(probabilities, rate=rate, noise=noise).astype(v.dtype)
    mixed = jnp.einsum("bhqs,bshk->bqhk", dropped, v)
    if relative is not None:
        mixed += jnp.einsum("bhqs,qsk->bqhk", dropped, relative)
    return mixed, probabilities
