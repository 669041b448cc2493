"""bert_jax: the whole BERT family in JAX and Flax."""

__version__ = "0.1.0"
