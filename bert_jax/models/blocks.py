"""One transformer layer.

The norm stands after each residual sum (post-norm: BERT, GPT) or before each sub-layer
(pre-norm: GPT-2, where one more follows the last layer):

    post:  x = Norm(x + dropout(Attention(x)));  x = Norm(x + dropout(FFN(x)))
    pre:   x = x + dropout(Attention(Norm(x)));  x = x + dropout(FFN(Norm(x)))
    FFN(x) = W₂ gelu(W₁ x + b₁) + b₂

(Devlin et al. 2019, arXiv:1810.04805; Radford et al. 2019). XLNet's second stream g
goes through the same layer: it asks what the first one, x, answers. Differs from the
releases in where dropout is drawn: XLNet and Transformer-XL have it inside the FFN and
on the last states, too, and DistilBERT has none behind attention.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.models import positions
from bert_jax.models.attention import attend
from bert_jax.models.dropout import Noise, dropout
from bert_jax.models.flash import attend_flash
from bert_jax.models.linear import ACTIVATE, Part, dense, keep, residual_shrink
from bert_jax.models.norm import norm
from bert_jax.models.positions import BIASES, TYPES, ByHead
from bert_jax.models.relative import Relative
from bert_jax.models.tokens import Memory, after
from bert_jax.models.view import View
from bert_jax.models.window import attend_window

# Places inside a layer where dropout is drawn; the last is the query stream's own.
PROBABILITIES, ATTENTION, FEED_FORWARD, QUERY = range(4)


class Attention(Part):
    """Projections around the kernel that the architecture names."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        source: jax.Array,
        view: View,
        noise: Noise | None,
        *,
        memory: Memory | None = None,
        answers: dict | None = None,
        streams: int = 1,
        biases=None,
        types=None,
    ) -> tuple[jax.Array, dict]:
        """x [B, Q, D] asks, source [B, S, D] answers, and so does what the memory has
        keys and values of: both are in `answers` once another stream has asked.
        `biases` and `types` are the layer's parameters for relative positions and
        types. With what can be captured."""
        arch, H, K = self.arch, self.arch.heads, self.arch.head_size
        linear = partial(
            dense, H * K, arch, self.dtype, bias=arch.attention_bias == "all"
        )

        def project(name: str, states: jax.Array) -> jax.Array:
            return keep(linear(name)(states)).reshape(*states.shape[:-1], H, K)

        def answering(name: str, before: jax.Array | None) -> list[jax.Array]:
            """The keys or values, once for each stream that asks."""
            # What is remembered; a norm of it has a gradient for its parameters.
            bare = arch.norm_place == "post"
            fixed = source.shape[1] - x.shape[1] if bare else 0
            if not fixed and streams == 1:
                return [after(before, project(name, source))]
            each = linear(name)(source, readers=streams, fixed=fixed)
            shape = (*source.shape[:-1], H, K)
            return [after(before, one.reshape(shape)) for one in each]

        q = project("q", x)
        r = None
        if answers is None:
            k, *more_k = answering("k", memory and memory.k)
            v, *more_v = answering("v", memory and memory.v)
            if arch.position == "xl":
                r = project("r", view.distances.astype(self.dtype))
        else:
            k, v, r = answers["other"]
        options = dict(
            rate=arch.attention_dropout, noise=noise and noise.at(PROBABILITIES)
        )
        probabilities = None
        if arch.attention == "window":
            far = (
                project("q_global", x),
                project("k_global", source),
                project("v_global", source),
            )
            if view.visible is None:
                mixed = attend_window(
                    (q, k, v), far, tokens=view.tokens, arch=arch, **options
                )
            else:
                mixed, probabilities = self.by_reach((q, k, v), far, view, options)
        elif view.visible is None:
            relative = None
            if arch.position == "xl":
                relative = Relative.of(r, biases, types)
            mixed = attend_flash(
                *(q, k, v),
                asking=view.tokens,
                answering=view.keys,
                relative=relative,
                slots=view.slots,
                **options,
            )
        else:
            bias = relative = None
            if arch.position == "functional":
                relative = view.distances.astype(self.dtype)
                bias = jnp.einsum(
                    "bqhk,qsk->bhqs", q, relative, preferred_element_type=jnp.float32
                )
            if arch.position == "xl":
                bias = positions.xl_scores(q, k, r, biases, where=view.where)
            if arch.type_scheme == "relative":
                bias += positions.type_scores(q, types, differs=view.differs)
            mixed, probabilities = attend(
                q, k, v, visible=view.visible, bias=bias, relative=relative, **options
            )
            mixed = keep(mixed)
        out = dense(
            arch.width,
            arch,
            self.dtype,
            "o",
            bias=arch.attention_bias == "all",
            shrink=residual_shrink(arch),
        )
        inside = {"attentions": probabilities, "k": k, "v": v}
        if streams > 1:
            inside["other"] = (*more_k, *more_v, r)  # for the one stream more
        return out(mixed.reshape(*x.shape[:-1], H * K)), inside

    def by_reach(self, near, far, view: View, options):
        """The window as plain dense attention: its definition, and quadratic. Global
        tokens ask, and are answered, through projections of their own."""
        mixed, probabilities = attend(*near, visible=view.visible, **options)
        if view.tokens.reach is None:
            return mixed, probabilities
        widely, their_probabilities = attend(*far, visible=view.visible, **options)
        reaches = view.tokens.reach > 0  # [B, S]
        return (
            jnp.where(reaches[:, :, None, None], widely, mixed),
            jnp.where(reaches[:, None, :, None], their_probabilities, probabilities),
        )


class FeedForward(Part):
    @nn.compact
    def __call__(self, x):
        arch = self.arch
        x = keep(dense(arch.inner, arch, self.dtype, "inner")(x))
        x = ACTIVATE[arch.activation](x)
        shrink = residual_shrink(arch)
        return dense(arch.width, arch, self.dtype, "outer", shrink=shrink)(x)


class Block(Part):
    """One layer. Its parts are stored side by side, each in as many copies as
    `arch.copies(part)` says."""

    @nn.compact
    def __call__(self, x, view: View, noise: Noise | None, memory=None, query=None):
        """x [B, S, D], and query: the second stream's states [B, P, D] and View.

        Returns both streams and what can be captured from inside.
        """
        arch, parts = self.arch, (self.arch, self.dtype)
        attention = Attention(*parts, name="attention")
        attention_norm = norm(*parts, "attention_norm")
        ffn, ffn_norm = FeedForward(*parts, name="ffn"), norm(*parts, "ffn_norm")
        before = arch.norm_place == "pre"
        extra: dict = {"memory": memory}
        if arch.position == "xl":
            extra["biases"] = ByHead(arch, BIASES, name="position")()
        if arch.type_scheme == "relative":
            extra["types"] = ByHead(arch, TYPES, name="types")()

        def drop(x, noise, place):
            there = noise and noise.at(place)
            return dropout(x, rate=arch.dropout, noise=there)

        def layer(x, source, view, noise, *, answers=None, streams=1):
            y = attention_norm(x) if before else x
            mixed, inside = attention(
                y, source, view, noise, answers=answers, streams=streams, **extra
            )
            x = x + drop(mixed, noise, ATTENTION)
            x = x if before else attention_norm(x)
            y = ffn(ffn_norm(x) if before else x)
            x = x + drop(y, noise, FEED_FORWARD)
            x = x if before else ffn_norm(x)
            return x, inside | {"hidden": x}

        source = after(memory and memory.states, x)
        source = attention_norm(source) if before else source
        x, inside = layer(x, source, view, noise, streams=1 + (query is not None))
        if query is None:
            return (x, None), inside
        there = noise and noise.at(QUERY)
        g, _ = layer(query[0], source, query[1], there, answers=inside)
        return (x, g), inside | {"query": g}
