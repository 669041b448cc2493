"""Shuffled parts: put back in order they are the text; every order is as likely."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.models.arch import Arch
from bert_jax.models.heads import OUTPUTS
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.sentence_reordering import PLACES, SentenceReordering
from bert_jax.step import row_keys
from tests.data.made import joined
from tests.models.made import quick_jit
from tests.objectives.made import FixedNet, packed, random_texts

OBJECTIVE = SentenceReordering()
S = 48
CONFIDENCE = 1e-4


def corrupted(batch: dict, seed: int = 0) -> dict[str, np.ndarray]:
    keys = row_keys(jax.random.key(seed), jnp.arange(len(batch["ids"])))
    return jax.device_get(quick_jit(OBJECTIVE.corrupt)(keys, batch))


def orders() -> list[tuple[int, ...]]:
    """For each class, which part of the text stands first, second, ..."""
    places = [p for m in (1, 2, 3) for p in itertools.permutations(range(m))]
    return [tuple(sorted(range(len(p)), key=p.__getitem__)) for p in places]


def test_there_are_as_many_classes_as_the_head_has():
    assert len(PLACES) == OUTPUTS["reorder"] == 1 + 2 + 6 == len(orders())
    assert len(set(orders())) == 9


def test_put_back_in_order_it_is_the_text():
    texts = random_texts(300, S, vocab=900)
    clean = packed(texts, S)
    out = corrupted(clean)
    classes = orders()
    seen = set()
    for row, examples in enumerate(texts):
        assert out["weights"][row].sum() == len(examples)
        for number, words in enumerate(examples):
            begin = int(out["first"][row, number])
            size = sum(map(len, words))
            here = slice(begin + 1, begin + 1 + size)
            group = clean["group"][row]
            assert (group == number + 1).argmax() == begin
            order = classes[out["targets"][row, number]]
            types, ids = out["types"][row, here], out["ids"][row, here]
            # Parts as shown: all there, one after the other.
            assert sorted(set(types.tolist())) == list(range(len(order)))
            assert (np.diff(types) >= 0).all()
            parts = [ids[types == place].tolist() for place in range(len(order))]
            back = [parts[order.index(n)] for n in range(len(order))]
            assert joined(back) == joined(words)
            # Words stay whole, and carry their numbers.
            borders = np.cumsum([0, *map(len, words)]).tolist()
            ends = np.cumsum([len(part) for part in back]).tolist()
            assert set(ends) <= set(borders)
            assert (out["words"][row, here] > 0).all()
            seen.add(order)
    assert seen == set(classes)
    # Nothing else moved.
    special = clean["words"] == 0
    np.testing.assert_array_equal(out["ids"][special], clean["ids"][special])
    np.testing.assert_array_equal(out["words"] == 0, special)
    assert not out["types"][special].any()
    for name in ("group", "positions", "row_id"):
        np.testing.assert_array_equal(out[name], clean[name])
    for name in ("ids", "words"):
        for a, b in zip(out[name], clean[name], strict=True):
            assert sorted(a) == sorted(b)


def test_rates():
    """One, two or three parts by even chance, then every order, and every cut."""
    count, words = 6000, 5
    texts = [[[(10 + n,) for n in range(words)], [(20,), (21,)], [(30,)]]] * count
    out = corrupted(packed(texts, 16))
    classes = out["targets"][:, :3]
    assert out["weights"][:, :3].all()
    assert not out["weights"][:, 3:].any()
    long = [1 / 3] + [1 / 6] * 2 + [1 / 18] * 6
    found = np.bincount(classes[:, 0], minlength=9)
    test = stats.chisquare(found, count * np.asarray(long))
    assert test.pvalue > CONFIDENCE
    # Two words have no three parts: these become two. One word is one part.
    pair = np.bincount(classes[:, 1], minlength=9)
    assert not pair[3:].any()
    test = stats.chisquare(pair[:3], count * np.asarray([1 / 3, 1 / 3, 1 / 3]))
    assert test.pvalue > CONFIDENCE
    assert not classes[:, 2].any()
    # Examples of a row, and rows, are drawn on their own.
    independent = stats.chi2_contingency(
        np.histogram2d(classes[:, 0], classes[:, 1], bins=(9, 3))[0]
    )
    assert independent.pvalue > CONFIDENCE
    # Two cuts of three parts left in order: each of the pairs of borders.
    rows = out["types"][classes[:, 0] == 3, 1 : 1 + words]
    cuts = [tuple(np.flatnonzero(np.diff(row)).tolist()) for row in rows]
    kinds = list(itertools.combinations(range(words - 1), 2))
    test = stats.chisquare([cuts.count(kind) for kind in kinds])
    assert set(cuts) == set(kinds)
    assert test.pvalue > CONFIDENCE


def test_what_is_not_the_text_does_not_tell_the_order():
    """Of texts of one piece over and over, all orders look alike: types say how many
    parts there are and where they end, by the same chance for every order."""
    count, words = 6000, 4
    out = corrupted(packed([[[(9,)] * words]] * count, 8))
    np.testing.assert_array_equal(out["ids"], out["ids"][:1].repeat(count, 0))
    shown = (out["types"][:, 1 : 1 + words] * [1, 3, 9, 27]).sum(1)
    for classes in ((1, 2), tuple(range(3, 9))):
        mine = np.isin(out["targets"][:, 0], classes)
        table = stats.contingency.crosstab(out["targets"][mine, 0], shown[mine])
        assert min(table.count.shape) >= 2
        assert stats.chi2_contingency(table.count).pvalue > CONFIDENCE


def test_more_examples_than_there_is_room_for():
    texts = [[[(5,), (6,)]] * 12]
    out = corrupted(packed(texts, S))
    assert out["first"].shape[1] == 8
    assert out["first"][0].tolist() == [4 * n for n in range(8)]
    assert out["weights"].all()


def test_the_loss_by_hand():
    """Three examples in two rows: 1/2, 1/4 and 1/8 for the class that is right."""
    out = corrupted(packed([[[(5,), (6,)]] * 2, [[(7,), (8,), (9,)]]], 16))
    slots = out["first"].shape[1]
    logits = np.full((2, slots, 9), 7.0, np.float32) * np.arange(9)  # empty slots
    asked = [(0, 0), (0, 1), (1, 0)]
    for n, (row, slot) in enumerate(asked, 1):
        logits[row, slot] = np.log((1 - 2.0**-n) / 8)
        logits[row, slot, out["targets"][row, slot]] = np.log(2.0**-n)
    net = FixedNet(reorder=jnp.asarray(logits))
    means = OBJECTIVE.terms(net, out).means
    loss = float(loss_of(OBJECTIVE, means))
    assert loss == pytest.approx(2 * math.log(2), rel=1e-5)
    assert float(means["sentence_reordering_accuracy"].total) == 3
    assert float(OBJECTIVE.counts(out)["sentence_reordering_loss"]) == 3
    assert net.asked["heads"] == ("pooler", "reorder")
    np.testing.assert_array_equal(net.asked["first"], out["first"])
    # It reads the parts as they are shown.
    np.testing.assert_array_equal(net.tokens.ids, out["ids"])
    np.testing.assert_array_equal(net.tokens.types, out["types"])
    # Of classes that are one off it is another loss.
    wrong = out | {"targets": (out["targets"] + 1) % 9}
    assert float(loss_of(OBJECTIVE, OBJECTIVE.terms(net, wrong).means)) > 1.1 * loss


def test_types_are_needed():
    assert OBJECTIVE.problems(Arch(types=4), "doc") == []
    assert OBJECTIVE.problems(Arch(types=2), "doc") == [
        "sentence_reordering numbers up to 3 parts by types: arch.types=2 must be at "
        "least 3"
    ]
