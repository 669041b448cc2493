"""Start from another model: continued pretraining and domain adaptation.

Every parameter is accounted for: taken over, taken over for the pieces that both
vocabularies have, or fresh. The report says which and how many.
"""

import jax
import numpy as np

from bert_jax.convert.engine import flatten, unflatten
from bert_jax.data.tokenizers import Tokenizer
from bert_jax.errors import InputError
from bert_jax.model_dir import LoadedModel
from bert_jax.models.arch import Arch
from bert_jax.models.heads import BY_PIECE

# What makes another function of the same parameters, and does not show in a shape.
FUNCTION = (
    *("heads", "activation", "norm_eps", "norm_place", "embed_norm", "embed_scale"),
    *("position", "max_distance", "position_biases", "type_scheme"),
    *("share", "groups", "group_layers"),
)
POOLED = ("pooler", "pool_from")  # the same of a model that pools


def warm_start(
    fresh: dict, *, arch: Arch, tokenizer: Tokenizer, source: LoadedModel
) -> tuple[dict, list[str]]:
    """Parameters of `arch`, shaped as `fresh`, and a report of their origin."""
    ours, theirs = flatten(jax.device_get(fresh)), flatten(source.params)
    same_pieces = source.tokenizer.hash == tokenizer.hash
    pairs = shared_pieces(source.tokenizer, tokenizer)
    taken, initialised = {}, []
    problems = [
        f"arch.{name} is {getattr(source.arch, name)!r} there, {getattr(arch, name)!r} "
        f"here: give --config.arch.{name}={getattr(source.arch, name)}"
        for name in (*FUNCTION, *(POOLED if "pooler" in fresh else ()))
        if getattr(source.arch, name) != getattr(arch, name)
    ]
    # A window reads global tokens through projections that begin as the ordinary ones.
    widely = {
        name: theirs[name.replace("_global", "")]
        for name in ours
        if "_global/" in name
        and name not in theirs
        and name.replace("_global", "") in theirs
    }
    theirs |= widely
    stretch = ""
    for name, leaf in ours.items():
        if name not in theirs:
            taken[name] = leaf
            initialised.append(name)
            continue
        other = np.asarray(theirs[name])
        offset, moved = arch.position_offset, source.arch.position_offset
        same_width = leaf.shape[1:] == other.shape[1:]
        if name == "embed/position" and moved != offset and same_width:
            # The rows before an example's first are padding's, where it has any.
            other = np.concatenate([leaf[:offset], other[moved:]])
        if name.endswith(BY_PIECE):
            if not same_width:
                problems.append(
                    f"{name}: width {other.shape[1:]}, here {leaf.shape[1:]}"
                )
                continue
            new = np.array(leaf)
            new[pairs[:, 1]] = other[pairs[:, 0]]
            taken[name] = new
        elif name == "embed/position" and len(other) < len(leaf):
            taken[name] = stretched(other, len(leaf), offset=arch.position_offset)
            stretch = f"positions: {len(other)} rows stretched to {len(leaf)}"
        elif leaf.shape != other.shape:
            problems.append(f"{name} has shape {other.shape}, here {leaf.shape}")
        else:
            taken[name] = other
    if problems:
        raise InputError(
            f"{source.path} does not fit config.arch (is it {source.preset.name}?):\n"
            + "\n".join(problems)
        )
    unused = sorted(set(theirs) - set(ours))
    report = [f"started from {source.path}: {len(ours) - len(initialised)} parameters"]
    if not same_pieces:
        report.append(
            f"other vocabulary: {len(pairs)} of {tokenizer.size} pieces copied, "
            f"{tokenizer.size - len(pairs)} initialised"
        )
    if stretch:
        report.append(stretch)
    if widely:
        report.append(f"begun as the ordinary projections: {', '.join(widely)}")
    if initialised:
        report.append(f"initialised, not in the source: {', '.join(initialised)}")
    if unused:
        report.append(f"in the source, not used here: {', '.join(unused)}")
    return unflatten(taken), report


def shared_pieces(source: Tokenizer, target: Tokenizer) -> np.ndarray:
    """(id there, id here) of every piece that both vocabularies have: [n, 2]."""
    there = {piece: number for number, piece in enumerate(known_pieces(source))}
    found = enumerate(known_pieces(target))
    pairs = [(there[piece], here) for here, piece in found if piece in there]
    return np.asarray(pairs, np.int64).reshape(-1, 2)


def known_pieces(tokenizer: Tokenizer) -> list[tuple]:
    """Pieces in a form that all kinds share: special ones by role, others by their
    text and whether they begin a word (`##ing`; `Ġthe`, `▁the`)."""
    sign = {"bpe": "Ġ", "unigram": "▁"}.get(tokenizer.kind, "##")
    pieces = [
        (bool(begins), piece.removeprefix(sign) or piece)
        for piece, begins in zip(tokenizer.vocab, tokenizer.starts, strict=True)
    ]
    for role in ("pad", "unk", "cls", "sep", "mask"):
        number = getattr(tokenizer, f"{role}_id")
        if number is not None:
            pieces[number] = (role,)
    return pieces


def stretched(table: np.ndarray, rows: int, *, offset: int = 0) -> np.ndarray:
    """A position table with more rows, the trained ones repeated in order.

    So Longformer starts from RoBERTa's 512 positions: eight copies of them, after the
    first `offset` rows, make 4096 (Beltagy et al. 2020, section 5).
    """
    if rows < len(table):
        raise InputError(
            f"a table of {len(table)} positions cannot be stretched to {rows}"
        )
    head, trained = table[:offset], table[offset:]
    index = np.arange(rows - offset) % len(trained)
    return np.concatenate([head, trained[index]])
