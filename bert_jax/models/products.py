"""Products of blocks, as the kernels of flash attention ask for them."""

from functools import partial

import jax
import jax.numpy as jnp

LANES = 128
PLAIN = (((1,), (0,)), ((), ()))  # a b
BY_KEYS = (((0,), (0,)), ((), ()))  # aᵀ b
BY_SIZE = (((1,), (1,)), ((), ()))  # a bᵀ
product = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
