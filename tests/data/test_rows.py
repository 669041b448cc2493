"""Built rows against a slow oracle, token by token, for every kind of row."""

import random

import numpy as np
import pytest

from bert_jax.data import plans
from bert_jax.data.pairs import RULES
from bert_jax.data.plans import KINDS
from bert_jax.data.rows import Rows
from bert_jax.data.tokenizers import SPECIALS, WordPiece
from bert_jax.errors import InputError
from tests.data.made import (
    full_rows,
    in_records,
    into_words,
    joined,
    make_corpus,
    numbered,
)

LABELLED = ("pair", "order", "sentence-pair", "distance")


def slow_row(rows: Rows, number: int, ids: list[int], begins: dict) -> dict[str, list]:
    """One row as rows.py describes it; `begins` says of each unit which pieces do."""
    special, plan = rows.corpus.tokenizer, rows.plan
    across = rows.kind in ("full", "stream") and rows.across == "attend"
    row = {name: [] for name in ("ids", "types", "positions", "group", *begins)}
    row |= {"row_id": number, "first": [], "next_sentence": []}
    counts = dict.fromkeys(begins, 0)

    def put(piece_id: int, kind: int, group: int, position: int, words: dict) -> None:
        values = {"ids": piece_id, "types": kind, "positions": position}
        for name, value in (values | {"group": group} | words).items():
            row[name].append(value)

    examples = range(*plan.rows[number : number + 2])
    for n, example in enumerate(examples):
        label = int(plan.labels[example])
        tokens = []  # (id, type, piece or none)
        if rows.kind not in ("full", "stream") or (rows.kind == "full" and n == 0):
            tokens.append((special.cls_id, 0, None))
        tokens += [(ids[p], 0, p) for p in range(*plan.a[example])]
        if rows.kind != "stream" or label == 1:
            tokens.append((special.sep_id, 0, None))
        second = range(*plan.b[example])
        if len(second):
            tokens += [(ids[p], 1, p) for p in second]
            tokens.append((special.sep_id, 1, None))
        row["first"].append(len(row["ids"]))
        row["next_sentence"].append(label)
        before = None
        for place, (piece_id, kind, piece) in enumerate(tokens):
            words = dict.fromkeys(begins, 0)
            if piece is not None:
                for unit in begins:
                    counts[unit] += before is None or begins[unit][piece]
                words = dict(counts)
            before = piece
            if across:
                put(piece_id, kind, 1, len(row["ids"]), words)
            else:
                put(piece_id, kind, n + 1, place, words)
    for name in ("ids", "types", "positions", "group", *begins):
        fill = special.pad_id if name == "ids" else 0
        assert len(row[name]) <= rows.length
        row[name] += [fill] * (rows.length - len(row[name]))
    missing = plan.most - len(examples)
    row["first"] += [0] * missing
    row["next_sentence"] += [-1] * missing
    if rows.kind not in LABELLED:
        del row["first"], row["next_sentence"]
    row["epoch"] = 0  # of a row by itself: the stream of batches counts them
    return row | ({"continues": 0} if rows.kind == "stream" else {})


def slow_batch(rows: Rows, numbers, ids, begins) -> dict[str, np.ndarray]:
    found = [slow_row(rows, n, ids, begins) for n in numbers]
    return {name: np.asarray([row[name] for row in found]) for name in found[0]}


def assert_equal(found: dict, expected: dict) -> None:
    assert set(found) == set(expected)
    for name, column in found.items():
        assert column.dtype == np.int32
        np.testing.assert_array_equal(column, expected[name], err_msg=name)


def build_all(rows: Rows) -> dict[str, np.ndarray]:
    count = len(rows)
    return rows.build(range(count), [rows.read(0, count)] * count, count)


@pytest.fixture(scope="module")
def ids(encoded):
    return joined(joined(encoded))


@pytest.fixture(scope="module")
def begins(ids, tokenizer):
    return {"words": [not tokenizer.vocab[i].startswith("##") for i in ids]}


@pytest.mark.parametrize("across", ["attend", "block"])
@pytest.mark.parametrize("length", [8, 32, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_oracle(kind, length, across, corpus, ids, begins):
    """All rows from one text; then some of them, each from a text of its own."""
    rows = Rows(corpus, kind, length, across=across, seed=1)
    numbers = range(len(rows))
    expected = slow_batch(rows, numbers, ids, begins)
    assert_equal(build_all(rows), expected)
    assert (
        expected["group"].max() > 1
        or length == 8
        or across == "attend"
        or (kind == "sentences")
    )
    numbers = random.Random(0).sample(numbers, min(40, len(rows)))
    batch = rows.build(numbers, [rows.read(n, n + 1) for n in numbers], len(numbers))
    assert_equal(batch, slow_batch(rows, numbers, ids, begins))


@pytest.mark.parametrize("across", ["attend", "block"])
@pytest.mark.parametrize("length", [17, 64])
def test_full_without_the_plan(length, across, corpus, encoded, ids, begins):
    """The text itself, word by word, put into rows by trial."""
    words = [into_words(document, begins["words"]) for document in numbered(encoded)]
    expected = joined(
        full_rows(documents, length) for documents in in_records(words, corpus)
    )
    special = corpus.tokenizer
    named = {"CLS": special.cls_id, "SEP": special.sep_id}
    batch = build_all(Rows(corpus, "full", length, across=across))
    assert len(batch["ids"]) == len(expected)
    several = 0
    for n, row in enumerate(expected):
        size = len(row)
        found = [named[p] if p in named else ids[p] for p, *_ in row]
        group = [document + 1 for _, document, _ in row]
        place = [at for *_, at in row]
        several += max(group) > 1
        if across == "attend":
            group, place = [1] * size, list(range(size))
        assert batch["ids"][n, :size].tolist() == found
        assert batch["group"][n].tolist() == group + [0] * (length - size)
        assert batch["positions"][n].tolist() == place + [0] * (length - size)
    assert several > 10


def test_stream_is_the_corpus(corpus, encoded, tokenizer):
    rows = Rows(corpus, "stream", 32)
    batch = build_all(rows)
    line = joined([*joined(document), tokenizer.sep_id] for document in encoded)
    found = batch["ids"].reshape(-1)
    assert found[: len(line)].tolist() == line
    assert (found[len(line) :] == tokenizer.pad_id).all()
    assert batch["group"].sum() == len(line)


def test_a_row_that_is_only_a_separator(tmp_path, tokenizer):
    """The end of the stream: there is no text to read."""
    texts = [["ba ke li mo nu"]] * 3
    size = len(tokenizer.encode(texts[0][0]))
    alone = make_corpus(tmp_path / "alone", texts, tokenizer)
    length = 3 * (size + 1) - 1
    assert length >= 8
    rows = Rows(alone, "stream", length)
    assert len(rows) == 2
    batch = rows.build([1], [rows.read(1, 2)], 1)
    assert batch["ids"][0, :2].tolist() == [tokenizer.sep_id, tokenizer.pad_id]
    assert batch["group"].sum() == 1
    assert not batch["words"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_real_is_what_the_rows_hold(kind, corpus, tokenizer):
    rows = Rows(corpus, kind, 40)
    batch = build_all(rows)
    measured = (batch["group"] > 0).mean()
    assert measured == (batch["ids"] != tokenizer.pad_id).mean()
    assert rows.plan.real == pytest.approx(measured, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows(kind, corpus, tokenizer):
    rows = Rows(corpus, kind, 32)
    batch = rows.build([3], [rows.read(3, 4)], 3)
    assert batch["row_id"].tolist() == [3, -1, -1]
    empty = rows.empty(2)
    assert list(empty) == list(batch)
    for name, column in batch.items():
        assert column.dtype == np.int32
        assert column[1:].tolist() == empty[name].tolist()
    assert (empty["ids"] == tokenizer.pad_id).all()
    assert not empty["group"].any()
    assert ("next_sentence" in empty) == (kind in LABELLED)
    if kind in LABELLED:
        assert (empty["next_sentence"] == -1).all()


def test_across(corpus):
    with pytest.raises(InputError, match="unknown across 'blok'. Did you mean block?"):
        Rows(corpus, "full", 32, across="blok")


# --- stored units --------------------------------------------------------------------


def tagged_texts(rng) -> list[list[list[list[str]]]]:
    """Documents of lines of phrases of words of Chinese characters."""
    characters = [chr(0x4E00 + n) for n in range(40)]

    def word() -> str:
        return "".join(rng.choices(characters, k=rng.choice((1, 1, 2, 2, 3, 4))))

    def phrase() -> list[str]:
        return [word() for _ in range(rng.choice((1, 1, 1, 2, 3)))]

    return [
        [[phrase() for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 6))]
        for _ in range(50)
    ]


def with_tags(phrase: list[str]) -> str:
    words = "  ".join(f"{word}/n" for word in phrase)
    return f"[{words}]nt" if len(phrase) > 1 else words


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """A corpus of tagged words; its characters, where words and phrases begin."""
    documents = tagged_texts(random.Random(0))
    texts = [
        ["  ".join(map(with_tags, phrases)) for phrases in lines] for lines in documents
    ]
    characters = joined(joined(joined(joined(documents))))
    tokenizer = WordPiece([*SPECIALS, *sorted(set(characters))])
    folder = tmp_path_factory.mktemp("tagged") / "corpus"
    corpus = make_corpus(folder, texts, tokenizer, record=1500, words="tags")
    begins = {"words": [], "phrases": []}
    for phrase in joined(joined(documents)):
        for n, word in enumerate(phrase):
            for k in range(len(word)):
                begins["words"].append(k == 0)
                begins["phrases"].append(n == k == 0)
    begins["entities"] = begins["phrases"]  # all of them are names
    return corpus, [tokenizer.vocab.index(c) for c in characters], begins


@pytest.mark.parametrize("across", ["attend", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_stored_units(kind, across, tagged, monkeypatch):
    monkeypatch.setattr(plans, "BLOCK", 300)
    corpus, ids, begins = tagged
    assert corpus.units == ("words", "phrases", "entities")
    assert corpus.records > 3
    assert corpus.read(0, len(ids)).tolist() == ids
    rows = Rows(corpus, kind, 32, across=across)
    expected = slow_batch(rows, range(len(rows)), ids, begins)
    assert_equal(build_all(rows), expected)
    words, phrases = expected["words"].max(), expected["phrases"].max()
    assert 1 < phrases < words < 31
    numbers = [len(rows) - 1, 0, 5]
    batch = rows.build(numbers, [rows.read(n, n + 1) for n in numbers], 3)
    assert_equal(batch, slow_batch(rows, numbers, ids, begins))
    backwards = rows.build(numbers, [rows.read(n, n + 1) for n in numbers], 3)
    rows.turn(backwards, [1])
    size = (batch["group"][1] > 0).sum()
    for name in ("ids", "words", "phrases"):
        expected = batch[name].copy()
        expected[1, :size] = expected[1, :size][::-1]
        np.testing.assert_array_equal(backwards[name], expected)
    if kind in ("full", "doc"):  # rows end between words, not between characters
        ends = rows.plan.a[:, 1]
        assert all(begins["words"][end] for end in ends if end < len(ids))
    elif kind not in RULES and kind != "sentences":
        assert not all(begins["words"][end] for end in rows.plan.a[:-1, 1])
