"""Files of a Hugging Face directory: JSON and tensors. No pickle is ever run."""

import json
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bert_jax.errors import InputError


def read_json(path: Path) -> dict:
    """A JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8 or not JSON
        raise InputError(f"{path} is damaged, not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged: it does not hold a JSON object")
    return content


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """The weights of a directory, in f32, whatever they are stored in."""
    for name, read in READERS.items():
        if (directory / name).exists():
            return read(directory / name)
    raise InputError(f"{directory} holds no weights ({', '.join(READERS)})")


def read_shards(index: Path, read) -> dict[str, np.ndarray]:
    """All files that an index names; each tensor must be where it says."""
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise InputError(f"{index} is damaged: it has no weight_map")
    tensors = {}
    for name in sorted(set(map(str, where.values()))):
        if Path(name).name != name:
            raise InputError(f"{index} names {name!r}, outside its directory")
        tensors |= read(index.parent / name)
    lost = sorted(set(where) - set(tensors))
    if lost:
        raise InputError(f"{index} lists tensors that no file holds: {', '.join(lost)}")
    return tensors


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="flax") as tensors:  # knows bfloat16
            return {
                name: np.asarray(tensors.get_tensor(name), np.float32)
                for name in tensors.keys()  # noqa: SIM118 (it is no dict)
            }
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except Exception as error:  # the library raises its own type for a damaged file
        raise InputError(f"{path} is damaged or not safetensors: {error}") from None


def read_torch(path: Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError:
        raise InputError(
            f"{path} needs PyTorch to be read: pip install 'bert_jax[torch]'"
        ) from None
    if not path.exists():
        raise InputError(f"{path} is missing")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        return {name: tensor.float().numpy() for name, tensor in loaded.items()}
    except Exception:  # torch has many types for it, and advises to run the pickle
        raise InputError(
            f"{path} is damaged or holds more than tensors; no code in it was run"
        ) from None


READERS = {
    "model.safetensors": read_safetensors,
    "model.safetensors.index.json": partial(read_shards, read=read_safetensors),
    "pytorch_model.bin": read_torch,
    "pytorch_model.bin.index.json": partial(read_shards, read=read_torch),
}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # as it calls a full disk
        raise OSError(str(error)) from None
