"""The model of the whole family: embed, stack, named heads.

Visibility, positions and types arrive with the `Tokens`; the choices arrive with the
`Arch`; what is returned is what was asked for by name, and nothing else is computed.
A second tower (ELECTRA's generator, Clark et al. 2020) reads the same embedding tables
through a projection, a stack and heads of its own.
"""

from functools import lru_cache
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch
from bert_jax.models.dropout import Noise
from bert_jax.models.embed import Embed
from bert_jax.models.flash import takes_flash
from bert_jax.models.heads import BY_PIECE, HEADS, ON_POOLED, ON_TOKENS, make_head
from bert_jax.models.linear import Part, dense
from bert_jax.models.stack import Stack
from bert_jax.models.tokens import Memory, Tokens, after, plain, take
from bert_jax.models.view import view_of
from bert_jax.models.window import slotted_reach

CAPTURES = ("hidden", "attentions", "k", "v", "query")


class Places(NamedTuple):
    """Places in the rows that heads look at; Model says what each is."""

    where: jax.Array | None
    first: jax.Array | None
    starts: jax.Array | None
    spans: jax.Array | None


class Tower(Part):
    """Everything after the embedding tables."""

    def setup(self):
        arch, parts = self.arch, (self.arch, self.dtype)
        if arch.embed_width:
            self.project = dense(arch.width, *parts)
        self.stack = Stack(*parts)
        for head in HEADS:
            setattr(self, head, make_head(head, *parts))

    def __call__(
        self, embedded, tokens, embed, places, *, heads, capture, noise, streams, memory
    ) -> dict[str, jax.Array]:
        arch, S, where = self.arch, tokens.ids.shape[1], places.where
        if arch.attention == "window":
            tokens = tokens.replace(reach=slotted_reach(tokens, arch.global_slots))
        x = self.project(embedded) if arch.embed_width else embedded
        start = x
        k = tokens
        if memory is not None:
            bare = tokens.replace(vectors=None, reach=None, task=None)
            k = jax.tree.map(after, memory.tokens, bare)
        fast = arch.attention == "window" or takes_flash(
            arch, length=S, keys=k.ids.shape[1]
        )
        quadratic = not fast or "attentions" in capture
        view = view_of(arch, tokens, k, dense=quadratic)
        query = None
        if streams == 2:
            asking = view_of(arch, tokens, k, strict=True, where=where, dense=not fast)
            g = jnp.broadcast_to(embed.query, (*where.shape, arch.width))
            query = (g.astype(self.dtype), asking)
        x, g, captured = self.stack(
            x, view, noise, memory=memory, query=query, capture=capture
        )
        out = captured | ({"last": x} if g is None else {"last": x, "query": g})
        # Of those captured the last is normalised, where norms stand before.
        if "hidden" in capture:
            out["hidden"] = jnp.concatenate(
                [start[None], captured["hidden"][:-1], x[None]]
            )
        if "query" in capture:
            out["query"] = jnp.concatenate(
                [query[0][None], captured["query"][:-1], g[None]]
            )
        if "lm" in heads:
            predicted = g if g is not None else x if where is None else take(x, where)
            out["lm"] = self.lm(predicted, embed.token)
        if "sbo" in heads:
            out["sbo"] = self.sbo(x, places.spans, embed.token)
        if "rtd" in heads:
            out["rtd"] = self.rtd(x)
        if "answer" in heads:
            last = self.standing(tokens)
            out |= self.answer(x, tokens.group > 0, last, places.starts)
        for head in ON_TOKENS:
            if head in heads:
                out[head] = getattr(self, head)(x)
        if "pooler" in heads or any(head in heads for head in ON_POOLED):
            first = self.standing(tokens) if places.first is None else places.first
            pooled = take(x, first)
            if arch.pooler != "none":
                pooled = out["pooler"] = self.pooler(pooled)
            for head in ON_POOLED:
                if head in heads:
                    out[head] = getattr(self, head)(pooled)
        return out

    def standing(self, tokens: Tokens) -> jax.Array:
        """[B, 1]: the place of the token that stands for a row of one example."""
        B, S = tokens.group.shape
        if self.arch.pool_from == "first":
            return jnp.zeros((B, 1), jnp.int32)
        last = jnp.where(tokens.group > 0, jnp.arange(S), 0).max(1)
        return last[:, None]


class Model(nn.Module):
    """`Model(arch)(tokens, heads=("lm",))["lm"]` are the logits of every position."""

    arch: Arch
    dtype: jnp.dtype = jnp.float32  # of the computation; parameters are f32
    towers: tuple[tuple[str, Arch], ...] = ()  # further ones, by name

    def setup(self):
        self.embed = Embed(self.arch, self.dtype)
        self.main = Tower(self.arch, self.dtype)
        nn.share_scope(self, self.main)  # its parameters have no `main/` before them
        for name, arch in self.towers:
            if arch.table_width != self.arch.table_width:
                raise InputError(
                    f"the tower {name} reads tables of width {arch.table_width}, they "
                    f"have {self.arch.table_width}: set its embed_width"
                )
            its, ours = ((a.vocab_size, a.padded_vocab) for a in (arch, self.arch))
            if its != ours:
                raise InputError(
                    f"the tower {name} reads tables of vocab_size={its[0]}, stored "
                    f"with {its[1]} rows; they have {ours[0]}, stored with {ours[1]}"
                )
            setattr(self, name, Tower(arch, self.dtype))

    def __call__(
        self,
        tokens: Tokens,
        *,
        where: jax.Array | None = None,  # [B, P]: positions the LM head scores
        first: jax.Array | None = None,  # [B, G]: the token that stands for an example
        starts: jax.Array | None = None,  # [B, C]: where answers may start
        spans: jax.Array | None = None,  # [B, P, 3]: see BoundaryHead
        heads: tuple[str, ...] = (),
        capture: tuple[str, ...] = (),
        tower: str = "main",
        streams: int = 1,
        memory: Memory | None = None,
        noise: Noise | None = None,  # present in training: turns dropout on
    ) -> dict[str, jax.Array]:
        """A dict with `last` [B, S, D] and each head and capture asked for.

        lm [B, P or S, padded V]; pooler [B, G, D], nsp and sop [B, G, 2], classify
        [B, G, labels], choice [B, G, 1], G = 1 where `first` is not given; rtd [B, S],
        tag [B, S, labels], span [B, S, 2], and ERNIE's tasks alike; answer gives
        answer_start [B, S], answer_end [B, S, C] and answer_class [B]; sbo [B, P,
        padded V]; hidden [N+1, B, S, D], the embedding output first; attentions
        [N, B, H, S, M + S], k and v [N, B, M + S, H, K], memory first.

        streams=2 adds XLNet's query stream, which asks at `where`: query [B, P, D], or
        [N+1, B, P, D] if captured; lm then scores it.
        """
        names = ("main", *(name for name, _ in self.towers))
        for asked, valid in (
            (heads, HEADS),
            (capture, CAPTURES),
            ((tower,), names),
        ):
            for name in asked:
                if name not in valid:
                    raise InputError(unknown("output", name, valid))
        both = streams == self.arch.streams == 2 and where is not None
        if not both and (streams != 1 or "query" in capture):
            raise InputError(
                f"streams={streams}: the query stream needs 2, arch.streams=2 (it is "
                f"{self.arch.streams}) and `where`"
            )
        if memory is not None:
            states, position = memory.states is not None, self.arch.position
            if states and position != "xl":
                raise InputError(f"memory needs arch.position='xl', it is {position!r}")
            if self.arch.attention == "window":
                raise InputError("a window has no place for keys and values of before")
        if "sbo" in heads and spans is None:
            raise InputError("the head sbo needs `spans`")
        embedded = self.embed(tokens, noise and noise.at(self.arch.layers))
        if tower != "main":
            noise = noise and noise.at(self.arch.layers + names.index(tower))
        places = Places(where, first, starts, spans)
        asked = dict(heads=heads, capture=capture, streams=streams, memory=memory)
        run = getattr(self, tower)
        return run(embedded, tokens, self.embed, places, noise=noise, **asked)

    def walk(self, tokens: Tokens, heads: tuple[str, ...]) -> None:
        """Through all that has parameters. `generator/lm` is the head of a tower."""
        names = ("main", *(name for name, _ in self.towers))
        asked = {head: head.rpartition("/")[0] or "main" for head in heads}
        for head, tower in asked.items():
            if tower not in names:
                raise InputError(unknown("tower of head", head, names))
        for name in names:
            mine = (head for head, tower in asked.items() if tower == name)
            heads_there = tuple(head.rpartition("/")[2] for head in mine)
            spans = jnp.zeros((1, 1, 3), jnp.int32)
            self(tokens, tower=name, heads=heads_there, spans=spans)


def init_params(model: Model, key: jax.Array, *, heads: tuple[str, ...]) -> dict:
    """Fresh parameters of the body and of the heads asked for."""

    @jax.jit  # nothing of the forward pass that `init` walks through is computed
    def draw(key):
        tokens = plain(jnp.zeros((1, 2), jnp.int32))
        return model.init(key, tokens, heads, method="walk")["params"]

    return draw(key)


@lru_cache
def param_shapes(
    arch: Arch, *, heads: tuple[str, ...], towers: tuple[tuple[str, Arch], ...] = ()
) -> dict:
    """The parameter tree as shapes, nothing allocated; not to be changed in place."""
    # One layer to walk through instead of N.
    towers = tuple((name, tower.but(stack="scan")) for name, tower in towers)
    model = Model(arch.but(stack="scan"), towers=towers)
    return jax.eval_shape(
        lambda key: init_params(model, key, heads=heads), jax.random.key(0)
    )


def count_params(
    arch: Arch, *, heads: tuple[str, ...], towers: tuple[tuple[str, Arch], ...] = ()
) -> int:
    """How many numbers are learned; the surplus rows of the vocabulary are not."""
    shapes = param_shapes(arch, heads=heads, towers=towers)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    surplus = arch.padded_vocab - arch.vocab_size
    return sum(
        leaf.size - surplus * leaf.size // leaf.shape[0]
        if path_name(path).endswith(BY_PIECE)
        else leaf.size
        for path, leaf in leaves
    )


def path_name(path) -> str:
    """A parameter's path in the tree as a/b/c."""
    return "/".join(str(getattr(part, "key", part)) for part in path)
