"""A corpus that was damaged, moved or is another's says so, and nothing is read."""

import json
import random
import shutil

import numpy as np
import pytest

from bert_jax.data import prepare as preparing
from bert_jax.data.corpus import FORMAT, open_corpus, pack_counts, unpack_counts
from bert_jax.data.prepare import prepare
from bert_jax.data.tokenizers import WordPiece
from bert_jax.errors import InputError
from tests import tiny


@pytest.mark.parametrize("most", [3, 255, 256, 2000])
def test_counts_are_packed(most):
    rng = np.random.default_rng(most)
    counts = rng.integers(0, most, 500)
    counts[:4] = [254, 255, 256, 510]
    assert unpack_counts(pack_counts(counts)).tolist() == counts.tolist()
    assert unpack_counts(pack_counts([])).tolist() == []
    assert len(pack_counts(counts)) <= 500 + counts.sum() // 255


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer


@pytest.fixture(scope="module")
def original(tmp_path_factory, tokenizer):
    """Several records, several pages in each."""
    folder = tmp_path_factory.mktemp("original")
    text = tiny.write_text(folder / "a.txt", documents=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "BATCH_CHARACTERS", 8000)
        corpus = prepare(
            [str(text)], tokenizer=tokenizer, out=folder / "out", progress=False
        )
    assert corpus.records > 3
    assert corpus.index["pieces"][0] > 2 * 512
    return corpus.path


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


def test_every_flipped_bit_is_found(original, copy):
    """Read as a whole, whatever bit of ids or sentences was flipped."""
    corpus = open_corpus(original)
    shard = copy / "shard-00000.tfrecord"
    data = shard.read_bytes()
    rng = random.Random(0)
    for record in (0, corpus.records - 1):
        for column, size in (
            ("ids", 2 * corpus.index["pieces"][record]),
            ("sentences", corpus.index["sentences_bytes"][record]),
            ("documents", corpus.index["documents_bytes"][record]),
        ):
            at = int(corpus.index[f"{column}_at"][record])
            for place in {at, at + int(size) - 1, at + rng.randrange(int(size))}:
                broken = bytearray(data)
                broken[place] ^= 1 << rng.randrange(8)
                shard.write_bytes(broken)
                with pytest.raises(InputError, match="damaged: the checksum of"):
                    read_all(open_corpus(copy))
    shard.write_bytes(data)
    read_all(open_corpus(copy))


def read_all(corpus) -> None:
    corpus.read(0, corpus.about["pieces"])
    for record in range(corpus.records):
        corpus.sentences(record)


def test_a_shard_that_goes_away(copy):
    corpus = open_corpus(copy)
    (copy / "shard-00000.tfrecord").unlink()
    with pytest.raises(InputError, match=r"shard-00000\.tfrecord cannot be read"):
        corpus.read(0, 10)


def test_a_shard_that_gets_shorter(copy):
    corpus = open_corpus(copy)
    (copy / "shard-00000.tfrecord").write_bytes(b"")
    with pytest.raises(InputError, match="ends early: copy or prepare"):
        corpus.read(0, 10)


def test_moved_corpus_opens(copy, original):
    assert open_corpus(copy).about == open_corpus(original).about


def test_missing_or_not_a_corpus(tmp_path):
    with pytest.raises(
        InputError, match=r"gone does not exist; make one with `bert_ja"
    ):
        open_corpus(tmp_path / "gone")
    with pytest.raises(InputError, match="is not a prepared corpus; make one with"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("change", ["truncated", "longer", "gone"])
def test_damaged_shard(copy, change):
    shard = copy / "shard-00000.tfrecord"
    data = shard.read_bytes()
    if change == "gone":
        shard.unlink()
    else:
        shard.write_bytes(data[:-1] if change == "truncated" else data + b"x")
    with pytest.raises(InputError) as error:
        open_corpus(copy)
    assert str(error.value) == (
        f"{shard} is missing or not {len(data)} bytes long: prepare the corpus again"
    )


@pytest.mark.parametrize("name", ["index.npz", "corpus.json"])
def test_damaged_index(copy, name):
    data = (copy / name).read_bytes()
    half = len(data) // 2  # of the same size, so that only the content tells
    (copy / name).write_bytes(data[:half] + bytes(len(data) - half))
    with pytest.raises(InputError, match=r"copy is damaged \(.+\): prepare it again"):
        open_corpus(copy)


def test_one_bit_of_the_index(copy):
    path = copy / "index.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"checksum of index\.npz is wrong"):
        open_corpus(copy)


def test_missing_index(copy):
    (copy / "index.npz").unlink()
    with pytest.raises(InputError, match=r"index\.npz is missing or not \d+ bytes"):
        open_corpus(copy)


def test_another_format(copy):
    path = copy / "corpus.json"
    about = json.loads(path.read_text())
    assert about["format"] == FORMAT
    path.write_text(json.dumps(about | {"format": 1}))
    message = f"has format 1, this version reads {FORMAT}: prepare"
    with pytest.raises(InputError, match=message):
        open_corpus(copy)


def test_another_tokenizer(copy, tokenizer):
    """Of the same size: only the hash can tell."""
    vocab = [*tokenizer.vocab[:-2], *tokenizer.vocab[:-3:-1]]
    assert sorted(vocab) == sorted(tokenizer.vocab)
    other = WordPiece(vocab)
    shutil.rmtree(copy / "tokenizer")
    other.save(copy / "tokenizer")
    corpus = open_corpus(copy)
    with pytest.raises(InputError) as error:
        _ = corpus.tokenizer
    assert str(error.value) == (
        f"{copy / 'tokenizer'} is not the tokenizer the corpus was made with (hash "
        f"{other.hash}, corpus {tokenizer.hash}): prepare the corpus again"
    )
