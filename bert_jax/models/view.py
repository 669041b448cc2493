"""What the queries of a stream see, worked out once for all layers."""

import flax.struct
import jax

from bert_jax.models import positions
from bert_jax.models.arch import Arch
from bert_jax.models.slots import Slots
from bert_jax.models.tokens import Tokens, visible


@flax.struct.dataclass
class View:
    """What the queries of one stream see; the same in every layer."""

    tokens: Tokens  # the queries; with `slots` a row, the others of which are padding
    keys: Tokens
    visible: jax.Array | None = None  # bool [B, Q, S]; None: not for this kernel
    differs: jax.Array | None = None  # bool [B, Q, S]: of another type
    where: jax.Array | None = None  # [B, Q]: their place in the row; None = in order
    distances: jax.Array | None = None  # sinusoids of the position scheme
    slots: Slots | None = None  # which of `tokens` the queries are; None = all


def view_of(
    arch: Arch,
    tokens: Tokens,
    k: Tokens,
    *,
    strict: bool = False,
    where: jax.Array | None = None,  # the places that ask; None = all
    dense: bool = True,
) -> View:
    """`dense` False leaves out all that grows with the square of the length."""
    length, S = tokens.ids.shape[1], k.ids.shape[1]
    distances = differs = None
    if arch.position == "xl":
        distances = positions.distance_vectors(arch, asking=length, answering=S)
    if not dense:
        slots = None if where is None else Slots.of(where, length=length)
        asking = tokens if slots is None else slots.asking(tokens)
        if strict:
            asking = asking.replace(rank=asking.rank - 1)
        return View(asking, k, distances=distances, slots=slots)
    q = tokens if where is None else tokens.at(where)
    window = arch.window if arch.attention == "window" else None
    if arch.position == "functional":
        distances = positions.functional_table(arch, S)[S - length :]
    if arch.type_scheme == "relative":
        differs = q.types[:, :, None] != k.types[:, None, :]
    seen = visible(q, k, strict=strict, window=window)
    return View(q, k, seen, differs, where, distances)
