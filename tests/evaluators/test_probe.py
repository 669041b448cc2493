"""Linear probes: the regression itself, and what it can read from states."""

import jax
import numpy as np
import pytest
import scipy.optimize

from bert_jax.data.labelled import read_labelled
from bert_jax.data.tasks import Task
from bert_jax.data.tokenizers import WordPiece
from bert_jax.evaluators.probe import (
    STRENGTHS,
    Probe,
    features,
    fit_best,
    fit_logistic,
    logistic_loss,
    predict,
)
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, init_params

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
ARCH = Arch(vocab_size=len(PIECES), width=16, layers=1, heads=2, inner=32)
ARCH = ARCH.but(max_positions=16, init_std=0.3)
COLUMNS = {"label": 0, "a": 1}


def test_the_gradient_is_that_of_the_loss():
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(20, 3)), rng.integers(0, 4, 20)
    weights = rng.normal(size=(4, 4))
    _, gradient = logistic_loss(weights, x, labels)
    numeric = scipy.optimize.approx_fprime(
        weights.ravel(), lambda w: logistic_loss(w.reshape(4, 4), x, labels)[0], 1e-6
    )
    np.testing.assert_allclose(gradient.ravel(), numeric, atol=1e-5)


def test_it_ends_where_the_gradient_vanishes():
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(200, 3)), rng.integers(0, 2, 200)
    weights = fit_logistic(x, labels, classes=2, strength=0.1)
    _, gradient = logistic_loss(weights, x, labels)
    gradient[:-1] += 0.1 * weights[:-1]
    assert np.abs(gradient).max() < 1e-4


def test_labels_without_a_pattern_are_not_found():
    """Many features, few examples: the held-out fifth must choose a strong λ."""
    rng = np.random.default_rng(0)
    x, plane = rng.normal(size=(2, 400, 50)), rng.normal(size=50)
    gold, each = (x @ plane > 0).astype(int), np.arange(400)
    learnt = predict(fit_best(x[0], gold[0], each, classes=2), x[1])
    assert (learnt == gold[1]).mean() > 0.9
    noise = rng.integers(0, 2, (2, 400))
    learnt = predict(fit_best(x[0], noise[0], each, classes=2), x[1])
    assert abs((learnt == noise[1]).mean() - 0.5) < 0.1  # 4 standard errors


def test_no_sentence_is_on_both_sides():
    """Five words with the vector and the label of their sentence, and labels without a
    pattern: who fits some words knows the others, but no other sentence."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(100), 5)
    x, labels = rng.normal(size=(100, 50))[owner], rng.integers(0, 2, 100)[owner]
    fits = [fit_logistic(x, labels, classes=2, strength=s) for s in STRENGTHS]
    by_sentence = fit_best(x, labels, owner, classes=2)
    np.testing.assert_array_equal(by_sentence, fits[0])
    by_word = fit_best(x, labels, np.arange(500), classes=2)
    np.testing.assert_array_equal(by_word, fits[-1])


def test_every_word_has_its_sentence(tmp_path):
    """Also in the second batch; sentences are of one to three words."""
    sizes = [1 + n % 3 for n in range(70)]
    text = "\n\n".join("\n".join(["a\tO"] * size) for size in sizes)
    (tmp_path / "x.conll").write_text(text + "\n")
    data = read_labelled(
        tmp_path / "x.conll",
        tokenizer=WordPiece(PIECES),
        length=8,
        columns={"word": 0, "tag": 1},
    )
    params = init_params(Model(ARCH), jax.random.key(0), heads=())
    found, labels, owner = features(Model(ARCH), params, data, layers=1)
    assert len(found) == len(labels) == sum(sizes)
    np.testing.assert_array_equal(owner, np.repeat(np.arange(70), sizes))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Does the text hold an `a`? Of random letters, each with a share of 1/8."""
    folder, rng = tmp_path_factory.mktemp("probe"), np.random.default_rng(0)
    found = []
    for count in (300, 150):
        texts = [" ".join(rng.choice([*"abcdefgh"], 6)) for _ in range(count)]
        lines = [f"{int('a' in text)}\t{text}\n" for text in texts]
        (folder / "x.tsv").write_text("".join(lines))
        tokenizer = WordPiece(PIECES)
        found.append(
            read_labelled(
                folder / "x.tsv", tokenizer=tokenizer, length=12, columns=COLUMNS
            )
        )
    return found


def run(arch: Arch, parts) -> dict:
    task = Task("x", "accuracy", COLUMNS, "", (), 12)
    params = init_params(Model(arch), jax.random.key(0), heads=())
    return Probe(layers=1).run(Model(arch), params, task, *parts)


def test_random_states_know_which_words_there_are(parts):
    """Also with padding beside them; and twice the same."""
    found = run(ARCH, parts)
    assert found["score"] > 0.85
    assert run(ARCH, parts) == found
