"""Pairs against the releases, line by line, and against their descriptions."""

import random

import numpy as np
import pytest

from bert_jax.data import pairs as module
from bert_jax.data.pairs import RULES, truncate_pair
from tests.data.made import SIGMAS, cut, joined, numbered


def random_documents(rng, count: int, *, longest: int) -> list[list[list[int]]]:
    """Sentences of numbered pieces; every third document is a single sentence."""
    return numbered(
        [
            [
                [0] * rng.randint(1, longest)
                for _ in range(rng.choice((1, rng.randint(1, 9))))
            ]
            for _ in range(count)
        ]
    )


def starts_of(document: list[list[int]]) -> list[int]:
    return [sentence[0] for sentence in document] + [document[-1][-1] + 1]


def examples(kind, documents, length, rng, partner=None) -> list[tuple]:
    """(A, B, label) of each document, the parts as lists of pieces."""
    found = []
    for document in documents:
        made = RULES[kind](starts_of(document), length, rng, partner)
        found.append([(list(range(*e[0:2])), list(range(*e[2:4])), e[4]) for e in made])
    return found


def partner_of_the_release(documents, rng):
    """A random B as create_pretraining_data.py of BERT draws it."""
    home = {
        sentence[0]: number
        for number, document in enumerate(documents)
        for sentence in document
    }

    def partner(a: int, wanted: int) -> tuple[int, int]:
        for _ in range(10):
            other = rng.randint(0, len(documents) - 1)
            if other != home[a]:
                break
        begin = rng.randint(0, len(documents[other]) - 1)
        b = []
        for sentence in documents[other][begin:]:
            b += sentence
            if len(b) >= wanted:
                break
        return b[0], b[-1] + 1

    return partner


def elsewhere(a: int, wanted: int) -> tuple[int, int]:
    """A partner from no document at all."""
    return 10**6, 10**6 + max(1, wanted)


# --- pair ----------------------------------------------------------------------------


def release_pairs(documents, number: int, length: int, rng) -> list[tuple]:
    """Google's create_instances_from_document on lists, up to the pair of lists.

    Every draw is made where the release makes it.
    """
    room = length - 3
    goal = room
    if rng.random() < 0.1:
        goal = rng.randint(2, room)
    document = documents[number]
    found, chunk, collected, i = [], [], 0, 0
    while i < len(document):
        chunk.append(document[i])
        collected += len(document[i])
        if i == len(document) - 1 or collected >= goal:
            a_end = 1
            if len(chunk) >= 2:
                a_end = rng.randint(1, len(chunk) - 1)
            a, b = joined(chunk[:a_end]), []
            if len(chunk) == 1 or rng.random() < 0.5:
                label = 1
                wanted = goal - len(a)
                for _ in range(10):
                    other = rng.randint(0, len(documents) - 1)
                    if other != number:
                        break
                begin = rng.randint(0, len(documents[other]) - 1)
                for sentence in documents[other][begin:]:
                    b.extend(sentence)
                    if len(b) >= wanted:
                        break
                i -= len(chunk) - a_end
            else:
                label = 0
                b.extend(joined(chunk[a_end:]))
            while len(a) + len(b) > room:
                longer = a if len(a) > len(b) else b
                if rng.random() < 0.5:
                    del longer[0]
                else:
                    longer.pop()
            found.append((a, b, label))
            chunk, collected = [], 0
        i += 1
    return found


@pytest.mark.parametrize("longest", ["cut", "uncut"])
@pytest.mark.parametrize("count", [2, 3, 20])
def test_pairs_are_those_of_the_release(count, longest):
    """With the sentences cut to a row, as plans have it, or as long as they are."""
    labels = set()
    for seed in range(60):
        rng = random.Random(seed)
        length = rng.choice((8, 9, 16, 40, 128))
        documents = random_documents(rng, count, longest=rng.choice((1, 4, 12, 60)))
        if longest == "cut":
            documents = [cut(sentences, length - 3) for sentences in documents]
        ours, theirs = random.Random(seed), random.Random(seed)
        partner = partner_of_the_release(documents, ours)
        found = joined(examples("pair", documents, length, ours, partner))
        expected = joined(
            release_pairs(documents, number, length, theirs) for number in range(count)
        )
        assert found == expected
        assert ours.getstate() == theirs.getstate()
        assert all(len(a) + len(b) + 3 <= length for a, b, _ in found)
        labels |= {label for *_, label in found}
    assert labels == {0, 1}


def test_positives_follow_and_what_b_did_not_use_is_put_back(monkeypatch):
    """Before truncation, which is left out here."""
    monkeypatch.setattr(module, "truncate_pair", lambda a, b, room, rng: (*a, *b))
    rng = random.Random(5)
    documents = random_documents(rng, 120, longest=12)
    seen = {0: 0, 1: 0}
    found = examples("pair", documents, 40, rng, elsewhere)
    for document, made in zip(documents, found, strict=True):
        read = []
        for a, b, label in made:
            if label == 0:
                assert b[0] == a[-1] + 1
                assert b[-1] <= document[-1][-1]
            read += a if label else a + b
            seen[label] += 1
        assert read == joined(document)  # once, in order
    assert min(seen.values()) > 20


def test_share_of_random_pairs():
    """Exactly binomial: two sentences of one piece are one choice a document."""
    count = 6000
    documents = numbered([[[0], [0]]] * count)
    found = joined(examples("pair", documents, 32, random.Random(1), elsewhere))
    positives = sum(label == 0 for *_, label in found)
    assert abs(positives - count / 2) < SIGMAS * (count / 4) ** 0.5
    # A random B leaves one sentence, which can only have a random B.
    assert len(found) == positives + 2 * (count - positives)


def long_documents(rng, count: int = 10, sentences: int = 4000):
    sizes = [[[0] * rng.randint(1, 9) for _ in range(sentences)] for _ in range(count)]
    return numbered(sizes)


@pytest.mark.parametrize("kind", ["pair", "order", "sentence-pair"])
def test_labels_are_balanced(kind):
    """Only the end of a document can force a label, or leave one out."""
    rng = random.Random(2)
    documents = long_documents(rng)
    labels = [e[2] for e in joined(examples(kind, documents, 64, rng, elsewhere))]
    count = len(labels)
    assert count > 2000
    slack = SIGMAS * (count / 4) ** 0.5 + 2 * len(documents)
    assert abs(labels.count(1) - count / 2) < slack
    # Lone chunks: at the end of a document, and where a target is very short.
    assert labels.count(-1) <= (count / 20 if kind == "order" else 0)


@pytest.mark.parametrize("kind", ["pair", "order"])
def test_share_of_short_documents(kind):
    """With sentences of one piece, the longest pair of a document is its target."""
    count, room = 2000, 20
    documents = numbered([[[0]] * 200] * count)
    found = examples(kind, documents, room + 3, random.Random(3), elsewhere)
    targets = np.asarray([max(len(a) + len(b) for a, b, _ in made) for made in found])
    assert targets.max() == room
    assert targets.min() == 2
    # Drawn from 2..room: one of room - 1 short documents is as long as the others.
    share = 0.1 * (1 - 1 / (room - 1))
    short = targets[targets < room]
    slack = SIGMAS * (count * share * (1 - share)) ** 0.5
    assert abs(len(short) - share * count) < slack
    spread = ((room - 2) ** 2 / 12) ** 0.5
    assert abs(short.mean() - (2 + room - 1) / 2) < SIGMAS * spread / len(short) ** 0.5


def test_truncation():
    """The longer is shortened, B if both are equal, at either end alike."""
    rng = random.Random(0)
    front = total = 0
    for _ in range(500):
        size_a, size_b, room = (
            rng.randint(1, 30),
            rng.randint(1, 30),
            rng.randint(2, 40),
        )
        a0, a1, b0, b1 = truncate_pair((100, 100 + size_a), (7, 7 + size_b), room, rng)
        assert 100 <= a0 < a1 <= 100 + size_a
        assert 7 <= b0 < b1 <= 7 + size_b
        kept = min(size_a + size_b, room)
        kept_a = min(size_a, max((kept + 1) // 2, kept - size_b))
        assert (a1 - a0, b1 - b0) == (kept_a, kept - kept_a)
        front += a0 - 100 + b0 - 7
        total += size_a + size_b - kept
    assert abs(front - total / 2) < SIGMAS * (total / 4) ** 0.5


# --- order ---------------------------------------------------------------------------


def test_order_unswapped_is_the_document(monkeypatch):
    """Before truncation, which is left out here: all of the text, once, in order."""
    monkeypatch.setattr(module, "truncate_pair", lambda a, b, room, rng: (*a, *b))
    documents = random_documents(random.Random(5), 300, longest=12)
    found = examples("order", documents, 40, random.Random(6))
    seen = {-1: 0, 0: 0, 1: 0}
    for document, made in zip(documents, found, strict=True):
        read = []
        for first, second, label in made:
            seen[label] += 1
            read += second + first if label == 1 else first + second
            if label == -1:
                assert not second
                assert first in document  # one whole sentence
            else:
                assert first
                assert second
        assert read == joined(document)
    assert min(seen.values()) > 50


def test_order_parts_are_neighbours_of_one_document():
    documents = random_documents(random.Random(7), 200, longest=30)
    found = examples("order", documents, 32, random.Random(8))
    cut_short = 0
    for document, made in zip(documents, found, strict=True):
        pieces = set(joined(document))
        for first, second, label in made:
            assert len(first) + len(second) <= 29
            assert pieces.issuperset(first + second)
            if label >= 0:
                low, high = (second, first) if label else (first, second)
                assert low[-1] < high[0]
                cut_short += low[-1] + 1 < high[0]
    assert cut_short > 10


@pytest.mark.parametrize("length", [64, 65])
def test_order_is_not_told_by_the_lengths(length):
    """Truncation leaves parts of nearly equal lengths: which is longer says nothing."""
    rng = random.Random(9)
    documents = long_documents(rng)
    labels = {-1: [], 0: [], 1: []}
    for first, second, label in joined(examples("order", documents, length, rng)):
        if label >= 0:
            longer = np.sign(len(first) - len(second))
            if abs(len(first) - len(second)) <= 1:
                labels[longer].append(label)
    assert sum(map(len, labels.values())) > 200
    for found in labels.values():
        assert abs(sum(found) - len(found) / 2) <= SIGMAS * (len(found) / 4) ** 0.5


# --- sentence-pair -------------------------------------------------------------------


def test_natural_sentences():
    """Positives are neighbours; every sentence is used once, besides a random B."""
    rng = random.Random(3)
    documents = random_documents(rng, 300, longest=12)
    partner = partner_of_the_release(documents, rng)
    found = examples("sentence-pair", documents, 40, rng, partner)
    everything = joined(documents)
    home = [n for n, document in enumerate(documents) for _ in joined(document)]
    seen = {0: 0, 1: 0}
    for number, (document, made) in enumerate(zip(documents, found, strict=True)):
        used = []
        for a, b, label in made:
            assert a in document
            assert b in everything
            if label == 0:
                assert document.index(b) == document.index(a) + 1
            else:
                assert home[b[0]] != number
            used += [a] if label else [a, b]
            seen[label] += 1
        assert used == document
    assert min(seen.values()) > 100


def test_long_natural_sentences_are_truncated():
    documents = numbered([[[0] * 20, [0] * 25]] * 40)
    found = joined(
        examples("sentence-pair", documents, 24, random.Random(1), elsewhere)
    )
    for a, b, label in found:
        assert len(a) + len(b) == (21 if label == 0 or len(a) == 20 else len(a) + 1)


# --- distance ------------------------------------------------------------------------


@pytest.mark.parametrize("far", [3, 100])
def test_distances_are_what_the_labels_say(far, monkeypatch):
    """Every sentence is A once, in order; B is as far away as its label says."""
    monkeypatch.setattr(module, "FAR", far)
    rng = random.Random(3)
    documents = random_documents(rng, 300, longest=6)
    partner = partner_of_the_release(documents, rng)
    found = examples("distance", documents, 40, rng, partner)
    home = [n for n, document in enumerate(documents) for _ in joined(document)]
    seen = {}
    for number, (document, made) in enumerate(zip(documents, found, strict=True)):
        assert [a for a, _, _ in made] == document
        for place, (_, b, label) in enumerate(made):
            same = home[b[0]] == number
            gap = document.index(b) - place if same else None
            assert label == (2 if not same else 0 if abs(gap) == 1 else 1)
            assert gap != 0
            assert not same or abs(gap) <= far
            seen[gap] = seen.get(gap, 0) + 1
    assert {None, *range(-3, 0), *range(1, 4)} <= set(seen)
    assert len(seen) == (7 if far == 3 else 1 + 2 * 8)


def test_distances_are_balanced():
    """Only a document of less than four sentences can force a class; a sentence of the
    middle has a B on either side by even chance."""
    rng = random.Random(4)
    documents = numbered([[[0]] * 200] * 60)
    found = joined(examples("distance", documents, 16, rng, elsewhere))
    count = len(found)
    for label in range(3):
        share = sum(e[2] == label for e in found)
        assert abs(share - count / 3) < SIGMAS * (count * 2 / 9) ** 0.5
    for label in (0, 1):
        after = [b[0] > a[0] for a, b, which in found if which == label]
        slack = SIGMAS * (len(after) / 4) ** 0.5
        assert abs(sum(after) - len(after) / 2) < slack
    short = numbered([[[0]]] * 50 + [[[0], [0]]] * 50)
    labels = [e[2] for e in joined(examples("distance", short, 16, rng, elsewhere))]
    assert set(labels[:50]) == {2}
    assert set(labels[50:]) == {0, 2}


# --- electra -------------------------------------------------------------------------


def electra_example(sentences, goal: int, length: int, rng) -> tuple[list, list]:
    """ELECTRA's on lists: 10 % one part; else A to half of the target.

    A sentence goes to A if A is empty, if A stays under its target, or with
    probability 0.5 if it takes A over it; after the first one of B all go to B.
    """
    first_goal = 100_000 if rng.random() < 0.1 else (goal - 3) // 2
    a, b = [], []
    for sentence in sentences:
        fits = len(a) + len(sentence) < first_goal
        if b:
            b = b + sentence
        elif not a or fits or (len(a) < first_goal and rng.random() < 0.5):
            a = a + sentence
        else:
            b = list(sentence)
    a = a[: length - 2]
    return a, b[: max(0, length - len(a) - 3)]


def electra_examples(document, length: int, rng) -> list[tuple[list, list, int]]:
    def draw() -> int:
        return rng.randint(5, length) if rng.random() < 0.05 else length

    goal, sentences, found = draw(), [], []
    for number, sentence in enumerate(document):
        sentences.append(sentence)
        if len(joined(sentences)) >= goal or number == len(document) - 1:
            found.append((*electra_example(sentences, goal, length, rng), -1))
            goal, sentences = draw(), []
    return found


def test_electra_against_its_description():
    pairs = 0
    for seed in range(150):
        rng = random.Random(seed)
        length = rng.choice((8, 16, 40, 128))
        documents = random_documents(rng, 12, longest=rng.choice((1, 4, 12, 60)))
        ours, theirs = random.Random(seed), random.Random(seed)
        found = examples("electra", documents, length, ours)
        expected = [electra_examples(d, length, theirs) for d in documents]
        assert found == expected
        assert ours.getstate() == theirs.getstate()
        for a, b, _ in joined(found):
            assert a
            assert len(a) + len(b) + 2 + bool(b) <= length
            assert not b or b[0] == a[-1] + 1
            pairs += len(b) > 0
    assert pairs > 400


def test_electra_shares():
    """Sentences of one piece: sizes are targets, and only chance makes a lone A."""
    count, length = 40, 64
    documents = numbered([[[0]] * 12_000] * count)
    found = [e[:-1] for e in examples("electra", documents, length, random.Random(4))]
    made = joined(found)  # without the last of each document, which is cut off
    total = len(made)
    assert total > 7000
    alone = [(a, b) for a, b, _ in made if not b]
    slack = SIGMAS * (total * 0.1 * 0.9) ** 0.5
    assert abs(len(alone) - 0.1 * total) < slack
    # 5 % have a target of 5..64; those of 62 and more fill the row like all others.
    share = 0.05 * (61 - 5 + 1) / (64 - 5 + 1)
    sizes = np.asarray([len(a) + len(b) for a, b, _ in made if b])
    short = sizes[sizes < length - 3]
    slack = SIGMAS * (len(sizes) * share) ** 0.5
    assert abs(len(short) - share * len(sizes)) < slack
    assert short.min() >= 5
    # A ends just under half the target, or just over it by an even chance.
    halves = [len(a) for a, b, _ in made if len(a) + len(b) == length - 3 and b]
    assert set(halves) >= {29, 30}
    over = sum(half > 29 for half in halves)
    assert abs(over - len(halves) / 2) < SIGMAS * (len(halves) / 4) ** 0.5
