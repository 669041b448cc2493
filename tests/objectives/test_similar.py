"""Similar words in the place of [MASK]: a slow oracle, invariants, rates, errors."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.data.similar import make_similar
from bert_jax.errors import InputError
from bert_jax.objectives import corrupt
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.step import row_keys
from tests.reference import QUICK, assert_devices_do_not_talk

V, S, MASK = 97, 48, 4
SPECIAL = (0, 1, 2, 3, 4)
CONFIDENCE = 1e-4  # as in test_corrupt.py


def make_table():
    """40 words of one to three pieces; the last one has a size of its own."""
    rng = np.random.default_rng(0)
    words = [rng.integers(5, V, size) for size in [*[1] * 7, *[2, 3] * 16, 5]]
    return make_similar(
        [word.astype(np.int32) for word in words],
        rng.normal(size=(40, 6)),
        names=[str(n) for n in range(40)],
        tokenizer="0",
        found_by="spaces",
        neighbours=9,  # of one piece there are less: 6 others
    )


TABLE = make_table()


def objective(**changes) -> MaskedLM:
    told = dict(choose="macbert", replace="similar", next_sentence=0.0, table=TABLE)
    return MaskedLM(V, MASK, SPECIAL, **told | changes)


def row(rng) -> dict[str, np.ndarray]:
    """[CLS] words [SEP] words [SEP] padding. Two words in three are the table's; the
    last one is cut, as where a row ends."""
    ids, words, word_id = [2], [0], [0]
    length, number = int(rng.integers(12, S)), 0
    while len(ids) < length - 1:
        number += 1
        known = int(rng.integers(1, 41)) if rng.random() < 2 / 3 else 0
        size = int(TABLE.sizes[known]) if known else int(rng.integers(1, 5))
        pieces = TABLE.pieces[known, :size] if known else rng.integers(5, V, size)
        ids, words = [*ids, *pieces], [*words, *[number] * size]
        word_id = [*word_id, *[known] * size]
        if number == 4:
            ids, words, word_id = [*ids, 3], [*words, 0], [*word_id, 0]
    columns = {"ids": ids, "words": words, "word_id": word_id}
    found = {name: np.zeros(S, np.int32) for name in columns}
    for name, column in columns.items():
        found[name][: length - 1] = column[: length - 1]
    found["ids"][length - 1] = 3
    return found


def batch_of(count: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = [row(rng) for _ in range(count)]
    batch = {name: np.stack([one[name] for one in rows]) for name in rows[0]}
    batch["group"] = (batch["ids"] > 0).astype(np.int32)
    # Every other row runs backwards, as Rows.turn has it.
    for n in range(0, count, 2):
        size = batch["group"][n].sum()
        for name in ("ids", "words", "word_id"):
            batch[name][n, :size] = batch[name][n, :size][::-1]
        batch["word_id"][n] *= -1
    return batch


@cache
def compiled(of: MaskedLM):
    return jax.jit(of.corrupt, compiler_options=QUICK)


def drawn(of: MaskedLM, batch: dict, seed: int = 0) -> dict[str, np.ndarray]:
    keys = row_keys(jax.random.key(seed), jnp.arange(len(batch["ids"])))
    return jax.device_get(compiled(of)(keys, batch))


def chosen_in(out: dict) -> np.ndarray:
    chosen = np.zeros((len(out["ids"]), S + 1), bool)
    places = np.where(out["weights"] > 0, out["where"], S)
    np.put_along_axis(chosen, places, True, axis=1)
    return chosen[:, :S]


def by_hand(key, one: dict, chosen: np.ndarray, hide: float, randomise: float):
    """The rule, word by word, with its own draws."""
    draw_key, which_key, piece_key = jax.random.split(key, 3)
    draw, which = (
        np.asarray(jax.random.uniform(k, (S,))) for k in (draw_key, which_key)
    )
    random = np.asarray(jax.random.randint(piece_key, (S,), 0, V - 1, jnp.int32))
    ids, shown = one["ids"], one["ids"].copy()
    start = 0
    while start < S:
        stop = start
        while stop < S and one["words"][stop] == one["words"][start]:
            stop += 1
        word = one["word_id"][start]
        choices = [n for n in TABLE.near[abs(word)] if n]
        size = stop - start
        alike = [n for n in range(1, 41) if TABLE.sizes[n] == size]
        back = one["word_id"].min() < 0
        whole = TABLE.sizes[abs(word)] == size
        for place in range(start, stop):
            if not chosen[place] or draw[start] >= hide + randomise:
                continue
            among = choices if draw[start] < hide and choices and whole else alike
            shown[place] = random[place] + (random[place] >= MASK)
            if among:
                new = among[int(which[start] * len(among))]
                pieces = TABLE.pieces[new, :size]
                shown[place] = (pieces[::-1] if back else pieces)[place - start]
        start = stop
    assert shown.shape == ids.shape
    return shown


def test_against_a_slow_oracle():
    rates = dict(mask_id=MASK, vocab_size=V, hide=0.6, randomise=0.2)
    replace = jax.jit(
        lambda key, ids, chosen, words, word_id: corrupt.replace_by_similar(
            key, ids, chosen, words, word_id, table=TABLE, **rates
        )
    )
    batch, rng = batch_of(60, seed=3), np.random.default_rng(0)
    changed = 0
    for n in range(60):
        one = {name: column[n] for name, column in batch.items()}
        chosen = (rng.random(S) < 0.9) & (one["ids"] >= 5)
        key = jax.random.key(n)
        expected = by_hand(key, one, chosen, rates["hide"], rates["randomise"])
        found = replace(key, one["ids"], chosen, one["words"], one["word_id"])
        np.testing.assert_array_equal(found, expected)
        changed += (expected != one["ids"]).sum()
    assert changed > 500


def test_invariants():
    """The length is kept, targets are what was there, [MASK] is not in the input, what
    was not chosen is as it was, words are whole, and the budget is not passed."""
    batch = batch_of(1600)
    of = objective()
    out = drawn(of, batch)
    chosen = chosen_in(out)
    assert out["ids"].shape == batch["ids"].shape
    assert not (out["ids"] == MASK).any()
    np.testing.assert_array_equal(out["ids"][~chosen], batch["ids"][~chosen])
    assert not np.isin(batch["ids"][chosen], SPECIAL).any()
    at = np.take_along_axis(batch["ids"], out["where"], axis=1)
    np.testing.assert_array_equal(out["targets"], at)
    budget = corrupt.budget(S, 0.15)[batch["group"].sum(1)]
    assert (chosen.sum(1) <= budget).all()
    assert chosen.sum() > 0.9 * budget.sum()
    for n in range(1600):
        for word in set(batch["words"][n][chosen[n]]):
            assert chosen[n][batch["words"][n] == word].all()
    same = drawn(of, batch)
    np.testing.assert_array_equal(out["ids"], same["ids"])
    assert (drawn(of, batch, 1)["ids"] != out["ids"]).any()


def chosen_words(batch: dict, out: dict):
    """Each as (its number, its pieces, what is shown), as they are read."""
    chosen = chosen_in(out)
    for n in range(len(chosen)):
        words, numbers = batch["words"][n], batch["word_id"][n]
        step = -1 if (numbers < 0).any() else 1
        for word in set(words[chosen[n]]):
            at = words == word
            pair = (ids[n][at][::step].tolist() for ids in (batch["ids"], out["ids"]))
            yield abs(numbers[at][0]), *pair


def words_of_size(size: int) -> list[list[int]]:
    return [row[:size].tolist() for row in TABLE.pieces[TABLE.sizes == size]]


def test_a_random_word_is_any_of_as_many_pieces():
    """Each as probable, of words that the table has and of those that it has not; and
    of four pieces it has none: then any piece but [MASK]."""
    batch = batch_of(600)
    out = drawn(objective(hide=0.0, randomise=1.0, rate=0.9), batch)
    assert not (out["ids"] == MASK).any()
    counts = {size: np.zeros(len(words_of_size(size))) for size in (1, 2, 3, 5)}
    pieces = []
    for _, was, new in chosen_words(batch, out):
        size = len(was)
        if size == 4:
            pieces += new
        else:
            counts[size][words_of_size(size).index(new)] += 1
    for size in (1, 2, 3):
        assert counts[size].sum() > 1000
        assert stats.chisquare(counts[size]).pvalue > CONFIDENCE
    assert counts[5].sum() > 50
    assert len(pieces) > 1000
    counts = np.delete(np.bincount(pieces, minlength=V), MASK)
    assert stats.chisquare(counts).pvalue > CONFIDENCE


def test_rates_by_word():
    """80 % similar, 10 % random, 10 % kept, of words that have similar ones; each of
    these is as probable; the others become random words. Of 16 words a random one is
    one of the 9 that are similar, or the same, by chance."""
    batch = batch_of(1600)
    out = drawn(objective(), batch)
    kept = similar = other = 0
    place_among, without = np.zeros(9), np.zeros(2)
    for number, was, new in chosen_words(batch, out):
        size = TABLE.sizes[number]
        if not number or size != len(was):
            without += [was == new, 1]
        elif size == 5:  # a random word can only be itself
            assert was == new
        elif size > 1:  # of one piece there are only similar ones
            near = TABLE.near[number]
            assert near.all()
            pieces = [TABLE.pieces[m, :size].tolist() for m in near]
            kept += was == new
            if new in pieces:
                similar += 1
                place_among[pieces.index(new)] += 1
            elif was != new:
                assert new in words_of_size(size)
                other += 1
    total = kept + similar + other
    assert total > 1000
    expected = np.array([0.8 + 0.1 * 9 / 16, 0.1 * 6 / 16, 0.1 + 0.1 / 16]) * total
    assert stats.chisquare([similar, other, kept], expected).pvalue > CONFIDENCE
    assert stats.chisquare(place_among).pvalue > CONFIDENCE
    same, all_of_them = without
    assert all_of_them > 500
    # Kept, or a word by chance the same: of one piece.
    low = stats.binom.interval(1 - CONFIDENCE, int(all_of_them), 0.1)[0]
    high = stats.binom.interval(1 - CONFIDENCE, int(all_of_them), 0.1 + 0.9 / V)[1]
    assert low <= same <= high


def test_words_of_an_ngram_are_drawn_one_by_one():
    """Within a run of chosen words some are kept and some are not."""
    batch = batch_of(400)
    out = drawn(objective(hide=0.5, randomise=0.0), batch)
    chosen, mixed = chosen_in(out), 0
    for n in range(len(chosen)):
        changed = out["ids"][n] != batch["ids"][n]
        pair = chosen[n][1:] & chosen[n][:-1]
        pair &= batch["words"][n][1:] != batch["words"][n][:-1]
        mixed += (changed[1:] != changed[:-1])[pair].any()
    assert mixed > 50


def test_eight_devices_do_not_talk():
    batch, seed = batch_of(16), jax.random.key(0)
    of = objective()

    def from_step(batch):
        return of.corrupt(row_keys(seed, jnp.arange(16)), batch)

    assert_devices_do_not_talk(from_step, batch)


def test_it_is_a_value():
    """Two objectives with equal tables are equal; so their step may be kept."""
    assert objective() == objective(table=make_table())
    assert hash(objective()) == hash(objective(table=make_table()))
    other = dataclasses.replace(TABLE, near=TABLE.near[:, :3].copy())
    assert objective() != objective(table=other)
    assert objective().columns == ("words", "word_id")
    assert objective(unit="phrases").columns == ("phrases", "word_id")


def test_what_does_not_fit():
    with pytest.raises(InputError, match="choose=token does not choose any"):
        objective(choose="token")
    with pytest.raises(InputError, match="needs a table of similar words"):
        objective(table=None)
