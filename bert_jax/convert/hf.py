"""Parameters to and from the layout of Hugging Face transformers.

One rename table serves both directions. Everything must be accounted for: a tensor we
miss, or one we have no name for, is an error that lists all of them.
"""

import json
import re
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bert_jax.convert import tables
from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch
from bert_jax.models.model import HEADS, Model, param_shapes, path_name
from bert_jax.models.tokens import plain
from bert_jax.whole import whole_folder

TOLERANCE = 1e-4  # f32: an export whose logits differ by more is not left on disk
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


# The engine: flat tensors of theirs <-> our tree.


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


def fold_in(tensor: np.ndarray, fold: str, arch: Arch) -> np.ndarray:
    """Their tensor as we store it."""
    if fold == "transpose":
        return tensor.T
    if fold == "vocab":
        surplus = arch.padded_vocab - len(tensor)
        return np.pad(tensor, [(0, surplus), *[(0, 0)] * (tensor.ndim - 1)])
    return tensor


def fold_out(tensor: np.ndarray, fold: str, arch: Arch) -> np.ndarray:
    """Our tensor as they store it."""
    if fold == "transpose":
        return np.ascontiguousarray(tensor.T)
    return tensor[: arch.vocab_size] if fold == "vocab" else tensor


def to_theirs(params: dict, arch: Arch) -> dict[str, np.ndarray]:
    """Our tree as flat f32 tensors under their names, tied ones written once."""
    ours = flatten(jax.device_get(params))
    table = {row.ours: row for row in tables.BERT}
    unnamed = sorted(set(ours) - set(table))
    if unnamed:
        raise InputError(f"no name in the export table for: {', '.join(unnamed)}")
    theirs = {}
    for name, leaf in ours.items():
        row = table[name]
        if "{n}" in row.theirs:
            for n, part in enumerate(leaf):
                theirs[row.theirs.format(n=n)] = fold_out(part, row.fold, arch)
        else:
            theirs[row.theirs] = fold_out(leaf, row.fold, arch)
    return theirs


def canonical(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Their tensors under today's names: with the `bert.` prefix, weight and bias."""
    renamed, twice = {}, []
    for given, tensor in tensors.items():
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", given)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        if re.match(r"(embeddings|encoder|pooler)\.", name):
            name = f"bert.{name}"
        if name in renamed:
            twice.append(f"{given} is another name of {name}, which is there too")
        renamed[name] = tensor
    if twice:
        raise InputError("\n".join(twice))
    return renamed


def heads_in(tensors: dict[str, np.ndarray]) -> tuple[str, ...]:
    """The heads whose tensors are all there; part of a head is reported later."""
    names = canonical(tensors)
    present = {row.ours.split("/")[0] for row in tables.BERT if row.theirs in names}
    return tuple(head for head in HEADS if head in present)


def to_ours(tensors: dict[str, np.ndarray], arch: Arch, *, source: str) -> dict:
    """Their tensors as our tree. `source` is named in the error."""
    theirs = canonical(tensors)
    problems = []
    for repeat, original in tables.BERT_TIED.items():
        if repeat not in theirs:
            continue
        copy = theirs.pop(repeat)
        if original not in theirs:
            theirs[original] = copy
        elif not np.array_equal(copy, theirs[original]):
            problems.append(f"{repeat} differs from {original}, to which it is tied")
    for name in tables.BERT_IGNORED:
        theirs.pop(name, None)

    heads = heads_in(theirs)
    expected = flatten(param_shapes(arch, heads=heads))
    table = {row.ours: row for row in tables.BERT}
    flat, missing = {}, []
    for ours, shape in expected.items():
        row = table[ours]
        stacked = "{n}" in row.theirs
        names = [row.theirs.format(n=n) for n in range(arch.layers if stacked else 1)]
        absent = [name for name in names if name not in theirs]
        missing += absent
        parts = [theirs.pop(name) for name in names if name not in absent]
        if absent:
            continue
        want = fold_out(np.zeros(shape.shape[stacked:], bool), row.fold, arch).shape
        for name, part in zip(names, parts, strict=True):
            if part.shape != want:
                problems.append(
                    f"{name} has shape {part.shape}, config.json says {want}"
                )
        if not problems:
            parts = [fold_in(np.asarray(p, np.float32), row.fold, arch) for p in parts]
            flat[ours] = np.stack(parts) if stacked else parts[0]
    if missing:
        problems.append(f"missing tensors: {', '.join(missing)}")
    if theirs:
        problems.append(f"unexpected tensors: {', '.join(sorted(theirs))}")
    if problems:
        raise InputError(f"{source}:\n" + "\n".join(problems))
    return unflatten(flat)


# Directories.


def read_json(path: Path) -> dict:
    """A JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8 or not JSON
        raise InputError(f"{path} is damaged, not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged: it does not hold a JSON object")
    return content


def read_arch(path: Path) -> Arch:
    """The architecture in a config.json."""
    config = read_json(path)
    kind = config.get("model_type")
    if kind != "bert":
        raise InputError(f"{path}: {unknown('model_type', str(kind), ['bert'])}")
    problems = []
    if config.get("position_embedding_type", "absolute") != "absolute":
        problems.append(
            f"position_embedding_type={config['position_embedding_type']!r}: only "
            "'absolute' is a BERT"
        )
    if config.get("is_decoder", False):
        problems.append("is_decoder=true: only encoders can be read")
    activation = str(config.get("hidden_act", "gelu"))
    if activation not in tables.ACTIVATIONS:
        problems.append(unknown("hidden_act", activation, tables.ACTIVATIONS))
    if problems:
        raise InputError(f"{path}: " + "\n".join(problems))
    sizes = {
        ours: config[theirs]
        for ours, theirs in tables.BERT_CONFIG.items()
        if theirs in config
    }
    try:
        return Arch(**sizes, activation=tables.ACTIVATIONS[activation])
    except InputError as error:
        raise InputError(f"{path} (in our names): {error}") from None


def write_config(path: Path, arch: Arch, *, reference: str, pad_id: int) -> None:
    theirs = {ours: name for name, ours in reversed(tables.ACTIVATIONS.items())}
    config = {
        "architectures": [reference],
        "model_type": "bert",
        **{their: getattr(arch, our) for our, their in tables.BERT_CONFIG.items()},
        "hidden_act": theirs[arch.activation],
        "pad_token_id": pad_id,
        "position_embedding_type": "absolute",
        "torch_dtype": "float32",
    }
    path.write_text(json.dumps(config, indent=2) + "\n")


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """The weights of a directory. No pickle is run: torch files load weights only."""
    single, index, torch_file = (directory / name for name in WEIGHTS)
    if single.exists():
        return read_safetensors(single)
    if index.exists():
        tensors = {}
        for name in sorted(set(read_json(index).get("weight_map", {}).values())):
            if Path(name).name != name:
                raise InputError(f"{index} names {name!r}, outside its directory")
            tensors |= read_safetensors(directory / name)
        return tensors
    if torch_file.exists():
        try:
            import torch
        except ImportError:
            raise InputError(
                f"{torch_file} needs PyTorch to be read: pip install 'bert_jax[torch]'"
            ) from None
        try:
            loaded = torch.load(torch_file, map_location="cpu", weights_only=True)
            return {name: tensor.float().numpy() for name, tensor in loaded.items()}
        except Exception:  # torch has many types for it, and advises to run the pickle
            raise InputError(
                f"{torch_file} is damaged or holds more than tensors; no code in it "
                "was run"
            ) from None
    raise InputError(f"{directory} holds no weights ({', '.join(WEIGHTS)})")


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except Exception as error:  # the library raises its own type for a damaged file
        raise InputError(f"{path} is damaged or not safetensors: {error}") from None


def import_model(directory: str | Path) -> tuple[Arch, dict]:
    """The architecture and parameters of a Hugging Face directory."""
    directory = Path(directory)
    arch = read_arch(directory / "config.json")
    return arch, to_ours(read_tensors(directory), arch, source=str(directory))


def export_model(out: str | Path, params: dict, arch: Arch, tokenizer) -> float | None:
    """Writes a Hugging Face directory, whole or not at all.

    Returns the largest difference between our logits and PyTorch's, or None where
    PyTorch is not installed and nothing could be verified.
    """
    if tokenizer.size != arch.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.size} pieces, the weights {arch.vocab_size}"
        )
    reference = tables.BERT_CLASSES[heads_of(params)]
    with whole_folder(out) as scratch:
        weights = scratch / "model.safetensors"
        try:
            save_file(to_theirs(params, arch), weights, metadata={"format": "pt"})
        except SafetensorError as error:  # as it calls a full disk
            raise OSError(str(error)) from None
        config = scratch / "config.json"
        write_config(config, arch, reference=reference, pad_id=tokenizer.pad_id)
        tokenizer.save(scratch)
        set_max_length(scratch / "tokenizer_config.json", arch)
        difference = verify(scratch, params, arch)
        if difference is not None and not difference <= TOLERANCE:
            raise InputError(
                f"PyTorch computes other logits from the export (difference "
                f"{difference:.2e}, allowed {TOLERANCE:.0e}): nothing was left at {out}"
            )
    return difference


def set_max_length(path: Path, arch: Arch) -> None:
    """So that truncation=True of transformers cuts a text to what the model takes."""
    config = read_json(path) | {"model_max_length": arch.max_positions}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def heads_of(params: dict) -> tuple[str, ...]:
    """The heads that are there; an error where no reference class has just these."""
    present = tuple(head for head in HEADS if head in params)
    if present not in tables.BERT_CLASSES:
        raise InputError(f"no reference class has just the heads {list(present)}")
    return present


def verify(directory: Path, params: dict, arch: Arch) -> float | None:
    """max |ours - theirs| over all outputs at real positions; None without torch."""
    try:
        import torch
        import transformers
    except ImportError:
        return None
    transformers.utils.logging.disable_progress_bar()
    heads = heads_of(params)
    options = {} if heads else {"add_pooling_layer": False}
    theirs, report = getattr(transformers, tables.BERT_CLASSES[heads]).from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True, **options
    )
    lost = [*report["missing_keys"], *report["unexpected_keys"]]
    if lost:
        raise InputError(f"transformers did not match: {', '.join(sorted(lost))}")
    rng = np.random.default_rng(0)
    S = min(32, arch.max_positions)
    ids = rng.integers(0, arch.vocab_size, (4, S))
    types = rng.integers(0, arch.types, (4, S))
    real = np.arange(S) < np.array([S, S // 2, S - 1, 3])[:, None]
    with torch.no_grad():
        out = theirs.eval()(
            input_ids=torch.tensor(ids),
            token_type_ids=torch.tensor(types),
            attention_mask=torch.tensor(real.astype(np.int64)),
        )
    with jax.default_matmul_precision("highest"):
        ours = Model(arch).apply(
            {"params": params}, plain(ids, types=types, real=real), heads=heads
        )
    V = arch.vocab_size
    pairs = []
    if "lm" in heads:
        logits = out.prediction_logits if "nsp" in heads else out.logits
        pairs.append((np.asarray(ours["lm"])[real][:, :V], logits.numpy()[real]))
    else:
        pairs.append((np.asarray(ours["last"])[real], out[0].numpy()[real]))
    if heads == ("pooler",):
        pairs.append((ours["pooler"][:, 0], out.pooler_output.numpy()))
    if "nsp" in heads:
        pairs.append((ours["nsp"][:, 0], out.seq_relationship_logits.numpy()))
    # np.max, unlike max, gives NaN if any difference is NaN.
    return float(np.max([np.abs(np.asarray(a) - b).max() for a, b in pairs]))
