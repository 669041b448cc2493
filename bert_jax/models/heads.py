"""What is computed from the last hidden states, by name.

    lm:     logits = E gelu-norm-transform(h) + b, E the token table (tied)
    pooler: tanh(W h_first + b), h_first the state of an example's first token
    nsp:    two logits on the pooled vector; 0 = "B follows A", 1 = "B is random"

(Devlin et al. 2019, section 3.1.)
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.models.arch import Arch
from bert_jax.models.blocks import ACTIVATE, dense, norm


class LanguageModelHead(nn.Module):
    """Logits over the padded vocabulary; surplus pieces get -inf."""

    arch: Arch
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
        arch = self.arch
        x = ACTIVATE[arch.activation](dense(arch.width, arch, self.dtype, "dense")(x))
        x = norm(arch, self.dtype, "norm")(x)
        bias = self.param("bias", nn.initializers.zeros, (arch.padded_vocab,))
        exists = jnp.arange(arch.padded_vocab) < arch.vocab_size
        B, P, D = x.shape
        logits = jnp.matmul(
            x.reshape(B * P, D),
            table.astype(self.dtype).T,
            preferred_element_type=jnp.float32,
        )
        # As a product, for its gradient: the sum over rows of an array this wide is
        # fifty times slower on a CPU than a product with ones.
        ones = jnp.ones((B * P, 1), jnp.float32)
        logits += ones @ jnp.where(exists, bias, 0.0)[None]
        return jnp.where(exists, logits, -jnp.inf).reshape(B, P, -1)


class Pooler(nn.Module):
    arch: Arch
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(dense(self.arch.width, self.arch, self.dtype, "dense")(x))


class NextSentenceHead(nn.Module):
    arch: Arch
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, pooled: jax.Array) -> jax.Array:
        logits = dense(2, self.arch, self.dtype, "dense")(pooled)
        return logits.astype(jnp.float32)


def take(x: jax.Array, where: jax.Array) -> jax.Array:
    """The states x [B, S, D] at positions where [B, P]: [B, P, D]."""
    return jnp.take_along_axis(x, where[:, :, None], axis=1)
