"""bert_jax: the whole BERT family in JAX and Flax.

import bert_jax
model = bert_jax.load("runs/demo")        # a workdir or a Hugging Face directory
out = model(ids)                          # dict: hidden, pooled, logits, ...
"""

from bert_jax.errors import InputError
from bert_jax.model_dir import load
from bert_jax.presets import preset

__all__ = ["InputError", "load", "preset"]
__version__ = "0.1.0"
