"""The stream of batches: any step by itself, any part by itself, nothing twice."""

import itertools
import random
import shutil

import numpy as np
import pytest

from bert_jax.data import rows as rows_module
from bert_jax.data.pipeline import checksum, eval_batches, train_batches
from bert_jax.data.prepare import Corpus, open_corpus, prepare
from bert_jax.data.rows import Rows
from bert_jax.data.tokenizers import train_wordpiece
from bert_jax.errors import InputError

KINDS = ("full", "doc", "pair")
LENGTH = 32
SIZE = 8
WHOLE = slice(0, SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def texts():
    """40 documents of 1 to 9 sentences."""
    rng = random.Random(0)
    syllables = ("ba", "ke", "li", "mo", "nu", "sta", "tri", "von")
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(90)]
    return [
        [
            " ".join(rng.choices(words, k=rng.randint(1, 12)))
            for _ in range(rng.randint(1, 9))
        ]
        for _ in range(40)
    ]


def make_corpus(folder, name, texts):
    lines = [line for lines in texts for line in lines]
    (folder / f"{name}.txt").write_text("\n\n".join(map("\n".join, texts)))
    return prepare(
        [str(folder / f"{name}.txt")],
        tokenizer=train_wordpiece(lines, vocab_size=80, progress=False),
        out=folder / name,
        sentences="line",
        progress=False,
    )


@pytest.fixture(scope="module")
def corpus(folder, texts):
    return make_corpus(folder, "many", texts)


def train(rows: Rows, start: int, stop: int, part: slice = WHOLE) -> list[dict]:
    return list(train_batches(rows, size=SIZE, start=start, stop=stop, part=part))


def assert_equal(a: dict, b: dict) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype == np.int32
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_any_step_by_itself(kind, corpus):
    """Through the end of the first epoch, from new row sets."""
    one = Rows(corpus, kind, LENGTH, seed=5)
    steps = one.per_epoch // SIZE + 4
    batches = train(one, 0, steps)
    assert len(batches) == steps > 8
    assert len({checksum(batch) for batch in batches}) == steps
    for start, stop in ((3, 5), (steps - 5, steps)):
        resumed = train(Rows(corpus, kind, LENGTH, seed=5), start, stop)
        for found, expected in zip(resumed, batches[start:stop], strict=True):
            assert_equal(found, expected)
    other = train(Rows(corpus, kind, LENGTH, seed=6), 0, 1)
    assert checksum(other[0]) != checksum(batches[0])


@pytest.mark.parametrize("kind", KINDS)
def test_batch_holds_the_rows_of_its_step(kind, corpus):
    rows = Rows(corpus, kind, LENGTH, seed=1)
    (batch,) = train(rows, 6, 7)
    for n in range(SIZE):
        row = rows.build([rows.locate(6 * SIZE + n)], 1)
        assert_equal({name: column[n : n + 1] for name, column in batch.items()}, row)


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_is_every_row_once(kind, corpus):
    rows = Rows(corpus, kind, LENGTH, seed=1)
    count = rows.per_epoch
    seen = [batch["row_id"] for batch in train(rows, 0, -(-count // SIZE))]
    assert sorted(np.concatenate(seen)[:count]) == list(range(count))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_two_processes(kind, corpus):
    whole = train(Rows(corpus, kind, LENGTH), 2, 6)
    parts = [
        train(Rows(corpus, kind, LENGTH), 2, 6, part)
        for part in (slice(0, 4), slice(4, 8))
    ]
    for batch, first, second in zip(whole, *parts, strict=True):
        assert len(first["ids"]) == len(second["ids"]) == 4
        joined = {name: np.concatenate([first[name], second[name]]) for name in first}
        assert_equal(joined, batch)
        assert checksum(first) != checksum(second)


@pytest.fixture
def reads(monkeypatch):
    """Every stretch that was read from the corpus."""
    found = []
    read = Corpus.read

    def counted(self, start, stop):
        found.append((int(start), int(stop)))
        return read(self, start, stop)

    monkeypatch.setattr(Corpus, "read", counted)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_reads_only_what_it_needs(kind, corpus, reads):
    rows = Rows(corpus, kind, LENGTH, seed=2)
    expected = []
    for number in range(1000 * SIZE, 1003 * SIZE):
        epoch, row = rows.locate(number)
        plan = rows.plan(epoch)
        for example in plan.row(row):
            both = (plan.a[example], plan.b[example])
            expected += [tuple(stretch) for stretch in both if stretch.any()]
    assert not reads
    train(Rows(corpus, kind, LENGTH, seed=2), 1000, 1003)
    assert sorted(reads) == sorted(expected)


def test_resuming_costs_what_beginning_costs(folder, texts, reads):
    """One document: each full row is one stretch, so the numbers are equal."""
    lines = [line for lines in texts for line in lines]
    alone = make_corpus(folder, "alone", [lines])
    counts = []
    for start in (0, 1000):
        reads.clear()
        assert len(train(Rows(alone, "full", LENGTH), start, start + 3)) == 3
        counts.append(len(reads))
    assert counts == [3 * SIZE, 3 * SIZE]


def test_resuming_draws_only_its_epoch(corpus, monkeypatch):
    """Of pairs, besides the first epoch, which says how long an epoch is."""
    rows = Rows(corpus, "pair", LENGTH, seed=9)
    start = 50 * rows.per_epoch // SIZE + 1
    drawn = []
    real = rows_module.random.Random

    def counted(seed):
        drawn.append(seed)
        return real(seed)

    monkeypatch.setattr(rows_module.random, "Random", counted)
    train(Rows(corpus, "pair", LENGTH, seed=9), start, start + 2)
    assert set(drawn) == {"9/0", "9/50"}


@pytest.mark.parametrize("kind", KINDS)
def test_eval_covers_every_row_once(kind, corpus):
    rows = Rows(corpus, kind, LENGTH, seed=3)
    total = rows.per_epoch
    size = next(n for n in (7, 8, 9) if total % n)
    batches = list(eval_batches(rows, size=size))
    assert len(batches) == -(-total // size)
    row_ids = np.concatenate([batch["row_id"] for batch in batches])
    padding = -total % size
    assert padding > 0
    assert row_ids.tolist() == [*range(total), *[-1] * padding]
    last = batches[-1]
    assert len(last["ids"]) == size
    assert not last["group"][-padding:].any()
    assert (last["ids"][-padding:] == corpus.tokenizer.pad_id).all()
    assert all(batch["group"][:, 0].all() for batch in batches[:-1])
    whole = rows.build([(0, number) for number in range(total)], total)
    joined = {
        name: np.concatenate([batch[name] for batch in batches])[:total]
        for name in whole
    }
    assert_equal(joined, whole)


def test_eval_count(corpus):
    rows = Rows(corpus, "full", LENGTH)
    total = rows.per_epoch

    def row_ids(**options):
        return [b["row_id"].tolist() for b in eval_batches(rows, size=4, **options)]

    assert row_ids(count=6) == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert row_ids(count=8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert row_ids(count=total + 100) == row_ids()
    for a, b in itertools.pairwise(eval_batches(rows, size=4, count=12)):
        assert checksum(a) != checksum(b)


def test_checksum(corpus):
    (batch,) = train(Rows(corpus, "pair", LENGTH), 0, 1)
    same = {name: batch[name].copy() for name in reversed(list(batch))}
    assert checksum(same) == checksum(batch)
    assert len(checksum(batch)) == 8
    for name in batch:
        other = {name: column.copy() for name, column in batch.items()}
        other[name].flat[-1] += 1
        assert checksum(other) != checksum(batch)
    swapped = batch | {"ids": batch["ids"][::-1]}
    assert checksum(swapped) != checksum(batch)


def test_another_tokenizer_is_an_input_error(corpus, tmp_path):
    """Not an error of TensorFlow's with the text inside."""
    copy = shutil.copytree(corpus.path, tmp_path / "copy")
    shutil.rmtree(copy / "tokenizer")
    train_wordpiece(["some other text"], vocab_size=30, progress=False).save(
        copy / "tokenizer"
    )
    with pytest.raises(InputError, match="is not the tokenizer the corpus was made wi"):
        train(Rows(open_corpus(copy), "full", LENGTH), 0, 1)
