"""Fill the blanks: the most probable pieces at each [MASK] of a text."""

import numpy as np

from bert_jax.errors import InputError
from bert_jax.model_dir import LoadedModel


def fill(model: LoadedModel, text: str, *, top: int = 5) -> list[list[dict]]:
    """For each blank the `top` guesses: piece, id and probability.

    A blank is [MASK], whatever the tokenizer calls it.
    """
    if "lm" not in model.heads:
        raise InputError(f"{model.path} has no masked-LM head: it cannot fill blanks")
    tokenizer = model.tokenizer
    if not 1 <= top <= tokenizer.size:
        raise InputError(f"top={top} must be between 1 and {tokenizer.size}")
    if tokenizer.mask_id is None:
        raise InputError(
            f"the {tokenizer.kind} tokenizer of {model.path} has no [MASK]"
        )
    named = text.replace("[MASK]", tokenizer.vocab[tokenizer.mask_id])
    pieces = tokenizer.encode(named, specials="parse")
    ids = np.asarray([[tokenizer.cls_id, *pieces, tokenizer.sep_id]])
    blanks = np.flatnonzero(ids[0] == tokenizer.mask_id)
    if not len(blanks):
        raise InputError(f"no [MASK] in {text!r}: put one where a word is missing")
    # A row as long as a power of two: few lengths, few compilations.
    length = min(1 << int(ids.size - 1).bit_length(), model.arch.max_positions)
    if ids.size > length:
        raise InputError(
            f"the text has {ids.size} pieces, the model has positions for {length}"
        )
    padded = np.pad(ids, ((0, 0), (0, length - ids.size)))
    out = model(padded, attention_mask=np.arange(length)[None] < ids.size)
    logits = np.asarray(out["logits"], np.float64)[0, blanks]
    logits -= logits.max(-1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return [
        [
            {"piece": tokenizer.vocab[i], "id": int(i), "probability": float(row[i])}
            for i in np.argsort(-row, kind="stable")[:top]
        ]
        for row in probabilities
    ]
