"""Config files; installed as `bert_jax.configs`."""
