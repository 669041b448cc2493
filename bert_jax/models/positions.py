"""Relative positions: what attention scores add for the distance of two tokens.

    learned     nothing: a table row was added to the embedding (BERT)
    functional  scores q·(k + a_ij), values v + a_ij, a_ij a sinusoid of the distance
                clipped to ±max_distance (NEZHA, Wei et al. 2019, arXiv:1909.00204)
    xl          (q + u)·k + (q + v)·W r_{i-j}, r a sinusoid, W, u and v learned
                (Transformer-XL, Dai et al. 2019, arXiv:1901.02860), and with relative
                types + (q + s)·t[another type?] (XLNet, Yang et al. 2019)

Distances are counted along the row, memory first: within an example that is the
difference of positions. Differs from the releases in: no dropout on the sinusoids.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.models.arch import Arch


def frequencies(width: int) -> np.ndarray:
    """10000^(-2i/width) for i < width/2."""
    return 10000.0 ** -(np.arange(0, width, 2) / width)


def distance_vectors(arch: Arch, *, asking: int, answering: int) -> jax.Array:
    """A sinusoid [sin | cos] for each distance from `answering` down to 1 - `asking`,
    the numbers of tokens that ask and that answer."""
    distance = np.arange(answering, -asking, -1)
    if arch.max_distance:
        distance = np.clip(distance, -arch.max_distance, arch.max_distance)
    angle = distance[:, None] * frequencies(arch.width)
    return jnp.asarray(np.concatenate([np.sin(angle), np.cos(angle)], -1), jnp.float32)


def functional_table(arch: Arch, length: int) -> jax.Array:
    """a_ij, sines and cosines interleaved: [S, S, K].

    NEZHA's release evaluates them at the index 0..2M of the clipped distance j - i, not
    at the distance itself.
    """
    M = arch.max_distance
    angle = np.arange(2 * M + 1)[:, None] * frequencies(arch.head_size)
    rows = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(2 * M + 1, -1)
    place = np.arange(length)
    index = np.clip(place[None, :] - place[:, None], -M, M) + M
    return jnp.asarray(rows, jnp.float32)[index]


def shift(scores: jax.Array, answering: int, where: jax.Array | None) -> jax.Array:
    """From scores by distance to scores by token, of A that answer.

    scores [B, H, Q, A + S]: column t is distance A - t. Token i of the S tokens stands
    at place A - S + i, so that answer j is in its column S - i + j. Without `where`
    query i is token i, and the columns slide by one a row: a reshape does it. `where`
    [B, Q] says which token each query is.
    """
    B, H, Q, T = scores.shape
    A = answering
    if where is None:
        slid = scores.reshape(B, H, T, Q)[:, :, 1:].reshape(B, H, Q, T - 1)
        return slid[..., :A]
    column = (T - A) - where[:, :, None] + jnp.arange(A)  # [B, Q, A]
    return jnp.take_along_axis(scores, column[:, None], axis=-1)


# Name and leading axes of what a layer learns for every head, [..., H, K].
BIASES = (("u", ()), ("v", ()))  # what any query asks of a word, of a place
TYPES = (("bias", ()), ("table", (2,)))  # s, and t: of the same type, of another


class ByHead(nn.Module):
    arch: Arch
    named: tuple[tuple[str, tuple[int, ...]], ...]

    @nn.compact
    def __call__(self) -> tuple[jax.Array, ...]:
        draw = jax.nn.initializers.truncated_normal(self.arch.init_std)
        shape = (self.arch.heads, self.arch.head_size)
        return tuple(self.param(name, draw, (*n, *shape)) for name, n in self.named)


def xl_scores(
    q: jax.Array,  # [B, Q, H, K]
    k: jax.Array,  # [B, S_k, H, K]
    r: jax.Array,  # [S_k + S, H, K], projected sinusoids
    biases: tuple[jax.Array, jax.Array],
    *,
    where: jax.Array | None,
) -> jax.Array:
    """u·k + (q + v)·r: what is added to q·k, [B, H, Q, S_k]."""
    u, v = (bias.astype(q.dtype) for bias in biases)
    exact = dict(preferred_element_type=jnp.float32)
    by_word = jnp.einsum("hk,bshk->bhs", u, k, **exact)[:, :, None]
    by_distance = jnp.einsum("bqhk,thk->bhqt", q + v, r, **exact)
    return by_word + shift(by_distance, k.shape[1], where)


def type_scores(
    q: jax.Array, types: tuple[jax.Array, jax.Array], *, differs: jax.Array
) -> jax.Array:
    """(q + s)·t[differs]: [B, H, Q, S_k]."""
    bias, table = (array.astype(q.dtype) for array in types)
    both = jnp.einsum(
        "bqhk,thk->bhqt", q + bias, table, preferred_element_type=jnp.float32
    )
    return jnp.where(differs[:, None], both[..., 1:], both[..., :1])
