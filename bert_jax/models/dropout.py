"""Dropout that costs little and does not depend on how the batch is sharded.

Whether an element is kept is an integer hash of (seed, row, index in the row), so
each device computes the bits of its own rows from their row numbers, and nothing is
drawn, stored or sent. The mixing function is the two-round multiply-xorshift
`lowbias32` of C. Wellons' hash prospector, with the seed put in before each round.
"""

import math

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Noise:
    """Where the random bits of one forward pass come from."""

    seed: jax.Array  # uint32 [2]
    rows: jax.Array  # uint32 [B], the number of each row in the whole batch

    @classmethod
    def of(cls, key: jax.Array, rows: jax.Array) -> "Noise":
        return cls(jax.random.bits(key, (2,)), rows.astype(jnp.uint32))

    def at(self, place) -> "Noise":
        """The noise of one place in the network: a layer, a site within it."""
        step = (jnp.asarray(place, jnp.uint32) + 1) * jnp.uint32(0x9E3779B9)
        return self.replace(seed=mix(self.seed, step, self.seed[::-1]))


def mix(x: jax.Array, first, second) -> jax.Array:
    """Two rounds of multiply and xor-shift over uint32."""
    x = x + first
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = x + second
    return (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)


def dropout(x: jax.Array, *, rate: float, noise: Noise | None) -> jax.Array:
    """Zeroes each element of x [B, ...] with probability `rate`, scales the others.

    Without noise (evaluation) x is returned as it is.
    """
    if noise is None or rate == 0.0:
        return x
    per_row = math.prod(x.shape[1:])
    index = jax.lax.iota(jnp.uint32, per_row).reshape(x.shape[1:])
    # Seeds of each row's own: a running number over all rows would wrap at 2^32, which
    # is row 1024 of attention over 512 tokens with 16 heads.
    rows = noise.rows.reshape(-1, *[1] * (x.ndim - 1))
    a, b = noise.seed
    bits = mix(index, mix(rows, a, b), mix(rows, b, a))
    keep = bits >= jnp.uint32(round(rate * 2**32))
    return jnp.where(keep, x * (1.0 / (1.0 - rate)), jnp.zeros((), x.dtype))
