"""Rows of a plan as arrays: special tokens, groups, positions, types, words.

    ids        [CLS], pieces, [SEP], padding
    group      equal where tokens may see one another: 1, 2, ... for packed examples; 0
               is padding
    positions  from 0 in every example
    types      0 in part A, 1 in part B
    words      number of the word, from 1 on through the row; 0 is a special token
    row_id     number of the row in the plan; -1 is a row of padding
    epoch      how often the corpus was gone through before

where the corpus has them `phrases`, `entities` (as words) and

    word_id    which word it is: its number in the corpus's table of similar words, 0
               for none; less than 0 in a row that runs backwards

and for pairs `first` (where each example begins) and `next_sentence` (its label, -1 is
none); for a stream `continues` (1 where the row goes on where the one in its place of
the batch before ended). Nothing is hidden here: rows are clean.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from bert_jax.data.corpus import Corpus
from bert_jax.data.plan_files import open_plan
from bert_jax.data.plans import ACROSS, LABELLED, Plan, check
from bert_jax.errors import InputError, unknown

SPARE = 0.08  # of the text may be read for nothing, so that it takes fewer reads

Batch = dict[str, np.ndarray]


class Pieces:
    """Text that was read: the stretches that some rows need, and a bit around."""

    def __init__(self, corpus: Corpus, stretches: np.ndarray):
        stretches = stretches[stretches[:, 1] > stretches[:, 0]]
        stretches = stretches[np.argsort(stretches[:, 0], kind="stable")]
        reach = np.maximum.accumulate(stretches[:, 1])
        gaps = stretches[1:, 0] - reach[:-1]
        order = np.argsort(gaps, kind="stable")  # the smallest are read along
        spent = np.cumsum(np.maximum(gaps[order], 0))
        skipped = np.empty(len(gaps), bool)
        skipped[order] = spent > SPARE * np.diff(stretches).sum()
        edges = np.flatnonzero(skipped) + 1
        # None at all, where the last row of a stream is nothing but a separator.
        first = np.concatenate([[0], edges]).astype(int)[: len(stretches)]
        last = np.append(edges, len(stretches)).astype(int)[: len(stretches)] - 1
        self.starts, stops = stretches[first, 0], reach[last]
        self.parts = [
            corpus.read_columns(int(start), int(stop))
            for start, stop in zip(self.starts, stops, strict=True)
        ]

    def find(self, start: int) -> tuple[dict[str, np.ndarray], int]:
        """The part that a stretch lies in, and where it begins there."""
        n = 0
        if len(self.parts) > 1:
            n = int(np.searchsorted(self.starts, start, side="right")) - 1
        return self.parts[n], start - int(self.starts[n])


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a corpus: text in, arrays out."""

    corpus: Corpus
    kind: str
    length: int
    across: str = "attend"
    seed: int = 0

    def __post_init__(self):
        check(self.corpus, self.kind, self.length)
        if self.across not in ACROSS:
            raise InputError(unknown("across", self.across, ACROSS))
        tokenizer = self.corpus.tokenizer
        if self.kind != "stream" and tokenizer.cls_id is None:
            raise InputError(
                f"rows={self.kind} begin with [CLS], for which the {tokenizer.kind} "
                f"tokenizer of {self.corpus.path} has no token: use rows=stream"
            )

    @cached_property
    def plan(self) -> Plan:
        return open_plan(self.corpus, self.kind, self.length, self.seed)

    def __len__(self) -> int:
        return len(self.plan)

    def read(self, first: int, last: int) -> Pieces:
        """The text of rows first..last."""
        plan = self.plan
        examples = slice(int(plan.rows[first]), int(plan.rows[last]))
        return Pieces(self.corpus, np.concatenate([plan.a[examples], plan.b[examples]]))

    def empty(self, count: int) -> Batch:
        """`count` rows of padding, with the columns that a batch has."""
        names = ("ids", "types", "positions", "group", "words")
        names += tuple(unit for unit in self.corpus.units if unit != "words")
        names += tuple(name for name in self.corpus.columns if name == "word_id")
        batch = {name: np.zeros((count, self.length), np.int32) for name in names}
        batch["ids"][:] = self.corpus.tokenizer.pad_id or 0  # GPT-2 has none
        batch["row_id"] = np.full(count, -1, np.int32)
        batch["epoch"] = np.zeros(count, np.int32)
        if self.kind == "stream":
            batch["continues"] = np.zeros(count, np.int32)
        if self.kind in LABELLED:
            batch["first"] = np.zeros((count, self.plan.most), np.int32)
            batch["next_sentence"] = np.full((count, self.plan.most), -1, np.int32)
        return batch

    def build(self, rows: Sequence[int], pieces: Sequence[Pieces], size: int) -> Batch:
        """The batch of the given rows, filled up to `size` with padding."""
        batch = self.empty(size)
        batch["row_id"][: len(rows)] = rows
        where = self.layout(np.asarray(rows, np.int64))
        special = self.corpus.tokenizer
        flat = batch["ids"].reshape(-1)
        if len(where.cls):
            flat[where.cls] = special.cls_id
        flat[where.sep] = special.sep_id
        units = self.corpus.units
        marks = {unit: np.zeros(flat.shape, bool) for unit in units or ("words",)}
        for at, start, count, row in where.stretches:
            part, begin = pieces[row].find(start)
            flat[at : at + count] = part["ids"][begin : begin + count]
            for unit in units:
                marks[unit][at : at + count] = part[unit][begin : begin + count]
            if "word_id" in batch:
                found = part["word_id"][begin : begin + count]
                batch["word_id"].reshape(-1)[at : at + count] = found
        real = self.fill_groups(batch, where)
        text = real.reshape(-1)
        text[where.cls] = text[where.sep] = False
        if "words" not in units:
            np.logical_and(special.starts[flat], text, out=marks["words"])
        begins = [at for at, *_ in where.stretches]
        for unit, mark in marks.items():
            mark[begins] = True  # a stretch begins a word, also if it was cut there
            numbers = np.cumsum(mark.reshape(real.shape), axis=1, dtype=np.int32)
            np.multiply(numbers, text.reshape(real.shape), out=batch[unit])
        return batch

    def turn(self, batch: Batch, rows: Sequence[int]) -> None:
        """Makes some rows of a batch run backwards; padding stays at the end."""
        for row in rows:
            size = int((batch["group"][row] > 0).sum())
            for name in {"ids", "group", "words", "word_id", *self.corpus.units}:
                if name in batch:
                    batch[name][row, :size] = batch[name][row, :size][::-1].copy()
            if "word_id" in batch:
                batch["word_id"][row] *= -1
            # Positions count up again, from 0 in every group.
            place, group = np.arange(size), batch["group"][row, :size]
            begins = np.diff(group, prepend=-1) != 0
            start = np.maximum.accumulate(place * begins)
            batch["positions"][row, :size] = place - start

    def layout(self, rows: np.ndarray) -> "Layout":
        """Where in the batch everything goes, as places in the flattened arrays."""
        plan = self.plan
        counts = plan.rows[rows + 1] - plan.rows[rows]
        row = np.repeat(np.arange(len(rows)), counts)  # of each example
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        example = np.repeat(plan.rows[rows], counts) + number
        a, b, labels = plan.a[example], plan.b[example], plan.labels[example]
        size_a, size_b = a[:, 1] - a[:, 0], b[:, 1] - b[:, 0]
        if self.kind == "stream":
            head, tail = np.zeros_like(row), labels.astype(np.int64)
        else:
            head = (number == 0) if self.kind == "full" else np.ones(len(row))
            head, tail = head.astype(np.int64), np.ones_like(row)
        sizes = head + size_a + tail + size_b + (size_b > 0)
        before = np.cumsum(sizes) - sizes  # tokens of all earlier examples
        begin = row * self.length + before - before[number == 0][row]
        at_a = begin + head
        at_b = at_a + size_a + tail
        stretches = [
            (at, start, count, n)
            for at, start, count, n in zip(
                np.concatenate([at_a, at_b]).tolist(),
                np.concatenate([a[:, 0], b[:, 0]]).tolist(),
                np.concatenate([size_a, size_b]).tolist(),
                np.concatenate([row, row]).tolist(),
                strict=True,
            )
            if count
        ]
        with_b = size_b > 0
        sep = np.concatenate([(at_a + size_a)[tail > 0], (at_b + size_b)[with_b]])
        return Layout(
            row=row,
            number=number,
            labels=labels,
            begin=begin,
            end=begin + sizes,
            at_b=at_b[with_b],
            end_b=(begin + sizes)[with_b],
            cls=begin[head > 0],
            sep=sep,
            stretches=stretches,
        )

    def fill_groups(self, batch: Batch, where: "Layout") -> np.ndarray:
        """Groups, positions, types, labels; which places hold a token, bool [B, S]."""
        shape = batch["ids"].shape
        edges = np.zeros(shape[0] * shape[1] + 1, np.int32)
        edges[where.begin] = 1
        np.subtract.at(edges, where.end, 1)
        real = np.cumsum(edges[:-1]).reshape(shape) > 0
        place = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        one = self.kind in ("full", "stream") and self.across == "attend"
        if one:
            np.multiply(place, real, out=batch["positions"])
            batch["group"][:] = real
        else:
            begins = np.zeros(shape, np.int32)
            begins.reshape(-1)[where.begin] = 1
            group = np.cumsum(begins, axis=1, dtype=np.int32)
            start = np.maximum.accumulate(place * begins, axis=1)
            np.multiply(group, real, out=batch["group"])
            np.multiply(place - start, real, out=batch["positions"])
        if len(where.at_b):
            kinds = np.zeros(shape[0] * shape[1] + 1, np.int32)
            kinds[where.at_b] += 1
            np.subtract.at(kinds, where.end_b, 1)
            batch["types"][:] = np.cumsum(kinds[:-1], dtype=np.int32).reshape(shape)
        if "first" in batch:
            batch["first"][where.row, where.number] = where.begin % shape[1]
            batch["next_sentence"][where.row, where.number] = where.labels
        return real


@dataclasses.dataclass(frozen=True)
class Layout:
    """Places in a batch, counted row after row."""

    row: np.ndarray  # [E] of each example: its row in the batch,
    number: np.ndarray  # [E] its number in the row,
    labels: np.ndarray  # [E] its label,
    begin: np.ndarray  # [E] and where it begins and ends
    end: np.ndarray
    at_b: np.ndarray  # where part B begins and ends, of those that have one
    end_b: np.ndarray
    cls: np.ndarray
    sep: np.ndarray
    stretches: list[tuple[int, int, int, int]]  # place, first piece, pieces, row
