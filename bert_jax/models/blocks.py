"""One transformer layer and the stack of them.

BERT's layer normalises after each residual sum (post-norm):

    x = Norm(x + dropout(Attention(x)))
    x = Norm(x + dropout(W₂ gelu(W₁ x + b₁) + b₂))

(Devlin et al. 2019, arXiv:1810.04805). The parameters of all layers are always
stored stacked along a first axis N; `arch.stack` only says how they are walked.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.models.arch import Arch
from bert_jax.models.attention import attend
from bert_jax.models.dropout import Noise, dropout


def gelu(x: jax.Array) -> jax.Array:
    """x Φ(x) through erf, as PyTorch has it; jax.nn.gelu's erfc costs twice as much."""
    return x * (0.5 * (1.0 + jax.lax.erf(x * 0.5**0.5)))


ACTIVATE = {
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
# What the backward pass finds saved, by name.
SAVED = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
# Places inside a layer where dropout is drawn.
PROBABILITIES, ATTENTION, FEED_FORWARD = range(3)


def dense(features: int, arch: Arch, dtype, name: str | None = None) -> nn.Dense:
    """A linear map with BERT's initialiser: a normal cut at 2σ, not rescaled."""
    init = jax.nn.initializers.truncated_normal(arch.init_std)
    return nn.Dense(
        features, dtype=dtype, kernel_init=init, dot_general=product, name=name
    )


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


class Attention(nn.Module):
    arch: Arch
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, visible, noise: Noise | None):
        B, S, D = x.shape
        H, K = self.arch.heads, self.arch.head_size
        project = partial(dense, D, self.arch, self.dtype)
        q, k, v = (project(name)(x).reshape(B, S, H, K) for name in "qkv")
        mixed, probabilities = attend(
            q,
            k,
            v,
            visible=visible,
            rate=self.arch.attention_dropout,
            noise=noise and noise.at(PROBABILITIES),
        )
        return project("o")(mixed.reshape(B, S, D)), probabilities


class FeedForward(nn.Module):
    arch: Arch
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        x = dense(self.arch.inner, self.arch, self.dtype, "inner")(x)
        x = ACTIVATE[self.arch.activation](x)
        return dense(self.arch.width, self.arch, self.dtype, "outer")(x)


class Block(nn.Module):
    """One layer. Returns its output and what can be captured from inside."""

    arch: Arch
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, visible, noise: Noise | None):
        rate = self.arch.dropout
        mixed, probabilities = Attention(self.arch, self.dtype, name="attention")(
            x, visible, noise
        )
        mixed = dropout(mixed, rate=rate, noise=noise and noise.at(ATTENTION))
        x = norm(self.arch, self.dtype, "attention_norm")(x + mixed)
        y = FeedForward(self.arch, self.dtype, name="ffn")(x)
        y = dropout(y, rate=rate, noise=noise and noise.at(FEED_FORWARD))
        x = norm(self.arch, self.dtype, "ffn_norm")(x + y)
        return x, {"hidden": x, "attentions": probabilities}


class Stack(nn.Module):
    """N layers, one after the other, from parameters stacked along N."""

    arch: Arch
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, visible, noise: Noise | None, capture: tuple[str, ...]):
        """The last layer's output, and each captured thing stacked along N."""
        N = self.arch.layers
        block = Block(self.arch, self.dtype, parent=None)

        def init(key):
            one = partial(block.init, x=x, visible=visible, noise=None)
            return jax.vmap(one)(jax.random.split(key, N))["params"]

        layers = self.param("layers", init)

        def step(x, layer):
            params, number = layer
            there = noise and noise.at(number)
            x, inside = block.apply({"params": params}, x, visible, there)
            return x, {name: inside[name] for name in capture}

        if self.arch.remat != "none":
            step = jax.checkpoint(step, policy=SAVED[self.arch.remat])

        numbers = jnp.arange(N, dtype=jnp.uint32)
        if self.arch.stack != "loop":
            return jax.lax.scan(step, x, (layers, numbers), unroll=self.arch.trip)

        captured = []
        for number, params in enumerate(unstack(layers, N)):
            x, inside = step(x, (params, numbers[number]))
            captured.append(inside)
        return x, jax.tree.map(lambda *parts: jnp.stack(parts), *captured)


def unstack(tree, count: int) -> list:
    """A stacked tree as `count` trees.

    One `lax.split` a leaf: its gradient is one concatenation, where the gradient of
    `leaf[i]` would be a sum of `count` arrays as large as the whole stack.
    """
    leaves, treedef = jax.tree.flatten(tree)
    columns = [
        [part.squeeze(0) for part in jax.lax.split(leaf, [1] * count, axis=0)]
        for leaf in leaves
    ]
    return [treedef.unflatten(row) for row in zip(*columns, strict=True)]
