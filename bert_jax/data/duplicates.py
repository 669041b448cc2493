"""Documents that occur more than once: the first is kept, the others are dropped.

    exact  the same words, whatever the case, punctuation and white space
    near   also those which share most of their runs of words

Two documents are near if the Jaccard index of their sets of 13-word shingles is high.
It is estimated by MinHash (Broder 1997): the share of equal minima over k hash
functions is an unbiased estimate of it. Minima in bands of r rows find the pairs
without comparing all: documents meet in one of b bands with probability
1 - (1 - J^r)^b, with b = 10 and r = 12 that is 0.96 at J = 0.9, 0.13 at 0.7 and 0.002
at 0.5. A document is kept in mind by its 11 hashes, which take about 900 bytes (70 for
the one hash of `exact`).
"""

import hashlib
import re
import zlib
from collections.abc import Callable

import numpy as np

from bert_jax.data.words import IDEOGRAPHS

DUPLICATES = ("keep", "exact", "near")
SHINGLE = 13  # words
BANDS, ROWS = 10, 12
_WORD = re.compile(rf"[{IDEOGRAPHS}]|[^\W{IDEOGRAPHS}]+")


def words_of(text: str) -> list[str]:
    """Each ideograph is one; a text of nothing but signs is its own only word."""
    return _WORD.findall(text.lower()) or [text]


def shingles(words: list[str]) -> np.ndarray:
    """The set of hashed runs of 13 words, sorted; a short text is one run."""
    words = words + [""] * (SHINGLE - len(words))
    codes = np.array([zlib.crc32(word.encode()) for word in words], np.uint64)
    # A polynomial modulo 2**64, with an arbitrary odd base.
    powers = np.cumprod(np.full(SHINGLE, 0x9E3779B97F4A7C15, np.uint64))
    runs = np.lib.stride_tricks.sliding_window_view(codes, SHINGLE)
    return np.unique((runs * powers).sum(axis=1))


def make_filter(kind: str) -> Callable[[str], bool]:
    """A function that says whether a text repeats one it was asked about before."""
    if kind == "keep":
        return lambda text: False
    seen: set[int] = set()

    def is_duplicate(text: str) -> bool:
        words = words_of(text)
        marks = [digest(" ".join(words))]
        if kind == "near":
            marks += bands(shingles(words))
        found = not seen.isdisjoint(marks)
        seen.update(marks)
        return found

    return is_duplicate


def digest(text: bytes | str) -> int:
    """64 bits, signed, as most systems keep an integer."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), signed=True)


def bands(runs: np.ndarray) -> list[int]:
    """Signatures, of which near documents have at least one in common."""
    rng = np.random.default_rng(0)
    factors = rng.integers(1, 2**63, BANDS * ROWS, dtype=np.uint64) | np.uint64(1)
    shifts = rng.integers(0, 2**63, BANDS * ROWS, dtype=np.uint64)
    minima = np.full(BANDS * ROWS, np.iinfo(np.uint64).max)
    for at in range(0, len(runs), 4096):  # a long text must not fill the memory
        hashed = runs[at : at + 4096, None] * factors + shifts
        minima = np.minimum(minima, (hashed >> np.uint64(20)).min(axis=0))
    parts = minima.reshape(BANDS, ROWS)
    return [digest(b"%d " % n + part.tobytes()) for n, part in enumerate(parts)]
