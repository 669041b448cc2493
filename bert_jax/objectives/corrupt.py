"""Corruptions: which tokens are predicted, and what the model sees in their place.

Everything here is for one row [S] and is used under `vmap`, so that what a row draws
is a function of its own key alone. Shapes are static; choices are made by sorting
noise, because a scatter or `top_k` over the batch would make the devices talk.
"""

import jax
import jax.numpy as jnp
import numpy as np


def budget(length: int, rate: float) -> np.ndarray:
    """Predictions for a row of n real tokens, n = 0..length, as BERT counts them.

    max(1, round(rate * n)), rounded half to even, [CLS] and [SEP] included in n.
    """
    counts = [max(1, round(rate * n)) for n in range(length + 1)]
    return np.asarray([0, *counts[1:]], np.int32)


def choose(key: jax.Array, candidates: jax.Array, count: jax.Array) -> jax.Array:
    """Exactly min(count, candidates) of the candidates [S], uniformly: bool [S]."""
    noise = jnp.where(candidates, jax.random.uniform(key, candidates.shape), jnp.inf)
    place = jnp.argsort(jnp.argsort(noise))
    return candidates & (place < count)


def positions_of(chosen: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """The chosen positions in order, filled up with 0: where [P] and weights [P]."""
    S = chosen.shape[0]
    index = jnp.arange(S, dtype=jnp.int32)
    where = jnp.sort(jnp.where(chosen, index, S))[:slots]
    filled = where < S
    return jnp.where(filled, where, 0), filled.astype(jnp.float32)


def replace(
    key: jax.Array,
    ids: jax.Array,
    chosen: jax.Array,
    *,
    mask_id: int,
    vocab_size: int,
    hide: float,
    randomise: float,
) -> jax.Array:
    """Each chosen piece is hidden, made random, or kept, independently.

    The random piece is uniform over the whole vocabulary, as in BERT's release: it
    may be a special piece or the original.
    """
    draw_key, piece_key = jax.random.split(key)
    draw = jax.random.uniform(draw_key, ids.shape)
    random = jax.random.randint(piece_key, ids.shape, 0, vocab_size, ids.dtype)
    new = jnp.where(
        draw < hide, mask_id, jnp.where(draw < hide + randomise, random, ids)
    )
    return jnp.where(chosen, new, ids)
