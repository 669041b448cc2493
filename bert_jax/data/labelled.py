"""Labelled examples as batches: a sentence or a pair with a label, words with tags.

Where things stand in a file is said by a mapping of columns, by number where the file
has no header and by name where it has one:

    {"label": 0, "a": 1, "b": 2}                label, text, text (without b: one text)
    {"label": "label", "a": "sentence"}         columns named in the first line
    {"word": 0, "tag": 1}                       a word a line, blank between sentences

A batch has ids, types, positions, group, words, row_id as rows of text have (rows.py),
one example a row, and

    first      [B, 1]  the token that stands for the example: [CLS], else the last one
    label      [B, 1]  number of the label; -1 is none
    tags       [B, S]  number of the word's tag at its first piece; -1 elsewhere

The batch of step k is a pure function of (seed, k). Texts that are too long lose their
end, of a pair the longer one first.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.data.rows import Batch
from bert_jax.data.text import numbered_lines
from bert_jax.data.tokenizers import Tokenizer
from bert_jax.errors import InputError, unknown

Columns = Mapping[str, int | str]
PAIRS: Columns = {"label": 0, "a": 1, "b": 2}
KINDS = ({"label", "a"}, {"label", "a", "b"}, {"word", "tag"})


@dataclasses.dataclass(frozen=True, eq=False)
class Labelled:
    """Examples in memory, each a row of the arrays."""

    path: str
    labels: tuple[str, ...]  # their names, by number
    arrays: Batch
    tags: tuple[tuple[int, ...], ...] = ()  # of all words, also those that were cut off

    def __len__(self) -> int:
        return len(self.arrays["ids"])

    @property
    def content(self) -> str:
        """A hash of the examples as the model reads them."""
        digest = hashlib.sha256()
        for name in sorted(self.arrays):
            digest.update(np.ascontiguousarray(self.arrays[name]))
        return digest.hexdigest()[:16]

    def some(self, count: int) -> "Labelled":
        """`count` examples spread over all, or all if there are no more."""
        total = min(count, len(self))
        rows = np.arange(total) * len(self) // max(total, 1)
        tags = tuple(self.tags[row] for row in rows) if self.tags else ()
        return dataclasses.replace(self, arrays=self.take(rows, total), tags=tags)

    def take(self, rows: np.ndarray, size: int) -> Batch:
        """A batch of these examples, filled up to `size` with padding."""
        rows = np.concatenate([rows, np.full(size - len(rows), -1)]).astype(int)
        batch = {name: array[rows] for name, array in self.arrays.items()}
        for name in batch:
            batch[name][rows < 0] = -1 if name in ("row_id", "label", "tags") else 0
        return batch

    def batch(self, step: int, *, size: int, seed: int) -> Batch:
        """The batch of a training step, counted from 0: every epoch in a new order."""
        places = step * size + np.arange(size)
        rows = np.empty(size, int)
        for epoch in np.unique(places // len(self)):
            order = np.random.default_rng((seed, int(epoch))).permutation(len(self))
            mine = places // len(self) == epoch
            rows[mine] = order[places[mine] % len(self)]
        return self.take(rows, size) | {"epoch": (places // len(self)).astype(np.int32)}

    def in_order(self, size: int) -> Iterator[Batch]:
        """All examples; rows that fill up the last batch have row_id -1."""
        for start in range(0, len(self), size):
            yield self.take(np.arange(start, min(start + size, len(self))), size)

    def named_tags(self, numbers: np.ndarray) -> tuple[list[list[str]], list]:
        """Predicted and true tags of all words of each sentence, by name. `numbers`
        are predictions where there is a tag; what was cut off is predicted to be O."""
        sizes = (self.arrays["tags"] >= 0).sum(1)
        parts = np.split(numbers, np.cumsum(sizes)[:-1])
        gold = [[self.labels[tag] for tag in tags] for tags in self.tags]
        said = [
            [self.labels[tag] for tag in part] + ["O"] * (len(there) - len(part))
            for part, there in zip(parts, gold, strict=True)
        ]
        return said, gold


class Example(NamedTuple):
    where: str  # file and line
    labels: list[str]  # one, or a tag for each word
    texts: list[str]  # one or two, or the words


def read_labelled(
    path: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    tokenizer: Tokenizer,
    length: int,
    columns: Columns = PAIRS,
    labels: Sequence[str] | None = None,
) -> Labelled:
    """The examples of a file, or of several with one header: also as .gz and .xz.

    `labels` are the valid ones in the order of their numbers: those of the training
    part, for any other part. Without them, those that are found, sorted.
    """
    if set(columns) not in KINDS:
        raise InputError(
            f"columns={dict(columns)}: give label and a; label, a and b; or word and "
            "tag"
        )
    tagged = "tag" in columns
    paths = [path] if isinstance(path, str | os.PathLike) else path
    examples = [
        example
        for file in map(Path, paths)
        for example in (read_tags if tagged else read_texts)(file, columns)
    ]
    names = tuple(labels or sorted({name for e in examples for name in e.labels}))
    numbers = number_labels(examples, names)
    encode = encode_words if tagged else encode_texts
    rows = [
        lay_out(parts, tokenizer, length)
        for parts in encode([example.texts for example in examples], tokenizer)
    ]
    arrays = fill(rows, tokenizer, length)
    if not tagged:
        arrays["label"] = np.asarray(numbers, np.int32)
        return Labelled(str(paths[0]), names, arrays)
    arrays["tags"] = np.full_like(arrays["ids"], -1)
    begins = np.diff(arrays["words"], prepend=0, axis=1) > 0
    for row, tags in enumerate(numbers):
        places = np.flatnonzero(begins[row])  # the first pieces, of the words kept
        arrays["tags"][row, places] = tags[: len(places)]
    return Labelled(str(paths[0]), names, arrays, tuple(map(tuple, numbers)))


# --- files ---------------------------------------------------------------------------


def read_cells(path: Path, columns: Columns) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, cell of each column); no cells at a blank line."""
    places, any_example = columns, False
    header = any(isinstance(column, str) for column in columns.values())
    for number, line in numbered_lines(path):
        cells = line.split("\t")
        if number == 1 and header:
            for column in columns.values():
                if column not in cells:
                    raise InputError(f"{path}: " + unknown("column", column, cells))
            places = {name: cells.index(column) for name, column in columns.items()}
            continue
        if not line:
            yield number, {}
            continue
        lacking = [f"{n} ({p + 1})" for n, p in places.items() if p >= len(cells)]
        if lacking:
            raise InputError(
                f"{path}:{number}: {len(cells)} column(s), set apart by tabs; none "
                f"for {', '.join(lacking)}: {line[:60]!r}"
            )
        any_example = True
        yield number, {name: cells[place].strip() for name, place in places.items()}
    if not any_example:
        raise InputError(f"{path} holds no example")


def read_texts(path: Path, columns: Columns) -> Iterator[Example]:
    for number, cells in read_cells(path, columns):
        if cells:
            texts = [cells[name] for name in ("a", "b") if name in cells]
            yield Example(f"{path}:{number}", [cells["label"]], texts)


def read_tags(path: Path, columns: Columns) -> Iterator[Example]:
    sentence = Example("", [], [])
    for number, cells in read_cells(path, columns):
        if cells:
            sentence = sentence._replace(where=sentence.where or f"{path}:{number}")
            sentence.labels.append(cells["tag"])
            sentence.texts.append(cells["word"])
        elif sentence.texts:
            yield sentence
            sentence = Example("", [], [])
    if sentence.texts:
        yield sentence


def number_labels(examples: list[Example], names: tuple[str, ...]) -> list[list[int]]:
    """The labels of each example as numbers; an unknown one is an error."""
    by_name = {name: number for number, name in enumerate(names)}
    for example in examples:
        for name in example.labels:
            if name not in by_name:
                raise InputError(f"{example.where}: " + unknown("label", name, names))
    return [[by_name[name] for name in example.labels] for example in examples]


# --- rows ----------------------------------------------------------------------------

Part = list[tuple[int, bool]]  # pieces, and whether each begins a word


class Row(NamedTuple):
    ids: list[int]
    types: list[int]
    words: list[int]


def encode_texts(texts: list[list[str]], tokenizer: Tokenizer) -> Iterator[list[Part]]:
    """The pieces of each text of each example."""
    sides = [tokenizer.encode_batch(side) for side in zip(*texts, strict=True)]
    for parts in zip(*sides, strict=True):
        yield [[(i, bool(tokenizer.starts[i])) for i in part] for part in parts]


def encode_words(texts: list[list[str]], tokenizer: Tokenizer) -> Iterator[list[Part]]:
    """Word by word. One that the tokenizer makes nothing of is an unknown piece."""
    joint = tokenizer.joint
    spaced = [(joint if n else "") + w for words in texts for n, w in enumerate(words)]
    pieces = iter(tokenizer.encode_batch(spaced))
    for words in texts:
        part = []
        for _ in words:
            ids = next(pieces) or [tokenizer.unk_id]
            part += [(i, n == 0) for n, i in enumerate(ids)]
        yield [part]


def lay_out(parts: list[Part], tokenizer: Tokenizer, length: int) -> Row:
    """[CLS] a [SEP], or [CLS] a [SEP] b [SEP], in the order that members have."""
    double = getattr(tokenizer, "style", "") == "roberta"
    between = [tokenizer.sep_id] * (len(parts) - 1) * (2 if double else 1)
    room = length - len(tokenizer.wrap(between)[0])
    if room < 2:
        raise InputError(f"length={length} leaves no room for text")
    parts = shortened(parts, room)
    a, b = [i for i, _ in parts[0]], [i for part in parts[1:] for i, _ in part]
    ids, types = tokenizer.wrap([*a, *between, *b])
    begin = tokenizer.wrap([-1])[0].index(-1)  # of A, after [CLS] where that is first
    begin_b = begin + len(a) + len(between)
    for place in range(begin_b, len(ids) if b else 0):
        types[place] = types[place] or 1  # XLNet's <cls> has type 2
    words, number = [0] * len(ids), 0
    for part, start in zip(parts, (begin, begin_b), strict=False):
        for place, (_, begins) in enumerate(part, start):
            number += begins or place == start
            words[place] = number
    return Row(ids, types, words)


def shortened(parts: list[Part], room: int) -> list[Part]:
    """Without their ends, where they are too long; the longer one gives first."""
    sizes = [len(part) for part in parts]
    while sum(sizes) > room:
        sizes[sizes.index(max(sizes))] -= 1
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def fill(rows: list[Row], tokenizer: Tokenizer, length: int) -> Batch:
    """Rows as arrays [rows, length]."""
    names = ("ids", "types", "positions", "group", "words")
    arrays = {name: np.zeros((len(rows), length), np.int32) for name in names}
    arrays["ids"][:] = tokenizer.pad_id or 0
    arrays["row_id"] = np.arange(len(rows), dtype=np.int32)
    arrays["first"] = np.zeros((len(rows), 1), np.int32)
    for number, (ids, types, words) in enumerate(rows):
        size = len(ids)
        whole = {"ids": ids, "types": types, "words": words}
        whole |= {"positions": range(size), "group": 1}
        for name, values in whole.items():
            arrays[name][number, :size] = values
        stands = ids.index(tokenizer.cls_id) if tokenizer.cls_id in ids else size - 1
        arrays["first"][number] = stands
    return arrays
