"""Documents from files and datasets, and what a person is told when they are broken."""

import gzip
import json
import lzma
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from bert_jax.data import text
from bert_jax.data import text as module
from bert_jax.data.text import Document, documents, find_sources, sampled
from bert_jax.errors import InputError

OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def put(path: Path, content: str | bytes) -> str:
    """Writes the file, packed as its name says, and returns its name."""
    data = content.encode() if isinstance(content, str) else content
    with OPENERS.get(path.suffix, open)(path, "wb") as file:
        file.write(data)
    return str(path)


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
def test_txt(tmp_path, packed):
    name = put(tmp_path / f"a.txt{packed}", "\n\none\ntwo  \n \n\n三\n\n\nfour")
    assert list(documents([name])) == [
        Document(f"{name}:3", "one\ntwo"),
        Document(f"{name}:7", "三"),
        Document(f"{name}:10", "four"),
    ]


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
def test_jsonl(tmp_path, packed):
    rows = [
        {"text": "a\n\nb", "id": 7},
        {"text": "c", "title": "T", "name": "N"},
        {"text": " "},
        {"text": "d", "name": ""},
    ]
    lines = "\n".join(map(json.dumps, rows)) + "\n\n"
    name = put(tmp_path / f"a.jsonl{packed}", lines)
    assert list(documents([name])) == [
        Document("7", "a\n\nb"),
        Document("N", "c"),
        Document(f"{name}:4", "d"),
    ]


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    name = put(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\r\n")
    assert [d.text for d in documents([name])] == ["one\ntwo", "three"]
    name = put(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "x\\r\\ny"}\r\n')
    assert [d.text for d in documents([name])] == ["x\ny"]


def test_globs_are_sorted_and_inputs_keep_their_order(tmp_path, monkeypatch):
    (tmp_path / "deep/er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "odd[1].txt"):
        put(tmp_path / name, name)
    monkeypatch.chdir(tmp_path)
    found = [d.text for d in documents(["deep/**/*.txt", "[ab].txt", "odd[1].txt"])]
    assert found == ["deep/er/c.txt", "a.txt", "b.txt", "odd[1].txt"]


def test_all_bad_inputs_are_told_at_once_before_reading(tmp_path):
    good = put(tmp_path / "good.txt", "x")
    csv = put(tmp_path / "a.csv", "x")
    inputs = [good, f"{tmp_path}/no.txt", f"{tmp_path}/*.jsonl", csv, str(tmp_path)]
    with pytest.raises(InputError) as caught:
        documents([*inputs, "pydocs:trian"])  # not iterated
    lines = str(caught.value).split("\n")
    assert len(lines) == 5
    assert "no.txt: no such file" in lines[0]
    assert "no file matches" in lines[1]
    assert "a.csv" in lines[2]
    assert ".txt, .txt.gz, .txt.xz, .jsonl, .jsonl.gz, .jsonl.xz" in lines[2]
    assert "is a folder" in lines[3]
    assert "Did you mean train?" in lines[4]


def test_no_input():
    with pytest.raises(InputError, match="no input"):
        documents([])
    with pytest.raises(TypeError, match="sequence of strings"):
        documents("a.txt")


BROKEN = {
    "empty.txt": (b"", "holds no document"),
    "blank.txt.gz": (b" \n\n", "holds no document"),
    "latin.txt": (
        b"ok\n\ncaf\xe9\n",
        r"latin.txt:3: not UTF-8 at byte 3 .*0xe9.*iconv",
    ),
    "wide.txt": ("hello".encode("utf-16"), r"wide.txt:1: not UTF-8 at byte 0 .*UTF-16"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": \n', r"cut.jsonl:2: not JSON: .*line 1"),
    "other.jsonl": (b'{"body": "a", "id": 1}\n', r"other.jsonl:1: .*fields body, id"),
    "list.jsonl": (b'["text"]\n', r"list.jsonl:1: .*got a list"),
    "number.jsonl": (b'{"text": 3}\n', r"number.jsonl:1: .*string field"),
    "half.jsonl": (b'{"text": "a\\ud800"}\n', r"half.jsonl:1: half a surrogate"),
    "title.jsonl": (
        b'{"text": "a", "title": "b\\udc00"}\n',
        r"title.jsonl:1: half a surrogate pair at character 1",
    ),
    "digits.jsonl": (
        b'{"text": "a", "id": ' + b"7" * 5000 + b"}\n",
        r"digits.jsonl:1: not JSON",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_content(tmp_path, name):
    content, message = BROKEN[name]
    stream = documents([put(tmp_path / name, content)])
    with pytest.raises(InputError, match=message):
        list(stream)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz"])
def test_broken_archives(tmp_path, name):
    lines = "\n".join(str(n * n) for n in range(100_000))
    path = Path(put(tmp_path / name, lines))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cut off after line [1-9]\d+"):
        list(documents([str(path)]))
    path.write_bytes(b"this is no archive at all")
    with pytest.raises(InputError, match="broken"):
        list(documents([str(path)]))


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LONGEST", 10_000)
    line = "some words in a line\n"
    name = put(tmp_path / "one_document.txt", line * 200_000)  # 4 MB, no blank line
    tracemalloc.start()
    total = sum(d.text.count("line") for d in documents([name]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 200_000
    assert peak < 1_000_000


def test_sources(tmp_path):
    """What a progress bar needs: sizes on disk, and how much of them was read."""
    a = put(tmp_path / "a.txt", "12345\n" * 3000)
    b = put(tmp_path / "b.jsonl.gz", '{"text": "x"}')
    first, second = find_sources([a, f"{tmp_path}/b*"])
    assert (first.name, first.size) == (a, 18000)
    assert (second.name, second.size) == (b, Path(b).stat().st_size)
    assert first.consumed == 0
    (document,) = first.read()
    assert document.text.count("12345") == 3000
    assert first.consumed == 18000
    assert [s.size for s in find_sources([a, "pydocs"])] == [18000, None]
    with pytest.raises(InputError, match="no such file"):
        find_sources([f"{tmp_path}/c.txt"])


@pytest.mark.parametrize(("alpha", "ratio"), [(1.0, 100.0), (0.5, 10.0), (0.0, 1.0)])
def test_inputs_are_sampled(alpha, ratio, tmp_path):
    """One input is a hundred times the other, in documents of the same size."""
    for name, count in (("small", 300), ("large", 30_000)):
        put(tmp_path / f"{name}.txt", "\n\n".join(["123456789"] * count))
    names = [str(tmp_path / f"{name}.txt") for name in ("small", "large")]
    found = [document.name for document in sampled(names, alpha=alpha)]
    counts = [sum(name in found for found in found) for name in ("small", "large")]
    assert counts[0] == 300  # the small one is whole
    assert counts[1] / 300 == pytest.approx(ratio, rel=0.25)


def test_documents_of_one_title_are_sampled(tmp_path):
    """300 of 30,000: within five standard deviations."""
    line = '{"text": "123456789", "title": "T"}\n'
    small, large = (
        put(tmp_path / f"{count}.jsonl", line * count) for count in (300, 30_000)
    )
    found = len(list(sampled([small, large], alpha=0.0)))
    assert abs(found - 600) < 5 * 300**0.5


def test_sampling_errors(tmp_path):
    name = put(tmp_path / "a.txt", "x")
    with pytest.raises(InputError, match=r"alpha=2 must be in 0\.\.1"):
        list(sampled([name], alpha=2))
    with pytest.raises(InputError, match="alpha takes files; pydocs has no size"):
        list(sampled([name, "pydocs"], alpha=0.5))


def test_datasets_are_read_by_a_thread_of_their_own():
    """Whole, in order, errors too; and it ends when nobody listens any more."""

    def read(fail: bool):
        for number in range(300):
            yield Document(str(number), "x")
        if fail:
            raise InputError("broken")

    names = [document.name for document in module._from_a_thread(lambda: read(False))]
    assert names == [str(number) for number in range(300)]
    with pytest.raises(InputError, match="broken"):
        list(module._from_a_thread(lambda: read(True)))
    before = threading.active_count()
    some = module._from_a_thread(lambda: read(False))
    next(some)
    some.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_a_vocabulary_from_a_dataset():
    """Its trainer asks from a thread that Python did not start."""
    from bert_jax.data.tokenizers import train_wordpiece

    texts = (document.text for document in documents(["pydocs:valid"]))
    assert train_wordpiece(texts, vocab_size=2000, progress=False).size == 2000


def test_a_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_LINE", 1 << 20)
    name = put(tmp_path / "a.txt", "x\n" + "y" * (1 << 20) + "\nz\n")
    with pytest.raises(InputError, match=r"a\.txt:2: the line is longer than 1 MB"):
        list(documents([name]))


def test_a_bucket(bucket):
    (bucket / "texts").mkdir(parents=True)
    long = "two " * 500_000  # more than one buffer
    put(bucket / "texts/a.txt", f"one\n\n{long}")
    put(bucket / "texts/b.txt.gz", "three")
    put(bucket / "texts/c.jsonl.xz", '{"text": "four"}')
    texts = [d.text for d in documents(["gs://texts/*"])]
    assert texts == ["one", long.rstrip(), "three", "four"]
    (document,) = documents(["gs://texts/b.txt.gz"])
    assert document.name == "gs://texts/b.txt.gz:1"
    with pytest.raises(InputError, match=r"gs://texts/d\.txt: no such file"):
        documents(["gs://texts/d.txt"])
    with pytest.raises(InputError, match=r"\*\* is not for buckets"):
        documents(["gs://**/*.txt"])


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl.xz"])
def test_many_lines_in_a_bucket(bucket, name):
    """More than after which a progress bar is told how far it is."""
    (bucket / "texts").mkdir(parents=True)
    line = '{"text": "x"}\n' if "jsonl" in name else "x\n\n"
    put(bucket / "texts" / name, line * 3000)
    (source,) = find_sources([f"gs://texts/{name}"])
    consumed = []
    for document in source.read():
        assert document.text == "x"
        consumed.append(source.consumed)
    assert len(consumed) == 3000
    assert 0 < consumed[2500] <= source.size
    assert source.consumed == source.size


def test_files_need_no_tensorflow(tmp_path):
    name = put(tmp_path / "a.txt", "x")
    code = (
        "import sys; from bert_jax.data.text import documents; "
        f"list(documents([{name!r}])); "
        "assert not {'tensorflow', 'tensorflow_datasets', 'jax'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2]
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A TFDS folder with two small datasets: one with `text`, one without."""
    import tensorflow_datasets as tfds

    folder = tmp_path_factory.mktemp("tfds")

    def make(name: str, features: dict, rows: list[dict]):
        numbered = list(enumerate(rows))
        tfds.dataset_builders.store_as_tfds_dataset(
            name=name,
            version="1.0.0",
            data_dir=str(folder),
            features=tfds.features.FeaturesDict(features),
            split_datasets={"train": numbered, "test": numbered[:1]},
        )

    string = tfds.features.Text()
    rows = [{"text": "第一", "title": "A"}, {"text": "two", "title": "B"}]
    make("with_text", {"text": string, "title": string}, rows)
    make("no_text", {"body": string}, [{"body": "x"}])
    return folder


@pytest.fixture
def _tfds_folder(prepared, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))


@pytest.mark.usefixtures("_tfds_folder")
def test_tfds():
    assert sorted(documents(["tfds:with_text"])) == [("A", "第一"), ("B", "two")]
    assert len(list(documents(["tfds:with_text:test"]))) == 1
    assert len(list(documents(["tfds:with_text:train[:1]"]))) == 1


@pytest.mark.usefixtures("_tfds_folder")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tfds:no_text", r"no feature `text`.*body \(Text\)"),
        ("tfds:with_text:trian", "Did you mean train"),
        ("tfds:not_a_dataset", "TFDS has no dataset 'not_a_dataset'"),
        ("tfds:", "TFDS has no dataset ''"),
        ("tfds:imdb_reviews", "not prepared in .*tfds build imdb_reviews"),
        ("tfds:wiki40b/xx", "TFDS has no dataset 'wiki40b/xx'"),
    ],
)
def test_tfds_errors(name, message):
    with pytest.raises(InputError, match=message):
        documents([name])
