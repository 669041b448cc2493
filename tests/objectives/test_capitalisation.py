"""Capitals: which words are asked about, and that what is shown does not tell."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.tokenizers import WordPiece
from bert_jax.errors import InputError
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.capitalisation import Capitalisation, small_letters
from tests.objectives.made import FixedNet, packed

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "THE", "London"]
VOCAB += ["##S", "##s", "iPhone", "cat", "Cat", "sat", "1", "Lo", "lo", "##ndon"]
ID = {piece: number for number, piece in enumerate(VOCAB)}
OBJECTIVE = Capitalisation(small_letters(VOCAB))


def test_small_letters_by_hand():
    changed = {
        VOCAB[n]: VOCAB[small] for n, small in enumerate(OBJECTIVE.small) if n != small
    }
    pairs = {"The": "the", "THE": "the", "##S": "##s", "Cat": "cat", "Lo": "lo"}
    assert changed == pairs
    marked = ["ĠThe", "Ġthe", "▁Ça", "▁ça", "Ж", "ж", "Ġ", "iX", "ix"]
    assert small_letters(marked) == (1, 1, 3, 3, 5, 5, 6, 7, 8)


def text(*words: str) -> list[tuple[int, ...]]:
    return [tuple(ID[piece] for piece in word.split()) for word in words]


def test_rows_by_hand():
    words = text("The", "cat ##S", "Cat", "London", "Lo ##ndon", "sat", "the", "THE")
    batch = packed([[words, text("the", "1", "iPhone")]], 20)
    out = OBJECTIVE.corrupt(None, batch)
    shown = [VOCAB[i] for i in out["ids"][0]]
    first = "[CLS] the cat ##s cat London lo ##ndon sat the the [SEP]"
    assert shown == f"{first} [CLS] the 1 iPhone [SEP] [PAD] [PAD] [PAD]".split()
    asked = np.flatnonzero(out["weights"][0]).tolist()
    # Of `sat`, `London` and `1` there is one form; the rest are words of two pieces.
    assert asked == [1, 4, 9, 10, 13]
    assert out["targets"][0, np.asarray(asked)].tolist() == [1, 1, 0, 1, 0]


def test_what_is_shown_does_not_tell():
    """Other capitals in the words asked about: the same input, other answers."""
    rng = np.random.default_rng(0)
    words = text("The", "cat ##S", "Cat", "London", "the", "sat", "Lo ##ndon", "the")
    batch = packed([[words]] * 50, 20)
    one = OBJECTIVE.corrupt(None, batch)
    forms = {ID["the"]: ("the", "The", "THE"), ID["cat"]: ("cat", "Cat")}
    other = {**batch, "ids": batch["ids"].copy()}
    for row, place in np.argwhere(one["weights"]):
        choices = forms[int(one["ids"][row, place])]
        other["ids"][row, place] = ID[rng.choice(choices)]
    two = OBJECTIVE.corrupt(None, other)
    np.testing.assert_array_equal(one["ids"], two["ids"])
    np.testing.assert_array_equal(one["weights"], two["weights"])
    asked = one["weights"] > 0
    assert asked.sum() == 50 * 4
    changed = (one["targets"] != two["targets"])[asked].mean()
    assert 0.3 < changed < 0.7


def test_a_word_is_cut_alike_with_and_without_its_capital():
    """A whole word of the vocabulary is one piece; else the pieces would tell."""
    tokenizer = WordPiece(VOCAB, lowercase=False)
    assert tokenizer.encode("London london") == [ID["London"], ID["lo"], ID["##ndon"]]
    words = [n for n, other in enumerate(OBJECTIVE.small) if n != other]
    words = [n for n in words if tokenizer.starts[n]]
    assert len(words) == 4
    for n in words:
        for piece in (n, OBJECTIVE.small[n]):
            assert tokenizer.encode(VOCAB[piece]) == [piece]


def test_the_loss_by_hand():
    logits = jnp.log(jnp.array([[[0.5, 0.5], [0.25, 0.75], [0.9, 0.1], [0.2, 0.8]]]))
    words = jnp.array([[0, 1, 2, 3]])
    batch = {
        "ids": words,
        "types": words * 0,
        "positions": words,
        "group": words * 0 + 1,
        "words": words,
        "targets": jnp.array([[0, 1, 1, 0]]),
        "weights": jnp.array([[0.0, 1.0, 1.0, 0.0]]),
    }
    net = FixedNet(capital=logits)
    means = OBJECTIVE.terms(net, batch).means
    expected = -(math.log(0.75) + math.log(0.1)) / 2
    assert float(loss_of(OBJECTIVE, means)) == pytest.approx(expected)
    assert float(means["capitalisation_accuracy"].value) == 0.5
    assert float(means["capitalisation_share"].value) == 1.0
    assert float(means["capitalisation_asked"].value) == pytest.approx(2 / 3)
    assert net.asked["heads"] == OBJECTIVE.heads == ("capital",)
    counts = jax.device_get(OBJECTIVE.counts(batch))
    assert counts == {"capitalisation_loss": 2.0}


def test_a_vocabulary_without_case():
    with pytest.raises(InputError, match="prepare the text with a cased tokenizer"):
        Capitalisation(small_letters(["[PAD]", "the", "cat", "London"]))
