"""A corpus on disk is the text, encoded: whole, readable anywhere, or not there."""

import itertools
import json
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data import prepare as module
from bert_jax.data.prepare import open_corpus, prepare
from bert_jax.data.sentences import split
from bert_jax.data.text import documents
from bert_jax.data.tokenizers import SPECIALS, Tokenizer, train_wordpiece
from bert_jax.errors import InputError

SYLLABLES = ("ba", "ke", "li", "mo", "nu", "sta", "tri", "von", "wex", "yod")


def make_documents(seed: int, count: int) -> list[list[str]]:
    """Documents of 1 to 12 sentences of made-up words."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(150)]
    return [
        [
            " ".join(rng.choices(words, k=rng.randint(1, 20))) + "."
            for _ in range(rng.randint(1, 12))
        ]
        for _ in range(count)
    ]


def write(path: Path, texts: list[list[str]]) -> str:
    path.write_text("\n\n".join("\n".join(lines) for lines in texts))
    return str(path)


def joined(lists) -> list:
    return list(itertools.chain.from_iterable(lists))


@pytest.fixture(scope="module")
def tokenizer():
    texts = joined(make_documents(0, 40))
    return train_wordpiece(texts, vocab_size=120, progress=False)


@pytest.fixture(scope="module")
def texts():
    return make_documents(0, 40)


@pytest.fixture
def source(tmp_path, texts):
    """Two files, whose documents together are `texts`."""
    return [
        write(tmp_path / "a.txt", texts[:25]),
        write(tmp_path / "b.txt", texts[25:]),
    ]


def make(source, tokenizer, out, **options):
    options = {"sentences": "line", "progress": False} | options
    return prepare(source, tokenizer=tokenizer, out=out, **options)


def read_records(corpus) -> list[dict[str, bytes]]:
    """All records, by nothing but TensorFlow's own reader."""
    import tensorflow as tf

    columns = ("name", "ids", "sentences", "starts")
    layout = {name: tf.io.FixedLenFeature([], tf.string) for name in columns}
    files = sorted(str(path) for path in corpus.path.glob("shard-*.tfrecord"))
    return [
        {name: value.numpy() for name, value in example.items()}
        for example in tf.data.TFRecordDataset(files).map(
            lambda data: tf.io.parse_single_example(data, layout)
        )
    ]


def shrink_shards(monkeypatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 1500)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 500)


# --- round trip ----------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_records(several, source, texts, tokenizer, tmp_path, monkeypatch):
    if several:
        shrink_shards(monkeypatch)
    corpus = make(source, tokenizer, tmp_path / "out")
    assert (corpus.about["shards"] > 5) == several
    assert len(list(corpus.path.glob("shard-*"))) == corpus.about["shards"]
    records = read_records(corpus)
    assert [r["name"].decode() for r in records] == [d.name for d in documents(source)]
    for record, lines in zip(records, texts, strict=True):
        encoded = [tokenizer.encode(line) for line in lines]
        ids = np.frombuffer(record["ids"], corpus.about["dtype"])
        assert ids.tolist() == joined(encoded)
        lengths = np.frombuffer(record["sentences"], "<u4")
        assert lengths.tolist() == [len(part) for part in encoded]
        bits = np.unpackbits(np.frombuffer(record["starts"], np.uint8))
        pieces = [tokenizer.vocab[i] for i in ids]
        begins = [int(not piece.startswith("##")) for piece in pieces]
        assert 0 < sum(begins) < len(begins) or len(begins) < 5
        assert bits[: len(ids)].tolist() == begins
        assert len(bits) - len(ids) < 8


@pytest.mark.parametrize("several", [False, True])
def test_read_anywhere(several, source, texts, tokenizer, tmp_path, monkeypatch):
    if several:
        shrink_shards(monkeypatch)
    corpus = make(source, tokenizer, tmp_path / "out")
    encoded = [joined(map(tokenizer.encode, lines)) for lines in texts]
    rng = random.Random(0)
    before = 0
    assert corpus.document_starts[-1] == sum(map(len, encoded))
    for number, ids in enumerate(encoded):
        assert corpus.document_starts[number] == before
        stretches = [(0, len(ids)), (0, 1), (len(ids) - 1, len(ids))]
        for _ in range(8):
            start = rng.randrange(len(ids))
            stretches.append((start, rng.randint(start + 1, len(ids))))
        for start, stop in stretches:
            found, starts = corpus.read(before + start, before + stop)
            assert found.tolist() == ids[start:stop]
            assert starts.tolist() == tokenizer.starts[ids[start:stop]].tolist()
        before += len(ids)


def test_opened_again(source, tokenizer, tmp_path):
    made = make(source, tokenizer, tmp_path / "out")
    again = open_corpus(str(tmp_path / "out"))
    assert again.about == made.about
    assert again.tokenizer.vocab == tokenizer.vocab
    stop = int(again.document_starts[1])
    assert again.read(0, stop)[0].tolist() == made.read(0, stop)[0].tolist()


def test_counts(source, texts, tokenizer, tmp_path):
    texts = [*texts, ["baba @ keke", "@"]]  # a character that the vocabulary lacks
    source = [*source, write(tmp_path / "c.txt", texts[-1:])]
    corpus = make(source, tokenizer, tmp_path / "out")
    encoded = [tokenizer.encode(line) for line in joined(texts)]
    ids = joined(encoded)
    about = corpus.about
    assert about["documents"] == len(texts) == 41
    assert about["sentences"] == len(encoded)
    assert about["pieces"] == len(ids)
    assert about["unknown"] == 2
    assert about["inputs"] == source
    assert about["split"] == "line"
    assert about["tokenizer"] == {"hash": tokenizer.hash, "size": 120}
    assert about["dtype"] == "<u2"
    index = corpus.index
    assert index["lengths"].tolist() == [len(part) for part in encoded]
    assert index["sentences"].tolist() == [len(lines) for lines in texts]
    assert index["counts"].tolist() == [ids.count(i) for i in range(120)]
    assert corpus.frequent_id == max(range(120), key=ids.count)


def test_sentences_are_lines_or_split(tokenizer, tmp_path):
    text = "Ba ke. Li mo!\nNu sta tri"
    (tmp_path / "a.txt").write_text(text)
    lengths = {}
    for choice in ("line", "split"):
        out = tmp_path / choice
        corpus = make([str(tmp_path / "a.txt")], tokenizer, out, sentences=choice)
        lengths[choice] = corpus.index["lengths"].tolist()
    encode = tokenizer.encode
    assert lengths["line"] == [len(encode(line)) for line in text.split("\n")]
    assert lengths["split"] == [len(encode(part)) for part in split(text)]
    assert len(lengths["split"]) == 3


def test_what_gives_no_pieces_is_left_out(tokenizer, tmp_path):
    zero_width = "\u200b"
    rows = [zero_width, "ba ke", f"li\n{zero_width}\n\nmo", f"{zero_width}\n\x00"]
    lines = [json.dumps({"text": text, "id": n}) for n, text in enumerate(rows)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    corpus = make([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "out")
    assert [record["name"] for record in read_records(corpus)] == [b"1", b"2"]
    assert corpus.about["documents"] == 2
    assert corpus.index["sentences"].tolist() == [1, 2]


def test_large_vocabulary_and_long_sentence(tmp_path):
    """Ids and lengths beyond 16 bits."""
    tokenizer = Tokenizer([*SPECIALS, *(f"w{n}" for n in range(70_000))])
    text = "w69999 w3 " * 35_000
    (tmp_path / "a.txt").write_text(f"w1\n\n{text}\nw65531 w65530\n\nw65536")
    corpus = make([str(tmp_path / "a.txt")], tokenizer, tmp_path / "out")
    assert corpus.about["dtype"] == "<u4"
    assert corpus.index["lengths"].tolist() == [1, 70_000, 2, 1]
    assert corpus.read(69_999, 70_003)[0].tolist() == [70_004, 8, 65_536, 65_535]
    assert corpus.read(70_003, 70_004)[0].tolist() == [65_541]


def test_same_bytes(source, tokenizer, tmp_path, monkeypatch):
    def contents(path):
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return {str(p.relative_to(path)): p.read_bytes() for p in files}

    shrink_shards(monkeypatch)
    first = contents(make(source, tokenizer, tmp_path / "one").path)
    assert {"corpus.json", "index.npz", "shard-00001.tfrecord"} < set(first)
    later = time.time() + 1e6
    monkeypatch.setattr(time, "time", lambda: later)
    assert contents(make(source, tokenizer, tmp_path / "two").path) == first
    other = contents(make(source[::-1], tokenizer, tmp_path / "three").path)
    assert other["shard-00000.tfrecord"] != first["shard-00000.tfrecord"]


def test_content_stands_for_the_text(source, tokenizer, tmp_path, monkeypatch):
    """Ids, sentences and order count; names and shards do not."""
    first = make(source, tokenizer, tmp_path / "one").about["content"]
    text = "\n\n".join(Path(name).read_text() for name in source)
    (tmp_path / "c.txt").write_text(text)
    (tmp_path / "d.txt").write_text(text.replace("\n", " ", 1))
    shrink_shards(monkeypatch)
    contents = [
        make(names, tokenizer, tmp_path / f"out{n}").about["content"]
        for n, names in enumerate(
            [[str(tmp_path / "c.txt")], [str(tmp_path / "d.txt")], source[::-1]]
        )
    ]
    assert [content == first for content in contents] == [True, False, False]


def test_size_on_disk(shared_data, tmp_path):
    source = [str(shared_data / "en_books/valid.txt.xz")]
    texts = [document.text for document in documents(source)]
    tokenizer = train_wordpiece(texts, vocab_size=8000, progress=False)
    corpus = make(source, tokenizer, tmp_path / "out", sentences="split")
    size = sum(corpus.about["files"].values())
    on_disk = [corpus.path / "index.npz", *corpus.path.glob("shard-*")]
    assert size == sum(path.stat().st_size for path in on_disk)
    ratio = size / (2 * corpus.about["pieces"])
    print(f"{size} bytes, {corpus.about['pieces']} pieces, {ratio:.3f} x the ids")
    assert 1 < ratio <= 1.5
    encoded = [joined(tokenizer.encode_batch(split(text))) for text in texts]
    for number, ids in enumerate(encoded):
        start, stop = corpus.document_starts[number : number + 2]
        assert corpus.read(start, stop)[0].tolist() == ids


# --- whole or not at all -------------------------------------------------------------


def test_out(source, tokenizer, tmp_path):
    """Made with its parents, or in the place of an empty folder."""
    deep = tmp_path / "not/yet/there"
    make(source, tokenizer, deep)
    assert [path.name for path in deep.parent.iterdir()] == ["there"]
    assert deep.stat().st_mode & 0o777 == 0o755
    empty = tmp_path / "empty"
    empty.mkdir()
    assert make(source, tokenizer, empty).about["documents"] == 40


def test_existing_out_is_refused(source, tokenizer, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(InputError, match=r"out exists already: choose another name"):
        make(source, tokenizer, out)
    assert [path.name for path in out.iterdir()] == ["precious"]
    with pytest.raises(InputError, match=r"a\.txt exists already"):
        make(source, tokenizer, tmp_path / "a.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "b.txt", "out"]


@pytest.mark.parametrize("batch", [100, 1 << 20])
@pytest.mark.parametrize("exists", [False, True])
def test_broken_text_leaves_nothing(
    batch, exists, source, tokenizer, tmp_path, monkeypatch
):
    """Also where shards had been written before the broken line was read."""
    written = []
    real = module.Writer.write
    monkeypatch.setattr(
        module.Writer,
        "write",
        lambda self, *rest: (written.append(rest[0]), real(self, *rest)),
    )
    monkeypatch.setattr(module, "BATCH_CHARACTERS", batch)
    Path(source[1]).write_bytes(b"ba ke\n\xff\xfe li\n")
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    with pytest.raises(InputError, match=r"b\.txt:2: not UTF-8"):
        make(source, tokenizer, out)
    assert bool(written) == (batch == 100)
    names = ["a.txt", "b.txt", *(["out"] if exists else [])]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert not exists or not any(out.iterdir())


def test_interruption_leaves_nothing(source, tokenizer, tmp_path, monkeypatch):
    def interrupt(self, **about):
        assert len(list(tmp_path.glob(".out-*/shard-*"))) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Writer, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(source, tokenizer, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "b.txt"]


def test_input_errors(source, tokenizer, tmp_path):
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "nothing.txt").write_text("\u200b\n\n\u200b\u200b\n")
    before = sorted(tmp_path.iterdir())
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"'lines'\. .* line\? Valid: line, split"):
        make(source, tokenizer, out, sentences="lines")
    with pytest.raises(InputError, match="no input: give"):
        make([], tokenizer, out)
    with pytest.raises(InputError, match=r"gone\.txt: no such file"):
        make([*source, str(tmp_path / "gone.txt")], tokenizer, out)
    with pytest.raises(InputError, match=r"blank\.txt holds no document"):
        make([str(tmp_path / "blank.txt")], tokenizer, out)
    with pytest.raises(InputError, match="holds no text the tokenizer makes pieces of"):
        make([str(tmp_path / "nothing.txt")], tokenizer, out)
    assert sorted(tmp_path.iterdir()) == before


# --- opening -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(tmp_path_factory, texts, tokenizer):
    path = tmp_path_factory.mktemp("original")
    return make([write(path / "a.txt", texts)], tokenizer, path / "out").path


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


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


def test_missing_index(copy):
    (copy / "index.npz").unlink()
    with pytest.raises(InputError, match=r"index\.npz is missing or not \d+ bytes"):
        open_corpus(copy)


def test_another_format(copy):
    path = copy / "corpus.json"
    about = json.loads(path.read_text())
    assert about["format"] == 1
    path.write_text(json.dumps(about | {"format": 2}))
    with pytest.raises(InputError, match="has format 2, this version reads 1: prepare"):
        open_corpus(copy)


def test_another_tokenizer(copy, tokenizer):
    """Of the same size: only the hash can tell."""
    vocab = [*tokenizer.vocab[:-2], *tokenizer.vocab[:-3:-1]]
    assert sorted(vocab) == sorted(tokenizer.vocab)
    other = Tokenizer(vocab)
    shutil.rmtree(copy / "tokenizer")
    other.save(copy / "tokenizer")
    corpus = open_corpus(copy)
    with pytest.raises(InputError) as error:
        _ = corpus.tokenizer
    assert str(error.value) == (
        f"{copy / 'tokenizer'} is not the tokenizer the corpus was made with (hash "
        f"{other.hash}, corpus {tokenizer.hash}): prepare the corpus again"
    )
