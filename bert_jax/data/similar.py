"""Tables of similar words: which word may stand in the place of which.

MacBERT (Cui et al. 2020, arXiv:2004.13922) hides a word behind a similar one, where
BERT shows [MASK], which no text has. A table knows words by their pieces. For each of
them it has the words whose vectors are nearest to its own, by their cosine, of those
with as many pieces: so every piece of the one takes the place of a piece of the other.
Words count from 1 on; 0 is any other word.

    DIR/similar.json   the tokenizer's hash, how words were found, the words as text
    DIR/similar.npz    pieces [W+1, L], sizes [W+1], near [W+1, K]
"""

import dataclasses
import hashlib
import io
import json
from functools import cached_property
from pathlib import Path

import numpy as np
from etils import epath

from bert_jax.errors import InputError

FORMAT = 1
LONGEST = 8  # pieces of a word: the table is a rectangle, and longer words are rare
CELLS = 1 << 24  # cosines that are looked at at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Similar:
    """A table. Equal to another one where both would say the same."""

    tokenizer: str  # hash of the one that made the pieces
    words: str  # how words are found: a segmenter of data/words.py
    names: tuple[str, ...]  # [W] the words, to be read by people
    pieces: np.ndarray  # int32 [W+1, L], filled up with 0
    sizes: np.ndarray  # int32 [W+1], pieces of each word
    near: np.ndarray  # int32 [W+1, K], the nearest first, filled up with 0

    def __len__(self) -> int:
        return len(self.names)

    def __hash__(self) -> int:
        return hash(self.hash)

    def __eq__(self, other) -> bool:
        return isinstance(other, Similar) and self.hash == other.hash

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integer that holds the number of every word."""
        return np.dtype("<u2" if len(self) < 1 << 16 else "<u4")

    @cached_property
    def numbering(self) -> str:
        """Stands for which word has which number, whatever is similar to it."""
        content = [self.tokenizer, self.words, *map(bytes, (self.pieces, self.sizes))]
        return digest(content)

    @cached_property
    def hash(self) -> str:
        return digest([self.numbering, bytes(self.near)])

    @cached_property
    def _known(self) -> dict[bytes, int]:
        sized = enumerate(zip(self.pieces, self.sizes, strict=True))
        return {bytes(row[:size]): n for n, (row, size) in sized if n}

    def numbers(self, ids: np.ndarray, begins: np.ndarray) -> np.ndarray:
        """The number of each piece's word, where `begins` is true at first pieces."""
        data, wide = ids.astype(np.int32).tobytes(), 4
        starts = np.flatnonzero(begins)
        stops = np.append(starts, len(ids))[1:]
        found = [
            self._known.get(data[start * wide : stop * wide], 0)
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        return np.repeat(np.asarray(found, self.dtype), stops - starts)

    def check_tokenizer(self, found: str, what: str) -> None:
        """Raises for a vocabulary that is not the table's."""
        if self.tokenizer != found:
            raise InputError(
                f"{what} is a table of words of another vocabulary (tokenizer "
                f"{self.tokenizer}, here {found}): make one with `bert_jax similar "
                "--tokenizer` of the same one"
            )

    def save(self, folder: Path) -> None:
        """As two files, always the same bytes."""
        folder.mkdir(exist_ok=True)
        arrays = {name: getattr(self, name) for name in ("pieces", "sizes", "near")}
        np.savez_compressed(folder / "similar.npz", **arrays)
        about = {
            "format": FORMAT,
            "hash": self.hash,
            "tokenizer": self.tokenizer,
            "words": self.words,
            "names": self.names,
        }
        text = json.dumps(about, ensure_ascii=False, indent=0) + "\n"
        (folder / "similar.json").write_text(text, encoding="utf-8")


def digest(parts: list[str | bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
    return found.hexdigest()[:16]


def is_similar(path: str | Path) -> bool:
    return (epath.Path(path) / "similar.json").exists()


def load_similar(path: str | Path) -> Similar:
    """A table written by `bert_jax similar`, here or in a bucket."""
    path = epath.Path(path)
    if not is_similar(path):
        raise InputError(
            f"{path} is no table of similar words; make one with "
            f"`bert_jax similar --tokenizer DIR --out {path} TEXT...`"
        )
    try:
        about = json.loads((path / "similar.json").read_text())
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']}, not {FORMAT}")
        data = io.BytesIO((path / "similar.npz").read_bytes())
        with np.load(data, allow_pickle=False) as arrays:
            found = Similar(
                tokenizer=about["tokenizer"],
                words=about["words"],
                names=tuple(about["names"]),
                **{name: arrays[name] for name in ("pieces", "sizes", "near")},
            )
        if found.hash != about["hash"]:
            raise ValueError("its checksum is wrong")
    except Exception as error:  # numpy raises many types for a damaged file
        raise InputError(f"{path} is damaged ({error}): make it again") from None
    return found


def make_similar(
    words: list[np.ndarray],
    vectors: np.ndarray,
    *,
    names: list[str],
    tokenizer: str,
    found_by: str,
    neighbours: int,
) -> Similar:
    """The table of words, given as their pieces, with vectors [W, D]."""
    sizes = np.array([0, *map(len, words)], np.int32)
    pieces = np.zeros((len(words) + 1, max(sizes)), np.int32)
    for number, word in enumerate(words, 1):
        pieces[number, : len(word)] = word
    near = np.zeros((len(words) + 1, neighbours), np.int32)
    near[1:] = nearest(vectors, sizes[1:], neighbours)
    return Similar(tokenizer, found_by, tuple(names), pieces, sizes, near)


def nearest(vectors: np.ndarray, sizes: np.ndarray, count: int) -> np.ndarray:
    """Of each word the numbers, from 1 on, of the words of its size that are nearest:
    [W, count], filled up with 0."""
    found = np.zeros((len(vectors), count), np.int32)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = vectors / np.maximum(length, 1e-12)
    for size in np.unique(sizes):
        same = np.flatnonzero(sizes == size)
        most = min(count, len(same) - 1)
        if not most:
            continue
        block = max(1, CELLS // len(same))
        for at in range(0, len(same), block):
            rows = same[at : at + block]
            far = -(directions[rows] @ directions[same].T)
            far[np.arange(len(rows)), at + np.arange(len(rows))] = np.inf
            best = np.argpartition(far, most - 1, axis=1)[:, :most]
            order = np.argsort(np.take_along_axis(far, best, 1), 1, kind="stable")
            best = np.take_along_axis(best, order, 1)
            found[rows, :most] = same[best] + 1
    return found
