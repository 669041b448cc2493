"""Fill the blanks: the most probable pieces at each [MASK] of a text."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.errors import InputError
from bert_jax.model_dir import LoadedModel
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.models.tokens import Tokens


def fill(model: LoadedModel, text: str, *, top: int = 5) -> list[list[dict]]:
    """For each blank the `top` guesses: piece, id and probability.

    A blank is [MASK], whatever the tokenizer calls it.
    """
    if "lm" not in model.heads:
        raise InputError(f"{model.path} has no masked-LM head: it cannot fill blanks")
    if model.arch.order == "causal":
        raise InputError(
            f"{model.path} reads from left to right: it cannot fill blanks, since it "
            "does not see what comes after them"
        )
    tokenizer = model.tokenizer
    if not 1 <= top <= tokenizer.size:
        raise InputError(f"top={top} must be between 1 and {tokenizer.size}")
    if tokenizer.mask_id is None:
        raise InputError(
            f"the {tokenizer.kind} tokenizer of {model.path} has no [MASK]"
        )
    named = text.replace("[MASK]", tokenizer.vocab[tokenizer.mask_id])
    pieces = tokenizer.encode(named, specials="parse")
    row, row_types = tokenizer.wrap(pieces)
    ids = np.asarray([row])
    blanks = np.flatnonzero(ids[0] == tokenizer.mask_id)
    if not len(blanks):
        raise InputError(f"no [MASK] in {text!r}: put one where a word is missing")
    # A row as long as a power of two: few lengths, few compilations.
    length = 1 << int(ids.size - 1).bit_length()
    length = min(length, model.arch.max_length or length)
    if ids.size > length:
        raise InputError(
            f"the text has {ids.size} pieces, the model has positions for {length}"
        )
    missing = (0, length - ids.size)
    tokens = model.tokens(
        np.pad(ids, ((0, 0), missing), constant_values=tokenizer.pad_id),
        token_type_ids=np.pad([row_types], ((0, 0), missing))
        if model.arch.types > 1
        else None,
        attention_mask=np.arange(length)[None] < ids.size,
    )
    logits = np.asarray(score(model, tokens, blanks), np.float64)
    logits -= logits.max(-1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return [
        [
            {"piece": tokenizer.vocab[i], "id": int(i), "probability": float(row[i])}
            for i in np.argsort(-row, kind="stable")[:top]
        ]
        for row in probabilities
    ]


def score(model: LoadedModel, tokens: Tokens, blanks: np.ndarray) -> jax.Array:
    """The logits at the blanks, [P, V].

    XLNet learned to predict a word that nothing else sees, through its query stream:
    so the blanks rank above all other words, and each asks on its own.
    """
    V = model.tokenizer.size  # spare rows of the table are no piece
    if model.arch.streams == 1:
        return model.forward(())(model.params, tokens)["lm"][0, blanks, :V]
    rank = np.zeros(tokens.ids.shape, np.int32)
    rank[0, blanks] = 1
    return query_logits(model.arch)(
        model.params, tokens.replace(rank=jnp.asarray(rank)), jnp.asarray(blanks)[None]
    )[0, :, :V]


@lru_cache
def query_logits(arch: Arch):
    """(params, tokens, where [B, P]) -> what the query stream says there."""

    @jax.jit
    def compute(params, tokens, where):
        asked = dict(where=where, heads=("lm",), streams=2)
        return Model(arch).apply({"params": params}, tokens, **asked)["lm"]

    return compute
