"""bert_jax: the whole BERT family in JAX and Flax.

import bert_jax
model = bert_jax.load("runs/demo")        # a workdir or a Hugging Face directory
out = model(ids)                          # dict: hidden, pooled, logits, ...
new = model.generate("Once upon a time")  # of a member that writes: dicts with `text`
"""

import importlib

__all__ = ["InputError", "load", "preset"]
__version__ = "0.1.0"

_HOME = {"InputError": "errors", "load": "model_dir", "preset": "presets"}


def __getattr__(name: str):
    """Imports a public name when it is first used, and with it JAX."""
    if name not in _HOME:
        raise AttributeError(f"module 'bert_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bert_jax.{_HOME[name]}"), name)
