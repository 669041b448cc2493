"""Skip-gram: its gradient, its draws, what it finds; vectors read from files."""

import gzip

import numpy as np
import pytest

from bert_jax.data import word_vectors as module
from bert_jax.data.word_vectors import learn, pairs, read_vectors, skip_gram
from bert_jax.errors import InputError


def loss(vectors, outputs, context, centre, wrong) -> float:
    """By the formula, pair by pair."""
    log_sigmoid = lambda x: -np.log1p(np.exp(-x))  # noqa: E731
    total = 0.0
    for c, o in zip(context, centre, strict=True):
        total -= log_sigmoid(vectors[c] @ outputs[o])
        others = [k for k in wrong if k != o]
        share = module.NEGATIVES / module.DRAWN
        total -= share * sum(log_sigmoid(-(vectors[c] @ outputs[k])) for k in others)
    return total


def test_a_step_goes_down_the_gradient():
    """Of the loss written out, by finite differences; rows that come twice add up."""
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=(7, 3)) for _ in range(2)]
    drawn = rng.integers(0, 7, 9), rng.integers(0, 7, 9), rng.integers(0, 7, 16)
    moved = [table.copy() for table in tables]
    learn(*moved, drawn, 0.1)
    for which in range(2):
        for place in np.ndindex(7, 3):
            sides = []
            for step in (1e-5, -1e-5):
                near = [table.copy() for table in tables]
                near[which][place] += step
                sides.append(loss(*near, *drawn))
            slope = (sides[0] - sides[1]) / 2e-5
            change = moved[which][place] - tables[which][place]
            assert change == pytest.approx(-0.1 * slope, abs=1e-7)


def test_pairs_are_those_of_the_windows():
    """Each within the reach drawn for the centre, none across sentences."""
    words, sentence = np.arange(50), np.arange(50) // 12
    reach = np.random.default_rng(3).integers(1, module.WINDOW + 1, 50)
    expected = sorted(
        (c, o)
        for o in range(50)
        for c in range(50)
        if 0 < abs(c - o) <= reach[o] and sentence[c] == sentence[o]
    )
    context, centre = pairs(words, sentence, np.random.default_rng(3))
    found = list(zip(context.tolist(), centre.tolist(), strict=True))
    assert sorted(found) == expected
    assert found != expected  # shuffled


def planted(seed: int, shuffled: bool) -> tuple[np.ndarray, np.ndarray]:
    """12 words in 3 classes; a sentence is of one class, and so are contexts 12..23."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 3, 1500)
    picked = rng.integers(0, 4, (1500, 8)) + 4 * kind[:, None]
    picked += 12 * rng.integers(0, 2, picked.shape)
    if shuffled:
        picked = rng.permutation(picked.reshape(-1)).reshape(picked.shape)
    return picked.reshape(-1), np.repeat(np.arange(1500), 8)


def share_of_class(vectors: np.ndarray) -> float:
    """How many of the 7 nearest of each word are of its class."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -2)
    nearest = np.argsort(-cosines, axis=1)[:, :7]
    kind = np.arange(24) % 12 // 4
    return float((kind[nearest] == kind[:, None]).mean())


def test_words_of_one_context_are_near():
    told = dict(width=16, epochs=4, frequent=1.0)
    found = skip_gram(*planted(0, shuffled=False), **told)
    assert share_of_class(found) > 0.95
    chance = 7 / 23
    shuffled = skip_gram(*planted(0, shuffled=True), **told)
    assert share_of_class(shuffled) < chance + 0.2
    again = skip_gram(*planted(0, shuffled=False), **told)
    np.testing.assert_array_equal(found, again)
    other = skip_gram(*planted(0, shuffled=False), **told, seed=1)
    assert not np.allclose(found, other)


def test_what_is_drawn(monkeypatch):
    """Frequent words stay by √(t/f) + t/f; negatives come by count ** 0.75."""
    rng = np.random.default_rng(0)
    share = np.array([0.5, 0.3, 0.15, 0.04, 0.01])
    words = rng.choice(5, 40_000, p=share)
    centres, wrongs = [], []

    def record(vectors, outputs, drawn, rate):
        centres.append(drawn[1])
        wrongs.append(drawn[2])

    monkeypatch.setattr(module, "learn", record)
    skip_gram(words, np.arange(40_000) // 20, frequent=0.02, epochs=1)
    counts = np.bincount(words)
    f = counts / counts.sum()
    stay = f * np.minimum(1, np.sqrt(0.02 / f) + 0.02 / f)
    found = np.bincount(np.concatenate(centres), minlength=5)
    # Pairs of a window are not independent: 3 % is ten times their spread.
    np.testing.assert_allclose(found / found.sum(), stay / stay.sum(), atol=0.03)
    wanted = counts**0.75 / (counts**0.75).sum()
    found = np.bincount(np.concatenate(wrongs), minlength=5)
    spread = np.sqrt(wanted * (1 - wanted) / found.sum())
    np.testing.assert_array_less(np.abs(found / found.sum() - wanted), 4.42 * spread)


def test_files(tmp_path):
    lines = ["the 0.5 1 -2e-1", "中国 1 2 3", ". . 4 5 6"]
    wanted = ["the", "中国", ". ."], [[0.5, 1, -0.2], [1, 2, 3], [4, 5, 6]]
    (tmp_path / "glove.txt").write_text("\n".join(lines))
    with gzip.open(tmp_path / "word2vec.txt.gz", "wt") as file:
        file.write("\n".join(["3 3", *(f"{line} " for line in lines)]))
    for name in ("glove.txt", "word2vec.txt.gz"):
        names, vectors = read_vectors(tmp_path / name, most=9)
        assert names == wanted[0]
        np.testing.assert_allclose(vectors, wanted[1])
    assert read_vectors(tmp_path / "glove.txt", most=2)[0] == wanted[0][:2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1 2\nb 1 x", r"v.txt:2: expected a word and 2 numbers"),
        ("a 1 2\nb 1", r"v.txt:2: expected a word and 2 numbers"),
        ("a 1 2\nb nan 1", r"v.txt:2: expected a word and 2 numbers"),
        ("5 7\na 1 2", r"v.txt:2: expected a word and 7 numbers"),
        ("just words", r"v.txt:1: expected a word and"),
        ("", "holds no vectors"),
    ],
)
def test_broken_files(tmp_path, text, message):
    (tmp_path / "v.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        read_vectors(tmp_path / "v.txt", most=9)
    with pytest.raises(InputError, match="No such file"):
        read_vectors(tmp_path / "gone.txt", most=9)
