"""Whole words, n-grams and spans: a slow oracle, invariants, rates."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.errors import InputError
from bert_jax.models.heads import SPAN_WORDS
from bert_jax.models.model import Model
from bert_jax.objectives import corrupt, unilm
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.step import Net, row_keys
from tests.models.made import TINY, drawn_params
from tests.reference import QUICK, assert_devices_do_not_talk

V, S = 997, 60
PAD, CLS, SEP, MASK = 0, 2, 3, 4
SPECIAL = (PAD, 1, CLS, SEP, MASK)
CONFIDENCE = 1e-4  # as in test_corrupt.py
KINDS = tuple(corrupt.LENGTHS)


def objective(kind: str, **changes) -> MaskedLM:
    return MaskedLM(V, MASK, SPECIAL, choose=kind, next_sentence=0.0, **changes)


def row(rng, length: int) -> tuple[np.ndarray, np.ndarray]:
    """[CLS] words [SEP] words [SEP] padding, words of one to four pieces."""
    ids, words = np.zeros(S, np.int32), np.zeros(S, np.int32)
    ids[:length] = rng.integers(5, V, length)
    starts = rng.random(length) < 0.6
    words[:length] = 1 + np.cumsum(starts)
    for place in (0, length // 2, length - 1):
        ids[place], words[place] = (SEP if place else CLS), 0
        words[place + 1 : length] += 1  # the next piece begins a word
    words[ids < 5] = 0
    return ids, words


def batch_of(count: int, *, seed: int = 0, least: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = [row(rng, int(n)) for n in rng.integers(least, S + 1, count)]
    ids, words = (np.stack(column) for column in zip(*rows, strict=True))
    return {"ids": ids, "words": words, "group": (ids != PAD).astype(np.int32)}


def drawn(of: MaskedLM, batch: dict, seed: int = 0) -> dict[str, np.ndarray]:
    keys = row_keys(jax.random.key(seed), jnp.arange(len(batch["ids"])))
    return jax.device_get(jax.jit(of.corrupt, compiler_options=QUICK)(keys, batch))


def chosen_in(out: dict) -> np.ndarray:
    """bool [B, S]"""
    chosen = np.zeros((len(out["ids"]), S + 1), bool)
    places = np.where(out["weights"] > 0, out["where"], S)
    np.put_along_axis(chosen, places, True, axis=1)
    return chosen[:, :S]


def by_hand(key, candidates, words, count, *, lengths, merge) -> set[int]:
    """The rule of choose_words, word by word, with its own draws."""
    order_key, length_key = jax.random.split(key)
    noise = np.asarray(jax.random.uniform(order_key, (S,)))
    sizes = np.asarray(
        jax.random.choice(length_key, len(lengths), (S,), p=jnp.array(lengths))
    )
    groups: list[list[int]] = []  # the pieces of each word
    for place in np.flatnonzero(candidates):
        goes_on = groups and groups[-1][-1] == place - 1
        if goes_on and words[place - 1] == words[place]:
            groups[-1].append(int(place))
        else:
            groups.append([int(place)])
    word_of = {place: n for n, pieces in enumerate(groups) for place in pieces}
    places = [p for pieces in groups for p in (pieces if merge else pieces[:1])]
    taken: set[int] = set()
    for turn, anchor in enumerate(sorted(places, key=lambda place: noise[place])):
        first = word_of[anchor]
        if groups[first][0] in taken:
            continue
        run: list[int] = []
        for n in range(first, min(first + 1 + sizes[turn], len(groups))):
            follows = not run or groups[n][0] == run[-1] + 1
            if not follows or len({*run, *groups[n]} - taken) + len(taken) > count:
                break
            run += groups[n]
        if merge or not {*run} & taken:
            taken |= {*run}
    return taken


@pytest.mark.parametrize("kind", [*KINDS, "unilm"])
def test_against_a_slow_oracle(kind: str):
    of_kind = corrupt.LENGTHS | {"unilm": unilm.LENGTHS}
    lengths, merge = of_kind[kind], kind == "span"
    choose = jax.jit(corrupt.choose_words, static_argnames=("lengths", "merge"))
    batch = batch_of(40, seed=3)
    found = []
    for number, (ids, words) in enumerate(
        zip(batch["ids"], batch["words"], strict=True)
    ):
        candidates, count = ids >= 5, [0, 1, 4, 9, 30, 100][number % 6]
        key = jax.random.key(number)
        chosen = choose(key, candidates, words, count, lengths=lengths, merge=merge)
        places = set(np.flatnonzero(chosen).tolist())
        expected = by_hand(key, candidates, words, count, lengths=lengths, merge=merge)
        assert places == expected, number
        found.append(len(places))
    assert 0 in found
    assert max(found) > 30


@pytest.mark.parametrize("kind", KINDS)
def test_invariants(kind: str):
    """No word is split, nothing special is chosen, the budget is met or just missed."""
    batch = batch_of(200)
    out = drawn(objective(kind), batch)
    chosen, short = chosen_in(out), []
    for n in range(200):
        ids, words = batch["ids"][n], batch["words"][n]
        places = np.flatnonzero(chosen[n])
        budget = max(1, round(0.15 * (ids != PAD).sum()))
        assert len(places) <= budget
        short.append(budget - len(places))
        assert (ids[places] >= 5).all()
        for word in set(words[places]):
            assert chosen[n][words == word].all()
        np.testing.assert_array_equal(
            out["targets"][n][out["weights"][n] > 0], ids[places]
        )
        others = ~chosen[n]
        np.testing.assert_array_equal(out["ids"][n][others], ids[others])
    assert np.mean(short) < 0.3


def test_words_of_one_piece_meet_the_budget():
    for kind in KINDS:
        batch = batch_of(50)
        batch["words"] = np.where(batch["words"] > 0, 1 + np.arange(S), 0)
        counts = drawn(objective(kind), batch)["weights"].sum(1)
        budgets = [max(1, round(0.15 * (ids != PAD).sum())) for ids in batch["ids"]]
        assert counts.tolist() == budgets


def test_lengths():
    """ALBERT's, MacBERT's and SpanBERT's, as published."""
    mean = {
        k: sum(n * p for n, p in enumerate(v, 1)) for k, v in corrupt.LENGTHS.items()
    }
    assert mean == pytest.approx(
        {"word": 1.0, "ngram": 18 / 11, "macbert": 2.0, "span": 3.797}, abs=1e-3
    )
    expected = [0.2241, 0.1792, 0.1434, 0.1147, 0.0918]
    expected += [0.0734, 0.0587, 0.0470, 0.0376, 0.0301]
    assert corrupt.LENGTHS["span"] == pytest.approx(expected, abs=5e-5)
    for pmf in corrupt.LENGTHS.values():
        assert sum(pmf) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["ngram", "macbert", "span"])
def test_runs_are_as_long_as_drawn(kind: str):
    """The first anchor's run in a long text, where no other is near it: with a budget
    of the longest length it is whole, and a gap stands before and after it."""
    lengths = corrupt.LENGTHS[kind]
    rows, most = 3000, len(lengths)
    N = 40 * most
    keys = row_keys(jax.random.key(1), jnp.arange(rows))

    def first_run(key):
        order_key, _ = jax.random.split(key)
        order = jnp.argsort(jax.random.uniform(order_key, (N,)))
        anchor, others = order[0], order[1 : 2 * most]
        chosen = corrupt.choose_words(
            key,
            jnp.ones(N, bool),
            jnp.arange(N),
            most,
            lengths=lengths,
            merge=kind == "span",
        )
        first, last = corrupt.runs_of(chosen)
        # Of the anchors' places alone, whatever lengths were drawn.
        alone = (jnp.abs(others - anchor) > most).all() & (anchor < N - most)
        length = jnp.where(first[anchor] == anchor, last[anchor] - anchor + 1, 0)
        return jnp.where(alone, length, -1)

    lengths_found = np.asarray(jax.jit(jax.vmap(first_run))(keys))
    found = np.bincount(lengths_found[lengths_found >= 0], minlength=most + 1)
    assert len(found) == most + 1
    assert found[0] == 0
    assert found.sum() > rows / 4
    expected = np.array(lengths) * found.sum()
    assert stats.chisquare(found[1:], expected).pvalue > CONFIDENCE


def test_words_are_chosen_evenly():
    batch = {
        name: np.repeat(x[:1], 6000, 0) for name, x in batch_of(1, least=S).items()
    }
    batch["words"] = np.where(batch["ids"] >= 5, (1 + np.arange(S)) // 2, 0)
    words = batch["words"][0]
    whole = [w for w in set(words) - {0} if (words == w).sum() == 2]
    chosen = chosen_in(drawn(objective("word"), batch))
    counts = np.array([chosen[:, words == w].all(1).sum() for w in whole])
    # Drawn without replacement: less uneven than this test allows.
    assert stats.chisquare(counts).pvalue > CONFIDENCE


@pytest.mark.parametrize("kind", ["word", "span"])
def test_a_run_is_shown_alike(kind: str):
    batch = batch_of(300, least=40)
    out = drawn(objective(kind, replace="run"), batch)
    alike = []
    for chosen, ids, shown in zip(
        chosen_in(out), batch["ids"], out["ids"], strict=True
    ):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen, [0]])))
        for first, last in edges.reshape(-1, 2):
            hidden = shown[first:last] == MASK
            kept = shown[first:last] == ids[first:last]
            assert hidden.all() or not hidden.any() or last - first > 30
            alike.append(
                "hidden" if hidden.all() else "kept" if kept.all() else "random"
            )
    counts = [alike.count(name) for name in ("hidden", "kept", "random")]
    expected = np.array([0.8, 0.1, 0.1]) * len(alike)
    assert stats.chisquare(counts, expected).pvalue > CONFIDENCE
    each = drawn(objective(kind), batch)  # and otherwise not
    mixed = [
        0 < (shown[chosen] == MASK).mean() < 1
        for chosen, shown in zip(chosen_in(each), each["ids"], strict=True)
    ]
    assert np.mean(mixed) > 0.5


def test_same_key_same_draw_and_other_key_another():
    batch = batch_of(16, least=40)
    for kind in KINDS:
        first, again, other = (
            drawn(objective(kind), batch, seed) for seed in (5, 5, 6)
        )
        np.testing.assert_array_equal(first["ids"], again["ids"])
        assert (first["where"] != other["where"]).any(1).mean() > 0.9


def test_eight_devices_do_not_talk():
    batch, seed = batch_of(16), jax.random.key(0)
    of = objective("span", replace="run", boundary=1.0)

    def from_step(batch):
        return of.corrupt(row_keys(seed, jnp.arange(16)), batch)

    assert_devices_do_not_talk(from_step, batch)


# The boundary objective.


def test_borders_by_hand():
    chosen = jnp.array([0, 1, 1, 0, 1, 0, 0, 1], bool)
    borders = np.asarray(corrupt.borders_of(chosen))
    assert borders[[1, 2, 4, 7]].tolist() == [
        [0, 3, 0],
        [0, 3, 1],
        [3, 5, 0],
        [6, 8, 0],
    ]


def test_what_has_two_borders():
    """Outside the run, in the same text; and no further in it than the head knows."""
    batch = batch_of(100)
    batch["group"] = np.where(batch["ids"] == PAD, 0, 1)
    batch["ids"][0] = 50  # no special at either end: some run may touch it
    batch["words"][0] = 1 + np.arange(S)
    batch["group"][0] = 1 + (np.arange(S) >= 30)
    out = drawn(objective("span", rate=0.6, boundary=1.0), batch)
    bounded = 0
    for n, chosen in enumerate(chosen_in(out)):
        group = batch["group"][n]
        for slot in np.flatnonzero(out["weights"][n]):
            at = left = right = int(out["where"][n, slot])
            while left >= 0 and chosen[left]:
                left -= 1
            while right < S and chosen[right]:
                right += 1
            inside = left >= 0 and right < S and at - left - 1 < SPAN_WORDS
            inside = inside and group[left] == group[right]
            assert out["bounded"][n, slot] == float(inside)
            read = [max(left, 0), min(right, S - 1), at - left - 1]
            assert out["spans"][n, slot].tolist() == read
            bounded += inside
        assert not out["bounded"][n][out["weights"][n] == 0].any()
    assert bounded > 100
    assert (out["bounded"] < out["weights"]).any()


def test_rows_without_borders_give_numbers():
    """Nothing but padding, nothing to choose, and text from end to end."""
    of = objective("span", rate=0.9, boundary=1.0)
    arch = TINY.but(vocab_size=V)
    ids = np.zeros((3, S), np.int32)
    ids[1, :9], ids[2] = CLS, 50
    place = np.broadcast_to(np.arange(S, dtype=np.int32), ids.shape)
    batch = {"ids": ids, "words": place + 1, "group": (ids != PAD).astype(np.int32)}
    batch |= {"types": np.zeros_like(ids), "positions": place % 40}
    batch = drawn(of, batch)
    assert batch["weights"].sum(1).tolist() == [0, 0, 54]
    assert batch["bounded"].sum() < batch["weights"].sum()
    params = drawn_params(arch, heads=of.heads)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params):
        def total(params):
            return loss_of(of, of.terms(Net(Model(arch), params), batch).means)

        return jax.value_and_grad(total)(params)

    for leaf in jax.tree.leaves(compute(params)):
        assert np.isfinite(leaf).all()


def test_the_loss_by_hand():
    """Two predictions of which one has borders; the other does not count."""
    of = objective("span", boundary=2.0)
    assert of.heads == ("lm", "sbo")
    assert of.weights == {"masked_lm_loss": 1.0, "boundary_loss": 2.0}
    logits = {"lm": np.zeros((1, 2, 4)), "sbo": np.log([[[1, 1, 1, 5], [1, 1, 1, 1]]])}

    def net(tokens, *, where, first, spans, heads):
        assert heads == of.heads
        assert spans.tolist() == [[[0, 3, 0], [0, 3, 1]]]
        assert first is None
        return logits

    zeros = jnp.zeros((1, 8), jnp.int32)
    batch = {name: zeros for name in ("ids", "types", "positions", "group")}
    batch |= {"where": jnp.array([[1, 2]]), "targets": jnp.array([[3, 0]])}
    batch |= {"weights": jnp.ones((1, 2)), "bounded": jnp.array([[1.0, 0.0]])}
    means = of.terms(net, batch | {"spans": jnp.array([[[0, 3, 0], [0, 3, 1]]])}).means
    assert float(means["masked_lm_loss"].value) == pytest.approx(np.log(4))
    assert float(means["boundary_loss"].value) == pytest.approx(np.log(8 / 5))
    assert float(means["boundary_accuracy"].count) == 1
    expected = np.log(4) + 2 * np.log(8 / 5)
    assert float(loss_of(of, means)) == pytest.approx(expected, rel=1e-6)


def test_wrong_words():
    with pytest.raises(InputError) as caught:
        objective("spam", replace="word", boundary=-1.0)
    text = str(caught.value)
    assert "unknown objective.choose 'spam'. Did you mean span" in text
    assert "unknown objective.replace 'word'" in text
    assert "objective.boundary=-1.0 is negative" in text
