"""The model of the whole family: embed, stack, named heads.

Visibility, positions and types arrive with the `Tokens`; the choices arrive with the
`Arch`; what is returned is what was asked for by name, and nothing else is computed.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch
from bert_jax.models.blocks import Stack
from bert_jax.models.dropout import Noise
from bert_jax.models.embed import Embed
from bert_jax.models.heads import LanguageModelHead, NextSentenceHead, Pooler, take
from bert_jax.models.tokens import Tokens, plain, visible

HEADS = ("lm", "pooler", "nsp")
CAPTURES = ("hidden", "attentions")


class Model(nn.Module):
    """`Model(arch)(tokens, heads=("lm",))["lm"]` are the logits of every position."""

    arch: Arch
    dtype: jnp.dtype = jnp.float32  # of the computation; parameters are f32

    def setup(self):
        parts = (self.arch, self.dtype)
        self.embed = Embed(*parts)
        self.stack = Stack(*parts)
        self.lm = LanguageModelHead(*parts)
        self.pooler = Pooler(*parts)
        self.nsp = NextSentenceHead(*parts)

    def __call__(
        self,
        tokens: Tokens,
        *,
        where: jax.Array | None = None,  # [B, P]: positions the LM head scores
        first: jax.Array | None = None,  # [B, G]: first token of each packed example
        heads: tuple[str, ...] = (),
        capture: tuple[str, ...] = (),
        noise: Noise | None = None,  # present in training: turns dropout on
    ) -> dict[str, jax.Array]:
        """A dict with `last` [B, S, D] and each head and capture asked for.

        lm [B, P or S, padded V]; pooler [B, G, D] and nsp [B, G, 2], G = 1 where
        `first` is not given; hidden [N+1, B, S, D], the embedding output first;
        attentions [N, B, H, S, S].
        """
        for asked, valid in ((heads, HEADS), (capture, CAPTURES)):
            for name in asked:
                if name not in valid:
                    raise InputError(unknown("output", name, valid))
        embedded = self.embed(tokens, noise and noise.at(self.arch.layers))
        x, captured = self.stack(embedded, visible(tokens, tokens), noise, capture)
        out = {"last": x}
        if "hidden" in capture:
            out["hidden"] = jnp.concatenate([embedded[None], captured["hidden"]])
        if "attentions" in capture:
            out["attentions"] = captured["attentions"]
        if "lm" in heads:
            predicted = x if where is None else take(x, where)
            out["lm"] = self.lm(predicted, self.embed.token)
        if "pooler" in heads or "nsp" in heads:
            start = x[:, :1] if first is None else take(x, first)
            out["pooler"] = self.pooler(start)
            if "nsp" in heads:
                out["nsp"] = self.nsp(out["pooler"])
        return out


def init_params(model: Model, key: jax.Array, *, heads: tuple[str, ...]) -> dict:
    """Fresh parameters of the body and of the heads asked for."""

    @jax.jit  # nothing of the forward pass that `init` walks through is computed
    def draw(key):
        tokens = plain(jnp.zeros((1, 2), jnp.int32))
        return model.init(key, tokens, heads=heads)["params"]

    return draw(key)


def param_shapes(arch: Arch, *, heads: tuple[str, ...]) -> dict:
    """The parameter tree as shapes; nothing is allocated."""
    model = Model(arch.but(stack="scan"))  # one layer to walk through instead of N
    return jax.eval_shape(
        lambda key: init_params(model, key, heads=heads), jax.random.key(0)
    )


def count_params(arch: Arch, *, heads: tuple[str, ...]) -> int:
    """How many numbers are learned; the surplus rows of the vocabulary are not."""
    shapes = param_shapes(arch, heads=heads)
    stored = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    surplus = arch.padded_vocab - arch.vocab_size
    return stored - surplus * (arch.width + ("lm" in heads))


def path_name(path) -> str:
    """A parameter's path in the tree as a/b/c."""
    return "/".join(str(getattr(part, "key", part)) for part in path)
