"""Rows against brute force: nothing lost, nothing too long, pairs drawn as BERT's."""

import itertools
import os
import random
import subprocess
import sys
import zlib

import numpy as np
import pytest

from bert_jax.data import rows as module
from bert_jax.data.prepare import prepare
from bert_jax.data.rows import (
    EXAMPLES,
    Rows,
    cut_sentences,
    pack,
    pairs_of_document,
    plan_doc,
    plan_full,
    plan_pair,
)
from bert_jax.data.text import documents as read_documents
from bert_jax.data.tokenizers import train_wordpiece
from bert_jax.errors import InputError

LENGTH = 32
KINDS = ("full", "doc", "pair")
SYLLABLES = ("ba", "ke", "li", "mo", "nu", "sta", "tri", "von", "wex", "yod")
SIGMAS = 4.42  # a normal variable is further out once in 100,000 cases


def make_texts(count: int) -> list[list[str]]:
    """Documents of 1 to 12 sentences; some have one, some sentences are very long."""
    rng = random.Random(0)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(150)]
    return [
        [
            " ".join(rng.choices(words, k=rng.choice((1, 2, 4, 5, 7, 9, 60))))
            for _ in range(1 if number % 5 == 0 else rng.randint(2, 12))
        ]
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def texts():
    return make_texts(60)


@pytest.fixture(scope="module")
def tokenizer(texts):
    lines = [line for lines in texts for line in lines]
    return train_wordpiece(lines, vocab_size=100, progress=False)


def make_corpus(folder, name, texts, tokenizer):
    source = folder / f"{name}.txt"
    source.write_text("\n\n".join("\n".join(lines) for lines in texts))
    return prepare(
        [str(source)],
        tokenizer=tokenizer,
        out=folder / name,
        sentences="line",
        progress=False,
    )


@pytest.fixture(scope="module")
def corpus(folder, texts, tokenizer):
    return make_corpus(folder, "many", texts, tokenizer)


@pytest.fixture(scope="module")
def encoded(texts, tokenizer):
    """Documents as lists of sentences as lists of ids."""
    return [[tokenizer.encode(line) for line in lines] for lines in texts]


def cut(sentences: list, longest: int) -> list:
    """Each list of a document in parts of at most `longest`."""
    return [
        part[at : at + longest]
        for part in sentences
        for at in range(0, len(part), longest)
    ]


def joined(lists) -> list:
    return list(itertools.chain.from_iterable(lists))


def numbered(documents: list[list[int]]) -> list[list[list[int]]]:
    """Sentence lengths to sentences whose pieces are numbered through the corpus."""
    count = itertools.count()
    return [[[next(count) for _ in range(n)] for n in sizes] for sizes in documents]


def units_of(documents: list[list[int]], longest: int) -> module.Units:
    """Units of documents given by the lengths of their sentences."""
    lengths = np.asarray(joined(documents), np.uint16)
    return cut_sentences(lengths, np.asarray([len(d) for d in documents]), longest)


def random_documents(rng, count: int, *, longest: int) -> list[list[int]]:
    """Sentence lengths; every third document is a single sentence."""
    return [
        [rng.randint(1, longest) for _ in range(rng.choice((1, rng.randint(1, 9))))]
        for _ in range(count)
    ]


def build_all(rows: Rows, epoch: int = 0) -> dict[str, np.ndarray]:
    count = len(rows.plan(epoch))
    return rows.build([(epoch, number) for number in range(count)], count)


def sizes_of(plan, specials: int) -> np.ndarray:
    return np.diff(plan.a)[:, 0] + np.diff(plan.b)[:, 0] + specials


# --- units ---------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [1, 2, 3, 7, 19, 50])
def test_cut_sentences(longest):
    documents = random_documents(random.Random(longest), 40, longest=20)
    units = units_of(documents, longest)
    parts = [cut(sentences, longest) for sentences in numbered(documents)]
    assert units.lengths.tolist() == [len(part) for part in joined(parts)]
    assert units.starts[:-1].tolist() == [part[0] for part in joined(parts)]
    assert units.starts[-1] == sum(joined(documents))
    assert np.diff(units.documents).tolist() == [len(part) for part in parts]
    assert units.documents[0] == 0
    assert units.cut == sum(n > longest for n in joined(documents))
    assert (units.cut > 0) == (longest < 20)


def test_long_sentences_are_cut_and_counted(corpus, encoded):
    rows = Rows(corpus, "doc", LENGTH)
    too_long = [part for part in joined(encoded) if len(part) > LENGTH - 3]
    assert rows.units.cut == len(too_long) > 10
    assert rows.units.lengths.max() == LENGTH - 3
    assert rows.units.starts[-1] == corpus.about["pieces"]


# --- full ----------------------------------------------------------------------------


def show(units: list[tuple[int, list]], cls, sep) -> list[tuple]:
    """A full row as (id, number of the document in the row, place in it)."""
    row = [(cls, 0, 0)]
    place = number = 0
    for at, (document, pieces) in enumerate(units):
        for piece in pieces:
            place += 1
            row.append((piece, number, place))
        if at + 1 == len(units) or units[at + 1][0] != document:
            row.append((sep, number, place + 1))
            number, place = number + 1, -1
    return row


def full_rows(documents: list[list[list]], length: int, cls, sep) -> list[list[tuple]]:
    """Rows by trial: one more unit as long as what is shown is not too long."""
    units = [(n, part) for n, parts in enumerate(documents) for part in parts]
    found = []
    start = 0
    while start < len(units):
        stop = start + 1
        while (
            stop < len(units) and len(show(units[start : stop + 1], cls, sep)) <= length
        ):
            stop += 1
        found.append(show(units[start:stop], cls, sep))
        start = stop
    return found


@pytest.mark.parametrize("length", [8, 11, 32, 100])
def test_plan_full_is_greedy(length):
    for seed in range(20):
        rng = random.Random(seed)
        documents = random_documents(rng, 30, longest=rng.choice((3, 12, 40)))
        parts = [cut(sentences, length - 3) for sentences in numbered(documents)]
        expected = [
            [piece for piece, *_ in row if piece not in ("CLS", "SEP")]
            for row in full_rows(parts, length, "CLS", "SEP")
        ]
        plan = plan_full(units_of(documents, length - 3), length)
        found = [
            joined(range(*plan.a[example]) for example in plan.row(number))
            for number in range(len(plan))
        ]
        assert found == expected
        assert not plan.b.any()
        assert (plan.labels == -1).all()


@pytest.mark.parametrize("across", ["attend", "block"])
@pytest.mark.parametrize("length", [8, LENGTH, 200])
def test_full_row_by_row(length, across, corpus, encoded, tokenizer):
    rows = Rows(corpus, "full", length, across=across)
    batch = build_all(rows)
    parts = [cut(sentences, length - 3) for sentences in encoded]
    expected = full_rows(parts, length, tokenizer.cls_id, tokenizer.sep_id)
    assert len(expected) == rows.per_epoch == len(batch["ids"])
    assert batch["group"].max() > 1 or across == "attend"
    for n, row in enumerate(expected):
        size = len(row)
        ids, document, place = np.asarray(row).T
        assert batch["ids"][n, :size].tolist() == ids.tolist()
        if across == "attend":
            document, place = 0 * document, np.arange(size)
        assert batch["group"][n, :size].tolist() == (document + 1).tolist()
        assert batch["positions"][n, :size].tolist() == place.tolist()
        assert (batch["ids"][n, size:] == tokenizer.pad_id).all()
        assert not batch["group"][n, size:].any()
        assert not batch["positions"][n, size:].any()
    assert not batch["types"].any()
    assert batch["row_id"].tolist() == list(range(len(expected)))


def test_full_is_the_corpus(corpus, encoded, tokenizer):
    rows = Rows(corpus, "full", LENGTH)
    batch = build_all(rows)
    ids = batch["ids"]
    assert (ids[:, 0] == tokenizer.cls_id).all()
    assert not (ids[:, 1:] == tokenizer.cls_id).any()
    assert set(np.unique(batch["group"])) == {0, 1}
    special = np.isin(ids, tokenizer.special_ids)
    assert ids[~special].tolist() == joined(joined(encoded))
    read = np.cumsum(~special).reshape(ids.shape)  # pieces so far
    ends = set(np.cumsum([len(joined(sentences)) for sentences in encoded]))
    separators = ids == tokenizer.sep_id
    assert ends <= set(read[separators])
    # Within a row, a separator is nothing but the end of a document.
    goes_on = np.pad(batch["group"][:, 1:] > 0, ((0, 0), (0, 1)))
    inside = read[separators & goes_on]
    assert len(inside) > 10
    assert set(inside) <= ends


# --- doc -----------------------------------------------------------------------------


def doc_stretches(documents: list[list[list[int]]], room: int) -> list[list[int]]:
    found = []
    for parts in documents:
        row: list[int] = []
        for part in parts:
            if row and len(row) + len(part) > room:
                found.append(row)
                row = []
            row = row + part
        found.append(row)
    return found


@pytest.mark.parametrize("length", [8, 11, 32, 100])
def test_plan_doc(length):
    for seed in range(20):
        rng = random.Random(seed)
        documents = random_documents(rng, 30, longest=rng.choice((3, 12, 40)))
        parts = [cut(sentences, length - 3) for sentences in numbered(documents)]
        plan = plan_doc(units_of(documents, length - 3), length)
        found = [list(range(*stretch)) for stretch in plan.a]
        assert found == doc_stretches(parts, length - 2)
        assert joined(found) == joined(joined(parts))  # once, in order
        assert sorted(plan.order) == list(range(len(plan.a)))
        assert not plan.b.any()


def test_doc_examples(corpus, encoded, tokenizer):
    batch = build_all(Rows(corpus, "doc", LENGTH))
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    found = [
        line[group == number].tolist()
        for line, group in zip(batch["ids"], batch["group"], strict=True)
        for number in range(1, group.max() + 1)
    ]
    parts = [cut(sentences, LENGTH - 3) for sentences in encoded]
    expected = [[cls, *row, sep] for row in doc_stretches(parts, LENGTH - 2)]
    assert sorted(found) == sorted(expected)
    assert not batch["types"].any()
    assert "first" not in batch


@pytest.mark.parametrize("kind", ["doc", "pair"])
@pytest.mark.parametrize("length", [LENGTH, 1000])
def test_packed(kind, length, corpus, tokenizer):
    rows = Rows(corpus, kind, length)
    plan, batch = rows.plan(0), build_all(rows)
    sizes = sizes_of(plan, 3 if kind == "pair" else 2)
    most = 0
    for n in range(len(plan)):
        examples = plan.row(n)
        assert 1 <= len(examples) <= EXAMPLES
        most = max(most, len(examples))
        assert sizes[examples].sum() <= length
        groups = joined([k + 1] * sizes[e] for k, e in enumerate(examples))
        places = joined(range(sizes[e]) for e in examples)
        rest = [0] * (length - len(groups))
        assert batch["group"][n].tolist() == groups + rest
        assert batch["positions"][n].tolist() == places + rest
        first = (batch["group"][n] > 0) & (batch["positions"][n] == 0)
        assert (first == (batch["ids"][n] == tokenizer.cls_id)).all()
        assert (batch["ids"][n, len(groups) :] == tokenizer.pad_id).all()
    assert most > 1 if length == LENGTH else most == EXAMPLES


# --- pair ----------------------------------------------------------------------------


def release_pairs(documents, number: int, length: int, rng) -> list[tuple]:
    """Google's create_instances_from_document on lists, up to the pair of lists.

    Every draw is made where the release makes it.
    """
    room = length - 3
    goal = room
    if rng.random() < 0.1:
        goal = rng.randint(2, room)
    document = documents[number]
    found, chunk, collected, i = [], [], 0, 0
    while i < len(document):
        chunk.append(document[i])
        collected += len(document[i])
        if i == len(document) - 1 or collected >= goal:
            a_end = 1
            if len(chunk) >= 2:
                a_end = rng.randint(1, len(chunk) - 1)
            a, b = joined(chunk[:a_end]), []
            if len(chunk) == 1 or rng.random() < 0.5:
                label = 1
                wanted = goal - len(a)
                for _ in range(10):
                    other = rng.randint(0, len(documents) - 1)
                    if other != number:
                        break
                begin = rng.randint(0, len(documents[other]) - 1)
                for sentence in documents[other][begin:]:
                    b.extend(sentence)
                    if len(b) >= wanted:
                        break
                i -= len(chunk) - a_end
            else:
                label = 0
                b.extend(joined(chunk[a_end:]))
            while len(a) + len(b) > room:
                longer = a if len(a) > len(b) else b
                if rng.random() < 0.5:
                    del longer[0]
                else:
                    longer.pop()
            found.append((a, b, label))
            chunk, collected = [], 0
        i += 1
    return found


@pytest.mark.parametrize("longest", ["cut", "uncut"])
@pytest.mark.parametrize("count", [2, 3, 20])
def test_pairs_are_those_of_the_release(count, longest):
    """With the sentences cut to a row, as Rows has it, or as long as they are."""
    labels = set()
    for seed in range(60):
        rng = random.Random(seed)
        length = rng.choice((8, 9, 16, 40, 128))
        documents = random_documents(rng, count, longest=rng.choice((1, 4, 12, 60)))
        limit = length - 3 if longest == "cut" else 60
        parts = [cut(sentences, limit) for sentences in numbered(documents)]
        ours, theirs = random.Random(seed), random.Random(seed)
        plan = plan_pair(units_of(documents, limit), length, ours)
        found = [
            (list(range(*a)), list(range(*b)), label)
            for a, b, label in zip(plan.a, plan.b, plan.labels, strict=True)
        ]
        expected = joined(
            release_pairs(parts, number, length, theirs) for number in range(count)
        )
        assert found == expected
        assert ours.getstate() == theirs.getstate()
        assert sizes_of(plan, 3).max() <= length
        labels |= set(plan.labels)
    assert labels == {0, 1}


def test_positives_follow_and_negatives_come_from_elsewhere(monkeypatch):
    """Before truncation, which is left out here."""
    monkeypatch.setattr(module, "truncate_pair", lambda a, b, room, rng: (*a, *b))
    rng = random.Random(5)
    documents = random_documents(rng, 60, longest=12)
    units = units_of(documents, 1000)
    starts, borders = units.starts.tolist(), units.documents.tolist()
    document_starts = units.starts[units.documents]
    home = np.repeat(np.arange(60), np.diff(document_starts))
    seen = {0: 0, 1: 0}
    for number in range(60):
        read = []
        for *bounds, label in pairs_of_document(starts, borders, number, 40, rng):
            a, b = bounds[:2], bounds[2:]
            assert set(home[slice(*a)]) == {number}
            (other,) = set(home[slice(*b)])
            if label == 0:
                assert (b[0], other) == (a[1], number)
                assert len(documents[number]) > 1
            else:
                assert other != number
            read += range(*a) if label else range(a[0], b[1])
            seen[label] += 1
        # What B did not use is put back: the text of a document is used once.
        assert read == list(range(*document_starts[number : number + 2]))
    assert min(seen.values()) > 20


def test_share_of_random_pairs():
    """Exactly binomial: two sentences of one piece are one choice a document."""
    count = 6000
    plan = plan_pair(units_of([[1, 1]] * count, 29), 32, random.Random(1))
    positives = int((plan.labels == 0).sum())
    assert abs(positives - count / 2) < SIGMAS * (count / 4) ** 0.5
    # A random B leaves one sentence, which can only have a random B.
    assert len(plan.labels) == positives + 2 * (count - positives)


def test_share_in_long_documents():
    """Only the last sentence of a document can be forced to a random B."""
    rng = random.Random(2)
    documents = [[rng.randint(1, 9) for _ in range(4000)] for _ in range(10)]
    labels = plan_pair(units_of(documents, 61), 64, rng).labels
    forced = 2 * len(documents)
    assert len(labels) > 4000
    slack = SIGMAS * (len(labels) / 4) ** 0.5 + forced
    assert abs((labels == 1).sum() - len(labels) / 2) < slack


def test_share_of_short_documents():
    """With sentences of one piece, the longest pair of a document is its target."""
    count, room = 2000, 20
    units = units_of([[1] * 200] * count, room)
    plan = plan_pair(units, room + 3, random.Random(3))
    targets = np.zeros(count, int)
    np.maximum.at(targets, plan.a[:, 0] // 200, sizes_of(plan, 0))
    assert targets.max() == room
    assert targets.min() == 2
    # Drawn from 2..room: one of room - 1 short documents is as long as the others.
    share = 0.1 * (1 - 1 / (room - 1))
    short = targets[targets < room]
    slack = SIGMAS * (count * share * (1 - share)) ** 0.5
    assert abs(len(short) - share * count) < slack
    spread = ((room - 2) ** 2 / 12) ** 0.5
    assert abs(short.mean() - (2 + room - 1) / 2) < SIGMAS * spread / len(short) ** 0.5


def test_pair_rows(corpus, encoded, tokenizer):
    rows = Rows(corpus, "pair", 64, seed=4)
    ids = joined(joined(encoded))
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    plan, batch = rows.plan(0), build_all(rows)
    assert set(plan.labels) == {0, 1}
    for n in range(len(plan)):
        at = 0
        examples = plan.row(n)
        for k, example in enumerate(examples):
            a, b = ids[slice(*plan.a[example])], ids[slice(*plan.b[example])]
            assert a
            assert b
            size = len(a) + len(b) + 3
            here = slice(at, at + size)
            assert batch["ids"][n, here].tolist() == [cls, *a, sep, *b, sep]
            types = [0] * (len(a) + 2) + [1] * (len(b) + 1)
            assert batch["types"][n, here].tolist() == types
            assert batch["first"][n, k] == at
            assert batch["next_sentence"][n, k] == plan.labels[example]
            at += size
        assert not batch["types"][n, at:].any()
        assert (batch["next_sentence"][n, len(examples) :] == -1).all()
        assert not batch["first"][n, len(examples) :].any()


# --- packing -------------------------------------------------------------------------


def fewest_rows(sizes: list[int], room: int, most: int) -> int:
    """The optimum, by trying everything."""

    def place(left: tuple, rows: tuple) -> int:
        if not left:
            return len(rows)
        size, rest = left[0], left[1:]
        best = place(rest, (*rows, (size, 1)))
        for n, (used, held) in enumerate(rows):
            if used + size <= room and held < most:
                added = (*rows[:n], (used + size, held + 1), *rows[n + 1 :])
                best = min(best, place(rest, added))
        return best

    return place(tuple(sizes), ())


def check_packed(sizes: np.ndarray, room: int, most: int) -> int:
    order, borders = pack(sizes, room)
    assert sorted(order) == list(range(len(sizes)))
    assert (borders[0], borders[-1]) == (0, len(sizes))
    assert (np.diff(borders) >= 1).all()
    assert (np.diff(borders) <= most).all()
    assert np.add.reduceat(sizes[order], borders[:-1]).max() <= room
    return len(borders) - 1


@pytest.mark.parametrize("most", [2, 3, 8])
def test_pack_is_near_the_optimum(most, monkeypatch):
    monkeypatch.setattr(module, "EXAMPLES", most)
    exact = 0
    for seed in range(60):
        rng = random.Random(seed)
        sizes = [rng.randint(1, rng.choice((5, 12))) for _ in range(rng.randint(1, 7))]
        found = check_packed(np.asarray(sizes), 12, most)
        best = fewest_rows(sizes, 12, most)
        assert best <= found <= best + 1
        exact += found == best
    assert exact > 50


def test_pack_is_best_fit_decreasing(monkeypatch):
    """Against a search through all rows; which of two equal ones does not matter."""
    monkeypatch.setattr(module, "EXAMPLES", 1000)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, rng.choice((20, 60, 101)), 300)
        left: list[int] = []
        for size in sorted(sizes.tolist(), reverse=True):
            best = min((free for free in left if free >= size), default=None)
            if best is None:
                best = 100
            else:
                left.remove(best)
            left.append(best - size)
        order, borders = pack(sizes, 100)
        used = np.add.reduceat(sizes[order], borders[:-1])
        assert sorted(100 - used) == sorted(left)


@pytest.mark.parametrize("room", [128, 512])
def test_pack_realistic_lengths(room):
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(np.log(room / 3), 0.7, 5000), 5, room).astype(int)
    assert check_packed(sizes, room, EXAMPLES) <= 1.05 * sizes.sum() / room


def test_pack_many_tiny_examples():
    """The number of examples is what fills a row."""
    assert check_packed(np.full(801, 3), 128, EXAMPLES) == 101
    assert check_packed(np.full(7, 128), 128, EXAMPLES) == 7


# --- all kinds -----------------------------------------------------------------------


@pytest.mark.parametrize("across", ["attend", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_words(kind, across, corpus, tokenizer):
    batch = build_all(Rows(corpus, kind, LENGTH, across=across))
    text = (batch["group"] > 0) & ~np.isin(batch["ids"], tokenizer.special_ids)
    assert (batch["words"][~text] == 0).all()
    inside_a_word = 0
    for ids, words, real in zip(batch["ids"], batch["words"], text, strict=True):
        before = 0
        places = np.flatnonzero(real)
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            numbers = tokenizer.word_numbers(ids[run])
            assert words[run].tolist() == (before + 1 + numbers).tolist()
            before = words[run[-1]]
            inside_a_word += not tokenizer.starts[ids[run[0]]]
    assert inside_a_word > 10  # stretches that do not begin with a word


@pytest.mark.parametrize("length", [16, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_real(kind, length, corpus, tokenizer):
    rows = Rows(corpus, kind, length)
    batch = build_all(rows)
    measured = (batch["ids"] != tokenizer.pad_id).mean()
    assert measured == (batch["group"] > 0).mean()
    assert 0.5 < measured < 1
    assert rows.real == pytest.approx(measured, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_once_an_epoch(kind, corpus):
    rows = Rows(corpus, kind, LENGTH, seed=1)
    count = rows.per_epoch
    assert count == len(rows.plan(0)) > 50
    orders = []
    for epoch in range(3):
        numbers = range(epoch * count, (epoch + 1) * count)
        places = [rows.locate(number) for number in numbers]
        assert {place[0] for place in places} == {epoch}
        order = [place[1] for place in places]
        available = len(rows.plan(epoch))
        if kind != "pair" or epoch == 0:
            assert available == count
        # A later epoch of pairs may have some rows more or less than the first.
        assert abs(available - count) < 0.1 * count
        seen = [order.count(number) for number in range(available)]
        assert max(seen) - min(seen) <= (available != count)
        assert sum(seen) == count
        orders.append(order)
    other = Rows(corpus, kind, LENGTH, seed=2)
    orders.append([other.locate(number)[1] for number in range(count)])
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    assert orders[0] != sorted(orders[0])


def row_checksum(rows: Rows, number: int) -> int:
    batch = rows.build([rows.locate(number)], 1)
    return zlib.crc32(b"".join(batch[name].tobytes() for name in sorted(batch)))


@pytest.mark.parametrize("kind", KINDS)
def test_row_is_a_function_of_seed_and_number(kind, corpus):
    numbers = [0, 1, 7, 300, 301, 2000, 5]
    first = Rows(corpus, kind, LENGTH, seed=3)
    found = [row_checksum(first, number) for number in numbers]
    assert len(set(found)) > 4
    second = Rows(corpus, kind, LENGTH, seed=3)
    again = [row_checksum(second, number) for number in reversed(numbers)]
    assert again[::-1] == found
    other = Rows(corpus, kind, LENGTH, seed=4)
    assert [row_checksum(other, number) for number in numbers] != found


def test_another_process_makes_the_same_rows(corpus):
    """With another seed of Python's hashes."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_rows import Rows, row_checksum\n"
        "from bert_jax.data.prepare import open_corpus\n"
        "rows = Rows(open_corpus(sys.argv[1]), 'pair', 32, seed=3)\n"
        "print([row_checksum(rows, number) for number in range(0, 900, 100)])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(corpus.path), os.path.dirname(__file__)],
        env=os.environ | {"PYTHONHASHSEED": "77"},
        cwd=os.path.join(os.path.dirname(__file__), "../.."),
        capture_output=True,
        text=True,
    )
    rows = Rows(corpus, "pair", 32, seed=3)
    expected = [row_checksum(rows, number) for number in range(0, 900, 100)]
    assert (result.stderr, result.stdout) == ("", f"{expected}\n")


def test_each_epoch_draws_its_pairs(corpus):
    def pairs(rows, epoch):
        plan = rows.plan(epoch)
        return np.concatenate([plan.a, plan.b], 1).tolist()

    rows, again = (Rows(corpus, "pair", LENGTH, seed=0) for _ in range(2))
    assert pairs(rows, 0) != pairs(rows, 1)
    assert pairs(rows, 1) == pairs(again, 1)
    assert pairs(rows, 0) != pairs(Rows(corpus, "pair", LENGTH, seed=1), 0)
    full = Rows(corpus, "full", LENGTH)
    assert full.plan(0) is full.plan(1)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows(kind, corpus, tokenizer):
    rows = Rows(corpus, kind, LENGTH)
    batch = rows.build([(0, 3)], 3)
    assert batch["row_id"].tolist() == [3, -1, -1]
    empty = rows.empty(2)
    assert list(empty) == list(batch)
    for name, column in batch.items():
        assert column.dtype == np.int32
        assert column[1:].tolist() == empty[name].tolist()
    assert (empty["ids"] == tokenizer.pad_id).all()
    assert not empty["group"].any()
    if kind == "pair":
        assert (empty["next_sentence"] == -1).all()


def test_errors(corpus, folder, texts, tokenizer):
    with pytest.raises(InputError) as error:
        Rows(corpus, "pairs", 7, across="blok")
    assert str(error.value).split("\n") == [
        "unknown rows 'pairs'. Did you mean pair? Valid: doc, full, pair",
        "unknown across 'blok'. Did you mean block? Valid: attend, block",
        "length=7 is too short: at least 8",
    ]
    alone = make_corpus(folder, "alone", [joined(texts[:3])], tokenizer)
    with pytest.raises(InputError, match=r"pair needs at least two documents .* has o"):
        Rows(alone, "pair", LENGTH)
    assert Rows(alone, "full", LENGTH).per_epoch > 1
    two = make_corpus(folder, "two", texts[1:3], tokenizer)
    assert Rows(two, "pair", 8).per_epoch > 1


def test_real_text(shared_data, folder):
    """Books: nothing lost, and rows nearly full."""
    source = [str(shared_data / "en_books/valid.txt.xz")]
    texts = (document.text for document in read_documents(source))
    tokenizer = train_wordpiece(texts, vocab_size=4000, progress=False)
    corpus = prepare(source, tokenizer=tokenizer, out=folder / "books", progress=False)
    for kind in KINDS:
        rows = Rows(corpus, kind, 128)
        plan = rows.plan(0)
        # Sentences are kept whole: only packed pairs fill their rows.
        assert rows.real > (0.98 if kind == "pair" else 0.84)
        if kind != "pair":
            assert plan.a[0, 0] == 0
            assert (plan.a[1:, 0] == plan.a[:-1, 1]).all()
            assert plan.a[-1, 1] == corpus.about["pieces"]
        if kind != "full":
            sizes = sizes_of(plan, 3 if kind == "pair" else 2)
            alone = (sizes > 64).sum()  # no two of these share a row
            assert len(plan) <= 1.05 * max(sizes.sum() / 128, alone)
