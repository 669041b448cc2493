"""Corpora that several tests of the data share: a small one and a real one."""

import pytest

from bert_jax.data import plans
from bert_jax.data.corpus import open_corpus
from bert_jax.data.prepare import prepare
from bert_jax.data.tokenizers import WordPiece, train_wordpiece
from tests.data import made


@pytest.fixture(scope="session")
def texts():
    return made.make_texts(60)


@pytest.fixture(scope="session")
def tokenizer(texts):
    lines = [line for lines in texts for line in lines]
    return train_wordpiece(lines, vocab_size=100, progress=False)


@pytest.fixture(scope="session")
def encoded(texts, tokenizer):
    """Documents as lists of sentences as lists of ids."""
    return made.encode(texts, tokenizer)


@pytest.fixture(scope="session")
def small(texts, tokenizer, tmp_path_factory):
    """A folder; open it by `corpus`."""
    folder = tmp_path_factory.mktemp("data") / "small"
    return made.make_corpus(folder, texts, tokenizer).path


@pytest.fixture
def corpus(small, monkeypatch):
    """Some 10 records, one of them empty, and blocks of a few rows."""
    monkeypatch.setattr(plans, "BLOCK", 300)
    return open_corpus(small)


@pytest.fixture(scope="session")
def real(shared_data, tmp_path_factory):
    """A folder with two records of books; open it by `books`."""
    vocab = (shared_data / "vocabs/bert-base-uncased-vocab.txt").read_text()
    source = str(shared_data / "en_books/valid.txt.xz")
    out = tmp_path_factory.mktemp("data") / "books"
    tokenizer = WordPiece(vocab.splitlines())
    prepare([source], tokenizer=tokenizer, out=out, workers=0, progress=False)
    return out


@pytest.fixture
def books(real):
    return open_corpus(real)
