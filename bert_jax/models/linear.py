"""The small parts that every layer is made of: linear map and activation."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bert_jax.models.arch import Arch
from bert_jax.placing import on_tpu


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


class Linear(nn.Module):
    """y = x W + b, in the type of the computation."""

    features: int
    dtype: jnp.dtype
    init: Callable
    bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, readers: int = 0, fixed: int = 0):
        """y; with `readers` y, kept, once for each of them: see product_for."""
        kernel = self.param("kernel", self.init, (x.shape[-1], self.features))
        x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
        ys = product_for(x, kernel, fixed, readers) if readers else [product(x, kernel)]
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            ys = [add_bias(y, bias.astype(self.dtype)) for y in ys]
        return ys if readers else ys[0]


def dense(
    features: int,
    arch: Arch,
    dtype,
    name: str | None = None,
    *,
    bias: bool = True,
    shrink: float = 1.0,
) -> Linear:
    """A linear map with BERT's initialiser: a normal cut at 2σ, not rescaled."""
    init = jax.nn.initializers.truncated_normal(arch.init_std * shrink)
    return Linear(features, dtype, init, bias, name=name)


def residual_shrink(arch: Arch) -> float:
    """How much smaller a map into the residual sum starts: 1/√2N in GPT-2 (Radford et
    al. 2019, section 2.3), where 2N maps add up."""
    return (2 * arch.layers) ** -0.5 if arch.residual_init == "depth" else 1.0


KEPT = "kept"


def keep(x: jax.Array) -> jax.Array:
    """x, marked as what arch.remat="kept" saves for the backward pass: the results of
    products and attention, and what norms ask for. Activations, dropout and softmax are
    cheaper to compute again than to store and read."""
    return checkpoint_name(x, KEPT)


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., I] times kernel [I, O], as one product of two matrices.

    The gradient for the kernel of a product over [B, S, I] makes XLA transpose and copy
    on a CPU: it takes twice as long as this one.
    """
    flat = jnp.matmul(x.reshape(-1, x.shape[-1]), kernel)
    return flat.reshape(*x.shape[:-1], kernel.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product_for(x: jax.Array, kernel: jax.Array, fixed: int, readers: int):
    """The product once for each of its readers, without gradient for the first `fixed`
    tokens of x [B, S, I]. By itself the compiler multiplies that of all tokens and then
    throws a part away, and sends what readers add up through memory."""
    return (product(x, kernel),) * readers


def product_for_forward(x, kernel, fixed: int, readers: int):
    return (keep(product(x, kernel)),) * readers, (x, kernel)


def product_for_backward(fixed: int, readers: int, saved, dys):
    x, kernel = saved
    (d_kernel,) = jax.vjp(lambda kernel: product(x, kernel), kernel)[1](sum(dys))
    dy, ours = sum(dy[:, fixed:] for dy in dys), x[:, fixed:]
    (dx,) = jax.vjp(lambda x: product(x, kernel), ours)[1](dy)
    return jnp.pad(dx, ((0, 0), (fixed, 0), (0, 0))), d_kernel


product_for.defvjp(product_for_forward, product_for_backward)


@jax.custom_vjp
def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y [..., O] + bias [O]. Its gradient for the bias is a product with ones, which
    the matrix unit of a TPU has long done when a sum over rows would still go on."""
    return y + bias


def add_bias_backward(_, dy: jax.Array):
    flat = dy.reshape(-1, dy.shape[-1])
    # Of a product with one row the compiler of TPUs makes a sum again.
    ones = jnp.ones((8 if on_tpu() else 1, len(flat)), dy.dtype)
    sums = jnp.matmul(ones, flat, preferred_element_type=jnp.float32)
    return dy, sums[0].astype(dy.dtype)


add_bias.defvjp(lambda y, bias: (y + bias, None), add_bias_backward)
