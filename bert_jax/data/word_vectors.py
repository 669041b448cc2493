"""Vectors of words: our own, by skip-gram with negative sampling, or given ones.

    L = -log σ(v_c · u_o) - Σ_k log σ(-v_c · u_k),    k drawn by count ** 0.75

Word o is the centre of a window whose half-width is drawn from 1..5, c is another word
in it, and v_c is c's vector. Frequent words are left out at random, and windows end
with the sentence (Mikolov et al. 2013, arXiv:1310.4546). It is numpy on one core: about
a minute for a million words.

Differs from the release in: pairs are learnt 256 at a time; these share 16 words drawn
as negatives, each of which counts for 5/16, so that the products are matrix products;
the order of pairs is shuffled within a chunk of text.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from bert_jax.data.text import read_lines
from bert_jax.errors import InputError

WINDOW = 5
NEGATIVES, DRAWN = 5, 16
# Pairs that are learnt at a time. Products of so few numbers are done by one thread:
# more threads spend their time in waiting for each other.
PAIRS = 256
CHUNK = 1 << 20  # words whose pairs are shuffled at a time


def skip_gram(
    words: np.ndarray,  # [T], numbers from 0 on
    sentence: np.ndarray,  # [T], equal in a sentence
    *,
    width: int = 64,
    epochs: int = 5,
    rate: float = 0.025,
    frequent: float = 1e-3,
    seed: int = 0,
    show: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """A vector for each word: f32 [W, width]. A function of its arguments alone."""
    rng = np.random.default_rng(seed)
    counts = np.bincount(words)
    W = len(counts)
    vectors = ((rng.random((W, width)) - 0.5) / width).astype(np.float32)
    outputs = np.zeros((W, width), np.float32)
    share = counts / counts.sum()
    kept = np.minimum(1.0, np.sqrt(frequent / share) + frequent / share)
    so_far = np.cumsum(counts**0.75)
    total, done = epochs * len(words), 0
    for _ in range(epochs):
        for at in range(0, len(words), CHUNK):
            chunk = words[at : at + CHUNK]
            stay = rng.random(len(chunk)) < kept[chunk]
            context, centre = pairs(chunk[stay], sentence[at : at + CHUNK][stay], rng)
            steps = max(1, -(-len(centre) // PAIRS))
            for n in range(steps):
                now = slice(n * PAIRS, (n + 1) * PAIRS)
                drawn = rng.random(DRAWN) * so_far[-1]
                wrong = np.searchsorted(so_far, drawn, side="right")
                left = 1 - (done + len(chunk) * n / steps) / total
                learn(
                    vectors,
                    outputs,
                    (context[now], centre[now], wrong),
                    rate * max(left, 1e-4),
                )
            done += len(chunk)
            show(len(chunk))
    return vectors


def pairs(
    words: np.ndarray, sentence: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(word in the window, centre of the window) of every window, shuffled."""
    reach = rng.integers(1, WINDOW + 1, len(words))
    contexts, centres = [], []
    for distance in range(1, WINDOW + 1):
        together = sentence[distance:] == sentence[:-distance]
        left, right = words[:-distance], words[distance:]
        for centre, other, far in (
            (left, right, reach[:-distance]),
            (right, left, reach[distance:]),
        ):
            seen = together & (far >= distance)
            centres.append(centre[seen])
            contexts.append(other[seen])
    order = rng.permutation(sum(map(len, centres)))
    return np.concatenate(contexts)[order], np.concatenate(centres)[order]


def learn(
    vectors: np.ndarray,
    outputs: np.ndarray,
    drawn: tuple[np.ndarray, np.ndarray, np.ndarray],
    rate: float,
) -> None:
    """One step down the gradient, in place; a word that is drawn twice moves twice."""
    context, centre, wrong = drawn
    v, right, others = vectors[context], outputs[centre], outputs[wrong]
    up = rate * (1 - sigmoid((v * right).sum(1)))[:, None]
    down = rate * NEGATIVES / DRAWN * sigmoid(v @ others.T)
    down *= wrong != centre[:, None]
    add(vectors, context, up * right - down @ others)
    add(outputs, centre, up * v)
    add(outputs, wrong, -down.T @ v)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -30, 30)))


def add(table: np.ndarray, rows: np.ndarray, changes: np.ndarray) -> None:
    """table[rows] += changes, where rows may be there more than once."""
    if not len(rows):
        return
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    table[rows[first]] += np.add.reduceat(changes[order], first)


def read_vectors(path: str | Path, *, most: int) -> tuple[list[str], np.ndarray]:
    """The first words of a file and their vectors, as word2vec (whose first line has
    the number of words and the width) and GloVe write them as text."""
    names, rows = [], []
    width = None
    for number, line in read_lines(path):
        if number == 1 and line.replace(" ", "").isdigit() and line.count(" ") == 1:
            width = int(line.split()[1])
            continue
        if width is None:
            width = line.count(" ")
        name, *values = line.rsplit(" ", width)  # a name may hold a space
        try:
            row = np.array(values, np.float32)
            if not name or width < 2 or len(row) != width or not np.isfinite(row).all():
                raise ValueError
        except ValueError:
            raise InputError(
                f"{path}:{number}: expected a word and {width} numbers, as word2vec "
                f"and GloVe write text; got {line[:60]!r}"
            ) from None
        names.append(name)
        rows.append(row)
        if len(names) == most:
            break
    if not names:
        raise InputError(f"{path} holds no vectors")
    return names, np.stack(rows)
