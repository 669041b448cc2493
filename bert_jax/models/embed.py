"""From pieces to vectors.

    x = dropout(Norm(token[id] + position[p] + type[t]))

(Devlin et al. 2019, section 3.2). The token table is stored with
`arch.padded_vocab` rows, so that it divides over devices; surplus rows are zero.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.models.arch import Arch
from bert_jax.models.blocks import norm
from bert_jax.models.dropout import Noise, dropout
from bert_jax.models.tokens import Tokens


def padded_table(arch: Arch):
    """Initialiser of a [padded V, D] table whose surplus rows are zero."""
    draw = jax.nn.initializers.truncated_normal(arch.init_std)

    def init(key, shape, dtype=jnp.float32):
        rows = draw(key, (arch.vocab_size, shape[1]), dtype)
        return jnp.pad(rows, ((0, shape[0] - arch.vocab_size), (0, 0)))

    return init


class Embed(nn.Module):
    arch: Arch
    dtype: jnp.dtype

    def setup(self):
        arch = self.arch
        draw = jax.nn.initializers.truncated_normal(arch.init_std)
        D = arch.width
        self.token = self.param("token", padded_table(arch), (arch.padded_vocab, D))
        self.position = self.param("position", draw, (arch.max_positions, D))
        self.type = self.param("type", draw, (arch.types, D))
        self.norm = norm(arch, self.dtype)

    def __call__(self, tokens: Tokens, noise: Noise | None) -> jax.Array:
        # [B, S, D], summed in f32
        x = tokens.vectors
        if x is None:
            x = jnp.take(self.token, tokens.ids, axis=0, mode="clip")
        # A table of a few rows is read by a product: its gradient needs no scatter.
        which = jax.nn.one_hot(tokens.types, self.arch.types, dtype=x.dtype)
        x = x + jnp.einsum("bst,td->bsd", which, self.type, precision="highest")
        x = x + jnp.take(self.position, tokens.positions, axis=0, mode="clip")
        return dropout(self.norm(x), rate=self.arch.dropout, noise=noise)
