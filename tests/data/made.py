"""Small texts with everything that can go wrong in them, as corpora of many records."""

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data import prepare as module
from bert_jax.data import records
from bert_jax.data.corpus import Corpus
from bert_jax.data.tokenizers import Tokenizer

SYLLABLES = ("ba", "ke", "li", "mo", "nu", "sta", "tri", "von", "wex", "yod")
NOTHING = "\u200b" * 4000  # a text the tokenizer makes no pieces of
SIGMAS = 4.42  # a normal variable is further out once in 100,000 cases


def make_texts(count: int, seed: int = 0) -> list[list[str]]:
    """Documents of 1 to 12 sentences.

    Every fifth has one; some sentences and some words are longer than a short row.
    Two documents of nothing follow each other, so that a record holds nothing at all.
    """
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(150)]
    words += ["".join(rng.choices(SYLLABLES, k=30)) for _ in range(3)]
    texts = [
        [
            " ".join(rng.choices(words, k=rng.choice((1, 2, 4, 5, 7, 9, 40))))
            for _ in range(1 if number % 5 == 0 else rng.randint(2, 12))
        ]
        for number in range(count)
    ]
    middle = count // 2
    return [*texts[:middle], [NOTHING], [NOTHING], *texts[middle:]]


def make_corpus(
    folder: Path,
    texts: list[list[str]],
    tokenizer: Tokenizer,
    *,
    record: int = 3000,
    shard: int = 6000,
    **settings: str,
) -> Corpus:
    """Records of about so many characters, in shards of about so many bytes."""
    source = folder.with_suffix(".txt")
    source.write_text("\n\n".join("\n".join(lines) for lines in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_CHARACTERS", record)
        patch.setattr(records, "SHARD_BYTES", shard)
        return module.prepare(
            [str(source)],
            tokenizer=tokenizer,
            out=folder,
            sentences="line",
            workers=0,
            progress=False,
            **settings,
        )


def encode(texts: list[list[str]], tokenizer: Tokenizer) -> list[list[list[int]]]:
    """Documents as sentences as ids, without what holds nothing."""
    found = [[tokenizer.encode(line) for line in lines] for lines in texts]
    return [kept for lines in found if (kept := [ids for ids in lines if ids])]


def joined(lists: Iterable) -> list:
    return list(itertools.chain.from_iterable(lists))


def cut(parts: list, longest: int) -> list:
    """Each list in pieces of at most `longest`."""
    return [
        part[at : at + longest] for part in parts for at in range(0, len(part), longest)
    ]


def numbered(documents: list[list[list]]) -> list[list[list[int]]]:
    """The same with pieces numbered through the corpus in the place of ids."""
    count = itertools.count()
    return [[[next(count) for _ in part] for part in parts] for parts in documents]


def into_words(document: list[list], begins: list[bool]) -> list[list[int]]:
    """The numbered pieces of a document word by word; it begins with a word."""
    words: list[list[int]] = []
    for number, piece in enumerate(joined(document)):
        if number == 0 or begins[piece]:
            words.append([])
        words[-1].append(piece)
    return words


def in_records(documents: list, corpus: Corpus) -> list[list]:
    """Documents of each record."""
    counts = corpus.index["document_count"]
    ends = np.cumsum(counts)
    return [
        documents[end - count : end] for end, count in zip(ends, counts, strict=True)
    ]


def full_row(units: list[tuple[int, list]]) -> list[tuple]:
    """A full row as (piece, number of the document in the row, place in it)."""
    row = [("CLS", 0, 0)]
    place = number = 0
    for at, (document, pieces) in enumerate(units):
        for piece in pieces:
            place += 1
            row.append((piece, number, place))
        if at + 1 == len(units) or units[at + 1][0] != document:
            row.append(("SEP", number, place + 1))
            number, place = number + 1, -1
    return row


def full_rows(documents: list[list[list[int]]], length: int) -> list[list[tuple]]:
    """By trial: one more word as long as what is shown is not too long."""
    units = [
        (number, part)
        for number, words in enumerate(documents)
        for part in cut(words, length - 2)
    ]
    found, start = [], 0
    while start < len(units):
        stop = start + 1
        while stop < len(units) and len(full_row(units[start : stop + 1])) <= length:
            stop += 1
        found.append(full_row(units[start:stop]))
        start = stop
    return found


def doc_stretches(documents: list[list[list[int]]], room: int) -> list[list[int]]:
    """Word after word of one document, as long as there is room."""
    found = []
    for words in documents:
        row: list[int] = []
        for word in cut(words, room):
            if len(row) + len(word) > room:
                found.append(row)
                row = []
            row = row + word
        found.append(row)
    return found
