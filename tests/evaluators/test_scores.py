"""Scores by hand, and against the definitions."""

import numpy as np
import pytest

from bert_jax.errors import InputError
from bert_jax.evaluators.scores import entities, score


def test_accuracy_and_its_error():
    predicted, gold = np.repeat([1, 0], [750, 250]), np.ones(1000, int)
    found = score("accuracy", predicted, gold)
    assert found["score"] == 0.75
    assert found["error"] == pytest.approx(np.sqrt(0.75 * 0.25 / 1000), rel=0.2)


def test_matthews_is_the_correlation_of_two_labels():
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 2, 400)
    predicted = np.where(rng.random(400) < 0.3, 1 - gold, gold)
    expected = np.corrcoef(predicted, gold)[0, 1]
    assert score("matthews", predicted, gold)["score"] == pytest.approx(expected)
    assert score("matthews", np.ones(400, int), gold)["score"] == 0


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-p I-p O", {("p", 1, 3)}),
        ("B-p B-p I-p", {("p", 0, 1), ("p", 1, 3)}),
        ("B-p I-q", {("p", 0, 1), ("q", 1, 2)}),
        ("I-p I-p O I-q", {("p", 0, 2), ("q", 3, 4)}),
        ("O O", set()),
        ("B-creative-work I-creative-work", {("creative-work", 0, 2)}),
    ],
)
def test_entities_as_conlleval_has_them(tags, expected):
    assert entities(tags.split()) == expected


def test_entity_f1_by_hand():
    """Of 3 entities 2 are found, one of them with a wrong end; one is invented."""
    gold = [["B-p", "I-p", "O"], ["B-q", "O", "B-p"]]
    said = [["B-p", "I-p", "I-p"], ["B-q", "B-q", "O"]]
    found = score("entity_f1", said, gold)["score"]
    assert found == pytest.approx(2 * 1 / (3 + 3))
    assert score("entity_f1", gold, gold)["score"] == 1
    assert score("entity_f1", [["O"]], [["O"]])["score"] == 0


def test_an_unknown_metric():
    with pytest.raises(InputError, match=r"unknown metric 'acc'.*accuracy"):
        score("acc", [], [])
