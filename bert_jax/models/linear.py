"""The small parts that every layer is made of: linear map, norm, activation."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.models.arch import Arch


class Part(nn.Module):
    """What every part of the model knows."""

    arch: Arch
    dtype: jnp.dtype  # of the computation; parameters are f32


def gelu(x: jax.Array) -> jax.Array:
    """x Φ(x) through erf, as PyTorch has it; jax.nn.gelu's erfc costs twice as much."""
    return x * (0.5 * (1.0 + jax.lax.erf(x * 0.5**0.5)))


ACTIVATE = {
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}


def dense(
    features: int,
    arch: Arch,
    dtype,
    name: str | None = None,
    *,
    bias: bool = True,
    shrink: float = 1.0,
) -> nn.Dense:
    """A linear map with BERT's initialiser: a normal cut at 2σ, not rescaled."""
    init = jax.nn.initializers.truncated_normal(arch.init_std * shrink)
    return nn.Dense(
        features,
        use_bias=bias,
        dtype=dtype,
        kernel_init=init,
        dot_general=product,
        name=name,
    )


def residual_shrink(arch: Arch) -> float:
    """How much smaller a map into the residual sum starts: 1/√2N in GPT-2 (Radford et
    al. 2019, section 2.3), where 2N maps add up."""
    return (2 * arch.layers) ** -0.5 if arch.residual_init == "depth" else 1.0


def product(x: jax.Array, kernel: jax.Array, _, precision=None) -> jax.Array:
    """x [..., I] times kernel [I, O], as one product of two matrices.

    The gradient for the kernel of a product over [B, S, I] makes XLA transpose and copy
    on a CPU: it takes twice as long as this one.
    """
    flat = jnp.matmul(x.reshape(-1, x.shape[-1]), kernel, precision=precision)
    return flat.reshape(*x.shape[:-1], kernel.shape[-1])


def norm(arch: Arch, dtype, name: str | None = None) -> nn.LayerNorm:
    """Layer normalisation with the two-pass variance, computed in f32."""
    return nn.LayerNorm(
        epsilon=arch.norm_eps, dtype=dtype, use_fast_variance=False, name=name
    )
