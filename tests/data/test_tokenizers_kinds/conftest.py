"""The compared texts, read once."""

import functools

import pytest

from tests.data.test_tokenizers_kinds import corpora


@functools.cache
def _read(folder):
    return {
        "en_books": corpora.english(folder),
        "zh_cluecorpussmall": corpora.chinese(folder),
        "wnut17": list(corpora.tweets(folder)),
        "fuzz": corpora.fuzz(),
    }


@pytest.fixture
def real_texts(shared_data):
    """Four sets of texts by name, all of each."""
    return _read(shared_data)


@pytest.fixture(scope="session")
def fuzz():
    return corpora.fuzz()
