"""The norm and the bias, whose derivatives are written by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.models.linear import add_bias
from bert_jax.models.norm import normalise

EPSILON = 1e-5
WIDTH = 24


def made(dtype=jnp.float32, *, offset: float = 0.0):
    keys = jax.random.split(jax.random.key(3), 4)
    x, dy = (jax.random.normal(key, (2, 5, WIDTH), dtype) for key in keys[:2])
    scale, bias = (1 + 0.5 * jax.random.normal(key, (WIDTH,)) for key in keys[2:])
    return 3 * x + offset, scale, bias, dy


def reference(x, scale, bias):
    layer = nn.LayerNorm(epsilon=EPSILON, use_fast_variance=False)
    return layer.apply({"params": {"scale": scale, "bias": bias}}, x)


def ours(x, scale, bias):
    return normalise(x, scale, bias, EPSILON, jnp.float32)


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_it_is_layer_norm(offset):
    *inputs, dy = made(offset=offset)
    with jax.enable_x64(True):  # what both are compared with
        exact, pull = jax.vjp(reference, *(np.float64(x) for x in inputs))
        wanted = (exact, *pull(np.float64(dy)))
    found, pull = jax.vjp(ours, *inputs)
    # Rounding of x itself, of size `offset`, comes back through the norm.
    share = 1e-6 * max(1.0, offset)
    for a, b in zip((found, *pull(dy)), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=share * np.abs(b).max())


def test_in_bfloat16_it_is_that_of_f32_to_its_rounding():
    x, scale, bias, dy = made(jnp.bfloat16)
    exact, pull = jax.vjp(ours, x.astype(jnp.float32), scale, bias)
    wanted = (exact, *pull(dy.astype(jnp.float32)))

    def low(x, scale, bias):
        x = x.astype(jnp.float32)
        return normalise(x, scale, bias, EPSILON, jnp.bfloat16)

    found, pull = jax.vjp(low, x, scale, bias)
    assert found.dtype == jnp.bfloat16
    for a, b in zip((found, *pull(dy)), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-7 * np.abs(b).max())


def test_what_has_no_spread_is_no_nan():
    x, scale, bias, dy = made()
    found, pull = jax.vjp(ours, jnp.ones_like(x), scale, bias)
    np.testing.assert_array_equal(found, jnp.broadcast_to(bias, found.shape))
    assert all(np.isfinite(part).all() for part in pull(dy))


def test_the_bias_has_the_gradient_of_a_sum():
    x, _, bias, dy = made()
    y, pull = jax.vjp(add_bias, x, bias)
    np.testing.assert_array_equal(y, x + bias)
    d_x, d_bias = pull(dy)
    np.testing.assert_array_equal(d_x, dy)
    np.testing.assert_allclose(d_bias, np.float64(dy).sum((0, 1)), rtol=0, atol=1e-5)
