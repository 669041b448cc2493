"""ERNIE's stages on real text: pieces, then phrases, then entities are hidden whole."""

import itertools
import lzma

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.data.prepare import prepare
from bert_jax.data.rows import Rows
from bert_jax.data.tokenizers import load_tokenizer
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.step import row_keys
from tests.reference import QUICK

STAGES = {  # ERNIE 1.0
    "basic": dict(choose="token"),
    "phrase": dict(choose="word", unit="phrases"),
    "entity": dict(choose="word", unit="entities"),
}
CONFIDENCE = 1e-4  # as in test_corrupt.py
BRACKETS = (
    "[中央/n  人民/n  广播/vn  电台/n]nt  [改革/vn  开放/vn]l  。/w"  # it has none
)


@pytest.fixture(scope="module")
def gold(shared_data, tmp_path_factory):
    """Rows of the People's Daily, with some phrases in brackets among its lines."""
    folder = tmp_path_factory.mktemp("gold")
    path = shared_data / "zh_peopledaily199801/199801.txt.xz"
    with lzma.open(path, "rt", encoding="utf-8") as file:
        lines = list(itertools.islice(file, 300))
    texts = [line for n in range(0, 300, 10) for line in (*lines[n : n + 10], BRACKETS)]
    (folder / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    tokenizer = load_tokenizer(shared_data / "vocabs/bert-base-chinese-vocab.txt")
    corpus = prepare(
        [str(folder / "text.txt")],
        tokenizer=tokenizer,
        out=folder / "corpus",
        words="tags",
        workers=0,
        progress=False,
    )
    rows = Rows(corpus, "full", 128)
    count = len(rows)
    return tokenizer, rows.build(range(count), [rows.read(0, count)] * count, count)


def hidden_by(tokenizer, batch: dict, **stage) -> np.ndarray:
    """Which pieces are chosen, in eight draws: bool [8 B, S]."""
    of = MaskedLM(
        tokenizer.size,
        tokenizer.mask_id,
        tokenizer.special_ids,
        next_sentence=0.0,
        **stage,
    )
    corrupt = jax.jit(of.corrupt, compiler_options=QUICK)
    B, S = batch["ids"].shape
    found = []
    for seed in range(8):
        out = jax.device_get(
            corrupt(row_keys(jax.random.key(seed), jnp.arange(B)), batch)
        )
        chosen = np.zeros((B, S + 1), bool)
        np.put_along_axis(
            chosen, np.where(out["weights"] > 0, out["where"], S), True, 1
        )
        found.append(chosen[:, :S])
    return np.concatenate(found)


def units_hidden(
    number: np.ndarray, candidates: np.ndarray, budget: np.ndarray, *, tries: int = 200
) -> tuple[float, float]:
    """The mean and the variance of how many units of [B, S] are hidden, by trying: they
    come in any order, and each is taken that still fits."""
    rng, mean, variance = np.random.default_rng(0), 0.0, 0.0
    for numbers, there, most in zip(number, candidates, budget, strict=True):
        units = []  # how many pieces, and whether it is one that counts
        for n in np.unique(numbers[there]):
            at = np.flatnonzero((numbers == n) & there)
            parts = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
            whole = there[numbers == n].all()
            units += [(len(part), whole) for part in parts]
        counts = []
        for _ in range(tries):
            left, count = most, 0
            for turn in rng.permutation(len(units)):
                size, whole = units[turn]
                if size <= left:
                    left, count = left - size, count + whole
            counts.append(count)
        mean, variance = mean + np.mean(counts), variance + np.var(counts, ddof=1)
    return mean, variance


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_hides_its_units_whole(gold, stage):
    tokenizer, batch = gold
    chosen = hidden_by(tokenizer, batch, **STAGES[stage])
    real = np.tile((batch["group"] > 0).sum(1), 8)
    candidates = np.tile(~np.isin(batch["ids"], tokenizer.special_ids), (8, 1))
    assert not chosen[~candidates].any()
    budget = np.maximum(1, np.round(0.15 * real))
    own = STAGES[stage].get("unit")
    if own is None:
        np.testing.assert_array_equal(chosen.sum(1), budget)
    assert (chosen.sum(1) <= budget).all()
    split, units, whole = {}, {}, {}
    for unit in ("words", "phrases", "entities"):
        number = np.tile(batch[unit], (8, 1))
        of_row = {}
        for row in range(len(chosen)):
            for n in np.unique(number[row][candidates[row]]):
                at = number[row] == n
                if candidates[row][at].all():  # an unknown piece cuts a unit in two
                    of_row[row, n] = (chosen[row][at].any(), chosen[row][at].all())
        some, all_of = (np.array(x) for x in zip(*of_row.values(), strict=True))
        units[unit], whole[unit] = len(some), int(all_of.sum())
        split[unit] = int((some & ~all_of).sum())
    assert units["words"] > units["entities"] > units["phrases"] * 0.9
    if own is None:
        assert min(split.values()) > 1000
    else:
        assert split[own] == 0
        # 15 % of the pieces are about 15 % of the units: those that no longer fit are
        # passed over, and so short ones are hidden a little more often.
        assert whole[own] / units[own] == pytest.approx(0.15, abs=0.01)
        B, tries = len(budget) // 8, 200
        mean, variance = units_hidden(
            batch[own], candidates[:B], budget[:B], tries=tries
        )
        spread = np.sqrt(8 * variance * (1 + 8 / tries))  # of draws, and of the trying
        reach = stats.norm.isf(CONFIDENCE / 2) * spread
        assert abs(whole[own] - 8 * mean) < reach < 0.0025 * units[own]
        assert chosen.sum() > 0.98 * budget.sum()
        other = {"phrases": "entities", "entities": "phrases"}[own]
        assert (
            split[other] > 0
        )  # names for the one, phrases that are none for the other


def test_a_name_is_hidden_as_a_whole(gold):
    """江泽民 is two words, and one entity."""
    tokenizer, batch = gold
    name = tokenizer.encode("江泽民")
    ids = np.tile(batch["ids"], (8, 1))
    places = [
        (row, at)
        for row in range(len(ids))
        for at in range(126)
        if ids[row, at : at + 3].tolist() == name
    ]
    assert len(places) > 50
    seen = {}
    for unit in ("words", "entities"):
        chosen = hidden_by(tokenizer, batch, choose="word", unit=unit)
        seen[unit] = {tuple(chosen[row, at : at + 3].tolist()) for row, at in places}
    assert seen["entities"] == {(False,) * 3, (True,) * 3}
    assert seen["words"] > seen["entities"]
