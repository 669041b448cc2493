"""Examples of two parts, A and B: who is set beside whom.

    pair           next-sentence prediction by BERT's rules (arXiv:1810.04805): B
                   follows A, label 0, or comes from elsewhere, label 1
    order          sentence order by ALBERT's (arXiv:1909.11942): B follows A, label 0,
                   or the two are swapped, label 1
    sentence-pair  two natural sentences, that follow each other or not (RoBERTa's
                   SENTENCE-PAIR, arXiv:1907.11692)
    distance       two sentences: adjacent, label 0, of one document but not adjacent,
                   label 1, or of two, label 2 (ERNIE 2.0's task, arXiv:1907.12412)
    electra        two parts of one text, no label (arXiv:2003.10555)

Each rule sees the documents of one record as `starts`, the piece at which each sentence
begins (and the end), and makes rows (A start, A stop, B start, B stop, label); label -1
is no label, an empty B no B.

Differs from the release of BERT in where a random B comes from: it begins at a random
sentence of another document, but the next one goes on after it for a while, so that
the partners of a block of text are read in one piece. ALBERT's release takes a random B
for a chunk of one sentence; here it stays alone, without a label. ERNIE's paper says no
more of the distance than that: here B comes after A as often as before it, and a B that
is not adjacent from at most FAR sentences away, so that it is read with A.
"""

import random
from collections.abc import Callable, Sequence

Example = tuple[int, int, int, int, int]
# (piece at which A begins, pieces wanted) -> (B start, B stop), in another document.
Partner = Callable[[int, int], tuple[int, int]]

SHORT = 0.1  # of the documents are cut to short pairs, as in BERT
FAR = 100  # sentences between two of one document, at the most


def next_sentence(
    starts: Sequence[int], length: int, rng: random.Random, partner: Partner
) -> list[Example]:
    """One document, as create_pretraining_data.py of google-research/bert has it."""
    found = []
    room = length - 3
    for begin, middle, end, target, put_back in chunks(starts, room, rng):
        a = starts[begin], starts[middle]
        if end - begin == 1 or rng.random() < 0.5:
            b, label = partner(a[0], target - (a[1] - a[0])), 1
            put_back()  # sentences that were collected and not used
        else:
            b, label = (starts[middle], starts[end]), 0
        found.append((*truncate_pair(a, b, room, rng), label))
    return found


def sentence_order(
    starts: Sequence[int], length: int, rng: random.Random, partner: Partner
) -> list[Example]:
    """One document; a chunk of one sentence has no order and no label."""
    found = []
    room = length - 3
    for begin, middle, end, _, _ in chunks(starts, room, rng):
        a, b = (starts[begin], starts[middle]), (starts[middle], starts[end])
        if end - begin == 1:
            found.append((*truncate_pair(a, (0, 0), room, rng), -1))
            continue
        label = int(rng.random() < 0.5)
        if label:  # before they are shortened: which is longer must not tell the label
            a, b = b, a
        found.append((*truncate_pair(a, b, room, rng), label))
    return found


def chunks(starts: Sequence[int], room: int, rng: random.Random):
    """Sentences begin..end, A before `middle`; `put_back` takes back those after it."""
    last = len(starts) - 1
    target = room
    if rng.random() < SHORT:
        target = rng.randint(2, room)
    begin = at = 0

    def put_back() -> None:
        nonlocal begin
        begin = middle

    while at < last:
        if at < last - 1 and starts[at + 1] - starts[begin] < target:
            at += 1
            continue
        count = at + 1 - begin
        middle = begin + (rng.randint(1, count - 1) if count >= 2 else 1)
        chunk = begin, middle, at + 1, target, put_back
        begin = at + 1
        yield chunk
        at = begin


def natural_pairs(
    starts: Sequence[int], length: int, rng: random.Random, partner: Partner
) -> list[Example]:
    """One document; what B did not use begins the next pair, as in BERT's rules."""
    found = []
    at, last = 0, len(starts) - 1
    while at < last:
        a = starts[at], starts[at + 1]
        if at + 1 == last or rng.random() < 0.5:
            b, label = partner(a[0], 1), 1  # one sentence
        else:
            b, label = (starts[at + 1], starts[at + 2]), 0
        found.append((*truncate_pair(a, b, length - 3, rng), label))
        at += 2 - label
    return found


def sentence_distance(
    starts: Sequence[int], length: int, rng: random.Random, partner: Partner
) -> list[Example]:
    """One document: every sentence is A once, beside a B of each class by even chance,
    or of those classes that its document allows."""
    found = []
    last = len(starts) - 1
    for at in range(last):
        near = [n for n in (at - 1, at + 1) if 0 <= n < last]
        before = range(max(0, at - FAR), at - 1)
        after = range(at + 2, min(last, at + FAR + 1))
        possible = near, before or after, True
        label = rng.choice([n for n, some in enumerate(possible) if some])
        a = starts[at], starts[at + 1]
        if label == 2:
            b = partner(a[0], 1)  # one sentence
        else:
            other = rng.choice([*before, *after] if label else near)
            b = starts[other], starts[other + 1]
        found.append((*truncate_pair(a, b, length - 3, rng), label))
    return found


def electra(
    starts: Sequence[int], length: int, rng: random.Random, partner: Partner
) -> list[Example]:
    """One document, as build_pretraining_dataset.py of google-research/electra has it.

    What does not fit at the end of a part is cut off and lost, as there. A is always
    followed by B: there, a short sentence after one of B may still join A.
    """

    def draw_target() -> int:
        return rng.randint(5, length) if rng.random() < 0.05 else length

    found = []
    begin, target = 0, draw_target()
    last = len(starts) - 1
    for at in range(1, last + 1):
        if starts[at] - starts[begin] < target and at < last:
            continue
        first_target = 100_000 if rng.random() < 0.1 else (target - 3) // 2
        middle = begin
        while middle < at:
            size, more = (starts[m] - starts[begin] for m in (middle, middle + 1))
            if (
                size == 0
                or more < first_target
                or (size < first_target and rng.random() < 0.5)
            ):
                middle += 1
            else:
                break
        a0, a1 = starts[begin], min(starts[middle], starts[begin] + length - 2)
        b0 = starts[middle]
        b1 = min(starts[at], b0 + max(0, length - (a1 - a0) - 3))
        found.append((a0, a1, b0, b1, -1) if b1 > b0 else (a0, a1, 0, 0, -1))
        begin, target = at, draw_target()
    return found


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


# The label of a B from another document.
RANDOM = {"pair": 1, "sentence-pair": 1, "distance": 2}
RULES = {
    "pair": next_sentence,
    "order": sentence_order,
    "sentence-pair": natural_pairs,
    "distance": sentence_distance,
    "electra": electra,
}
