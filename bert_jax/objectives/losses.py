"""Losses per prediction, in f32."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] for each prediction: [..., V], [...] -> [...]."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def binary_cross_entropy(scores: jax.Array, answers: jax.Array) -> jax.Array:
    """-log σ(score) where the answer is yes, -log(1 - σ(score)) where it is no."""
    scores = scores.astype(jnp.float32)
    return jnp.logaddexp(0.0, scores) - jnp.where(answers, scores, 0.0)


def correct(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """1 where the largest logit is the target's, else 0."""
    return (logits.argmax(-1) == targets).astype(jnp.float32)
