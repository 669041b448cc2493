"""The order of rows: every row once an epoch, from all over, any sample by itself."""

import itertools

import numpy as np
import pytest

from bert_jax.data.order import Order, Read
from bert_jax.data.plan_files import open_plan


def random_blocks(rows: int, seed: int = 0) -> np.ndarray:
    """Blocks of 1 to 13 rows, as uneven as packing makes them."""
    rng = np.random.default_rng(seed)
    edges = np.cumsum(rng.integers(1, 14, rows))
    return np.concatenate([[0], edges[edges < rows], [rows]])


def even_blocks(rows: int, each: int) -> np.ndarray:
    return np.append(np.arange(0, rows, each), rows)


def row_of(order: Order, sample: int) -> int:
    read, place = order(sample)
    return int(order.rows_of(read)[place])


CASES = [(64, 8), (61, 8), (100, 7), (9, 8), (8, 8), (500, 1), (331, 128), (30, 30)]


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize(("rows", "batch"), CASES)
def test_an_epoch_is_every_row_once(rows, batch, shuffled):
    order = Order(random_blocks(rows), batch, 3, shuffled=shuffled)
    assert order.rows == rows
    for epoch in range(3):
        samples = range(epoch * rows, (epoch + 1) * rows)
        assert sorted(row_of(order, n) for n in samples) == list(range(rows))


@pytest.mark.parametrize(("rows", "batch"), [(200, 8), (203, 8), (500, 1), (331, 128)])
def test_orders_differ_by_epoch_and_seed(rows, batch):
    blocks = random_blocks(rows)
    orders = [
        [row_of(Order(blocks, batch, seed), epoch * rows + n) for n in range(rows)]
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    ]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    for one in orders:
        moved = np.mean([row != n for n, row in enumerate(one)])
        assert moved > 0.9


def test_a_slot_goes_elsewhere_in_every_epoch():
    """Blocks are shuffled anew, and not only the rows in them."""
    order = Order(random_blocks(800), 8, 0)
    stretches = [
        {row_of(order, epoch * 800 + n) for n in range(0, 800, 8)} for epoch in range(4)
    ]
    for one, two in itertools.combinations(stretches, 2):
        assert len(one) == len(two) == 100
        assert len(one & two) < 60  # 12.5 by chance


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize(("rows", "batch"), CASES)
def test_reads(rows, batch, shuffled):
    """Parts of blocks; a slot goes through each of them without leaving it."""
    blocks = random_blocks(rows)
    order = Order(blocks, batch, 5, shuffled=shuffled)
    for epoch in range(2):
        seen: dict[Read, list[tuple[int, int]]] = {}
        for sample in range(epoch * rows, (epoch + 1) * rows):
            read, place = order(sample)
            assert read.epoch == epoch
            seen.setdefault(read, []).append((sample, place))
        for read, found in seen.items():
            samples, places = zip(*found, strict=True)
            assert places == tuple(range(read.last - read.first))
            assert set(np.diff(samples)) <= {batch}  # one slot, step after step
            block = np.searchsorted(blocks, read.first, side="right")
            assert read.last <= blocks[block]
            again = order.rows_of(read)
            assert sorted(again) == list(range(read.first, read.last))
            assert again.tolist() == order.rows_of(Read(*read)).tolist()
        rows_read = sorted(n for r in seen for n in range(r.first, r.last))
        assert rows_read == list(range(rows))
        most = order.together if shuffled else rows
        parts = sum(-(-size // most) for size in np.diff(blocks).tolist())
        assert len(seen) <= parts + batch - 1


def test_slots_of_a_small_corpus_see_several_places():
    """One block, one slot: not the same rows in every epoch."""
    order = Order(np.array([0, 100]), 10, 0)
    first = [
        {row_of(order, epoch * 100 + sample) for sample in range(0, 100, 10)}
        for epoch in range(3)
    ]
    for one, two in itertools.combinations(first, 2):
        assert len(one | two) > 12


def test_backwards_is_the_same_stretch_from_its_end():
    order = Order(even_blocks(120, 7), 6, 0, shuffled=False)

    def rows(slot: int, back: bool) -> list[int]:
        found = [order(sample, back=back) for sample in range(slot, 120, 6)]
        assert all(read.back == back for read, _ in found)
        return [int(order.rows_of(read)[place]) for read, place in found]

    for slot in range(6):
        assert rows(slot, True) == rows(slot, False)[::-1]


def test_rows_of_a_read_are_shuffled():
    order = Order(even_blocks(1000, 50), 4, 0)
    found = [order.rows_of(Read(epoch, 100, 150)).tolist() for epoch in range(3)]
    assert all(a != b for a, b in itertools.combinations(found, 2))
    assert all(one != sorted(one) for one in found)


def test_any_sample_by_itself():
    """Far ahead and in any sequence, from new objects, as in sequence."""
    blocks = random_blocks(203)
    whole = Order(blocks, 8, 7)
    expected = [row_of(whole, sample) for sample in range(203 * 12)]
    samples = np.random.default_rng(0).permutation(203 * 12)[:400]
    one = Order(blocks, 8, 7)
    for sample in samples.tolist():
        assert row_of(one, sample) == expected[sample]
    assert row_of(Order(blocks, 8, 7), 2000) == expected[2000]
    far = 10**9 + 7
    read, _ = one(far)
    assert read.epoch == far // 203
    assert row_of(one, far) == row_of(Order(blocks, 8, 7), far)


@pytest.mark.parametrize("rows", [256, 3000, 100_000])
@pytest.mark.parametrize("each", [1, 64, 256])
def test_a_batch_draws_on_the_whole_corpus(rows, each):
    """Of 128 equal parts of the corpus, a batch of 256 has rows of at least 64.

    In every batch of the first epochs that is looked at, whether there are more blocks
    than slots or fewer. 256 rows drawn at random would be of 111 parts.
    """
    order = Order(even_blocks(rows, each), 256, 1)
    steps = np.random.default_rng(0).integers(0, 3 * rows // 256, 8)
    for step in [0, 1, *steps.tolist()]:
        found = [row_of(order, n) for n in range(step * 256, (step + 1) * 256)]
        parts = {row * 128 // rows for row in found}
        assert len(parts) >= 64
        assert {part // 8 for part in parts} == set(range(16))


def test_a_batch_draws_on_all_of_the_books(books):
    plan = open_plan(books, "full", 512, 0)
    order = Order(plan.blocks, 256, 0)
    for step in range(2):
        found = [row_of(order, n) for n in range(step * 256, (step + 1) * 256)]
        begins = plan.a[plan.rows[found], 0]
        assert len(set(begins * 128 // books.about["pieces"])) >= 64


@pytest.mark.parametrize(("rows", "batch"), CASES)
def test_stream_order_keeps_slots_contiguous(rows, batch):
    """In its place of the batch, each row goes on where the last one ended."""
    order = Order(random_blocks(rows), batch, 3, shuffled=False)
    for sample in range(2 * rows):
        here, later = row_of(order, sample), row_of(order, sample + batch)
        if sample // rows == (sample + batch) // rows:
            assert later == here + 1
    # The slots share the corpus evenly, one after the other.
    begins = [row_of(order, slot) for slot in range(batch)]
    sizes = np.diff([*begins, rows])
    assert begins[0] == 0
    assert sizes.max() - sizes.min() <= 1


# --- several inputs ------------------------------------------------------------------


def of_inputs(*sizes: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of inputs with so many rows, one after the other; the input of each."""
    parts = [random_blocks(size, seed=size) for size in sizes]
    before = np.cumsum([0, *sizes])
    edges = [part[1:] + start for part, start in zip(parts, before, strict=False)]
    inputs = np.repeat(np.arange(len(sizes)), [len(part) - 1 for part in parts])
    return np.concatenate([[0], *edges]), inputs


def test_all_of_every_input():
    blocks, inputs = of_inputs(30, 500, 3)
    order = Order(blocks, 8, 3, inputs=inputs)
    for epoch in range(3):
        samples = range(epoch * 533, (epoch + 1) * 533)
        assert sorted(row_of(order, n) for n in samples) == list(range(533))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7])
def test_shares_of_inputs(alpha):
    """p ** alpha of each epoch; each input gone through again and again, evenly."""
    sizes = np.asarray([30, 500, 3, 120])
    blocks, inputs = of_inputs(*sizes.tolist())
    total, ends = sizes.sum(), np.cumsum(sizes)
    order = Order(blocks, 8, 3, inputs=inputs, alpha=alpha)
    wanted = (sizes / total) ** alpha
    wanted = wanted / wanted.sum() * total
    times = np.zeros(total, int)
    for epoch in range(5):
        found = [row_of(order, epoch * total + n) for n in range(total)]
        of_input = np.searchsorted(ends, found, side="right")
        assert (np.abs(np.bincount(of_input, minlength=4) - wanted) < 1).all()
        np.add.at(times, found, 1)
        for end, size in zip(ends, sizes, strict=True):
            assert np.ptp(times[end - size : end]) <= 1


def test_reads_of_an_input_that_comes_twice_are_told_apart():
    """The same rows in two slots at a time are two reads, each in its own order."""
    blocks, inputs = of_inputs(30, 500)
    order = Order(blocks, 8, 3, inputs=inputs, alpha=0.0)
    seen: dict[Read, list[int]] = {}
    for sample in range(530):
        read, place = order(sample)
        assert place == len(seen.setdefault(read, []))
        seen[read].append(sample % 8)
    again = [read for read in seen if read.last <= 30]
    assert len(again) > len({(read.first, read.last) for read in again})
    for read, slots in seen.items():
        assert len(slots) == read.last - read.first
        assert len(set(slots)) == 1
