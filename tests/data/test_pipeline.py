"""The stream of batches: any step by itself, any part by itself, nothing twice."""

import gc
import shutil
import threading
import time
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data import pipeline, plans
from bert_jax.data.corpus import Corpus, open_corpus, shard_name
from bert_jax.data.order import Order
from bert_jax.data.pipeline import checksum, eval_batches, train_batches
from bert_jax.data.plans import KINDS
from bert_jax.data.prepare import prepare
from bert_jax.data.rows import Rows
from bert_jax.data.tokenizers import train_wordpiece
from bert_jax.errors import InputError
from tests.data.made import make_corpus

LENGTH = 32
SIZE = 8
READ = 2 * plans.BLOCK  # bytes


def train(rows: Rows, start: int, stop: int, *, size: int = SIZE, part=None) -> list:
    part = part or slice(0, size)
    return list(train_batches(rows, size=size, start=start, stop=stop, part=part))


def sums(*arguments, **options) -> list[str]:
    return [checksum(batch) for batch in train(*arguments, **options)]


def assert_equal(a: dict, b: dict) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype == np.int32
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def order_of(rows: Rows, size: int) -> Order:
    shuffled = rows.kind != "stream"
    return Order(rows.plan.blocks, size, rows.seed, shuffled=shuffled)


# --- a pure function of seed and step ------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_any_step_by_itself(kind, corpus, small):
    """Resumed at 0, 1, 1000 and in the third epoch, by new objects, as straight."""
    size = 3
    rows = Rows(corpus, kind, LENGTH, seed=5)
    third = 2 * len(rows) // size + 1
    assert third < 998
    straight = sums(rows, 0, 1003, size=size)
    assert len(straight) == 1003
    assert len(set(straight)) > (60 if kind == "stream" else 900)
    for start in (0, 1, 1000, third):
        again = Rows(open_corpus(small), kind, LENGTH, seed=5)
        assert sums(again, start, start + 3, size=size) == straight[start : start + 3]
    other = Rows(open_corpus(small), kind, LENGTH, seed=6)
    assert (sums(other, 0, 1, size=size) != straight[:1]) == (kind != "stream")


@pytest.mark.parametrize("kind", KINDS)
def test_batch_holds_the_rows_of_its_step(kind, corpus):
    rows = Rows(corpus, kind, LENGTH, seed=1)
    (batch,) = train(rows, 6, 7)
    order = order_of(rows, SIZE)
    for n in range(SIZE):
        read, place = order(6 * SIZE + n)
        number = int(order.rows_of(read)[place])
        row = rows.build([number], [rows.read(number, number + 1)], 1)
        if kind == "stream":  # which a row by itself does not know
            row["continues"][:] = read.epoch == 0
        assert_equal({name: column[n : n + 1] for name, column in batch.items()}, row)


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_is_every_row_once(kind, corpus):
    rows = Rows(corpus, kind, LENGTH, seed=1)
    count = len(rows)
    size = next(n for n in (7, 8, 9) if count % n)
    batches = train(rows, 0, -(-3 * count // size), size=size)
    seen = np.concatenate([batch["row_id"] for batch in batches])[: 3 * count]
    epochs = seen.reshape(3, count)
    assert (np.sort(epochs) == np.arange(count)).all()
    if kind != "stream":
        assert (epochs[0] != epochs[1]).mean() > 0.9
        assert (epochs[1] != epochs[2]).mean() > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_hosts(kind, corpus, small):
    """1, 2 and 4 hosts, through the end of the first epoch."""
    count = len(Rows(corpus, kind, LENGTH, seed=2))
    start = count // SIZE - 3
    whole = sums(Rows(corpus, kind, LENGTH, seed=2), start, start + 6)
    assert len(set(whole)) == 6
    for hosts in (2, 4):
        each = SIZE // hosts
        parts = [
            train(
                Rows(open_corpus(small), kind, LENGTH, seed=2),
                start,
                start + 6,
                part=slice(host * each, (host + 1) * each),
            )
            for host in range(hosts)
        ]
        for expected, *of_hosts in zip(whole, *parts, strict=True):
            assert all(len(batch["ids"]) == each for batch in of_hosts)
            names = of_hosts[0]
            joined = {n: np.concatenate([b[n] for b in of_hosts]) for n in names}
            assert checksum(joined) == expected


def test_more_hosts_than_shards(real):
    """Four hosts, one shard: nobody goes short, for no host owns a shard."""
    rows = Rows(open_corpus(real), "full", 128)
    assert rows.corpus.about["shards"] == 1
    whole = train(rows, 0, 5, size=16)
    for host in range(4):
        part = slice(4 * host, 4 * host + 4)
        own = train(Rows(open_corpus(real), "full", 128), 0, 5, size=16, part=part)
        for batch, all_rows in zip(own, whole, strict=True):
            np.testing.assert_array_equal(batch["ids"], all_rows["ids"][part])


@pytest.mark.parametrize("kind", ["full", "doc", "pair"])
def test_stages(kind, corpus, small):
    """Longer rows in smaller batches from step 40 on: as if it had always been so."""
    first = sums(Rows(corpus, kind, 16, seed=3), 0, 40, size=8)
    second = Rows(corpus, kind, 64, seed=3)
    count, size = len(second), 4
    begin = 40 * size
    assert begin < 2 * count
    epochs = -(-begin // count)  # ended, or begun before
    stop = -(-(epochs + 1) * count // size)
    batches = train(second, 40, stop, size=size)
    seen = np.concatenate([batch["row_id"] for batch in batches])
    whole = seen[epochs * count - begin :][:count]
    assert sorted(whole) == list(range(count))
    again = Rows(open_corpus(small), kind, 64, seed=3)
    found = [checksum(batch) for batch in batches]
    assert sums(again, 0, stop, size=size)[40:] == found
    assert not set(first) & set(found)


@pytest.mark.parametrize("size", [8, 64])
def test_a_small_input_that_comes_often(size, tmp_path, texts, tokenizer, monkeypatch):
    """Several times an epoch, also in several slots at a time; resumed alike."""
    monkeypatch.setattr(plans, "BLOCK", 300)
    folder = tmp_path / "two"
    sources = [tmp_path / name for name in ("small.txt", "large.txt")]
    for source, some in zip(sources, (texts[1:4], texts[4:30]), strict=True):
        source.write_text("\n\n".join(map("\n".join, some)))
    prepare(
        list(map(str, sources)),
        tokenizer=tokenizer,
        out=folder,
        sentences="line",
        workers=0,
        progress=False,
    )
    rows = Rows(open_corpus(folder), "full", 16)
    assert set(rows.plan.inputs) == {0, 1}
    steps = 3 * len(rows) // size
    assert steps > 6
    options = {"size": size, "part": slice(0, size), "alpha": 0.0}
    batches = list(train_batches(rows, start=0, stop=steps, **options))
    seen = np.concatenate([batch["row_id"] for batch in batches])
    small = rows.plan.blocks[(rows.plan.inputs == 0).sum()]
    assert abs((seen < small).mean() - 0.5) < 0.1
    again = Rows(open_corpus(folder), "full", 16)
    for start in (1, steps - 3):
        found = list(train_batches(again, start=start, stop=steps, **options))
        for one, two in zip(found, batches[start:], strict=True):
            assert_equal(one, two)


def test_in_a_bucket(small, corpus, monkeypatch, tmp_path):
    """Where the next read of each slot is begun ahead of time: the same batches."""
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path))
    for kind in ("full", "pair", "stream"):
        rows = Rows(corpus, kind, LENGTH)
        steps = 2 * len(rows) // SIZE + 3
        here = sums(rows, 0, steps)
        with monkeypatch.context() as patch:
            patch.setattr(Corpus, "remote", True)
            assert sums(Rows(open_corpus(small), kind, LENGTH), 0, steps) == here
    assert len(list(tmp_path.rglob("plan.json"))) == 3


@pytest.mark.parametrize("kind", ["full", "pair", "stream"])
def test_batches_come_from_a_bucket(kind, small, corpus, bucket, monkeypatch, tmp_path):
    """The plan is made and the text is read through it, not from the folder."""
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    shutil.copytree(small, bucket / "corpora/small")
    there = open_corpus("gs://corpora/small")
    assert there.remote
    assert sums(Rows(there, kind, LENGTH), 0, 9) == sums(
        Rows(corpus, kind, LENGTH), 0, 9
    )
    assert there.bytes_read > 0
    assert list((tmp_path / "cache").rglob("plan.json"))


# --- reads ---------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """Every stretch of rows whose text was asked for."""
    found = []
    read = Rows.read

    def counted(self, first, last):
        found.append((first, last))
        return read(self, first, last)

    monkeypatch.setattr(Rows, "read", counted)
    return found


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_twice(kind, remote, corpus, reads, monkeypatch, tmp_path):
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(Corpus, "remote", remote)
    rows = Rows(corpus, kind, LENGTH, seed=2)
    steps = 2 * len(rows) // SIZE + 1
    train(rows, 0, steps)
    order = order_of(rows, SIZE)
    needed = {order(sample)[0] for sample in range(steps * SIZE)}
    expected = sorted((read.first, read.last) for read in needed)
    if remote:  # and one for each slot that was begun ahead
        assert len(expected) < len(reads) <= len(expected) + SIZE
        needed |= {order(s)[0] for s in range(steps * SIZE, 2 * steps * SIZE)}
        expected = {(read.first, read.last) for read in needed}
        assert set(reads) <= expected
    else:
        assert sorted(reads) == expected


def test_the_next_read_is_begun_in_a_bucket(corpus, reads, monkeypatch, tmp_path):
    """While a slot goes through one, not when it is at its end."""
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(Corpus, "remote", True)
    rows = Rows(corpus, "full", LENGTH, seed=2)
    order = order_of(rows, SIZE)
    train(rows, 0, 1)
    expected = set()
    for slot in range(SIZE):
        walked = [order(slot + SIZE * step)[0] for step in range(len(rows))]
        following = next(read for read in walked if read != walked[0])
        expected |= {walked[0], following}
    assert sorted(reads) == sorted((read.first, read.last) for read in expected)


def epoch_ratio(path, kind: str, length: int, size: int, part: slice) -> float:
    """Bytes that a host reads in an epoch, over bytes of the ids that it feeds."""
    rows = Rows(open_corpus(path), kind, length)
    plan = rows.plan
    before = rows.corpus.bytes_read
    steps = -(-len(rows) // size)
    batches = train(rows, 0, steps, size=size, part=part)
    read = rows.corpus.bytes_read - before
    # The last batch has begun the second epoch: that is not counted.
    order = order_of(rows, size)
    last = range((steps - 1) * size, steps * size)[part]
    later = {order(sample)[0] for sample in last if sample >= len(rows)}
    before = rows.corpus.bytes_read
    for first in later:
        rows.read(first.first, first.last)
    read -= rows.corpus.bytes_read - before
    numbers = np.concatenate([batch["row_id"] for batch in batches])
    numbers = numbers[: len(numbers) - sum(sample >= len(rows) for sample in last)]
    pieces = np.diff(plan.a)[:, 0] + np.diff(plan.b)[:, 0]
    fed = np.add.reduceat(pieces, plan.rows[:-1])[numbers].sum()
    return read / (fed * rows.corpus.dtype.itemsize)


@pytest.mark.parametrize("length", [128, 512])
def test_a_host_reads_little_more_than_it_feeds(length, real):
    """At most 1.1 times, of all kinds, on one host and on two."""
    size = 16
    for kind in KINDS:
        hosts = (slice(0, size), slice(0, size // 2), slice(size // 2, size))
        ratios = [epoch_ratio(real, kind, length, size, host) for host in hosts]
        print(f"{kind:13} {length}: " + ", ".join(f"{r:.3f}" for r in ratios))
        # A stretch may serve as A and as B; a distant sentence serves others, too.
        assert min(ratios) >= (0.9 if kind == "distance" else 0.99)
        assert max(ratios) <= 1.1


@pytest.mark.parametrize("hosts", [1, 2])
def test_half_of_a_stream_goes_backwards(hosts, corpus):
    """Read from its end, the second half of the batch is the first half."""
    rows = Rows(corpus, "stream", LENGTH)
    slots = 4
    steps = len(rows) // slots
    assert steps > 5
    part = 2 * slots // hosts
    batches = [
        train_batches(
            rows,
            size=2 * slots,
            start=0,
            stop=steps,
            part=slice(host * part, (host + 1) * part),
            direction="both",
        )
        for host in range(hosts)
    ]
    walked = [[] for _ in range(2 * slots)]
    for found in zip(*batches, strict=True):
        ids, group = (
            np.concatenate([batch[name] for batch in found])
            for name in ("ids", "group")
        )
        for slot in range(2 * slots):
            walked[slot].append(ids[slot][group[slot] > 0].tolist())
    more = len(rows) % slots  # of the first slots, the last row comes in the next step
    for slot in range(slots):
        forward, back = walked[slot], walked[slots + slot]
        mirrored = [row[::-1] for row in back[::-1]]
        assert mirrored[:-1] == forward[1:] if slot < more else mirrored == forward


@pytest.mark.parametrize("hosts", [1, 2])
def test_rows_of_a_stream_say_whether_they_go_on(hosts, corpus):
    """Into the third epoch, forwards and backwards, and from any step on."""
    rows = Rows(corpus, "stream", LENGTH)
    slots, part = 3, 6 // hosts
    stop = 2 * len(rows) // slots + 2
    for start in (0, 5):
        for host in range(hosts):
            own = slice(host * part, (host + 1) * part)
            options = dict(size=6, stop=stop, part=own, direction="both")
            before = np.full(part, -9)
            back = np.arange(6)[own] >= slots
            breaks = 0
            for n, batch in enumerate(train_batches(rows, start=start, **options)):
                goes_on = batch["row_id"] - before == np.where(back, -1, 1)
                if n or not start:
                    np.testing.assert_array_equal(batch["continues"], goes_on)
                    breaks += (~goes_on).sum()
                before = batch["row_id"]
                sample = (start + n) * slots + np.arange(6)[own] % slots
                np.testing.assert_array_equal(batch["epoch"], sample // len(rows))
            assert breaks == part * (3 if not start else 2)


def test_a_row_does_not_go_on_across_documents_that_are_apart(corpus):
    """across=block: where a document ends with its row, forwards and backwards."""
    rows = Rows(corpus, "stream", LENGTH, across="block")
    options = dict(size=2, start=0, stop=len(rows), part=slice(2), direction="both")
    ended = {
        row
        for row in range(len(rows))
        if rows.plan.labels[rows.plan.rows[row + 1] - 1] == 1
    }
    assert ended & set(range(len(rows) - 1)), "no document ends with its row"
    before = [-9, -9]
    for batch in train_batches(rows, **options):
        forward, back = batch["row_id"].tolist()
        expected = [
            forward == before[0] + 1 and before[0] not in ended,
            back == before[1] - 1 and back not in ended,
        ]
        assert batch["continues"].tolist() == expected
        before = [forward, back]


@pytest.mark.parametrize("across", ["attend", "block"])
def test_backwards_is_a_mirror(across, tmp_path, tokenizer, corpus):
    """Of ids, groups and words; positions count up from 0 in every group."""
    rows = Rows(corpus, "stream", LENGTH, across=across)
    options = {"size": 8, "start": 0, "stop": 3, "part": slice(4, 8)}
    turned = 0
    for batch in train_batches(rows, direction="both", **options):
        for n, row in enumerate(batch["row_id"].tolist()):
            forward = rows.build([row], [rows.read(row, row + 1)], 1)
            size = (forward["group"][0] > 0).sum()
            for name in ("ids", "group", "words"):
                mirror = forward[name][0, :size][::-1]
                np.testing.assert_array_equal(batch[name][n, :size], mirror)
                turned += (mirror != mirror[::-1]).any()
            seen = {}
            for group, position in zip(
                batch["group"][n, :size], batch["positions"][n, :size], strict=True
            ):
                assert position == seen.setdefault(group, 0)
                seen[group] += 1
            assert len(seen) > 1 or across == "attend" or row_has_one(forward)
    assert turned > 12


def row_has_one(batch) -> bool:
    """Whether all of a row is one document."""
    return batch["group"].max() == 1


def test_directions_are_checked(corpus):
    options = {"start": 0, "stop": 1, "part": slice(0, 4)}
    stream, full = (Rows(corpus, kind, LENGTH) for kind in ("stream", "full"))
    with pytest.raises(InputError, match="unknown direction 'back'"):
        train_batches(stream, size=4, direction="back", **options)
    with pytest.raises(InputError, match="takes rows=stream and an even batch"):
        train_batches(full, size=4, direction="both", **options)
    with pytest.raises(InputError, match="got rows=stream and batch=5"):
        train_batches(stream, size=5, direction="both", **options)


@pytest.mark.parametrize("kind", ["full", "doc", "stream"])
def test_beginning_anywhere_costs_the_same(kind, real):
    """One read for each slot, at step 0 and at step 1,000,000."""
    for start in (0, 1, 1_000_000):
        rows = Rows(open_corpus(real), kind, 512)
        assert rows.plan is not None
        before = rows.corpus.bytes_read
        (batch,) = train(rows, start, start + 1, size=16)
        read = rows.corpus.bytes_read - before
        assert 2 * (batch["words"] > 0).sum() <= read <= 16 * READ


@pytest.mark.parametrize("kind", ["full", "doc", "pair"])
def test_resuming_reads_one_buffer_more(kind, real):
    def read(start, stop):
        rows = Rows(open_corpus(real), kind, 128)
        assert rows.plan is not None
        before = rows.corpus.bytes_read
        train(rows, start, stop, size=16)
        return rows.corpus.bytes_read - before

    straight = read(0, 120)
    resumed = read(0, 50) + read(50, 120)
    assert straight < resumed <= straight + 16 * READ


def own_threads() -> list[threading.Thread]:
    """Those that Python started; TensorFlow's, which only call it, come and go."""
    foreign = threading._DummyThread
    return [t for t in threading.enumerate() if not isinstance(t, foreign)]


def test_nothing_is_left_of_a_stream(corpus, monkeypatch):
    """Ended, stopped halfway or broken: its threads and its text are gone."""
    made = weakref.WeakSet()

    class Counted(pipeline.Stream):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.add(self)

        def batch(self, step):
            if step == 20:
                raise InputError("broken")
            return super().batch(step)

    monkeypatch.setattr(pipeline, "Stream", Counted)
    rows = Rows(corpus, "full", LENGTH)
    before = {*own_threads()}
    options = {"size": SIZE, "part": slice(0, SIZE)}
    for _ in range(3):
        train(rows, 0, 5)
        halfway = train_batches(rows, start=0, stop=15, **options)
        next(halfway)
        assert len(made) == 1
        assert {*own_threads()} - before
        halfway.close()
        with pytest.raises(InputError, match="broken"):
            train(rows, 19, 25)
        train_batches(rows, start=0, stop=5, **options)  # never begun
        gc.collect()
        assert not made
    for _ in range(50):
        if not {*own_threads()} - before:
            break
        time.sleep(0.1)
    assert not {*own_threads()} - before


# --- errors --------------------------------------------------------------------------


def test_fewer_rows_than_one_batch(corpus):
    rows = Rows(corpus, "full", LENGTH)
    count = len(rows)
    assert len(train(rows, 0, 2, size=count)) == 2
    with pytest.raises(InputError) as error:
        train_batches(rows, size=count + 1, start=0, stop=1, part=slice(0, 1))
    assert str(error.value) == (
        f"{corpus.path} makes {count} full rows of 32, fewer than one batch of "
        f"{count + 1}: use a smaller batch, shorter rows or more text"
    )


def test_a_flipped_bit(real, tmp_path):
    """Our error, not one of TensorFlow's with the text inside."""
    copy = shutil.copytree(real, tmp_path / "copy")
    corpus = open_corpus(copy)
    rows = Rows(corpus, "full", 512)
    order = order_of(rows, 16)
    read = max(
        (order(n)[0] for n in range(16)), key=lambda read: read.last - read.first
    )
    row = (read.first + read.last) // 2
    piece = int(rows.plan.a[rows.plan.rows[row]].mean())  # in the middle of it
    record = int(np.searchsorted(corpus.record_starts, piece, side="right")) - 1
    shard = copy / shard_name(corpus.index["shard"][record])
    data = bytearray(shard.read_bytes())
    at = corpus.index["ids_at"][record] + 2 * (piece - corpus.record_starts[record])
    data[at] ^= 4
    shard.write_bytes(data)
    for attempt in (rows, Rows(open_corpus(copy), "full", 512)):
        with pytest.raises(InputError) as error:
            train(attempt, 0, 40, size=16)
        assert type(error.value) is InputError
        assert error.value.__cause__ is None
        message = str(error.value)
        assert message.startswith(f"{shard} is damaged: the checksum of page ")
        assert f"of record {record} is wrong" in message
    with pytest.raises(InputError, match=f"{shard.name} is damaged"):
        list(eval_batches(Rows(open_corpus(copy), "full", 512), size=16))


def test_any_flipped_bit_is_found(real, tmp_path):
    """Before the first batch, also where a plan came with the copy."""
    assert len(Rows(open_corpus(real), "full", 128)) > 256
    copy = shutil.copytree(real, tmp_path / "copy")
    corpus = open_corpus(copy)
    shard = copy / shard_name(0)
    begin, pieces = int(corpus.index["ids_at"][0]), int(corpus.index["pieces"][0])
    clean = shard.read_bytes()
    for place in np.random.default_rng(0).integers(0, 2 * pieces, 5).tolist():
        data = bytearray(clean)
        data[begin + place] ^= 1 << place % 8
        shard.write_bytes(data)
        rows = Rows(open_corpus(copy), "full", 128)
        with pytest.raises(InputError, match="the checksum of page"):
            train(rows, 0, 1, size=256)


def test_batches_before_an_error_come(corpus, monkeypatch):
    """The error stands where its batch would."""
    batch = pipeline.Stream.batch

    def broken(self, step):
        if step == 7:
            raise InputError("broken")
        return batch(self, step)

    rows = Rows(corpus, "full", LENGTH)
    expected = sums(rows, 0, 7)
    monkeypatch.setattr(pipeline.Stream, "batch", broken)
    stream = train_batches(rows, size=SIZE, start=0, stop=20, part=slice(0, SIZE))
    found = [checksum(next(stream)) for _ in range(7)]
    with pytest.raises(InputError, match="^broken$"):
        next(stream)
    assert found == expected


def test_a_shard_that_went_away(corpus, small, tmp_path):
    """After the corpus was opened, which would have told."""
    Rows(corpus, "full", LENGTH).read(0, 1)  # there is a plan to copy
    copy = shutil.copytree(small, tmp_path / "copy")
    opened = open_corpus(copy)
    (copy / shard_name(1)).unlink()
    with pytest.raises(InputError, match="shard-00001.tfrecord cannot be read"):
        train(Rows(opened, "full", LENGTH), 0, 40)


def test_another_tokenizer(small, corpus, tmp_path):
    copy = shutil.copytree(small, tmp_path / "copy")
    shutil.rmtree(copy / "tokenizer")
    train_wordpiece(["some other text"], vocab_size=30, progress=False).save(
        copy / "tokenizer"
    )
    with pytest.raises(InputError, match="is not the tokenizer the corpus was made wi"):
        train(Rows(open_corpus(copy), "full", LENGTH), 0, 1)


# --- evaluation ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_eval_is_every_row_in_its_order(kind, corpus):
    rows = Rows(corpus, kind, LENGTH, seed=3)
    total = len(rows)
    size = next(n for n in (7, 8, 9) if total % n)
    batches = list(eval_batches(rows, size=size))
    row_ids = np.concatenate([batch["row_id"] for batch in batches])
    padding = -total % size
    assert padding > 0
    assert row_ids.tolist() == [*range(total), *[-1] * padding]
    last = batches[-1]
    assert not last["group"][-padding:].any()
    assert (last["ids"][-padding:] == corpus.tokenizer.pad_id).all()
    whole = rows.build(range(total), [rows.read(0, total)] * total, total)
    joined = {
        name: np.concatenate([batch[name] for batch in batches])[:total]
        for name in whole
    }
    assert_equal(joined, whole)


def test_eval_count(corpus):
    rows = Rows(corpus, "full", LENGTH)

    def row_ids(**options):
        return [b["row_id"].tolist() for b in eval_batches(rows, size=4, **options)]

    sixth = len(rows) / 6
    first, second = row_ids(count=6)
    assert second[2:] == [-1, -1]
    assert [*first, *second[:2]] == [int(n * sixth) for n in range(6)]  # spread
    assert row_ids(count=len(rows) + 100) == row_ids()
    assert row_ids(count=0) == []
    some, each = eval_batches(rows, size=4, count=6), eval_batches(rows, size=1)
    built = {int(batch["row_id"][0]): batch for batch in each}
    for batch in some:
        for n, row in enumerate(batch["row_id"].tolist()):
            if row >= 0:
                np.testing.assert_array_equal(batch["ids"][n], built[row]["ids"][0])


def test_eval_of_a_stream_that_ends_with_a_separator(tmp_path, tokenizer):
    texts = [["ba ke li mo nu"]] * 3
    alone = make_corpus(tmp_path / "alone", texts, tokenizer)
    length = 3 * (len(tokenizer.encode(texts[0][0])) + 1) - 1
    rows = Rows(alone, "stream", length)
    batches = list(eval_batches(rows, size=1))
    assert [batch["group"].sum() for batch in batches] == [length, 1]
    assert len(train(rows, 0, 3, size=2)) == 3


def test_checksum(corpus):
    (batch,) = train(Rows(corpus, "pair", LENGTH), 0, 1)
    same = {name: batch[name].copy() for name in reversed(list(batch))}
    assert checksum(same) == checksum(batch)
    spread = jax.jit(partial(checksum, xp=jnp))(batch)
    assert spread == checksum(batch)
    for name in batch:
        other = {name: column.copy() for name, column in batch.items()}
        other[name].flat[-1] += 1
        assert checksum(other) != checksum(batch)
    swapped = batch | {"ids": batch["ids"][::-1]}
    assert checksum(swapped) != checksum(batch)
