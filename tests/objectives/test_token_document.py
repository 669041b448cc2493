"""Words that come again: an oracle on lists, and halves that do not see each other."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.objectives.base import loss_of
from bert_jax.objectives.token_document import TokenDocument
from tests.models.made import quick_jit
from tests.objectives.made import FixedNet, packed, random_texts

OBJECTIVE = TokenDocument()
S = 48


def corrupted(texts, length: int = S) -> dict[str, np.ndarray]:
    return jax.device_get(quick_jit(OBJECTIVE.corrupt)(None, packed(texts, length)))


def expected_row(examples: list[list[tuple[int, ...]]]) -> tuple[list, dict]:
    """Word by word: groups, and the answer at each place that is asked."""
    group, answers = [], {}
    for number, words in enumerate(examples, 1):
        middle = math.ceil(len(words) / 2)
        halves = words[:middle], words[middle:]
        group.append(2 * number - 1)
        for half, other in ((0, 1), (1, 0)):
            for word in halves[half]:
                if halves[other]:
                    answers[len(group)] = int(word in halves[other])
                group += [2 * number - 1 + half] * len(word)
        group.append(group[-1])
    return group, answers


def test_against_the_oracle():
    """Few pieces, so that words share some of theirs, and many come again."""
    texts = random_texts(200, S, vocab=9)
    out = corrupted(texts)
    answers = []
    for row, examples in enumerate(texts):
        group, expected = expected_row(examples)
        size = len(group)
        assert out["group"][row, :size].tolist() == group
        assert not out["group"][row, size:].any()
        asked = np.flatnonzero(out["weights"][row]).tolist()
        assert dict(zip(asked, out["targets"][row, asked], strict=True)) == expected
        answers += expected.values()
    assert len(answers) > 1000
    assert 0.1 < np.mean(answers) < 0.9


def test_parts_of_a_word_are_not_the_word():
    """`a b` is neither `a` nor `a b c` nor `x b`, and is found only whole."""
    a, b, c, x = 10, 11, 12, 13
    first = [(a, b), (a,), (b,), (x, b), (a, b, c)]
    cases = (
        ([(a, b), (x,), (x,), (x,)], [1, 0, 0, 0, 0]),
        ([(a, b, c), (x,), (x,), (x,)], [0, 0, 0, 0, 1]),
        ([(a,), (b,), (b, c), (x, b, c)], [0, 1, 1, 0, 0]),
    )
    out = corrupted([[first + second] for second, _ in cases])
    for row, (_, found) in enumerate(cases):
        asked = np.flatnonzero(out["weights"][row])[:5]
        assert out["targets"][row, asked].tolist() == found


def test_the_loss_by_hand():
    batch = corrupted([[[(5,), (6,), (5,), (7,)]]], 6)
    logits = jnp.log(jnp.array([0.5, 0.25, 0.4, 0.8, 0.5, 0.5]))  # of coming again
    logits = jnp.stack([jnp.log1p(-jnp.exp(logits)), logits], -1)[None]
    net = FixedNet(relation=logits)
    means = OBJECTIVE.terms(net, batch).means
    expected = -(math.log(0.25) + math.log(0.6) + math.log(0.8) + math.log(0.5)) / 4
    assert float(loss_of(OBJECTIVE, means)) == pytest.approx(expected)
    assert float(means["token_document_share"].value) == 0.5
    assert float(means["token_document_accuracy"].value) == 0.75
    assert net.asked["heads"] == OBJECTIVE.heads == ("relation",)
    assert float(OBJECTIVE.counts(batch)["token_document_loss"]) == 4
