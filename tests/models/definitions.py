"""Who sees whom in the papers' words: i may look at j, asked pair by pair.

Nothing here knows of ranks. Each definition makes a function of two places.
"""

from collections.abc import Callable

import numpy as np

Sees = Callable[[int, int], bool]


def table(sees: Sees, queries: int, keys: int | None = None) -> np.ndarray:
    """Every pair asked, one by one: bool [queries, keys]."""
    keys = queries if keys is None else keys
    answers = np.zeros((queries, keys), bool)
    for i in range(queries):
        for j in range(keys):
            answers[i, j] = sees(i, j)
    return answers


def everything(i: int, j: int) -> bool:
    """BERT: each token attends to the whole row."""
    return True


def causal(i: int, j: int) -> bool:
    """GPT: a token attends to those on its left and to itself."""
    return j <= i


def right_to_left(i: int, j: int) -> bool:
    """UniLM's backward model: to those on its right and to itself."""
    return j >= i


def prefix(length: int) -> Sees:
    """UniLM's seq2seq: the first part attends to all of itself and never to the second;
    a token of the second to all of the first, and in the second to its left."""

    def sees(i: int, j: int) -> bool:
        if j < length:
            return True
        return i >= length and j <= i

    return sees


def permutation(kinds: list[str], order: list[int], half: int, *, stream: str) -> Sees:
    """XLNet. Each half has its own order. The first half sees nothing of the second,
    the second all of the first. Within a half words that are not predicted are seen by
    all and see only each other; targets and functional tokens are seen by those later
    in the order. As content a token sees itself, as a query a target does not."""

    def sees(i: int, j: int) -> bool:
        if (i < half) != (j < half):
            return j < half
        if kinds[j] == "word":
            return True
        if kinds[i] == "word":
            return False
        if i == j:
            return stream == "content" or kinds[i] != "target"
        return order[j] < order[i]

    return sees


def remembering(memory: list[int], sees: Sees) -> Sees:
    """Transformer-XL: all of the memory stands before the text, and every token sees
    it. `memory` is 0 where there was only padding."""

    def sees_more(i: int, j: int) -> bool:
        if j < len(memory):
            return memory[j] > 0
        return sees(i, j - len(memory))

    return sees_more


def window(size: int, reach: list[int]) -> Sees:
    """Longformer: half the window on each side; a global token sees all and is seen by
    all."""

    def sees(i: int, j: int) -> bool:
        return abs(i - j) <= size // 2 or reach[i] == 1 or reach[j] == 1

    return sees


def packed(group: list[int], sees: Sees, *, places: list[int] | None = None) -> Sees:
    """Examples side by side: none sees into another, padding (0) sees nothing.

    `places` are counted in each example, if what a token sees depends on them.
    """
    places = list(range(len(group))) if places is None else places

    def sees_within(i: int, j: int) -> bool:
        if group[i] == 0 or group[i] != group[j]:
            return False
        return sees(places[i], places[j])

    return sees_within


def through_layers(seen: np.ndarray, layers: int) -> np.ndarray:
    """Who can influence whom: a token keeps what it has, and hears what it sees."""
    heard = seen | np.eye(len(seen), dtype=bool)
    return np.linalg.matrix_power(heard.astype(int), layers) > 0
