"""Packing against brute force, first fit and best fit by search."""

import itertools
import random

import numpy as np
import pytest

from bert_jax.data.pack import pack
from tests.data.made import joined


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


def first_fit(sizes: list[int], room: int, most: int) -> int:
    rows: list[tuple[int, int]] = []
    for size in sizes:
        for n, (used, held) in enumerate(rows):
            if used + size <= room and held < most:
                rows[n] = used + size, held + 1
                break
        else:
            rows.append((size, 1))
    return len(rows)


def check_packed(sizes, room: int, most: int) -> list[list[int]]:
    """Every example once, no row too long, rows in the order of their first."""
    sizes = np.asarray(sizes)
    rows = pack(sizes, room, most=most)
    assert sorted(joined(rows)) == list(range(len(sizes)))
    for row in rows:
        assert 1 <= len(row) <= most
        assert sizes[row].sum() <= room
        assert row == sorted(row)
    assert all(a[0] < b[0] for a, b in itertools.pairwise(rows))
    return rows


@pytest.mark.parametrize("most", [2, 3, 8])
def test_near_the_optimum(most):
    exact = 0
    for seed in range(60):
        rng = random.Random(seed)
        sizes = [rng.randint(1, rng.choice((5, 12))) for _ in range(rng.randint(1, 7))]
        found = len(check_packed(sizes, 12, most))
        best = fewest_rows(sizes, 12, most)
        assert best <= found <= best + 1
        exact += found == best
    assert exact > 50


@pytest.mark.parametrize("largest", [12, 20, 30, 60, 100])
@pytest.mark.parametrize("most", [3, 8, 16, 1000])
def test_not_worse_than_first_fit(most, largest):
    """In all; a single case may take one row more."""
    rows = simple_rows = 0
    for seed in range(20):
        sizes = np.random.default_rng(seed).integers(1, largest + 1, 10 * (seed + 1))
        found = len(check_packed(sizes, 100, most))
        simple = first_fit(sizes.tolist(), 100, most)
        assert found <= simple + 1
        rows, simple_rows = rows + found, simple_rows + simple
    assert rows <= simple_rows
    if largest == 100:
        assert rows < 0.98 * simple_rows


def test_best_fit_decreasing():
    """Against a search through all rows; which of two equal ones does not matter."""
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
        used = [sizes[row].sum() for row in check_packed(sizes, 100, 1000)]
        assert sorted(100 - np.asarray(used)) == sorted(left)


@pytest.mark.parametrize("room", [128, 512])
def test_realistic_lengths(room):
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(np.log(room / 3), 0.7, 5000), 5, room).astype(int)
    assert len(check_packed(sizes, room, 8)) <= 1.05 * sizes.sum() / room


def test_many_tiny_examples():
    """The number of examples is what fills a row."""
    assert len(check_packed(np.full(801, 3), 128, 8)) == 101
    assert len(check_packed(np.full(7, 128), 128, 8)) == 7
    assert check_packed([5], 8, 8) == [[0]]
