"""What is computed from the last hidden states, by name.

    lm        logits = E transform(h) + b, E the token table (tied); the transform is
              dense, activation, norm (BERT), or nothing (XLNet, and GPT without b)
    pooler    act(W h + b), h the state of the token that stands for an example
    nsp, sop  two logits on the pooled vector: 0 = "B follows A", 1 = random or swapped
    rtd       one logit a token: was it replaced? w·act(W h + b) (ELECTRA)
    classify  `arch.labels` logits on the pooled vector
    choice    one logit on the pooled vector; the examples of a question are compared
    tag       `arch.labels` logits a token
    span      two logits a token: does the answer start, end here?
    answer    the same in steps: a start, an end that knows it, and whether there is an
              answer at all (XLNet)
    sbo       logits of each word of a span from the states at its two borders and its
              place in it: f([h_left; h_right; p]) (SpanBERT's boundary objective)
    capital, relation                         two logits a token, and
    reorder, distance, discourse, relevance   9, 3, `arch.labels` and 3 on the pooled
              vector: the tasks of ERNIE 2.0, one objective each

(Devlin et al. 2019, sections 3 and 4; Lan et al. 2020; Clark et al. 2020,
arXiv:2003.10555; Yang et al. 2019; Joshi et al. 2020, arXiv:1907.10529; Sun et al.
2020, arXiv:1907.12412.)
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.models.arch import Arch
from bert_jax.models.attention import HIDDEN
from bert_jax.models.linear import ACTIVATE, Part, add_bias, dense
from bert_jax.models.norm import norm
from bert_jax.models.tokens import take
from bert_jax.placing import (
    apart_by_pieces,
    apart_by_rows,
    apart_by_rows_and_pieces,
)

HEADS = ("lm", "pooler", "nsp", "sop", "rtd", "classify", "tag", "span", "choice")
HEADS += ("answer", "sbo", "capital", "relation")
HEADS += ("reorder", "distance", "discourse", "relevance")
ON_POOLED = ("nsp", "sop", "classify", "choice", *HEADS[-4:])
ON_TOKENS = ("tag", "span", "capital", "relation")
OUTPUTS = {"nsp": 2, "sop": 2, "span": 2, "choice": 1, "capital": 2, "relation": 2}
OUTPUTS |= {"reorder": 9, "distance": 3, "relevance": 3}  # else as many as labels
SPAN_WORDS, SPAN_WIDTH = 20, 200  # the table of places in a span, as in the release
BY_PIECE = ("embed/token", "lm/bias", "sbo/bias")  # ends of names: a row a piece
BEST_STARTS = 5  # starts for which ends are scored where none is given


def heads_of(params: dict, arch: Arch) -> tuple[str, ...]:
    """The heads that parameters are there for; a bare language model needs none."""
    bare = ("lm",) if arch.lm_head == "bare" else ()
    return tuple(head for head in HEADS if head in (*params, *bare))


def fits(pieces: int, arch: Arch) -> bool:
    """Whether a vocabulary is the model's. A few spare rows are none's (ERNIE 1.0 has
    17,964 pieces and 18,000 rows); many are a sign of another vocabulary."""
    return 0 <= (arch.vocab_size - pieces) * 200 < max(1, arch.vocab_size)


class LanguageModelHead(Part):
    """Logits over the padded vocabulary; surplus pieces get -inf."""

    @nn.compact
    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
        arch = self.arch
        if arch.lm_head == "transform":
            x = dense(arch.table_width, arch, self.dtype, "dense")(x)
            x = norm(arch, self.dtype, "norm")(ACTIVATE[arch.activation](x))
        bias = None
        if arch.lm_head != "bare":
            bias = self.param("bias", nn.initializers.zeros, (arch.padded_vocab,))
        return tied_logits(x, table.astype(self.dtype), bias, arch)


def tied_logits(
    x: jax.Array, table: jax.Array, bias: jax.Array | None, arch: Arch
) -> jax.Array:
    """x [B, P, E] times the token table, plus a bias: [B, P, padded V]."""
    exists = jnp.arange(arch.padded_vocab) < arch.vocab_size
    B, P, E = x.shape
    flat = apart_by_rows(x.reshape(B * P, E))
    logits = jnp.matmul(flat, table.T, preferred_element_type=jnp.float32)
    logits = apart_by_rows_and_pieces(logits)
    if bias is not None:
        logits = add_bias(logits, jnp.where(exists, apart_by_pieces(bias), 0.0))
    return jnp.where(exists, logits, -jnp.inf).reshape(B, P, -1)


class Pooler(Part):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = dense(self.arch.width, self.arch, self.dtype, "dense")(x)
        return ACTIVATE[self.arch.pooler](x)


class LinearHead(Part):
    """Logits straight from a state or a pooled vector."""

    outputs: int
    bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        linear = dense(self.outputs, self.arch, self.dtype, "dense", bias=self.bias)
        return linear(x).astype(jnp.float32)


class ReplacedTokenHead(Part):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = dense(self.arch.width, self.arch, self.dtype, "dense")(x)
        x = ACTIVATE[self.arch.activation](x)
        score = dense(1, self.arch, self.dtype, "score")(x)
        return score[..., 0].astype(jnp.float32)


class AnswerHead(Part):
    """Where the answer starts, where it ends given that, and whether there is one."""

    @nn.compact
    def __call__(self, x, real, last, starts) -> dict[str, jax.Array]:
        """real [B, S]; last [B, 1]: the token that stands for the row; starts [B, C]
        or None: the most probable ones."""
        linear = partial(dense, arch=self.arch, dtype=self.dtype)
        D = self.arch.width
        start = linear(1, name="start")(x)[..., 0].astype(jnp.float32)
        start = jnp.where(real, start, HIDDEN)
        if starts is None:
            places = jax.lax.top_k(start, min(BEST_STARTS, start.shape[1]))[1]
            share = jax.nn.softmax(start).astype(self.dtype)
            begins = jnp.einsum("bs,bsd->bd", share, x)
        else:
            places, begins = starts, take(x, starts[:, :1])[:, 0]
        B, S, C = *x.shape[:2], places.shape[1]
        both = [
            jnp.broadcast_to(x[:, :, None], (B, S, C, D)),
            jnp.broadcast_to(take(x, places)[:, None], (B, S, C, D)),
        ]
        y = jnp.tanh(linear(D, name="end_dense")(jnp.concatenate(both, -1)))
        end = linear(1, name="end")(norm(self.arch, self.dtype, "end_norm")(y))
        y = jnp.concatenate([begins, take(x, last)[:, 0]], -1)
        y = jnp.tanh(linear(D, name="class_dense")(y))
        answered = linear(1, name="class", bias=False)(y)
        return {
            "answer_start": start,  # [B, S]
            "answer_starts": places,  # [B, C]
            "answer_end": jnp.where(
                real[:, :, None], end[..., 0].astype(jnp.float32), HIDDEN
            ),  # [B, S, C]
            "answer_class": answered[..., 0].astype(jnp.float32),  # [B]: above 0, none
        }


class BoundaryHead(Part):
    """Logits of the words inside spans, from what stands outside."""

    @nn.compact
    def __call__(self, x, spans: jax.Array, table: jax.Array) -> jax.Array:
        """spans [B, P, 3]: the token before the span, the one after it, and the number
        of the word in it, from 0."""
        arch = self.arch
        draw = jax.nn.initializers.truncated_normal(arch.init_std)
        places = self.param("position", draw, (SPAN_WORDS, SPAN_WIDTH))
        inside = jnp.take(places, spans[..., 2], axis=0, mode="clip")
        borders = [take(x, spans[..., 0]), take(x, spans[..., 1])]
        y = jnp.concatenate([*borders, inside.astype(self.dtype)], axis=-1)
        for n, features in ((1, arch.width), (2, arch.table_width)):
            y = ACTIVATE[arch.activation](
                dense(features, arch, self.dtype, f"dense_{n}")(y)
            )
            y = norm(arch, self.dtype, f"norm_{n}")(y)
        bias = self.param("bias", nn.initializers.zeros, (arch.padded_vocab,))
        return tied_logits(y, table.astype(self.dtype), bias, arch)


def make_head(name: str, arch: Arch, dtype: jnp.dtype) -> nn.Module:
    if name in (*ON_POOLED, *ON_TOKENS):
        # GPT's score of a text is a bare product with its last state.
        bias = name != "classify" or arch.pooler != "none"
        return LinearHead(arch, dtype, OUTPUTS.get(name, arch.labels), bias)
    kinds = {"lm": LanguageModelHead, "pooler": Pooler, "rtd": ReplacedTokenHead}
    kinds |= {"answer": AnswerHead, "sbo": BoundaryHead}
    return kinds[name](arch, dtype)
