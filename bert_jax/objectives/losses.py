"""Losses per prediction, in f32."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] for each prediction: [..., V], [...] -> [...]."""
    logits = logits.astype(jnp.float32)
    # By a sum: a look-up would gather logits whose pieces lie on many devices.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def binary_cross_entropy(scores: jax.Array, answers: jax.Array) -> jax.Array:
    """-log σ(score) where the answer is yes, -log(1 - σ(score)) where it is no."""
    scores = scores.astype(jnp.float32)
    return jnp.logaddexp(0.0, scores) - jnp.where(answers, scores, 0.0)


def correct(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """1 where the largest logit, the first of those, is the target's, else 0."""
    # By two reductions: `argmax` is one of pairs, for which devices that each have some
    # of the pieces send each other as many numbers as there are logits. Numbers of
    # pieces, far below 2^24, are floats, so that a TPU finds the best one while it adds
    # up what is needed for the loss.
    is_best = logits == logits.max(-1, keepdims=True)
    pieces = jnp.arange(logits.shape[-1], dtype=jnp.float32)
    best = -jnp.where(is_best, -pieces, -jnp.inf).max(-1)
    return (best == targets).astype(jnp.float32)
