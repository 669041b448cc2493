"""Corruptions: invariants, rates with a stated confidence, and a slow oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.objectives import corrupt
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.step import row_keys
from tests.reference import QUICK, assert_devices_do_not_talk

V, S = 997, 40
PAD, CLS, SEP, MASK = 0, 2, 3, 4
OBJECTIVE = MaskedLM(V, mask_id=MASK, special_ids=(PAD, 1, CLS, SEP, MASK))
# A right program fails a test of rates once in 10,000 runs; keys are fixed, so that
# in fact it fails never or always.
CONFIDENCE = 1e-4


def row(rng, length: int) -> np.ndarray:
    """[CLS] words [SEP] words [SEP] padding."""
    ids = np.zeros(S, np.int32)
    ids[:length] = rng.integers(5, V, length)
    ids[0], ids[length // 2], ids[length - 1] = CLS, SEP, SEP
    return ids


def rows_of(lengths, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = np.stack([row(rng, length) for length in lengths])
    return {"ids": ids, "group": (ids != PAD).astype(np.int32)}


def keys_of(seed: int, count: int, first: int = 0) -> jax.Array:
    return row_keys(jax.random.key(seed), jnp.arange(first, first + count))


run = jax.jit(OBJECTIVE.corrupt, compiler_options=QUICK)


def quick(objective: MaskedLM, keys, batch) -> dict[str, np.ndarray]:
    corrupted = jax.jit(objective.corrupt, compiler_options=QUICK)(keys, batch)
    return jax.device_get(corrupted)


def drawn(batch, keys) -> dict[str, np.ndarray]:
    return jax.device_get(run(keys, batch))


@pytest.mark.parametrize("rate", [0.15, 0.3, 1.0])
def test_budget_is_pythons(rate: float):
    table = corrupt.budget(600, rate)
    assert table.shape == (601,)
    assert table[0] == 0
    for n in range(1, 601):
        assert table[n] == max(1, round(rate * n))


def test_budget_at_known_lengths():
    # 0.15 * 10 and 0.15 * 30 are 1.5 and 4.5 exactly: half goes to even.
    table = corrupt.budget(512, 0.15)
    assert table[[1, 3, 10, 30, 128, 512]].tolist() == [1, 1, 2, 4, 19, 77]


def test_invariants():
    lengths = [40, 39, 33, 20, 12, 7, 5, 4] * 8
    batch = rows_of(lengths)
    out = drawn(batch, keys_of(0, len(lengths)))
    slots = round(0.15 * S)
    assert out["where"].shape == out["targets"].shape == (64, slots)
    assert out["group"] is not None
    for number, length in enumerate(lengths):
        before, after = batch["ids"][number], out["ids"][number]
        where, weights = out["where"][number], out["weights"][number]
        candidates = np.flatnonzero(before >= 5)
        count = min(max(1, round(0.15 * length)), len(candidates))
        assert weights.tolist() == [1.0] * count + [0.0] * (slots - count)
        chosen = where[:count]
        assert (np.diff(chosen) > 0).all()  # in order, none twice
        assert set(chosen) <= set(candidates)  # neither specials nor padding
        assert (where[count:] == 0).all()
        np.testing.assert_array_equal(out["targets"][number, :count], before[chosen])
        others = np.setdiff1d(np.arange(S), chosen)
        np.testing.assert_array_equal(after[others], before[others])
        assert ((after >= 0) & (after < V)).all()


def test_fewer_candidates_than_the_budget():
    objective = MaskedLM(V, MASK, OBJECTIVE.special_ids, rate=0.5)
    ids = np.zeros((4, S), np.int32)
    ids[0, :20] = CLS  # no candidate, budget 10
    ids[1, :20] = [CLS, 9, 8, *[SEP] * 17]  # two
    ids[2, :20] = 7  # enough
    batch = {"ids": ids, "group": (ids != PAD).astype(np.int32)}  # 3: only padding
    out = quick(objective, keys_of(0, 4), batch)
    assert out["weights"].sum(1).tolist() == [0, 2, 10, 0]
    assert out["where"][1, :3].tolist() == [1, 2, 0]
    assert out["targets"][1, :2].tolist() == [9, 8]
    np.testing.assert_array_equal(out["ids"][[0, 3]], ids[[0, 3]])


def many(seed: int, count: int = 6000) -> tuple[dict, dict]:
    batch = rows_of([S] * 100)
    batch = {name: np.tile(value, (count // 100, 1)) for name, value in batch.items()}
    return batch, drawn(batch, keys_of(seed, count))


@pytest.fixture(scope="module")
def sample() -> tuple[dict, dict]:
    return many(1)


def shown_and_original(sample) -> tuple[np.ndarray, np.ndarray]:
    _, out = sample
    filled = out["weights"] > 0
    shown = np.take_along_axis(out["ids"], out["where"], 1)[filled]
    return shown, out["targets"][filled]


def test_hidden_random_and_kept(sample):
    """80 / 10 / 10; a random piece is the original, or [MASK], once in V each."""
    shown, original = shown_and_original(sample)
    assert len(shown) == 36000
    counts = np.array(
        [
            (shown == MASK).sum(),
            (shown == original).sum(),
            ((shown != MASK) & (shown != original)).sum(),
        ]
    )
    rates = np.array([0.8 + 0.1 / V, 0.1 + 0.1 / V, 0.1 - 0.2 / V])
    assert stats.chisquare(counts, rates * len(shown)).pvalue > CONFIDENCE


def test_positions_are_uniform(sample):
    batch, out = sample
    counts = np.bincount(out["where"][out["weights"] > 0], minlength=S)
    candidates = np.flatnonzero((batch["ids"][:100] >= 5).all(0))
    assert len(candidates) == S - 3
    assert counts.sum() == counts[candidates].sum()
    # Six of 37 without replacement: the counts vary less than if drawn singly.
    n, k, K = len(out["ids"]), 6, len(candidates)
    share = k / K
    statistic = ((counts[candidates] - n * share) ** 2).sum() / (n * share)
    statistic *= (K - 1) / (K - k)
    assert stats.chi2.sf(statistic, K - 1) > CONFIDENCE
    assert stats.chi2.cdf(statistic, K - 1) > CONFIDENCE  # nor too even


def test_pairs_of_positions_are_uniform(sample):
    """Neighbours are chosen together as often as any two."""
    batch, out = sample
    chosen = np.zeros((len(out["ids"]), S), bool)
    np.put_along_axis(chosen, out["where"], True, axis=1)
    chosen = chosen[:, (batch["ids"][:100] >= 5).all(0)].astype(int)
    together = (chosen[:, 1:] * chosen[:, :-1]).sum()
    K, n = chosen.shape[1], len(chosen)
    expected = n * (K - 1) * 6 * 5 / (K * (K - 1))
    assert abs(together - expected) < 4 * expected**0.5


def test_random_pieces_are_uniform_over_the_vocabulary(sample):
    shown, original = shown_and_original(sample)
    random = shown[(shown != MASK) & (shown != original)]
    bins = np.bincount(random * 20 // V, minlength=20)
    edges = np.bincount(np.arange(V) * 20 // V, minlength=20)
    assert stats.chisquare(bins, edges / V * len(random)).pvalue > CONFIDENCE
    assert random.min() < 5  # specials too, as in the release
    assert random.max() > V - 10


def test_what_is_shown_does_not_depend_on_the_place(sample):
    _, out = sample
    shown = np.take_along_axis(out["ids"], out["where"], 1)
    table = [[(column == MASK).sum(), (column != MASK).sum()] for column in shown.T]
    assert stats.chi2_contingency(table).pvalue > CONFIDENCE


def test_same_key_same_draw_and_other_key_another():
    batch = rows_of([40] * 16)
    first, again, other = (drawn(batch, keys_of(seed, 16)) for seed in (5, 5, 6))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    differ = (first["where"] != other["where"]).any(1)
    assert differ.all()  # by chance a row is drawn again once in 2,324,784


def test_a_row_depends_on_its_own_key_alone():
    batch = rows_of([40, 39, 33, 20, 12, 7, 5, 4])
    keys = keys_of(0, 8)
    order = np.array([3, 0, 7, 5, 1, 2, 6, 4])
    straight = drawn(batch, keys)
    mixed = drawn({name: value[order] for name, value in batch.items()}, keys[order])
    alone = drawn({name: value[2:3] for name, value in batch.items()}, keys[2:3])
    for name in straight:
        np.testing.assert_array_equal(straight[name][order], mixed[name])
        np.testing.assert_array_equal(straight[name][2:3], alone[name])


def test_rows_of_a_batch_draw_differently():
    batch = rows_of([40])
    batch = {name: np.tile(value, (16, 1)) for name, value in batch.items()}
    out = drawn(batch, keys_of(0, 16))
    assert len({tuple(where) for where in out["where"]}) == 16


def test_choose_against_a_slow_oracle():
    rng = np.random.default_rng(0)
    choose = jax.jit(corrupt.choose)
    for case in range(60):
        key = jax.random.key(case)
        candidates = rng.random(12) < rng.random()
        count = int(rng.integers(0, 14))
        noise = np.asarray(jax.random.uniform(key, (12,)))
        ranked = sorted(np.flatnonzero(candidates), key=lambda place: noise[place])
        expected = np.isin(np.arange(12), ranked[:count])
        chosen = np.asarray(choose(key, candidates, count))
        np.testing.assert_array_equal(chosen, expected)
        slots = 9
        where, weights = corrupt.positions_of(jnp.asarray(chosen), slots)
        listed = [*np.flatnonzero(expected)][:slots]
        fill = slots - len(listed)
        assert where.tolist() == listed + [0] * fill
        assert weights.tolist() == [1.0] * len(listed) + [0.0] * fill


@pytest.mark.parametrize("by_run", [False, True], ids=["each", "by-run"])
def test_replace_against_a_slow_oracle(by_run: bool):
    """By run, the first piece draws for all; what is random differs all the same."""
    rng, runs = np.random.default_rng(1), 0
    for case in range(30):
        key = jax.random.key(case)
        ids = rng.integers(5, V, 50).astype(np.int32)
        chosen = rng.random(50) < 0.5
        hide, randomise = [(0.8, 0.1), (0.3, 0.6), (0.0, 1.0), (1.0, 0.0)][case % 4]
        draw_key, piece_key = jax.random.split(key)
        draw = np.asarray(jax.random.uniform(draw_key, (50,)))
        pieces = np.asarray(jax.random.randint(piece_key, (50,), 0, V))
        expected, first = ids.copy(), 0
        for place in np.flatnonzero(chosen):
            if not (by_run and place and chosen[place - 1]):
                first = place
            if draw[first] < hide:
                expected[place] = MASK
            elif draw[first] < hide + randomise:
                expected[place] = pieces[place]
                runs += place > first
                assert place == first or expected[place] != expected[place - 1]
        shown = corrupt.replace(
            key,
            jnp.asarray(ids),
            jnp.asarray(chosen),
            mask_id=MASK,
            vocab_size=V,
            hide=hide,
            randomise=randomise,
            by_run=by_run,
        )
        np.testing.assert_array_equal(shown, expected)
        assert shown.dtype == jnp.int32
    assert (runs > 50) == by_run


@pytest.mark.parametrize(
    ("hide", "randomise", "allowed"),
    [(1.0, 0.0, "hidden"), (0.0, 0.0, "kept"), (0.0, 1.0, "random")],
)
def test_extreme_shares(hide: float, randomise: float, allowed: str):
    objective = MaskedLM(V, MASK, (PAD,), hide=hide, randomise=randomise)
    batch = rows_of([40] * 20)
    out = quick(objective, keys_of(0, 20), batch)
    shown = np.take_along_axis(out["ids"], out["where"], 1)
    share_hidden = (shown == MASK).mean()
    share_kept = (shown == out["targets"]).mean()
    assert {
        "hidden": share_hidden == 1,
        "kept": share_kept == 1,
        "random": share_hidden < 0.1 and share_kept < 0.1,
    }[allowed]


def test_eight_devices_do_not_talk():
    batch = rows_of([40, 12] * 8)
    seed = jax.random.key(0)

    def from_step(batch):
        return OBJECTIVE.corrupt(row_keys(seed, jnp.arange(16)), batch)

    assert_devices_do_not_talk(from_step, batch)
