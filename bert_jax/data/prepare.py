"""Raw text to a corpus on disk (corpus.py): fast, streaming, and the same every time.

One process reads, filters and cuts the text into batches of about a megabyte; workers
split sentences and tokenise, each batch by itself; the first process writes them in
order. So memory depends on the longest document and not on the corpus, and the bytes
written depend on neither the number of workers nor how often it was interrupted: run
again, it keeps the records that are whole and goes on after them.
"""

import collections
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import types
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from etils import epath
from tqdm import tqdm

from bert_jax.bucket import is_bucket, upload
from bert_jax.data import sentences
from bert_jax.data.corpus import (
    FORMAT,
    Columns,
    Corpus,
    columns_of_pieces,
    open_corpus,
    pack_counts,
)
from bert_jax.data.duplicates import DUPLICATES, make_filter
from bert_jax.data.records import Writer, serialise
from bert_jax.data.similar import Similar, is_similar, load_similar
from bert_jax.data.text import Document, Source, find_sources
from bert_jax.data.tokenizers import Tokenizer, load_tokenizer
from bert_jax.data.words import SEGMENTERS, UNITS
from bert_jax.errors import InputError, UnfinishedError, unknown
from bert_jax.interrupt import Interrupt
from bert_jax.whole import cache_folder, whole_folder, write_text

SPLITS = {"line": str.splitlines, "split": sentences.split}
BATCH_CHARACTERS = 1 << 20  # text in a record
SMALL = 2 << 20  # bytes of input that are not worth starting workers for
SETTINGS = "settings.json"  # in the scratch folder: what is being prepared


class Settings(NamedTuple):
    """What decides the pieces, beside the text and the tokenizer."""

    sentences: str = "split"  # line | split
    # Where words begin: pieces | spaces | tags | jieba, or a table of similar words,
    # which knows how its words were found.
    words: str = "pieces"
    duplicates: str = "keep"  # keep | exact | near: documents to drop
    shortest: int = 0  # characters; shorter documents are dropped


def prepare(
    inputs: Sequence[str],
    *,
    tokenizer: Tokenizer,
    out: str | os.PathLike,
    sentences: str = "split",
    words: str = "pieces",
    duplicates: str = "keep",
    shortest: int = 0,
    workers: int | None = None,
    progress: bool = True,
) -> Corpus:
    """Writes the corpus of all documents of `inputs`, whole or not at all.

    `workers` is the number of processes that tokenise, by default one for each core;
    0 does all the work in this one.
    """
    settings = Settings(sentences, words, duplicates, shortest)
    settings, similar = find_similar(settings, tokenizer)
    check(settings)
    if workers is not None and workers < 0:
        raise InputError(f"workers={workers} is negative; 0 is no process but this one")
    sources = find_sources(inputs)
    if workers is None:
        small = sum(source.size or SMALL for source in sources) < SMALL
        workers = 0 if small else len(os.sched_getaffinity(0))
    make = functools.partial(
        write_corpus,
        sources,
        inputs=list(inputs),
        tokenizer=tokenizer,
        settings=settings,
        similar=similar,
        workers=workers,
        progress=progress,
    )
    if not is_bucket(out):
        make(out=Path(out))
    else:  # made here, then copied there
        check_no_corpus(epath.Path(out))
        known = f"{out} {identity(sources, tokenizer, settings, similar)}"
        name = hashlib.sha256(known.encode()).hexdigest()[:16]
        local = cache_folder() / "prepare" / name
        if not local.exists():
            make(out=local)
        upload(local, epath.Path(out), last="corpus.json")
        shutil.rmtree(local)
    return open_corpus(out)


def write_corpus(
    sources: list[Source],
    *,
    inputs: list[str],
    tokenizer: Tokenizer,
    settings: Settings,
    similar: Similar | None,
    out: Path,
    workers: int,
    progress: bool,
) -> None:
    known = identity(sources, tokenizer, settings, similar)
    with whole_folder(out, same=functools.partial(is_same, known=known)) as scratch:
        write_text(scratch / SETTINGS, known)
        tokenizer.save(scratch / "tokenizer")
        if similar:
            similar.save(scratch / "similar")
        columns = stored_columns(tokenizer, settings, similar)
        writer = Writer(scratch, columns, tokenizer.size)
        reader = Reader(sources, settings)
        kept = len(writer.index)
        batches = (batch for n, batch in enumerate(reader.batches()) if n >= kept)
        with progress_bar(sources, progress) as show, Interrupt() as interrupt:
            work = Work(str(scratch / "tokenizer"), settings, similar)
            for columns in in_order(work, batches, workers, tokenizer):
                writer.append(serialise(columns))
                show(reader)
                if interrupt.signal:
                    raise KeyboardInterrupt
        writer.close()
        if reader.counts["documents"] == reader.counts["too_short"]:
            raise InputError(
                f"all {reader.counts['documents']} documents are shorter than "
                f"shortest={settings.shortest} characters"
            )
        about = describe(inputs, settings, similar)
        writer.index.write(scratch, tokenizer, **about, read=reader.counts)
        (scratch / SETTINGS).unlink()


def check_no_corpus(out: epath.Path) -> None:
    """In a bucket; parts of one whose corpus.json is missing may be overwritten."""
    if (out / "corpus.json").exists():
        raise InputError(f"{out} exists already: choose another name or remove it")


def find_similar(
    settings: Settings, tokenizer: Tokenizer
) -> tuple[Settings, Similar | None]:
    """The table that `words` may name, and settings with its way to find words."""
    if settings.words in SEGMENTERS or not is_similar(settings.words):
        return settings, None
    similar = load_similar(settings.words)
    similar.check_tokenizer(tokenizer.hash, f"words={settings.words}")
    return settings._replace(words=similar.words), similar


def stored_columns(
    tokenizer: Tokenizer, settings: Settings, similar: Similar | None
) -> Columns:
    word_id = similar.dtype if similar else None
    return columns_of_pieces(tokenizer.dtype, UNITS[settings.words], word_id)


def describe(inputs: list[str], settings: Settings, similar: Similar | None) -> dict:
    """What corpus.json says of how it was made."""
    about = {"settings": {"inputs": inputs, **settings._asdict()}}
    if similar:
        about["similar"] = {"hash": similar.hash, "dtype": similar.dtype.str}
    return about


def check(settings: Settings) -> None:
    choices = {"sentences": SPLITS, "words": SEGMENTERS, "duplicates": DUPLICATES}
    also = {"words": ", or a folder made by `bert_jax similar`"}
    problems = [
        unknown(name, getattr(settings, name), valid) + also.get(name, "")
        for name, valid in choices.items()
        if getattr(settings, name) not in valid
    ]
    if settings.shortest < 0:
        problems.append(f"shortest={settings.shortest} is negative")
    if problems:
        raise InputError("\n".join(problems))


def identity(
    sources: list[Source],
    tokenizer: Tokenizer,
    settings: Settings,
    similar: Similar | None,
) -> str:
    """What must be the same for an interrupted preparation to be gone on with."""
    about = {
        "format": FORMAT,
        "tokenizer": tokenizer.hash,
        "sources": [
            [source.number, source.name, source.size, source.changed]
            for source in sources
        ],
        **settings._asdict(),
        "similar": similar.hash if similar else None,
    }
    return json.dumps(about, indent=1)


def is_same(scratch: Path, known: str) -> bool:
    path = scratch / SETTINGS
    return path.is_file() and path.read_text() == known


# --- reading -------------------------------------------------------------------------


class Batch(NamedTuple):
    """The documents of a record, and the number of the input they are from."""

    number: int
    documents: list[Document]


class Reader:
    """Documents that pass the filters, in batches, and counts of those that do not."""

    def __init__(self, sources: list[Source], settings: Settings):
        self.sources, self.settings = sources, settings
        self.counts = {"documents": 0, "too_short": 0, "duplicates": 0}
        self.bytes = 0

    def batches(self) -> Iterator["Batch"]:
        """Never across groups of sources, which others may read elsewhere."""
        is_duplicate = make_filter(self.settings.duplicates)
        for group in in_groups(self.sources):
            for found in in_batches(self.kept(group, is_duplicate)):
                yield Batch(group[0].number, found)

    def kept(self, group: list[Source], is_duplicate) -> Iterator[Document]:
        for source in group:
            for document in source.read():
                self.counts["documents"] += 1
                self.bytes += len(document.text.encode())
                if len(document.text) < self.settings.shortest:
                    self.counts["too_short"] += 1
                elif is_duplicate(document.text):
                    self.counts["duplicates"] += 1
                else:
                    yield document


def in_groups(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """Small files of one input together, so that records are not needlessly small."""
    group, size = [], 0
    for source in sources:
        if group and (size >= BATCH_CHARACTERS or source.number != group[0].number):
            yield group
            group, size = [], 0
        group.append(source)
        size += source.size or BATCH_CHARACTERS
    if group:
        yield group


def in_batches(found: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents together until they make a record."""
    batch, characters = [], 0
    for document in found:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def progress_bar(sources: list[Source], shown: bool):
    """A function that shows how far a reader is: of the bytes on disk, if known."""
    sizes = [source.size for source in sources]
    total = None if None in sizes else sum(sizes)
    with tqdm(
        total=total, desc="prepare", unit="B", unit_scale=True, disable=not shown
    ) as bar:

        def show(reader: Reader) -> None:
            seconds = bar.format_dict["elapsed"] or 1e-9
            bar.set_postfix_str(
                f"{reader.bytes / 1e6 / seconds:.1f} MB/s of text", refresh=False
            )
            done = reader.bytes
            if total is not None:
                done = sum(source.consumed for source in sources)
            bar.update(done - bar.n)

        yield show


# --- tokenising ----------------------------------------------------------------------


class Work(NamedTuple):
    """What a worker process is told."""

    tokenizer: str
    settings: Settings
    similar: Similar | None


def in_order(work: Work, batches: Iterator, workers: int, tokenizer: Tokenizer):
    """The columns of each batch, in order, with a few under way."""
    if not workers:
        for batch in batches:
            yield columns_of(batch, tokenizer, work.settings, work.similar)
        return
    pending = collections.deque()
    # Spawned, because forking a process with threads (TensorFlow's) may hang.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, context, start_worker, [work]) as pool:
            for batch in batches:
                with spawning():  # the pool starts a worker when it needs one
                    pending.append(pool.submit(do_work, batch))
                if len(pending) > workers + 2:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
    except BrokenProcessPool:
        raise UnfinishedError(
            "a worker process was killed, perhaps for want of memory. What is done is "
            "kept: run the same command, if need be with fewer --workers"
        ) from None


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """What a process that is started meanwhile inherits.

    It would import the caller's script, which may do anything: it finds none. It
    leaves Ctrl-C to the first process.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    first = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if first else None
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if first:
            signal.signal(signal.SIGINT, before)


def start_worker(work: Work) -> None:
    global _tokenizer, _work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each worker
    _tokenizer, _work = load_tokenizer(work.tokenizer), work


def do_work(batch: Batch) -> dict[str, bytes]:
    return columns_of(batch, _tokenizer, _work.settings, _work.similar)


def columns_of(
    batch: Batch, tokenizer: Tokenizer, settings: Settings, similar: Similar | None
) -> dict[str, bytes]:
    """The columns of one record; what gives no pieces is left out."""
    documents = batch.documents
    encoded, bits, counts = encode_documents(documents, tokenizer, settings)
    lengths = np.array([len(ids) for ids in encoded], np.int64)
    owner = np.repeat(np.arange(len(documents)), counts)[lengths > 0]
    kept = np.bincount(owner, minlength=len(documents))
    names = [documents[n].name.replace("\n", " ") for n in np.flatnonzero(kept)]
    ids = np.concatenate([np.empty(0, tokenizer.dtype), *encoded])
    columns = {
        "ids": ids.tobytes(),
        "sentences": pack_counts(lengths[lengths > 0]),
        "documents": pack_counts(kept[kept > 0]),
        "names": zlib.compress("\n".join(names).encode()),
        "input": b"%d" % batch.number,
        **{
            f"starts/{unit}": np.packbits(found).tobytes()
            for unit, found in bits.items()
        },
    }
    if similar:
        begins = word_begins(ids, bits, lengths, tokenizer)
        columns["word_id"] = similar.numbers(ids, begins).tobytes()
    return columns


def word_begins(
    ids: np.ndarray, bits: dict, lengths: np.ndarray, tokenizer: Tokenizer
) -> np.ndarray:
    """Which pieces of some sentences begin a word; a sentence always does."""
    begins = bits["words"].copy() if "words" in bits else tokenizer.starts[ids]
    begins[(np.cumsum(lengths) - lengths)[lengths > 0]] = True
    return begins


def encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, settings: Settings
) -> tuple[list[np.ndarray], dict[str, np.ndarray], list[int]]:
    """Ids of each sentence; for each unit that ids do not tell, whether a piece is the
    first in its unit; and the number of sentences of each document."""
    split, find_words = SPLITS[settings.sentences], SEGMENTERS[settings.words]
    texts, borders = [], []  # of each sentence: its text, {unit: where units begin}
    counts = []  # sentences of each document
    for document in documents:
        text, units = find_words(document.text) if find_words else (document.text, {})
        parts = split(text)
        units = {name: np.asarray(places) for name, places in units.items()}
        at = 0
        for number, part in enumerate(parts):
            before = tokenizer.joint if number else ""
            texts.append(before + part)
            if units:
                at = text.index(part, at)
                borders.append(
                    {
                        name: places[slice(*places.searchsorted([at, at + len(part)]))]
                        - (at - len(before))
                        for name, places in units.items()
                    }
                )
                at += len(part)
        counts.append(len(parts))
    if settings.words == "pieces":
        encoded, bits = tokenizer.encode_fast(texts), {}
    else:
        encoded, bits = encode_with_units(
            texts, borders, tokenizer, UNITS[settings.words]
        )
    return encoded, bits, counts


def encode_with_units(
    texts: list[str], borders: list[dict], tokenizer: Tokenizer, units: Sequence[str]
) -> tuple[list, dict[str, np.ndarray]]:
    """Ids of each text, and for each unit whether a piece is the first in its unit."""
    encoded, starts = [], {unit: [np.empty(0, bool)] for unit in units}
    found = tokenizer.encode_offsets_batch(texts)
    for (ids, offsets), where in zip(found, borders, strict=True):
        encoded.append(np.asarray(ids, tokenizer.dtype))
        places = np.asarray(offsets, np.int64).reshape(-1, 2)[:, 0]
        for unit in units:
            number = np.searchsorted(np.asarray(where[unit]), places, side="right")
            starts[unit].append(np.diff(number, prepend=-1) != 0)
    return encoded, {unit: np.concatenate(parts) for unit, parts in starts.items()}
