"""Models to and from Hugging Face directories.

    config.json, model.safetensors, the tokenizer's files; extra.safetensors for
    parameters that no class of theirs knows

What is written is read back by PyTorch, and left on disk only if it computes the same.
"""

import dataclasses
import json
import warnings
from pathlib import Path

from bert_jax.convert import tf1
from bert_jax.convert.engine import class_for, to_ours, to_theirs
from bert_jax.convert.files import (
    read_json,
    read_safetensors,
    read_tensors,
    write_safetensors,
)
from bert_jax.convert.tables import LAYOUTS, Layout
from bert_jax.errors import InputError, InputWarning, unknown
from bert_jax.models.arch import Arch
from bert_jax.models.heads import fits
from bert_jax.whole import whole_folder

TOLERANCE = 1e-4  # f32: an export whose logits differ by more is not left on disk
EXTRA = "extra.safetensors"


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written."""

    reference: str  # the class that reads it
    difference: float | None  # largest one between our outputs and PyTorch's
    unverified: str  # why there is none
    extra: tuple[str, ...]  # parameters that the class does not know


def read_arch(config: dict, *, source: str) -> tuple[Arch, Layout]:
    """The architecture in a config.json, and the layout of its tensors."""
    if config.get("model_type") is None:
        raise InputError(
            f"{source} has no model_type, which says what the model is: add one of "
            + ", ".join(sorted(LAYOUTS))
        )
    kind = str(config["model_type"])
    if kind not in LAYOUTS:
        raise InputError(f"{source}: {unknown('model_type', kind, LAYOUTS)}")
    layout = LAYOUTS[kind]
    try:
        fields = layout.to_arch(config)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    try:
        arch = Arch(**fields)
    except InputError as error:
        raise InputError(f"{source} (in our names): {error}") from None
    strange = layout.strange(config)
    if strange:
        warnings.warn(
            f"{source}: nothing is known of the fields {', '.join(strange)}; they are "
            "left out of account",
            InputWarning,
            stacklevel=2,
        )
    return arch, layout


def config_of(
    arch: Arch, layout: Layout, heads: tuple[str, ...], *, pad_id: int, labels=()
) -> dict:
    """The config.json of a model; an error where the layout cannot say it."""
    return {
        "architectures": [layout.classes[heads]],
        **layout.to_config(arch, heads, labels),
        "pad_token_id": pad_id,
        "torch_dtype": "float32",
    }


def import_model(
    directory: str | Path, *, tower: str = "discriminator"
) -> tuple[Arch, dict, Layout]:
    """The architecture, the parameters and the layout of a directory, also of one
    with a TensorFlow 1 checkpoint of a google-research release."""
    directory = Path(directory)
    extra = {}
    if (directory / "config.json").is_file():
        if tower != "discriminator":
            raise InputError(f"{directory} holds one model: it has no towers")
        config = read_json(directory / "config.json")
        source = str(directory / "config.json")
        arch, layout = read_arch(config, source=source)
        tensors = read_tensors(directory)
        if (directory / EXTRA).is_file():
            extra = read_safetensors(directory / EXTRA)
            arch = arch.but(labels=labels_of(extra, arch))
    elif tf1.is_tf1(directory):
        config, tensors = tf1.read_tf1(directory, tower)
        arch, layout = read_arch(config, source=str(directory))
    else:
        raise InputError(
            f"{directory} holds neither a config.json nor a TensorFlow checkpoint"
        )
    classes = config.get("architectures")
    params = to_ours(
        tensors,
        arch,
        layout,
        source=str(directory),
        architectures=tuple(map(str, classes)) if isinstance(classes, list) else (),
        extra=extra,
    )
    return arch, params, layout


def labels_of(extra: dict, arch: Arch) -> int:
    """How many labels there are: config.json says so only where its class has them."""
    kernels = [extra.get(f"{head}/dense/kernel") for head in ("classify", "tag")]
    return next((k.shape[-1] for k in kernels if k is not None and k.ndim), arch.labels)


def export_model(
    out: str | Path, params: dict, arch: Arch, tokenizer, *, layout="bert", labels=()
) -> Exported:
    """Writes a Hugging Face directory, whole or not at all."""
    if not fits(tokenizer.size, arch):
        raise InputError(
            f"the tokenizer has {tokenizer.size} pieces, the weights {arch.vocab_size}"
        )
    names = LAYOUTS[layout]
    if arch.position_offset and tokenizer.pad_id != arch.position_offset - 1:
        raise InputError(
            f"arch.position_offset={arch.position_offset} is one more than the id of "
            f"padding in a {layout}, and the tokenizer's is {tokenizer.pad_id}"
        )
    heads = class_for(names, params, arch)
    with whole_folder(out) as scratch:
        theirs, extra = to_theirs(params, arch, names, heads=heads)
        write_safetensors(scratch / "model.safetensors", theirs)
        if extra:
            write_safetensors(scratch / EXTRA, extra)
        config = config_of(arch, names, heads, pad_id=tokenizer.pad_id, labels=labels)
        text = json.dumps(config | tokenizer.token_ids, indent=2) + "\n"
        (scratch / "config.json").write_text(text)
        tokenizer.save(scratch)
        set_max_length(scratch / "tokenizer_config.json", arch)
        difference, unverified = check_export(scratch, params, arch, layout)
        if difference is not None and not difference <= TOLERANCE:
            raise InputError(
                f"PyTorch computes other logits from the export (difference "
                f"{difference:.2e}, allowed {TOLERANCE:.0e}): nothing was left at {out}"
            )
    return Exported(names.classes[heads], difference, unverified, tuple(sorted(extra)))


def set_max_length(path: Path, arch: Arch) -> None:
    """So that truncation=True of transformers cuts a text to what the model takes."""
    if arch.max_length is None:
        return
    config = read_json(path) | {"model_max_length": arch.max_length}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def check_export(
    directory: Path, params: dict, arch: Arch, layout: str
) -> tuple[float | None, str]:
    """The largest difference between our outputs and PyTorch's, or None and why."""
    if LAYOUTS[layout].verified_by != "transformers":
        return None, f"its class needs {LAYOUTS[layout].verified_by}"
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        return None, "it is not installed (pip install 'bert_jax[torch]')"
    from bert_jax.parity import verify

    return verify(directory, params, arch, LAYOUTS[layout]), ""
