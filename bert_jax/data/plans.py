"""Which pieces of a corpus form which row.

    full       contiguous text, filled up, across documents, with a separator between
               (RoBERTa's FULL-SENTENCES, Liu et al. 2019, arXiv:1907.11692)
    doc        the same within one document; short examples share a row
    stream     contiguous text without [CLS]: row r + 1 goes on where row r ends
    sentences  one sentence a row
    pair, order, sentence-pair, distance, electra
               two parts, A and B (pairs.py), packed

A plan is a function of (data, kind, length, seed); plan_files.py keeps it. Its rows are
in the order of the text, in blocks: a block is a stretch of text that is read in one
piece, and examples that share a row come from one block. Records are planned one by one
and written as they come; only of a stream all rows are in memory for a while, some 60
bytes each.

Differs from RoBERTa's FULL-SENTENCES in that a sentence which does not fit goes on in
the next row, cut between two words: whole sentences leave 13 % of a row of 128 empty
(en_books), cut ones less than 1 %.
"""

import bisect
import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from bert_jax.data.corpus import Corpus
from bert_jax.data.pack import pack
from bert_jax.data.pairs import RANDOM, RULES
from bert_jax.errors import InputError, unknown

KINDS = ("full", "doc", "stream", "sentences", *RULES)
ACROSS = ("attend", "block")  # whether attention crosses documents in a full row
LABELLED = tuple(kind for kind in RULES if kind != "electra")
PAIRS = tuple(kind for kind in LABELLED if kind != "distance")  # label 0 or 1
BLOCK = 1 << 15  # pieces read in one piece: 64 kB


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Row r holds the examples rows[r]:rows[r + 1], block b the rows of blocks[b]."""

    kind: str
    length: int
    a: np.ndarray  # int64 [E, 2]: start and stop of part A, in pieces of the corpus
    b: np.ndarray  # int64 [E, 2]: of part B; empty where there is none
    labels: np.ndarray  # int8 [E], -1 = none; in a stream 1 where a document ends
    rows: np.ndarray  # int64 [R + 1]
    blocks: np.ndarray  # int64 [blocks + 1]
    inputs: np.ndarray  # int32 [blocks]: number of the input a block is from
    # cut: sentences longer than a row; tokens: real ones, specials too; pieces: of the
    # corpus; covered: of these in a row, a random B not counted
    about: dict

    def __len__(self) -> int:
        return len(self.rows) - 1

    @property
    def real(self) -> float:
        """Share of the places in a row that hold a token."""
        return self.about["tokens"] / (len(self) * self.length)

    @property
    def covered(self) -> float:
        """Share of the text that is in the rows; pairs that are too long are cut."""
        return self.about["covered"] / self.about["pieces"]

    @property
    def most(self) -> int:
        """Examples in a row, at the most."""
        return most_of(self.kind, self.length)


def most_of(kind: str, length: int) -> int:
    """Labels have a place each in the batch, so rows with labels hold a limited number.

    Examples of 16 tokens on average fill a row.
    """
    return max(8, length // 16) if kind in LABELLED else length


class Text(NamedTuple):
    """One record as a planner sees it; pieces are counted from its beginning."""

    lengths: np.ndarray  # of the sentences
    documents: np.ndarray  # sentences of each
    begins: np.ndarray  # bool: where words begin; empty where the kind needs none

    @property
    def borders(self) -> np.ndarray:
        """Where documents begin, and the end."""
        ends = np.cumsum(self.lengths)[np.cumsum(self.documents) - 1]
        return np.concatenate([[0], ends])

    def cuts(self, longest: int) -> np.ndarray:
        """Where a row may end: before a word, or inside one longer than a row."""
        begins = self.begins.copy()
        begins[self.borders[:-1]] = True
        places = np.append(np.flatnonzero(begins), len(begins))
        gaps = np.diff(places)
        inside = [
            np.arange(start + longest, stop, longest)
            for start, stop in zip(
                places[:-1][gaps > longest], places[1:][gaps > longest], strict=True
            )
        ]
        return np.sort(np.concatenate([places, *inside])) if inside else places


# --- rows of one part ----------------------------------------------------------------


def walk(reach: Callable[[int], int], end: int) -> list[int]:
    """0, reach(0), reach(reach(0)), ... up to the end."""
    path = [0]
    while path[-1] < end:
        path.append(int(reach(path[-1])))
    return path


def plan_full(text: Text, length: int) -> tuple[np.ndarray, np.ndarray]:
    """[CLS] text [SEP] text of the next document [SEP] ...: stretches, row borders."""
    cuts, borders = text.cuts(length - 2), text.borders
    is_border = np.zeros(len(text.begins) + 1, bool)
    is_border[borders] = True
    ended = np.cumsum(is_border)[cuts] - 1  # documents before it
    total = cuts + ended  # with a separator after each document
    ends = total + ~is_border[cuts]  # and one if a row ends inside a document

    def reach(at: int) -> int:
        return ends.searchsorted(total[at] + length - 1, side="right") - 1

    rows = cuts[walk(reach, len(cuts) - 1)]
    edges = np.union1d(rows, borders)
    return np.stack([edges[:-1], edges[1:]], 1), np.searchsorted(edges, rows)


def plan_doc(text: Text, length: int) -> np.ndarray:
    """[CLS] text [SEP] within one document: stretches, to be packed."""
    cuts, borders = text.cuts(length - 2), text.borders

    def reach(at: int) -> int:
        end = borders[borders.searchsorted(cuts[at], side="right")]  # of the document
        return cuts.searchsorted(min(cuts[at] + length - 2, end), side="right") - 1

    edges = cuts[walk(reach, len(cuts) - 1)]
    return np.stack([edges[:-1], edges[1:]], 1)


def plan_stream(borders: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
    """text [SEP] text of the next document [SEP] ... in rows of exactly `length`.

    Stretches, row borders, and whether a separator follows each stretch.
    """
    begins = borders + np.arange(len(borders))  # with a separator after each document
    total = begins[-1]
    rows = np.append(np.arange(0, total, length), total)
    edges = np.union1d(rows, begins)
    document = np.searchsorted(begins, edges[:-1], side="right") - 1
    ends = np.isin(edges[1:], begins)  # the last place is the separator's
    a = np.stack([edges[:-1] - document, edges[1:] - ends - document], 1)
    return a, np.searchsorted(edges, rows), ends


def plan_sentences(text: Text, length: int) -> np.ndarray:
    edges = np.concatenate([[0], np.cumsum(cut_sentences(text.lengths, length - 2))])
    return np.stack([edges[:-1], edges[1:]], 1)


def cut_sentences(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Lengths of the sentences, those longer than a row in parts."""
    parts = -(-lengths // longest)
    ends = np.cumsum(parts)
    sizes = np.full(ends[-1], longest, np.int64)
    sizes[ends - 1] = lengths - (parts - 1) * longest  # the last part has the rest
    return sizes


# --- rows of two parts ---------------------------------------------------------------


class Partners:
    """Random B: from a random sentence of another document on, for half a block."""

    def __init__(self, corpus: Corpus, length: int, rng: random.Random):
        self.corpus, self.length, self.rng = corpus, length, rng
        self.weights = np.cumsum(corpus.index["document_count"]).tolist()
        self.left = 0

    def __call__(self, a: int, wanted: int) -> tuple[int, int]:
        """Whole sentences of one document, at least `wanted` pieces if it has them."""
        while True:
            if self.left <= 0 or self.at >= len(self.starts) - 1:
                self.jump()
            document = bisect.bisect_right(self.borders, self.starts[self.at]) - 1
            begin, end = self.borders[document : document + 2]
            if not begin <= a < end:
                break
            self.left = 0  # the document of A: look elsewhere
        start = self.at
        self.at += 1
        stop = bisect.bisect_left(self.starts, end)
        while self.at < stop and self.starts[self.at] - self.starts[start] < wanted:
            self.at += 1
        found = self.starts[start], self.starts[self.at]
        self.left -= found[1] - found[0]
        return found

    def jump(self) -> None:
        """To a random sentence of a random document."""
        number = self.rng.randrange(self.weights[-1])
        record = bisect.bisect_right(self.weights, number)
        text = read_text(self.corpus, record)
        first = int(self.corpus.record_starts[record])
        self.borders = (first + text.borders).tolist()
        sizes = cut_sentences(text.lengths, self.length - 3)
        self.starts = (first + np.concatenate([[0], np.cumsum(sizes)])).tolist()
        document = number - (self.weights[record - 1] if record else 0)
        low, high = (
            bisect.bisect_left(self.starts, border)
            for border in self.borders[document : document + 2]
        )
        self.at = self.rng.randrange(low, high)
        self.left = BLOCK // 2


@lru_cache(maxsize=4)
def read_text(corpus: Corpus, record: int) -> Text:
    return Text(*corpus.sentences(record), np.empty(0, bool))


def plan_pairs(
    text: Text,
    first: int,
    kind: str,
    length: int,
    rng: random.Random,
    partner: Partners,
) -> np.ndarray:
    """(A start, A stop, B start, B stop, label) of all documents, to be packed."""
    sizes = cut_sentences(text.lengths, length - 3)
    starts = first + np.concatenate([[0], np.cumsum(sizes)])
    edges = np.searchsorted(starts, first + text.borders)
    starts, found = starts.tolist(), []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        found += RULES[kind](starts[low : high + 1], length, rng, partner)
    return np.asarray(found, np.int64)


# --- the plan of a corpus ------------------------------------------------------------


def plan_record(
    corpus: Corpus, record: int, kind: str, length: int, seed: int, partners
) -> dict[str, np.ndarray]:
    """The part of a plan that one record makes; rows and blocks are sizes here."""
    first = int(corpus.record_starts[record])
    text = read_text(corpus, record)
    rows = None  # their sizes, where examples lie in rows already
    if kind in RULES:
        rng = random.Random(f"{seed}/{record}")
        partners.rng, partners.left = rng, 0
        table = plan_pairs(text, first, kind, length, rng, partners)
        a, b, labels = table[:, 0:2], table[:, 2:4], table[:, 4]
    else:
        if kind == "sentences":
            a = plan_sentences(text, length)
            rows = np.ones(len(a), np.int64)
        else:
            text = text._replace(begins=word_begins(corpus, record))
            if kind == "doc":
                a = plan_doc(text, length)
            else:
                a, edges = plan_full(text, length)
                rows = np.diff(edges)
        a = a + first
        b, labels = np.zeros_like(a), np.full(len(a), -1)
    if rows is None:
        order, rows, blocks = pack_blocks(a, b, length, most_of(kind, length))
        a, b, labels = a[order], b[order], labels[order]
    else:
        blocks = even_blocks(len(rows), length)
    return dict(a=a, b=b, labels=labels, rows=rows, blocks=blocks)


def even_blocks(rows: int, length: int) -> np.ndarray:
    """As many rows as make a block, in each but the last."""
    each = max(1, BLOCK // length)
    return np.diff(np.append(np.arange(0, rows, each), rows))


def pack_blocks(a, b, length: int, most: int) -> tuple[np.ndarray, ...]:
    """Examples packed into rows, block by block: their order, sizes of rows, blocks."""
    sizes = example_sizes(a, b)
    block = (np.cumsum(sizes) - 1) // BLOCK
    order, rows, blocks = [], [], []
    for first, last in zip(*edges_of(block), strict=True):
        packed = pack(sizes[first:last], length, most=most)
        order += [first + example for row in packed for example in row]
        rows += [len(row) for row in packed]
        blocks.append(len(packed))
    return np.asarray(order), np.asarray(rows), np.asarray(blocks)


def edges_of(numbers: np.ndarray) -> tuple[list[int], list[int]]:
    """Where runs of equal numbers begin and end."""
    edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
    return edges[:-1], edges[1:]


def example_sizes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Tokens of packed examples: [CLS] A [SEP], and B [SEP] where there is a B."""
    second = b[:, 1] - b[:, 0]
    return a[:, 1] - a[:, 0] + 2 + second + (second > 0)


def word_begins(corpus: Corpus, record: int) -> np.ndarray:
    start, stop = corpus.record_starts[record : record + 2].tolist()
    columns = corpus.read_columns(start, stop)
    if "words" in columns:
        return columns["words"]
    return corpus.tokenizer.starts[columns["ids"]]


def plan_parts(corpus: Corpus, kind: str, length: int, seed: int) -> Iterator[dict]:
    """Parts of the plan, one after the other; they hold at least one row each."""
    if kind == "stream":
        borders, before = [np.zeros(1, np.int64)], 0
        for record in range(corpus.records):
            ends = read_text(corpus, record).borders[1:] + before
            borders.append(ends)
            before = int(corpus.record_starts[record + 1])
        a, rows, ends = plan_stream(np.concatenate(borders), length)
        yield dict(
            a=a,
            b=np.zeros_like(a),
            labels=ends.astype(np.int8),
            rows=np.diff(rows),
            blocks=even_blocks(len(rows) - 1, length),
            inputs=np.zeros_like(even_blocks(len(rows) - 1, length)),
        )
        return
    partners = Partners(corpus, length, random.Random(0)) if kind in RULES else None
    for record in range(corpus.records):
        if corpus.index["pieces"][record]:
            part = plan_record(corpus, record, kind, length, seed, partners)
            source = corpus.index["input"][record]
            yield part | {"inputs": np.full(len(part["blocks"]), source)}


def covered_count(part: dict, kind: str) -> int:
    """Pieces of the text of a part of a plan that are in its rows, each once."""
    random_b = part["labels"] == RANDOM.get(kind, -2)
    stretches = np.concatenate([part["a"], part["b"][~random_b]])
    stretches = stretches[np.argsort(stretches[:, 0], kind="stable")]
    reach = np.maximum.accumulate(stretches[:, 1])
    begins = np.maximum(stretches[1:, 0], reach[:-1])
    fresh = np.maximum(stretches[1:, 1] - begins, 0).sum()
    return int(stretches[0, 1] - stretches[0, 0] + fresh)


def token_count(part: dict, kind: str) -> int:
    """Real tokens of a part of a plan, special ones included."""
    if kind == "stream":
        return int((part["a"][:, 1] - part["a"][:, 0] + part["labels"]).sum())
    if kind == "full":  # one separator a stretch, one [CLS] a row
        sizes = part["a"][:, 1] - part["a"][:, 0] + 1
        return int(sizes.sum() + len(part["rows"]))
    return int(example_sizes(part["a"], part["b"]).sum())


def check(corpus: Corpus, kind: str, length: int) -> None:
    problems = []
    if kind not in KINDS:
        problems.append(unknown("rows", kind, KINDS))
    if length < 8:
        problems.append(f"length={length} is too short: at least 8")
    if kind in RANDOM and corpus.about["documents"] < 2:
        problems.append(
            f"rows={kind} needs at least two documents (a random B comes from "
            f"another one); {corpus.path} has one: use rows=full"
        )
    if problems:
        raise InputError("\n".join(problems))
