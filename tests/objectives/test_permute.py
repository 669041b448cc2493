"""XLNet's order: how many are predicted, in which runs, and who knows whom."""

import itertools
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats
from transformers import DataCollatorForPermutationLanguageModeling

from bert_jax.models.tokens import plain, visible
from bert_jax.objectives.permute import choose_runs, permute, ranks_of
from tests.models import definitions as defined
from tests.models.made import quick_jit

K, LONGEST = 6, 5
ROWS = 60


def made(count: int, length: int, *, seed: int = 0, short: bool = True) -> dict:
    """Words of one to four pieces, some special tokens, and padding at the end."""
    rng = np.random.default_rng(seed)
    shape = (count, length)
    special = rng.random(shape) < 0.05
    words = np.cumsum(special | (rng.random(shape) < 0.6), axis=1) + 1
    sizes = rng.integers(0, length + 1, count) if short else np.full(count, length)
    sizes[: count // 3] = length
    real = np.arange(length) < sizes[:, None]
    return {
        "candidates": real & ~special,
        "real": real,
        "words": np.where(real & ~special, words, 0).astype(np.int32),
    }


def keys_of(count: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), count)


@quick_jit
def permuted(keys, candidates, real, words):
    one = lambda *row: permute(*row, partial=K, longest=LONGEST)  # noqa: E731
    return jax.vmap(one)(keys, candidates, real, words)


@quick_jit
def runs(keys, candidates, begins, counts):
    one = lambda *row: choose_runs(*row, partial=K, longest=LONGEST)  # noqa: E731
    return jax.vmap(one)(keys, candidates, begins, counts)


@pytest.fixture(scope="module", params=[40, 31], ids=["even", "odd"])
def drawn(request):
    """Rows, what is predicted in them, and their ranks."""
    rows = made(ROWS, request.param)
    return rows, *jax.device_get(permuted(keys_of(ROWS), **rows))


# How many.


def test_the_release_has_43_and_42_of_512():
    rows = made(8, 512, short=False)
    chosen, rank = jax.device_get(permuted(keys_of(8), **rows))
    assert chosen[:, :256].sum(1).tolist() == [43] * 8
    assert chosen[:, 256:].sum(1).tolist() == [42] * 8
    assert (rank[:, :256] < 256).all()
    assert (rank[:, 256:] >= 256).all()


def test_exact_numbers(drawn):
    """One in K of the real tokens, shared out by halves, or all words there are."""
    rows, chosen, _ = drawn
    half = chosen.shape[1] // 2
    assert not (chosen & ~rows["candidates"]).any()
    for row in range(ROWS):
        early, n = int(rows["real"][row, :half].sum()), int(rows["real"][row].sum())
        wanted = -(-(n // K) * early // max(n, 1))
        for part, count in (
            (slice(half), wanted),
            (slice(half, None), n // K - wanted),
        ):
            there = int(rows["candidates"][row, part].sum())
            assert chosen[row, part].sum() == min(count, there)


def test_too_few_words():
    """Of 12 tokens in a half 2 are wanted, and one is a word."""
    words = np.zeros((1, 24), np.int32)
    words[0, [3, 12, 20, 21]] = [1, 2, 3, 3]
    chosen, _ = permuted(keys_of(1), words > 0, np.ones((1, 24), bool), words)
    assert np.flatnonzero(chosen[0, :12]).tolist() == [3]
    assert chosen[0, 12:].sum() == 2


# Runs.


def runs_by_loop(key, candidates, begins, count: int) -> np.ndarray:
    """As the release's loop has it, with the numbers that ours draws."""
    size_key, place_key = jax.random.split(key)
    S = len(candidates)
    trips = -(-S // (K + 1))
    odds = np.array([1 / n for n in range(1, LONGEST + 1)], np.float32)
    p = jnp.asarray(odds / odds.sum())
    sizes = 1 + np.asarray(jax.random.choice(size_key, LONGEST, (trips,), p=p))
    shares = np.asarray(jax.random.uniform(place_key, (trips,)))
    taken, at = [False] * S, 0
    for size, share in zip(sizes.tolist(), shares.tolist(), strict=True):
        if at >= S or sum(taken) >= count:
            break
        size = min(size, count - sum(taken))
        left = int(share * size * K)
        right = size * K - left
        begin = at + left
        while begin < S and not begins[begin]:
            begin += 1
        end = begin + size
        if end > S:
            break
        for place in range(begin, end):
            taken[place] |= bool(candidates[place])
        at = end + right
    assert at >= S or sum(taken) >= count or end > S, "more trips were needed"
    return np.array(taken)


def test_runs_equal_the_loop():
    rows = made(ROWS, 61, seed=1)
    words, candidates = rows["words"], rows["candidates"]
    begins = candidates & (words != np.pad(words, ((0, 0), (1, 0)))[:, :-1])
    counts = np.arange(ROWS, dtype=np.int32) % 14
    keys = keys_of(ROWS)
    found = np.asarray(runs(keys, candidates, begins, counts))
    for row in range(ROWS):
        expected = runs_by_loop(keys[row], candidates[row], begins[row], counts[row])
        np.testing.assert_array_equal(found[row], expected)
    assert found.sum() > 3 * ROWS
    # Each begins with a word, or goes on after a special token inside of it.
    first = found & ~np.pad(found, ((0, 0), (1, 0)))[:, :-1]
    assert begins[first].all()


def test_sizes_and_places_of_runs():
    """p(n) ~ 1/n, and the room on the left is uniform: chi-square, each
    at 1e-4. Every piece is a word, and there is more room than one run needs."""
    count = 4000
    words = np.ones((count, 70), bool)
    most = np.full(count, 99, np.int32)
    found = np.asarray(runs(keys_of(count, 2), words, words, most))
    begin = found.argmax(1)
    after = np.where(np.arange(70) >= begin[:, None], found, True)
    size = after.argmin(1) - begin
    odds = np.array([1 / n for n in range(1, 6)])
    sizes = Counter(size.tolist())
    assert set(sizes) == set(range(1, 6))  # no run touches the next
    observed = [sizes[n] for n in range(1, 6)]
    assert stats.chisquare(observed, odds * count / odds.sum()).pvalue > 1e-4
    for n in (1, 2):
        places = Counter(begin[size == n].tolist())
        assert set(places) == set(range(n * K))
        assert stats.chisquare([places[i] for i in range(n * K)]).pvalue > 1e-4


# Who knows whom.


def kinds_of(candidates, chosen) -> list[str]:
    return [
        "target" if target else "word" if word else "functional"
        for word, target in zip(candidates, chosen, strict=True)
    ]


def order_of(rank: np.ndarray, kinds: list[str]) -> list[int]:
    """Places in the order of each half; of words, which have none, 0."""
    half = len(rank) // 2
    own = rank - (np.arange(len(rank)) >= half) * (half + 1)
    return [0 if kind == "word" else int(n) for n, kind in zip(own, kinds, strict=True)]


def test_ranks_say_who_sees_whom(drawn):
    """Pair by pair against the definition, for both streams."""
    rows, chosen, rank = drawn
    S = chosen.shape[1]
    tokens = plain(np.ones(rank.shape)).replace(rank=jnp.asarray(rank))
    content = np.asarray(visible(tokens, tokens))
    query = np.asarray(visible(tokens, tokens, strict=True))
    for row in range(ROWS):
        kinds = kinds_of(rows["candidates"][row], chosen[row])
        order = order_of(rank[row], kinds)
        for part in (slice(S // 2), slice(S // 2, S)):
            ordered = [
                n
                for n, kind in zip(order[part], kinds[part], strict=True)
                if kind != "word"
            ]
            assert len(set(ordered)) == len(ordered)
            assert all(0 <= n < len(order[part]) for n in ordered)
        for stream, seen in (("content", content), ("query", query)):
            sees = defined.permutation(kinds, order, S // 2, stream=stream)
            asks = [stream == "content" or kind == "target" for kind in kinds]
            np.testing.assert_array_equal(seen[row][asks], defined.table(sees, S)[asks])


def test_targets_are_in_a_strict_order(drawn):
    """No two have the same rank: of two exactly one knows the other."""
    _, chosen, rank = drawn
    for row in range(ROWS):
        ranks = rank[row][chosen[row]]
        assert len(set(ranks.tolist())) == len(ranks)


def test_orders_are_uniform():
    """Of two tokens that are never words either comes first in half of the rows."""
    count = 2000
    real, none = np.ones((count, 8), bool), np.zeros((count, 8), np.int32)
    _, rank = permuted(keys_of(count, 3), none > 0, real, none)
    rank = np.asarray(rank)
    np.testing.assert_array_equal(np.sort(rank[:, :4]), [[0, 1, 2, 3]] * count)
    np.testing.assert_array_equal(np.sort(rank[:, 4:]), [[5, 6, 7, 8]] * count)
    orders = Counter(map(tuple, rank[:, :4].tolist()))
    assert stats.chisquare([*orders.values()]).pvalue > 1e-4
    assert len(orders) == 24
    alike = (rank[:, :4] == rank[:, 4:] - 5).all(1).mean()
    assert alike < 0.1  # each half has an order of its own


def test_collator_of_transformers(monkeypatch):
    """All orders of four, T=8. Theirs has one order for both halves, in which we must
    agree: on who sees whom within a half, and on what a target of the second half sees
    of the first. (Theirs shows the first half words of the second, and hides targets of
    the first from words of the second.)"""
    tokenizer = SimpleNamespace(
        mask_token="<mask>", mask_token_id=1, pad_token="<pad>", pad_token_id=0
    )
    tokenizer.get_special_tokens_mask = lambda ids, **_: [0] * len(ids)
    collator = DataCollatorForPermutationLanguageModeling(
        tokenizer, plm_probability=1 / 2, max_span_length=2
    )
    torch.manual_seed(0)
    half = np.arange(8) >= 4
    seen_targets = set()
    for order in itertools.permutations(range(4)):
        monkeypatch.setattr(torch, "randperm", lambda n, o=order: torch.tensor(o))
        _, hides, _, labels = collator.torch_mask_tokens(torch.full((24, 8), 7))
        targets = (labels != -100).numpy()
        places = np.broadcast_to(np.tile(order, 2), (24, 8))
        rank = jax.vmap(ranks_of)(np.ones((24, 8), bool), targets, places)
        tokens = plain(np.ones((24, 8))).replace(rank=rank)
        content = np.asarray(visible(tokens, tokens))
        query = np.asarray(visible(tokens, tokens, strict=True))
        ours = np.where(targets[:, :, None], query, content)
        agreed = half[:, None] == half[None, :]
        agreed = agreed | (targets[:, :, None] & half[:, None] & ~half[None, :])
        theirs = hides.numpy() == 0
        np.testing.assert_array_equal(ours[agreed], theirs[agreed])
        seen_targets |= set(map(tuple, targets.tolist()))
    assert len(seen_targets) > 50


def test_the_same_key_draws_the_same():
    rows = made(ROWS, 40)
    first = permuted(keys_of(ROWS), **rows)
    for a, b in zip(first, permuted(keys_of(ROWS), **rows), strict=True):
        np.testing.assert_array_equal(a, b)
    # A row's draw is its own: in another company it is the same.
    turned = {name: column[::-1] for name, column in rows.items()}
    for a, b in zip(first, permuted(keys_of(ROWS)[::-1], **turned), strict=True):
        np.testing.assert_array_equal(a, b[::-1])
    other = permuted(keys_of(ROWS, 9), **rows)
    assert (np.asarray(first[1]) != np.asarray(other[1])).any(1).mean() > 0.9
