"""From pieces to vectors.

    x = dropout(Norm(token[id] + position[p] + type[t] + task[k]))

(Devlin et al. 2019, section 3.2; the task of ERNIE 2.0, Sun et al. 2020,
arXiv:1907.12412). Members leave terms out. The token table is stored with
`arch.padded_vocab` rows, so that it divides over devices; surplus rows are zero.
"""

import jax
import jax.numpy as jnp

from bert_jax.models.arch import Arch
from bert_jax.models.dropout import Noise, dropout
from bert_jax.models.linear import Part
from bert_jax.models.norm import norm
from bert_jax.models.tokens import Tokens
from bert_jax.placing import apart_by_pieces


def padded_table(arch: Arch):
    """Initialiser of a [padded V, E] table whose surplus rows are zero."""
    draw = jax.nn.initializers.truncated_normal(arch.init_std)

    def init(key, shape, dtype=jnp.float32):
        rows = draw(key, (arch.vocab_size, shape[1]), dtype)
        return jnp.pad(rows, ((0, shape[0] - arch.vocab_size), (0, 0)))

    return init


class Embed(Part):
    def setup(self):
        arch = self.arch
        draw = jax.nn.initializers.truncated_normal(arch.init_std)
        E = arch.table_width
        table = self.param("token", padded_table(arch), (arch.padded_vocab, E))
        self.token = apart_by_pieces(table)
        if arch.position == "learned":
            self.position = self.param("position", draw, (arch.max_positions, E))
        if self.has_types:
            self.type = self.param("type", draw, (arch.types, E))
        if arch.task_types:
            self.task = self.param("task", draw, (arch.task_types, E))
        if arch.embed_norm == "norm":
            self.norm = norm(arch, self.dtype)
        if arch.streams == 2:
            self.query = self.param("query", draw, (arch.width,))

    @property
    def has_types(self) -> bool:
        return self.arch.types > 0 and self.arch.type_scheme == "absolute"

    def __call__(self, tokens: Tokens, noise: Noise | None) -> jax.Array:
        # [B, S, E], summed in f32
        arch, x = self.arch, tokens.vectors
        if x is None:
            x = jnp.take(self.token, tokens.ids, axis=0, mode="clip")
        if arch.embed_scale == "sqrt":
            x = x * arch.width**0.5
        if self.has_types:
            # RoBERTa has one type: it is added to every token, of whichever sentence.
            x = x + rows_of(self.type, jnp.minimum(tokens.types, arch.types - 1))
        if arch.position == "learned":
            place = tokens.positions + arch.position_offset
            x = x + jnp.take(self.position, place, axis=0, mode="clip")
        if arch.task_types:
            task = jnp.zeros_like(tokens.ids) if tokens.task is None else tokens.task
            x = x + rows_of(self.task, task)
        if arch.embed_norm == "norm":
            x = self.norm(x)
        return dropout(x.astype(self.dtype), rate=arch.dropout, noise=noise)


def rows_of(table: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of a small table, read by a product: its gradient needs no scatter."""
    which = jax.nn.one_hot(index, len(table), dtype=table.dtype)
    return jnp.einsum("bst,td->bsd", which, table, precision="highest")
