"""Stored numbers of what transformers 5 has no class for: see make.py."""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent


def load(member: str) -> dict[str, dict[str, np.ndarray]]:
    """Of one of the files: configuration -> name -> array."""
    configurations: dict[str, dict[str, np.ndarray]] = {}
    with np.load(FOLDER / f"{member}.npz", allow_pickle=False) as stored:
        for name in stored.files:
            configuration, rest = name.split("/", 1)
            configurations.setdefault(configuration, {})[rest] = stored[name]
    return configurations


def below(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """What is called prefix/NAME, as NAME."""
    start = prefix + "/"
    return {n.removeprefix(start): a for n, a in arrays.items() if n.startswith(start)}


def tensors_of(
    arrays: dict[str, np.ndarray], kind: str, under: str = "param"
) -> dict[str, np.ndarray]:
    """The parameters (or, under "grad/right", gradients) of one class, each once."""
    stored = below(arrays, under)
    found = {}
    for name in arrays[f"names/{kind}"].tolist():
        for key in (f"{kind}:{name}", name):
            if key in stored:
                found[name] = stored[key]
                break
    return found
