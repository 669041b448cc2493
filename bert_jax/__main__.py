"""`python -m bert_jax` is the `bert_jax` command."""

from bert_jax.cli import main

if __name__ == "__main__":
    main()
