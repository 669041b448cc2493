"""A corpus and a run small enough for a test: seconds, not minutes."""

import random
from pathlib import Path

from bert_jax.config import Run, load_config, override, resolve
from bert_jax.data.prepare import Corpus, prepare
from bert_jax.data.tokenizers import Tokenizer, train_wordpiece

SUBJECTS = ["the cat", "a dog", "my sister", "the old man", "every child", "one bird"]
VERBS = ["sees", "likes", "follows", "paints", "remembers", "carries"]
OBJECTS = ["the sea", "a red house", "the moon", "some bread", "a letter", "the river"]

SETTINGS = {
    "arch.layers": "2",
    "arch.width": "32",
    "arch.heads": "2",
    "arch.inner": "64",
    "arch.max_positions": "64",
    "length": "32",
    "batch": "8",
    "steps": "6",
    "optim.lr": "1e-3",
    "optim.warmup": "0.1",
    "log_every": "1",
    "save_every": "2",
    "eval.rows": "16",
}


def write_text(path: Path, *, documents: int = 40, seed: int = 0) -> Path:
    """Documents of a few short sentences, one paragraph a line."""
    rng = random.Random(seed)

    def sentence() -> str:
        parts = (rng.choice(words) for words in (SUBJECTS, VERBS, OBJECTS))
        return " ".join(parts).capitalize() + "."

    texts = [
        "\n".join(
            " ".join(sentence() for _ in range(rng.randint(1, 4)))
            for _ in range(rng.randint(1, 4))
        )
        for _ in range(documents)
    ]
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return path


def make_tokenizer(*, pieces: int = 100, seed: int = 0, folder: Path) -> Tokenizer:
    text = write_text(folder / f"tokenizer-{seed}.txt", seed=seed).read_text()
    return train_wordpiece([text], vocab_size=pieces, progress=False)


def make_corpus(folder: Path, *, tokenizer: Tokenizer, seed: int = 0) -> Corpus:
    text = write_text(folder / f"text-{seed}.txt", seed=seed)
    out = folder / f"corpus-{seed}"
    return prepare([str(text)], tokenizer=tokenizer, out=out, progress=False)


def make_run(corpus: Corpus, **changes: str) -> Run:
    """A run of the smallest BERT; fields are given with __ for the dot."""
    config = load_config("pretrain:bert-tiny")
    named = {
        name.replace("__", "."): value if isinstance(value, tuple) else str(value)
        for name, value in changes.items()
    }
    override(config, {"data": str(corpus.path), **SETTINGS, **named})
    return resolve(config)
