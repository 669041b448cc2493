"""A table of similar words (similar.py) from text, or from vectors that are given.

    text ──words──> numbers ──skip-gram──> vectors ──nearest──> table

Words are found and encoded as `prepare` does it; two words with the same pieces are one
word. Words that are rare, longer than similar.LONGEST pieces, or hold a piece that the
tokenizer does not know are left out: they are hidden behind random pieces.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bert_jax.data.prepare import (
    Reader,
    Settings,
    check,
    encode_documents,
    word_begins,
)
from bert_jax.data.similar import LONGEST, Similar, make_similar
from bert_jax.data.text import find_sources
from bert_jax.data.tokenizers import Tokenizer
from bert_jax.data.word_vectors import read_vectors, skip_gram
from bert_jax.data.words import by_spaces
from bert_jax.errors import InputError

RAREST = 5  # times that a word is there at least, as in word2vec
MOST = 100_000  # words: all are compared with all


def similar_from_text(
    inputs: Sequence[str],
    *,
    tokenizer: Tokenizer,
    words: str = "pieces",
    neighbours: int = 10,
    seed: int = 0,
    progress: bool = True,
) -> Similar:
    """With vectors learnt from this text."""
    check_neighbours(neighbours)
    settings = Settings(words=words)
    check(settings)
    found, numbers, sentence = count_words(inputs, tokenizer, settings)
    counts = np.bincount(numbers, minlength=len(found))
    special = set(tokenizer.special_ids)
    usable = [len(ids) <= LONGEST and special.isdisjoint(ids) for ids in found]
    often = np.flatnonzero((counts >= RAREST) & np.array(usable, bool))
    often = often[np.argsort(-counts[often], kind="stable")][:MOST]
    if len(often) < 2:
        raise InputError(
            f"the text has {len(often)} words that are there {RAREST} times: it is "
            "too little to tell which are similar"
        )
    new = np.full(len(found), -1, np.int32)
    new[often] = np.arange(len(often))
    kept = new[numbers] >= 0
    with tqdm(total=0, desc="vectors", unit=" words", disable=not progress) as bar:
        vectors = skip_gram(
            new[numbers[kept]], sentence[kept], seed=seed, show=bar.update
        )
    pieces = [found[n] for n in often]
    names = [by_spaces(tokenizer.decode(ids.tolist()))[0] for ids in pieces]
    return make_similar(
        pieces,
        vectors,
        names=names,
        tokenizer=tokenizer.hash,
        found_by=words,
        neighbours=neighbours,
    )


def similar_from_vectors(
    path: str | Path,
    *,
    tokenizer: Tokenizer,
    words: str = "pieces",
    neighbours: int = 10,
) -> Similar:
    """With the vectors of a file, most frequent words first, as they mostly are."""
    check_neighbours(neighbours)
    check(Settings(words=words))
    names, vectors = read_vectors(path, most=MOST)
    special = set(tokenizer.special_ids)
    encoded = tokenizer.encode_batch([tokenizer.joint + name for name in names])
    kept: dict[tuple[int, ...], int] = {}
    for number, ids in enumerate(encoded):
        # Where pieces tell what a word is, several words are never one.
        several = words == "pieces" and tokenizer.starts[ids].sum() > 1
        if 0 < len(ids) <= LONGEST and special.isdisjoint(ids) and not several:
            kept.setdefault(tuple(ids), number)
    if len(kept) < 2:
        raise InputError(
            f"of the {len(names)} words of {path} the tokenizer knows {len(kept)}"
            + (" as single words" if words == "pieces" else "")
        )
    numbers = list(kept.values())
    return make_similar(
        [np.array(ids, np.int32) for ids in kept],
        vectors[numbers],
        names=[names[n] for n in numbers],
        tokenizer=tokenizer.hash,
        found_by=words,
        neighbours=neighbours,
    )


def check_neighbours(neighbours: int) -> None:
    if neighbours < 1:
        raise InputError(f"neighbours={neighbours}: at least 1")


def count_words(
    inputs: Sequence[str], tokenizer: Tokenizer, settings: Settings
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """The pieces of each word; the text as their numbers [T], in the order in which
    they come first; and the number of the sentence of each [T]."""
    known: dict[bytes, int] = {}
    numbers, sentence, sentences = [], [], 0
    wide = tokenizer.dtype.itemsize
    for batch in Reader(find_sources(inputs), settings).batches():
        encoded, bits, _ = encode_documents(batch.documents, tokenizer, settings)
        lengths = np.array([len(ids) for ids in encoded], np.int64)
        ids = np.concatenate([np.empty(0, tokenizer.dtype), *encoded])
        starts = np.flatnonzero(word_begins(ids, bits, lengths, tokenizer))
        stops = np.append(starts, len(ids))[1:]
        data = ids.tobytes()
        numbers += [
            known.setdefault(data[start * wide : stop * wide], len(known))
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        owner = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        sentence.append(owner[starts] + sentences)
        sentences += len(lengths)
    found = [np.frombuffer(data, tokenizer.dtype) for data in known]
    return found, np.array(numbers, np.int32), np.concatenate(sentence)
