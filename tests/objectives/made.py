"""Packed rows with words of several pieces, and a net that says what it is told."""

import numpy as np

PAD, CLS, SEP, MASK = 0, 2, 3, 4
SPECIAL = (PAD, 1, CLS, SEP, MASK)


class FixedNet:
    """Gives chosen logits, and remembers what it was asked."""

    def __init__(self, **logits):
        self.logits = logits

    def __call__(self, tokens, **asked):
        self.tokens, self.asked = tokens, asked
        return self.logits


def packed(texts: list[list[list[tuple[int, ...]]]], length: int) -> dict:
    """Rows of examples of words of pieces, laid out as data/rows.py has it."""
    names = ("ids", "types", "positions", "group", "words")
    batch = {name: np.zeros((len(texts), length), np.int32) for name in names}
    for row, examples in enumerate(texts):
        at = number = 0
        for group, words in enumerate(examples, 1):
            pieces = [(CLS, 0)]
            for word in words:
                number += 1
                pieces += [(piece, number) for piece in word]
            pieces.append((SEP, 0))
            size = len(pieces)
            assert at + size <= length
            here = slice(at, at + size)
            batch["ids"][row, here], batch["words"][row, here] = zip(
                *pieces, strict=True
            )
            batch["positions"][row, here] = range(size)
            batch["group"][row, here] = group
            at += size
    batch["row_id"] = np.arange(len(texts), dtype=np.int32)
    return batch


def random_texts(
    rows: int, length: int, *, vocab: int, seed: int = 0, longest: int = 3
):
    """Rows of one to four examples, of words of 1 to `longest` pieces."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(rows):
        examples, room = [], length
        for _ in range(rng.integers(1, 5)):
            wanted, words = rng.integers(1, length // 2), []
            while room > 2 and len(words) < wanted:
                size = int(rng.integers(1, longest + 1))
                if sum(map(len, words)) + size + 2 > room:
                    break
                words.append(tuple(rng.integers(5, vocab, size).tolist()))
            if not words:
                break
            examples.append(words)
            room -= sum(map(len, words)) + 2
        texts.append(examples)
    return texts


def labelled(texts: list, length: int, *, slots: int = 8, seed: int = 0) -> dict:
    """Packed rows with where each example begins, and one of three labels for it."""
    batch, rng = packed(texts, length), np.random.default_rng(seed)
    first = np.zeros((len(texts), slots), np.int32)
    labels = np.full((len(texts), slots), -1, np.int32)
    for row, group in enumerate(batch["group"]):
        for number in range(group.max()):
            first[row, number] = (group == number + 1).argmax()
            labels[row, number] = rng.integers(3)
    return batch | {"first": first, "next_sentence": labels, "label": labels}


def counting(
    rows: int, length: int, *, turns: int = 20, seed: int = 0, shuffled: bool = False
) -> dict[str, np.ndarray]:
    """Rows that count on from anywhere, modulo `turns`, two pieces a word; or the same
    pieces in any order and any row: within its row, what is left would tell a lot of
    what is hidden."""
    rng = np.random.default_rng(seed)
    place = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    ids = (rng.integers(0, turns, (rows, 1)) + place) % turns
    if shuffled:
        ids = rng.permutation(ids.ravel()).reshape(ids.shape)
    return {
        "ids": ids.astype(np.int32),
        "types": np.zeros_like(place),
        "positions": place,
        "group": np.ones_like(place),
        "words": place // 2 + 1,
        "row_id": np.arange(rows, dtype=np.int32),
    }


def pairs(
    rows: int, length: int, *, seed: int = 0, swap: bool = False, shuffled: bool = False
) -> dict[str, np.ndarray]:
    """Rows of two sentences. Of the two topics that there are, a sentence that begins a
    text has five pieces of its own, and one that goes on with it five others. Label 1:
    the second is of the other topic, or, with `swap`, stands first; or the labels are
    those of any rows."""
    rng = np.random.default_rng(seed)
    batch = counting(rows, length)
    topic, label = rng.integers(0, 2, (2, rows, 1))
    part = (batch["positions"] >= length // 2).astype(np.int32)
    block = 2 * topic + (part ^ label) if swap else 2 * (topic ^ part & label) + part
    if shuffled:
        label = rng.permutation(label)
    return batch | {
        "ids": (5 * block + rng.integers(0, 5, block.shape)).astype(np.int32),
        "first": np.zeros((rows, 1), np.int32),
        "next_sentence": label.astype(np.int32),
    }
