"""Queries of some places of a row, put there and taken back.

Gathers and scatters within each row are slow on a TPU, and products with ones and zeros
are not. A place that several slots ask for is asked for once, by the first of them.
"""

import flax.struct
import jax
import jax.numpy as jnp

from bert_jax.models.tokens import Tokens


@flax.struct.dataclass
class Slots:
    at: jax.Array  # bool [B, P, S]: the place of each slot
    number: jax.Array  # [B, S], the first slot of a place; 0 where there is none

    @classmethod
    def of(cls, where: jax.Array, *, length: int) -> "Slots":
        """where [B, P] says which place of the row each slot asks for."""
        at = where[:, :, None] == jnp.arange(length)
        return cls(at, jnp.argmax(at, axis=1).astype(jnp.int32))

    @property
    def count(self) -> int:
        """P."""
        return self.at.shape[1]

    def put(self, x: jax.Array) -> jax.Array:
        """x [B, P, ...] at its places, [B, S, ...]; elsewhere 0."""
        slot = jnp.arange(self.count)[:, None]
        first = self.at & (self.number[:, None] == slot)
        return moved("bps,bpd->bsd", first, x)

    def take(self, x: jax.Array) -> jax.Array:
        """What stands at each slot's place of x [B, S, ...]: [B, P, ...]."""
        return moved("bps,bsd->bpd", self.at, x)

    def asking(self, tokens: Tokens) -> Tokens:
        """A row's tokens [B, S] as queries: those of other places are padding."""
        return tokens.replace(group=jnp.where(self.at.any(1), tokens.group, 0))


def moved(form: str, places: jax.Array, x: jax.Array) -> jax.Array:
    flat = x.reshape(*x.shape[:2], -1)
    exact = jax.lax.Precision.HIGHEST
    there = jnp.einsum(form, places.astype(x.dtype), flat, precision=exact)
    return there.reshape(*there.shape[:2], *x.shape[2:])
