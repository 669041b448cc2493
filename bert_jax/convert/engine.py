"""Tensors of theirs <-> our tree of parameters, through one rename table.

Everything must be accounted for: a tensor we miss, or one we have no name for, is an
error that lists all of them.
"""

import re
import warnings

import jax
import numpy as np

from bert_jax.convert.tables import LAYOUTS, Layout, Rename
from bert_jax.errors import InputError, InputWarning
from bert_jax.models.arch import Arch
from bert_jax.models.heads import BY_PIECE, HEADS, heads_of
from bert_jax.models.model import param_shapes, path_name

STACKED = "stack/layers/"
MAIN = ("embed", "project", "stack", *HEADS)
MOST = 500  # missing tensors that an error names
OLD_NORM = (
    (r"(LayerNorm|layer_norm[12])\.gamma$", r"\1.weight"),
    (r"(LayerNorm|layer_norm[12])\.beta$", r"\1.bias"),
)


def flatten(params: dict) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {path_name(path): leaf for path, leaf in leaves}


def unflatten(flat: dict[str, np.ndarray]) -> dict:
    tree: dict = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


# One tensor.


def fold_in(tensor: np.ndarray, fold: str, arch: Arch) -> np.ndarray:
    """Their tensor as we store it."""
    match fold:
        case "transpose":
            return tensor.T
        case "vocab":
            surplus = arch.padded_vocab - len(tensor)
            return np.pad(tensor, [(0, surplus), *[(0, 0)] * (tensor.ndim - 1)])
        case "row":
            return tensor.reshape(-1)
        case "heads":
            return tensor.reshape(len(tensor), -1)
        case "heads_out":
            return tensor.reshape(len(tensor), -1).T
    return tensor


def fold_out(tensor: np.ndarray, fold: str, arch: Arch) -> np.ndarray:
    """Our tensor as they store it."""
    heads = (arch.heads, arch.head_size)
    match fold:
        case "transpose":
            tensor = tensor.T
        case "vocab":
            tensor = tensor[: arch.vocab_size]
        case "row":
            tensor = tensor.reshape(1, 1, -1)
        case "heads":
            tensor = tensor.reshape(-1, *heads)
        case "heads_out":
            tensor = tensor.T.reshape(-1, *heads)
    return np.ascontiguousarray(tensor)


# One row of a table.


def paths(row: Rename) -> tuple[str, ...]:
    return (row.ours,) if isinstance(row.ours, str) else row.ours


def names(row: Rename, arch: Arch) -> list[str]:
    """Their names for a row: one for each stored copy of what layers have."""
    part = paths(row)[0].removeprefix(STACKED).split("/")[0]
    return row.names(max(arch.copies(part)) + 1, arch.group_layers)


def put_out(row: Rename, ours: dict[str, np.ndarray], arch: Arch) -> dict:
    """The tensors of theirs that a row gives."""
    leaf = np.concatenate([ours[path] for path in paths(row)], axis=-1)
    copies = leaf if paths(row)[0].startswith(STACKED) else leaf[None]
    return {
        name: fold_out(copy, row.fold, arch)
        for name, copy in zip(names(row, arch), copies, strict=True)
    }


def take_in(row: Rename, tensors: list[np.ndarray], arch: Arch, shapes) -> dict:
    """The leaves of ours, of these shapes, that the tensors of a row make."""
    parts = [
        fold_in(np.asarray(tensor, np.float32), row.fold, arch) for tensor in tensors
    ]
    leaf = np.stack(parts) if paths(row)[0].startswith(STACKED) else parts[0]
    cuts = np.cumsum([shape[-1] for shape in shapes])[:-1]
    leaves = np.split(leaf, cuts, axis=-1) if len(cuts) else [leaf]
    return dict(zip(paths(row), leaves, strict=True))


# A whole model.


def to_theirs(
    params: dict, arch: Arch, layout: Layout, *, heads: tuple[str, ...]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Our tree as flat f32 tensors under the names of the class with these heads, tied
    ones written once; and what that class does not know: heads that no class has under
    the names of their release, others under ours."""
    ours = flatten(jax.device_get(params))
    theirs = {}
    for row in layout.table(arch, heads).values():
        if all(path in ours for path in paths(row)):
            theirs |= put_out(row, ours, arch)
            for path in paths(row):
                del ours[path]
    if layout.write_tied:
        repeats = layout.repeats(arch, heads).items()
        theirs |= {
            copy: theirs[name].copy() for copy, name in repeats if name in theirs
        }
    rest = {}
    for head in layout.unclassed:
        for row in layout.heads[head]:
            if all(path in ours for path in paths(row)):
                rest |= put_out(
                    row, {path: ours.pop(path) for path in paths(row)}, arch
                )
    for name, leaf in ours.items():
        rest[name] = fold_out(leaf, rest_fold(name), arch)
    return theirs, rest


def rest_fold(ours: str) -> str:
    """The fold of a parameter that is written under our name."""
    return "vocab" if ours.endswith(BY_PIECE) else ""


def class_for(layout: Layout, params: dict, arch: Arch) -> tuple[str, ...]:
    """The heads of the class that knows most of those that are there."""
    present = set(heads_of(params, arch))
    fits = [heads for heads in layout.classes if set(heads) <= present]
    return max(fits, key=lambda heads: (len(set(heads) & set(params)), len(heads)))


def reference_heads(model_type: str, reference: str) -> tuple[str, ...]:
    """The heads of a class of a layout; `reference` may say more after its name."""
    classes = LAYOUTS[model_type].classes.items()
    return next(heads for heads, name in classes if name == reference.split(" ")[0])


def canonical(tensors: dict[str, np.ndarray], layout: Layout) -> dict[str, np.ndarray]:
    """Their tensors under today's names: with the body's prefix, weight and bias."""
    bare = not any(name.startswith(layout.prefix) for name in tensors)
    renamed, twice = {}, []
    for given, tensor in tensors.items():
        name = layout.full_name(given) if bare else given
        for old, new in OLD_NORM:
            name = re.sub(old, new, name)
        if name in renamed:
            twice.append(f"{given} is another name of {name}, which is there too")
        if not layout.is_ignored(name):
            renamed[name] = tensor
    if twice:
        raise InputError("\n".join(twice))
    return renamed


def heads_in(
    there: set[str], arch: Arch, layout: Layout, architectures: tuple[str, ...]
) -> tuple[str, ...]:
    """The heads whose tensors are there, in whole or in part.

    Several heads may have the same tensors (BERT's `classifier`): config.json's
    `architectures` decides, and where it does not, the class listed first.
    """

    def tensors(head: str, heads: tuple[str, ...]) -> set[str]:
        rows = layout.table(arch, heads).values()
        own = (row for row in rows if paths(row)[0].startswith(f"{head}/"))
        return {name for row in own for name in names(row, arch)}

    def found(heads: tuple[str, ...]) -> int:
        """How many tensors a class would read; -1 if it is not this class."""
        sets = [tensors(head, heads) for head in heads]
        if any(own and not own & there for own in sets):
            return -1
        return sum(len(own & there) for own in sets)

    fits = [heads for heads in layout.classes if found(heads) >= 0]
    named = [heads for heads in fits if layout.classes[heads] in architectures]
    least = set(max(named, key=found)) if named else set()
    chosen = max((h for h in fits if set(h) >= least), key=found)
    # More than the class has: an old checkpoint with the pooler beside the LM head.
    used = {name for head in chosen for name in tensors(head, chosen)}
    further = []
    for head in set(layout.heads) - set(chosen):
        own = tensors(head, (head,))
        if own and own <= there and not own & used:
            further.append(head)
    return tuple(head for head in HEADS if head in (*chosen, *further))


def to_ours(
    tensors: dict[str, np.ndarray],
    arch: Arch,
    layout: Layout,
    *,
    source: str,
    architectures: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> dict:
    """Their tensors as our tree. `source` is named in the error; `extra` are those
    that no class of theirs knows."""
    theirs, problems = canonical(tensors, layout), []
    named = {name: leaf for name, leaf in (extra or {}).items() if "/" not in name}
    extra = {name: leaf for name, leaf in (extra or {}).items() if "/" in name}
    problems += [f"{name} is in both files" for name in named if name in theirs]
    theirs |= named
    heads = heads_in(set(theirs), arch, layout, architectures)
    own = {row.theirs for row in layout.table(arch, heads).values()}
    spare = {row.theirs for row in layout.heads.get("pooler", ())} - own
    if "pooler" in heads and spare & set(theirs):
        # Old files: the body's, beside a classifier that brings a pooler of its own.
        text = f"{source}: not read, since its class has another: {sorted(spare)}"
        warnings.warn(text, InputWarning, stacklevel=3)
        theirs = {name: theirs[name] for name in theirs if name not in spare}
    for repeat, original in layout.repeats(arch, heads).items():
        if repeat not in theirs:
            continue
        copy = theirs.pop(repeat)
        if original not in theirs:
            theirs[original] = copy
        elif not np.array_equal(copy, theirs[original]):
            problems.append(f"{repeat} differs from {original}, to which it is tied")

    also = {name.split("/")[0] for name in extra}
    expected = flatten(param_shapes(arch, heads=(*heads, *(set(HEADS) & also))))
    flat, missing = {}, []
    for row in layout.table(arch, heads).values():
        if not all(path in expected for path in paths(row)):
            continue
        shapes = [expected.pop(path).shape for path in paths(row)]
        blank = zip(
            paths(row), (np.zeros(shape, bool) for shape in shapes), strict=True
        )
        wanted = put_out(row, dict(blank), arch)
        absent = [name for name in wanted if name not in theirs]
        parts = {name: theirs.pop(name) for name in wanted if name in theirs}
        wrong = [
            f"{name} has shape {part.shape}, config.json says {wanted[name].shape}"
            for name, part in parts.items()
            if part.shape != wanted[name].shape
        ]
        missing, problems = missing + absent, problems + wrong
        if not absent and not wrong:
            flat |= take_in(row, list(parts.values()), arch, shapes)
    for path, want in expected.items():
        leaf, fold = extra.pop(path, None), rest_fold(path)
        shape = fold_out(np.zeros(want.shape, bool), fold, arch).shape
        if leaf is None:
            missing.append(path)
        elif leaf.shape != shape:
            problems.append(f"{path} has shape {leaf.shape}, config.json says {shape}")
        else:
            flat[path] = fold_in(leaf, fold, arch)
    # What is no part of the main model (a second tower) comes back as it went.
    inner = {path.rpartition("/")[0] for path in extra}
    for path in [*extra]:
        short = rest_fold(path) and len(extra[path]) != arch.vocab_size
        if path.split("/")[0] not in (*MAIN, "") and path not in inner and not short:
            flat[path] = fold_in(extra.pop(path), rest_fold(path), arch)
    if missing:
        rest = f", and {len(missing) - MOST} more" if len(missing) > MOST else ""
        problems.append(f"missing tensors: {', '.join(missing[:MOST])}{rest}")
    if theirs or extra:
        problems.append(f"unexpected tensors: {', '.join(sorted([*theirs, *extra]))}")
    strange = [name for name in architectures if name not in layout.classes.values()]
    if problems and strange:
        known = ", ".join(sorted({*layout.classes.values()}))
        problems.append(f"{', '.join(strange)} is not among the known classes: {known}")
    if problems:
        raise InputError(f"{source}:\n" + "\n".join(problems))
    return unflatten(flat)
