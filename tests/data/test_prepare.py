"""A corpus on disk is the text, encoded: whole, readable anywhere, or not there."""

import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data import prepare as module
from bert_jax.data import records
from bert_jax.data.corpus import open_corpus, unpack_counts
from bert_jax.data.prepare import prepare
from bert_jax.data.sentences import split
from bert_jax.data.text import documents
from bert_jax.data.tokenizers import (
    SPECIALS,
    WordPiece,
    load_tokenizer,
    train_wordpiece,
)
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

    columns = ["ids", "sentences", "documents", "names"]
    columns += [f"starts/{unit}" for unit in corpus.units]
    layout = {name: tf.io.FixedLenFeature([], tf.string) for name in columns}
    files = sorted(str(path) for path in corpus.path.glob("shard-*.tfrecord"))
    return [
        {name: value.numpy() for name, value in example.items()}
        for example in tf.data.TFRecordDataset(files).map(
            lambda data: tf.io.parse_single_example(data, layout)
        )
    ]


def read_documents(corpus) -> list[tuple[str, list[list[int]]]]:
    """(name, sentences as lists of ids) of every document, from the records alone."""
    found = []
    for record in read_records(corpus):
        ids = np.frombuffer(record["ids"], corpus.about["dtype"]).tolist()
        lengths = iter(unpack_counts(record["sentences"]).tolist())
        names = zlib.decompress(record["names"]).decode().split("\n")
        at = 0
        counts = unpack_counts(record["documents"]).tolist()
        for name, count in zip(names if counts else [], counts, strict=True):
            sentences = []
            for length in itertools.islice(lengths, count):
                sentences.append(ids[at : at + length])
                at += length
            found.append((name, sentences))
        assert at == len(ids)
        assert next(lengths, None) is None
    return found


def contents(path: Path) -> dict[str, bytes]:
    path = Path(path)
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


def shrink_shards(monkeypatch) -> None:
    monkeypatch.setattr(records, "SHARD_BYTES", 1500)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 500)


# --- round trip ----------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_records(several, source, texts, tokenizer, tmp_path, monkeypatch):
    if several:
        shrink_shards(monkeypatch)
    corpus = make(source, tokenizer, tmp_path / "out")
    assert (corpus.about["shards"] > 5) == several
    assert len(list(corpus.path.glob("shard-*"))) == corpus.about["shards"]
    found = read_documents(corpus)
    assert [name for name, _ in found] == [d.name for d in documents(source)]
    encoded = [[tokenizer.encode(line) for line in lines] for lines in texts]
    assert [sentences for _, sentences in found] == encoded


@pytest.mark.parametrize("several", [False, True])
def test_read_anywhere(several, source, texts, tokenizer, tmp_path, monkeypatch):
    """Also across documents, records and shards."""
    if several:
        shrink_shards(monkeypatch)
    corpus = make(source, tokenizer, tmp_path / "out")
    assert (corpus.records > 10) == several
    ids = joined(joined(map(tokenizer.encode, lines)) for lines in texts)
    assert corpus.record_starts[-1] == len(ids)
    rng = random.Random(0)
    stretches = [(0, len(ids)), (0, 1), (len(ids) - 1, len(ids))]
    stretches += [(int(n), int(n) + 1) for n in corpus.record_starts[:-1]]
    for _ in range(300):
        start = rng.randrange(len(ids))
        stretches.append((start, rng.randint(start + 1, len(ids))))
    for start, stop in stretches:
        assert corpus.read(start, stop).tolist() == ids[start:stop]


def test_opened_again(source, tokenizer, tmp_path):
    made = make(source, tokenizer, tmp_path / "out")
    again = open_corpus(str(tmp_path / "out"))
    assert again.about == made.about
    assert again.tokenizer.vocab == tokenizer.vocab
    assert again.read(0, 100).tolist() == made.read(0, 100).tolist()


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
    assert about["settings"] == {
        "inputs": source,
        "sentences": "line",
        "words": "pieces",
        "duplicates": "keep",
        "shortest": 0,
    }
    assert about["read"] == {"documents": 41, "too_short": 0, "duplicates": 0}
    assert about["tokenizer"] == {"hash": tokenizer.hash, "size": 120}
    assert about["dtype"] == "<u2"
    assert about["units"] == []
    assert corpus.index["counts"].tolist() == [ids.count(i) for i in range(120)]
    assert corpus.frequent_id == max(range(120), key=ids.count)


def test_sentences_are_lines_or_split(tokenizer, tmp_path):
    text = "Ba ke. Li mo!\nNu sta tri"
    (tmp_path / "a.txt").write_text(text)
    lengths = {}
    for choice in ("line", "split"):
        out = tmp_path / choice
        corpus = make([str(tmp_path / "a.txt")], tokenizer, out, sentences=choice)
        lengths[choice] = corpus.sentences(0)[0].tolist()
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
    assert [name for name, _ in read_documents(corpus)] == ["1", "2"]
    assert corpus.about["documents"] == 2
    assert corpus.sentences(0)[1].tolist() == [1, 2]


def test_a_batch_without_pieces(tokenizer, tmp_path, monkeypatch):
    """Its record is empty: records are counted as batches are."""
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 1)
    (tmp_path / "a.txt").write_text("\u200b\n\nba ke\n\n\u200b\n\nli")
    corpus = make([str(tmp_path / "a.txt")], tokenizer, tmp_path / "out")
    assert corpus.index["pieces"].tolist() == [0, 2, 0, 1]
    assert corpus.read(0, 3).tolist() == tokenizer.encode("ba ke li")
    assert len(read_documents(corpus)) == 2


def test_large_vocabulary_and_long_sentence(tmp_path):
    """Ids and lengths beyond 16 bits."""
    tokenizer = WordPiece([*SPECIALS, *(f"w{n}" for n in range(70_000))])
    text = "w69999 w3 " * 35_000
    (tmp_path / "a.txt").write_text(f"w1\n\n{text}\nw65531 w65530\n\nw65536")
    corpus = make([str(tmp_path / "a.txt")], tokenizer, tmp_path / "out")
    assert corpus.about["dtype"] == "<u4"
    assert corpus.sentences(0)[0].tolist() == [1, 70_000, 2, 1]
    assert corpus.read(69_999, 70_003).tolist() == [70_004, 8, 65_536, 65_535]
    assert corpus.read(70_003, 70_004).tolist() == [65_541]


def test_same_bytes(source, tokenizer, tmp_path, monkeypatch):
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
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 500)
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
    assert size == sum(path.stat().length for path in on_disk)
    ratio = size / (2 * corpus.about["pieces"])
    print(f"{size} bytes, {corpus.about['pieces']} pieces, {ratio:.3f} x the ids")
    assert 1 < ratio <= 1.2
    encoded = [joined(tokenizer.encode_batch(split(text))) for text in texts]
    assert corpus.read(0, corpus.about["pieces"]).tolist() == joined(encoded)


# --- workers and interruptions -------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_make_no_difference(workers, source, tokenizer, tmp_path, monkeypatch):
    shrink_shards(monkeypatch)
    alone = make(source, tokenizer, tmp_path / "alone", workers=0)
    several = make(source, tokenizer, tmp_path / "several", workers=workers)
    assert contents(several.path) == contents(alone.path)
    assert several.records > 10


def test_a_script_without_a_guard(source, tokenizer, tmp_path):
    """Workers do not run the script that started them."""
    tokenizer.save(tmp_path / "tokenizer")
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\n"
        "from bert_jax.data.prepare import prepare\n"
        "from bert_jax.data.tokenizers import load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(tmp_path / 'tokenizer')!r})\n"
        f"prepare({source}, tokenizer=tokenizer, out={str(tmp_path / 'out')!r}, "
        "workers=2, progress=False)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once\n"
    assert open_corpus(tmp_path / "out").about["documents"] == 40


@pytest.mark.parametrize("moments", [[1], [4], [9], [3, 3], [2, 5]])
@pytest.mark.parametrize("damage", ["", "cut", "flip"])
def test_interrupted_and_gone_on_with(
    moments, damage, source, tokenizer, tmp_path, monkeypatch
):
    """Once or twice, also in the middle of a record, also while going on."""
    shrink_shards(monkeypatch)
    straight = make(source, tokenizer, tmp_path / "straight")
    real = module.columns_of
    encoded = []

    def columns_of(batch, *rest):
        encoded.append(batch.documents[0].name)
        return real(batch, *rest)

    monkeypatch.setattr(module, "columns_of", columns_of)
    append = module.Writer.append
    for moment in moments:
        stop_at = len(encoded) + moment

        def stop(self, data, stop_at=stop_at):
            if len(encoded) > stop_at:
                raise KeyboardInterrupt
            append(self, data)

        monkeypatch.setattr(module.Writer, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            make(source, tokenizer, tmp_path / "out")
    monkeypatch.setattr(module.Writer, "append", append)
    assert not (tmp_path / "out").exists()
    last = sorted((tmp_path / ".out.partial").glob("shard-*"))[-1]
    data = bytearray(last.read_bytes())
    if damage == "cut":
        del data[-10:]
    elif damage == "flip":
        data[len(data) // 2] ^= 1
    last.write_bytes(data)
    encoded.clear()
    out = make(source, tokenizer, tmp_path / "out")
    assert contents(out.path) == contents(straight.path)
    # What was whole was not tokenised again.
    assert len(encoded) == straight.records - sum(moments) or damage
    assert len(encoded) < straight.records or moments == [1]


def test_interrupted_while_going_on(source, tokenizer, tmp_path, monkeypatch):
    """Killed while the last shard was being copied."""
    shrink_shards(monkeypatch)
    straight = make(source, tokenizer, tmp_path / "straight")
    enter = module.Writer.enter

    def stop(self, data, *, most):
        if len(self.index) == most:
            raise KeyboardInterrupt
        enter(self, data)

    for most in (9, 7, 8):
        monkeypatch.setattr(
            module.Writer, "enter", lambda self, d, most=most: stop(self, d, most=most)
        )
        with pytest.raises(KeyboardInterrupt):
            make(source, tokenizer, tmp_path / "out")
    monkeypatch.setattr(module.Writer, "enter", enter)
    out = make(source, tokenizer, tmp_path / "out")
    assert contents(out.path) == contents(straight.path)


def test_another_text_or_setting_starts_over(source, tokenizer, tmp_path, monkeypatch):
    shrink_shards(monkeypatch)

    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.Writer, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make(source, tokenizer, tmp_path / "out")
    out = make(source, tokenizer, tmp_path / "out", shortest=200)
    straight = make(source, tokenizer, tmp_path / "straight", shortest=200)
    assert contents(out.path) == contents(straight.path)


def test_another_spelling_of_the_inputs_starts_over(tokenizer, tmp_path, monkeypatch):
    """Two inputs, or one of two files: what is one record there is two here."""
    names = [tmp_path / f"{name}.txt" for name in "ab"]
    for path in names:
        path.write_text("one two three\n\nfour five\n")
    append, count = module.Writer.append, []

    def stop(self, data):
        append(self, data)
        count.append(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.Writer, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            make([str(path) for path in names], tokenizer, tmp_path / "out")
    assert count == [1]
    out = make([f"{tmp_path}/[ab].txt"], tokenizer, tmp_path / "out")
    straight = make([f"{tmp_path}/[ab].txt"], tokenizer, tmp_path / "straight")
    assert contents(out.path) == contents(straight.path)
    assert out.about["documents"] == 4


def test_a_killed_worker(source, tokenizer, tmp_path, monkeypatch):
    """As by a machine that is out of memory: said in words, and gone on with."""
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 500)
    append = module.Writer.append

    def kill(self, data):
        append(self, data)
        # None is left when what it had done before comes in.
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(module.Writer, "append", kill)
        with pytest.raises(InputError, match="a worker process was killed, perhaps"):
            make(source, tokenizer, tmp_path / "out", workers=1)
    assert list((tmp_path / ".out.partial").glob("shard-*"))
    out = make(source, tokenizer, tmp_path / "out")
    straight = make(source, tokenizer, tmp_path / "straight")
    assert contents(out.path) == contents(straight.path)


def test_a_disk_that_fills_up(source, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 500)
    straight = make(source, tokenizer, tmp_path / "straight")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        with pytest.raises(InputError, match=r"cannot be written: .*make room and run"):
            make(source, tokenizer, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / ".out.partial").glob("shard-*"))
    out = make(source, tokenizer, tmp_path / "out")
    assert contents(out.path) == contents(straight.path)


def test_progress(source, tokenizer, tmp_path, capsys):
    prepare(source, tokenizer=tokenizer, out=tmp_path / "out", workers=0)
    shown = capsys.readouterr().err
    assert "MB/s of text" in shown
    assert "100%" in shown


def test_a_bucket(source, texts, tokenizer, tmp_path, bucket):
    """Text from a bucket, the corpus to a bucket, and read from there."""
    (bucket / "texts").mkdir(parents=True)
    for name in source:
        Path(name).rename(bucket / "texts" / Path(name).name)
    corpus = make(["gs://texts/*.txt"], tokenizer, "gs://corpora/one")
    assert corpus.remote
    assert (bucket / "corpora/one/corpus.json").is_file()
    assert corpus.tokenizer.hash == tokenizer.hash
    ids = joined(joined(map(tokenizer.encode, lines)) for lines in texts)
    assert corpus.read(0, len(ids)).tolist() == ids
    with pytest.raises(InputError, match="gs://corpora/one exists already"):
        make(["gs://texts/*.txt"], tokenizer, "gs://corpora/one")


# --- filters -------------------------------------------------------------------------


def test_short_documents_are_dropped_and_counted(source, texts, tokenizer, tmp_path):
    corpus = make(source, tokenizer, tmp_path / "out", shortest=200)
    long = [lines for lines in texts if len("\n".join(lines)) >= 200]
    assert 0 < len(long) < len(texts)
    assert corpus.about["read"]["too_short"] == len(texts) - len(long)
    assert corpus.about["documents"] == len(long)


def test_duplicates_are_dropped_and_counted(texts, tokenizer, tmp_path):
    again = [[line.upper() + " !" for line in texts[3]], texts[7], texts[3]]
    source = [write(tmp_path / "a.txt", [*texts, *again])]
    for kind, dropped in (("keep", 0), ("exact", 3)):
        corpus = make(source, tokenizer, tmp_path / kind, duplicates=kind)
        assert corpus.about["read"]["duplicates"] == dropped
        assert corpus.about["documents"] == len(texts) + 3 - dropped


# --- words from the input ------------------------------------------------------------


def test_words_and_phrases_of_tagged_text(tmp_path):
    characters = "人民中央电视台在北京。大会召开"
    tokenizer = WordPiece([*SPECIALS, *characters, "win", "##dows"])
    text = "[中央/n  电视台/n]nt  在/p  北京/ns  。/w  Windows/n  大会/n  召开/v"
    (tmp_path / "a.txt").write_text(text)
    corpus = make([str(tmp_path / "a.txt")], tokenizer, tmp_path / "out", words="tags")
    columns = corpus.read_columns(0, corpus.about["pieces"])
    pieces = [tokenizer.vocab[i] for i in columns["ids"]]
    assert pieces == [*"中央电视台在北京。", "win", "##dows", *"大会召开"]
    assert corpus.units == ("words", "phrases", "entities")

    def units(name: str) -> list[str]:
        found: list[str] = []
        for piece, begins in zip(pieces, columns[name], strict=True):
            found = [*found, piece] if begins else [*found[:-1], found[-1] + piece]
        return found

    words = ["中央", "电视台", "在", "北京", "。", "win##dows", "大会", "召开"]
    assert units("words") == words
    assert units("phrases") == ["中央电视台", *words[2:]]


def test_words_found_by_jieba(tmp_path):
    """The model reads characters; jieba says which of them are words."""
    (tmp_path / "a.txt").write_text("我来到北京清华大学。\n")
    tokenizer = WordPiece([*SPECIALS, *"我来到北京清华大学。"])
    corpus = make([f"{tmp_path}/a.txt"], tokenizer, tmp_path / "out", words="jieba")
    assert corpus.units == ("words",)
    found = corpus.read_columns(0, 10)
    assert "".join(tokenizer.vocab[i] for i in found["ids"]) == "我来到北京清华大学。"
    assert np.flatnonzero(found["words"]).tolist() == [0, 1, 3, 5, 9]


def test_words_of_equal_sentences(tmp_path):
    """The same sentence twice, with other words the second time."""
    tokenizer = WordPiece([*SPECIALS, *"中国人民。"])
    (tmp_path / "a.txt").write_text("中国 人民 。 中 国人 民 。")
    corpus = make(
        [str(tmp_path / "a.txt")],
        tokenizer,
        tmp_path / "out",
        words="spaces",
        sentences="split",
    )
    assert corpus.about["sentences"] == 2
    begins = corpus.read_columns(0, 10)["words"].astype(int).tolist()
    assert begins == [1, 0, 1, 0, 1, 1, 1, 0, 1, 1]


def test_a_long_document_with_words(tmp_path):
    """The work grows with the text, not with its square: 40,000 sentences in one."""
    tokenizer = WordPiece([*SPECIALS, *"中国人民。"])
    (tmp_path / "a.txt").write_text("\n".join(["中国/n 人民/n 。/w"] * 40_000))
    corpus = make([str(tmp_path / "a.txt")], tokenizer, tmp_path / "out", words="tags")
    assert corpus.about["sentences"] == 40_000
    begins = corpus.read_columns(0, 200_000)["words"].reshape(-1, 5)
    assert (begins == [True, False, True, False, True]).all()


def test_words_cross_sentences_records_and_reads(tmp_path, shared_data, monkeypatch):
    """Real text: words put together again are the gold words."""
    import lzma

    path = next((shared_data / "zh_peopledaily199801").glob("*.xz"))
    with lzma.open(path, "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in itertools.islice(file, 400) if line.strip()]
    (tmp_path / "a.txt").write_text("\n\n".join(lines))
    vocab = shared_data / "vocabs/bert-base-chinese-vocab.txt"
    tokenizer = load_tokenizer(vocab)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 5000)
    corpus = make(
        [str(tmp_path / "a.txt")],
        tokenizer,
        tmp_path / "out",
        words="tags",
        sentences="split",
    )
    assert corpus.records > 5
    columns = corpus.read_columns(0, corpus.about["pieces"])
    found = np.split(columns["ids"], np.flatnonzero(columns["words"])[1:])
    gold = [
        tokenizer.encode(item.strip("[").split("/")[0])
        for line in lines
        for item in line.split()
    ]
    assert [part.tolist() for part in found] == [ids for ids in gold if ids]
    # Any part of it, at any bit.
    rng = random.Random(0)
    for _ in range(200):
        start = rng.randrange(corpus.about["pieces"])
        stop = rng.randint(start + 1, min(start + 3000, corpus.about["pieces"]))
        part = corpus.read_columns(start, stop)
        for name, column in part.items():
            assert column.tolist() == columns[name][start:stop].tolist()


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
    real = module.Writer.append
    monkeypatch.setattr(
        module.Writer,
        "append",
        lambda self, *rest: (written.append(rest[0]), real(self, *rest)),
    )
    monkeypatch.setattr(module, "BATCH_CHARACTERS", batch)
    Path(source[1]).write_bytes(b"ba ke\n\xff\xfe li\n")
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    with pytest.raises(InputError, match=r"b\.txt:2: not UTF-8"):
        make(source, tokenizer, out)
    assert len(written) == 1 if batch > 100 else len(written) > 5
    names = ["a.txt", "b.txt", *(["out"] if exists else [])]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert not exists or not any(out.iterdir())


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
    with pytest.raises(InputError, match="all 40 documents are shorter than shortest="):
        make(source, tokenizer, out, shortest=100_000)
    with pytest.raises(InputError, match="workers=-2 is negative"):
        make(source, tokenizer, out, workers=-2)
    long = write(tmp_path / "nothing.txt", [["ba ke " * 40]])
    with pytest.raises(InputError, match="none of 80 words has a tag"):
        make([long], tokenizer, out, words="tags")
    assert sorted(tmp_path.iterdir()) == before
