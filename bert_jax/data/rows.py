"""Sentences to rows: which text shares a row, decided when it is read.

    full  contiguous text, sentences together until a row is full, across documents
          (RoBERTa's FULL-SENTENCES, Liu et al. 2019, arXiv:1907.11692)
    doc   the same within one document; short examples are packed into one row
    pair  sentence pairs for next-sentence prediction by BERT's own rules, packed

A plan says for every row of an epoch which pieces of the corpus it holds. It is made
from the lengths of the sentences alone, so nothing is read before it is needed; full
and doc have one plan, pair draws a new one each epoch. Packed examples are told apart
by their group; nothing is hidden here.
"""

import dataclasses
import random
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from bert_jax.data.prepare import Corpus
from bert_jax.errors import InputError, unknown

KINDS = ("full", "doc", "pair")
ACROSS = ("attend", "block")  # whether attention crosses documents in a full row
EXAMPLES = 8  # packed examples in a row, at the most
SHORT = 0.1  # of the documents are cut to short pairs, as in BERT


@dataclasses.dataclass(frozen=True)
class Plan:
    """Examples and the rows they are packed into.

    An example is a stretch of pieces A, and in pairs another one, B. Row r holds the
    examples order[rows[r]:rows[r + 1]].
    """

    a: np.ndarray  # int64 [E, 2], start and stop
    b: np.ndarray  # int64 [E, 2], empty where there is no B
    labels: np.ndarray  # [E]: 0 B follows A, 1 B is random, -1 no pair
    order: np.ndarray  # [E]
    rows: np.ndarray  # [R + 1]

    def __len__(self) -> int:
        return len(self.rows) - 1

    def row(self, number: int) -> np.ndarray:
        return self.order[self.rows[number] : self.rows[number + 1]]


@dataclasses.dataclass(frozen=True)
class Units:
    """Sentences, those longer than a row cut into parts: the atoms of every plan."""

    starts: np.ndarray  # [U + 1], pieces
    documents: np.ndarray  # [documents + 1], number of each document's first unit
    cut: int  # sentences that were too long

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)


def cut_sentences(lengths: np.ndarray, sentences: np.ndarray, longest: int) -> Units:
    """Units of at most `longest` pieces from the sentences of all documents."""
    lengths = lengths.astype(np.int64)
    parts = -(-lengths // longest)
    ends = np.cumsum(parts)
    sizes = np.full(ends[-1], longest, np.int64)
    sizes[ends - 1] = lengths - (parts - 1) * longest  # the last part has the rest
    documents = np.concatenate([[0], ends[np.cumsum(sentences) - 1]])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return Units(starts, documents, cut=int((parts > 1).sum()))


def walk(following: np.ndarray) -> np.ndarray:
    """0, following[0], following[following[0]], ... up to the end."""
    following, at, path = following.tolist(), 0, [0]
    while at < len(following):
        at = following[at]
        path.append(at)
    return np.asarray(path)


def plan_full(units: Units, length: int) -> Plan:
    """[CLS] text [SEP] text of the next document [SEP] ..., at most `length` long."""
    sizes = units.lengths.copy()
    sizes[units.documents[1:] - 1] += 1  # the separator at the end of a document
    total = np.concatenate([[0], np.cumsum(sizes)])
    ends = total + 1  # with the separator of a row that ends inside a document
    ends[units.documents] -= 1
    borders = walk(np.searchsorted(ends, total[:-1] + length - 1, side="right") - 1)
    # A stretch ends where a row ends or a document ends.
    edges = np.union1d(borders, units.documents)
    rows = np.searchsorted(edges, borders)
    a = np.stack([units.starts[edges[:-1]], units.starts[edges[1:]]], 1)
    return Plan(a, np.zeros_like(a), np.full(len(a), -1), np.arange(len(a)), rows)


def plan_doc(units: Units, length: int) -> Plan:
    """[CLS] text [SEP] within one document; short ones share a row."""
    total = units.starts
    room = length - 2
    document = np.repeat(np.arange(len(units.documents) - 1), np.diff(units.documents))
    last = units.documents[1:][document]  # where the unit's document ends
    reach = np.searchsorted(total, total[:-1] + room, side="right") - 1
    borders = walk(np.minimum(reach, last))
    a = np.stack([units.starts[borders[:-1]], units.starts[borders[1:]]], 1)
    order, rows = pack(a[:, 1] - a[:, 0] + 2, length)
    return Plan(a, np.zeros_like(a), np.full(len(a), -1), order, rows)


def plan_pair(units: Units, length: int, rng: random.Random) -> Plan:
    """[CLS] A [SEP] B [SEP]; half of the B follow A, half come from elsewhere."""
    starts = units.starts.tolist()
    borders = units.documents.tolist()
    drawn = []
    for document in range(len(borders) - 1):
        drawn += pairs_of_document(starts, borders, document, length - 3, rng)
    table = np.asarray(drawn, np.int64)
    a, b, labels = table[:, 0:2], table[:, 2:4], table[:, 4]
    sizes = (a[:, 1] - a[:, 0]) + (b[:, 1] - b[:, 0]) + 3
    order, rows = pack(sizes, length)
    return Plan(a, b, labels, order, rows)


def pairs_of_document(
    starts: Sequence[int],
    borders: Sequence[int],
    document: int,
    room: int,
    rng: random.Random,
) -> list[tuple[int, int, int, int, int]]:
    """(A start, A stop, B start, B stop, label) of one document.

    The rules, and the order of the draws, of BERT's create_pretraining_data.py.
    """
    first, last = borders[document], borders[document + 1]
    count = len(borders) - 1
    target = room
    if rng.random() < SHORT:
        target = rng.randint(2, room)
    pairs = []
    begin = unit = first
    while unit < last:
        if unit < last - 1 and starts[unit + 1] - starts[begin] < target:
            unit += 1
            continue
        chunk = unit + 1 - begin  # sentences collected
        in_a = rng.randint(1, chunk - 1) if chunk >= 2 else 1
        middle = begin + in_a
        a = starts[begin], starts[middle]
        if chunk == 1 or rng.random() < 0.5:
            for _ in range(10):
                other = rng.randint(0, count - 1)
                if other != document:
                    break
            at = rng.randint(0, borders[other + 1] - borders[other] - 1)
            at += borders[other]
            stop = at + 1
            wanted = target - (a[1] - a[0])
            while stop < borders[other + 1] and starts[stop] - starts[at] < wanted:
                stop += 1
            b, label = (starts[at], starts[stop]), 1
            unit -= chunk - in_a  # sentences not used are put back
        else:
            b, label = (starts[middle], starts[unit + 1]), 0
        pairs.append((*truncate_pair(a, b, room, rng), label))
        begin = unit = unit + 1
    return pairs


def truncate_pair(a, b, room: int, rng: random.Random) -> tuple[int, int, int, int]:
    """Shortens the longer of the two, at either end, until both fit."""
    a, b = list(a), list(b)
    while (a[1] - a[0]) + (b[1] - b[0]) > room:
        longer = a if a[1] - a[0] > b[1] - b[0] else b
        if rng.random() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return *a, *b


def pack(sizes: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing bin packing: the order of the examples, and the rows.

    Rows by the space they have left are stacks; a big integer has bit n set where the
    stack of rows with n free places is not empty, so the best fit is one shift away.
    """
    free: list[list[int]] = [[] for _ in range(room + 1)]
    nonempty = 0
    held: list[list[int]] = []
    for example in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[example])
        fits = nonempty >> size
        if fits:
            space = size + (fits & -fits).bit_length() - 1
            row = free[space].pop()
            if not free[space]:
                nonempty &= ~(1 << space)
            held[row].append(example)
        else:
            space, row = room, len(held)
            held.append([example])
        left = space - size
        if left and len(held[row]) < EXAMPLES:
            free[left].append(row)
            nonempty |= 1 << left
    order = np.asarray([example for row in held for example in row])
    return order, np.concatenate([[0], np.cumsum([len(row) for row in held])])


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a corpus. Row n of the run is a pure function of (seed, n)."""

    corpus: Corpus
    kind: str
    length: int
    across: str = "attend"
    seed: int = 0

    def __post_init__(self):
        problems = []
        if self.kind not in KINDS:
            problems.append(unknown("rows", self.kind, KINDS))
        if self.across not in ACROSS:
            problems.append(unknown("across", self.across, ACROSS))
        if self.length < 8:
            problems.append(f"length={self.length} is too short: at least 8")
        if self.kind == "pair" and len(self.corpus.document_starts) < 3:
            problems.append(
                "rows=pair needs at least two documents (a random B comes from "
                f"another one); {self.corpus.path} has one: use rows=full"
            )
        if problems:
            raise InputError("\n".join(problems))

    @cached_property
    def units(self) -> Units:
        index = self.corpus.index
        # [CLS] A [SEP] B [SEP] leaves room for length - 3 pieces.
        return cut_sentences(index["lengths"], index["sentences"], self.length - 3)

    def plan(self, epoch: int) -> Plan:
        return _plan(self, epoch if self.kind == "pair" else 0)

    @cached_property
    def per_epoch(self) -> int:
        """Rows of an epoch. Pairs differ in number; the first epoch's counts."""
        return len(self.plan(0))

    @property
    def real(self) -> float:
        """Share of the places in a row that hold a token, in the first epoch."""
        plan = self.plan(0)
        text = (plan.a[:, 1] - plan.a[:, 0]).sum() + (plan.b[:, 1] - plan.b[:, 0]).sum()
        if self.kind == "full":
            # [CLS], a separator after each document, one more where a row ends early.
            extra = len(plan) + len(plan.a)
        else:
            extra = len(plan.a) * (3 if self.kind == "pair" else 2)
        return float((text + extra) / (len(plan) * self.length))

    def locate(self, number: int) -> tuple[int, int]:
        """Row `number` of the whole run: its epoch, and its number in the plan."""
        epoch, place = divmod(number, self.per_epoch)
        shuffled = _permutation(self.seed, epoch, self.per_epoch)
        return epoch, int(shuffled[place]) % len(self.plan(epoch))

    def empty(self, count: int) -> dict[str, np.ndarray]:
        """`count` rows of padding, with the columns that a batch has."""
        columns = ("ids", "types", "positions", "group", "words")
        batch = {name: np.zeros((count, self.length), np.int32) for name in columns}
        batch["ids"][:] = self.corpus.tokenizer.pad_id
        batch["row_id"] = np.full(count, -1, np.int32)
        if self.kind == "pair":
            batch["first"] = np.zeros((count, EXAMPLES), np.int32)
            batch["next_sentence"] = np.full((count, EXAMPLES), -1, np.int32)
        return batch

    def build(self, places: Sequence[tuple[int, int]], size: int) -> dict:
        """The batch of the given (epoch, row), filled up to `size` with padding."""
        batch = self.empty(size)
        for n, (epoch, row) in enumerate(places):
            batch["row_id"][n] = row
            plan = self.plan(epoch)
            line = {
                name: column[n] for name, column in batch.items() if name != "row_id"
            }
            fill = self.fill_full if self.kind == "full" else self.fill_packed
            fill(line, plan, plan.row(row))
        return batch

    def fill_full(self, line: dict, plan: Plan, examples: np.ndarray) -> None:
        """One row of contiguous text; with across=block a group per document."""
        special = self.corpus.tokenizer
        at = position = 0
        words = 0
        for number, example in enumerate(examples):
            pieces, starts = self.corpus.read(*plan.a[example])
            head = [special.cls_id] if number == 0 else []
            size = len(head) + len(pieces) + 1
            here = slice(at, at + size)
            line["ids"][here] = [*head, *pieces, special.sep_id]
            line["words"][at + len(head) : at + size - 1] = count_words(starts, words)
            words = line["words"][at + size - 2]
            line["group"][here] = 1 + number if self.across == "block" else 1
            line["positions"][here] = np.arange(position, position + size)
            position = 0 if self.across == "block" else position + size
            at += size

    def fill_packed(self, line: dict, plan: Plan, examples: np.ndarray) -> None:
        """Examples side by side, each with its own group and positions from 0."""
        special = self.corpus.tokenizer
        at = words = 0
        for number, example in enumerate(examples):
            begin = at
            line["ids"][at] = special.cls_id
            at += 1
            for kind, (start, stop) in enumerate((plan.a[example], plan.b[example])):
                if start == stop:
                    continue
                pieces, starts = self.corpus.read(start, stop)
                here = slice(at, at + len(pieces))
                line["ids"][here] = pieces
                line["words"][here] = count_words(starts, words)
                words = line["words"][at + len(pieces) - 1]
                line["ids"][at + len(pieces)] = special.sep_id
                line["types"][at : at + len(pieces) + 1] = kind
                at += len(pieces) + 1
            line["group"][begin:at] = number + 1
            line["positions"][begin:at] = np.arange(at - begin)
            if self.kind == "pair":
                line["first"][number] = begin
                line["next_sentence"][number] = plan.labels[example]


def count_words(starts: np.ndarray, before: int) -> np.ndarray:
    """Numbers of the words, going on from `before`; a stretch begins a word."""
    starts = starts.copy()
    starts[0] = True
    return before + np.cumsum(starts)


# Two epochs may be in use at a time; row sets are told apart by identity.


@lru_cache(maxsize=4)
def _plan(rows: Rows, epoch: int) -> Plan:
    if rows.kind == "full":
        return plan_full(rows.units, rows.length)
    if rows.kind == "doc":
        return plan_doc(rows.units, rows.length)
    rng = random.Random(f"{rows.seed}/{epoch}")
    return plan_pair(rows.units, rows.length, rng)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)
