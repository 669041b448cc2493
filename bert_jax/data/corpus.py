"""A prepared corpus: one long run of pieces on disk, of which any stretch is read.

    DIR/corpus.json   what it is: tokenizer hash, totals, where it came from
    DIR/index.npz     per record: where its columns lie and what they hold; checksums
    DIR/tokenizer/    the tokenizer it was made with
    DIR/shard-*.tfrecord

A record is a `tf.train.Example` with the documents of about a megabyte of text:

    ids         the pieces of all documents, in the smallest integer type that fits
    sentences   pieces of each sentence
    documents   sentences of each document
    names       of the documents, zlib, one a line
    input       number of the input they are from
    starts/X    one bit a piece, where a unit X begins: only what ids do not tell
    word_id     of each piece: the number of its word in the table of similar words that
                the corpus was made with and keeps a copy of (DIR/similar), 0 for none

Everything in a record lies where the index says, so a stretch costs one read of its
own bytes. Which pieces begin a word follows from the ids (## pieces, leading space)
and takes no room, except where the words come from a segmentation of the input.
"""

import dataclasses
import io
import json
import os
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
from etils import epath
from tqdm import tqdm

from bert_jax.bucket import is_bucket, read_range
from bert_jax.data.similar import Similar, load_similar
from bert_jax.data.tokenizers import Tokenizer, load_tokenizer
from bert_jax.data.words import IDEOGRAPH
from bert_jax.errors import InputError

FORMAT = 2
PAGE = 128  # pieces under one checksum
LONG_WORD = 16  # pieces: text with spaces has few words that are longer
SAMPLED = 4  # records in which words are measured

# What a record keeps of each piece, by name: a number of that type; None is a bit.
Columns = dict[str, np.dtype | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared corpus. Text is addressed by piece, counted through all documents."""

    path: epath.Path
    about: dict  # corpus.json
    index: dict[str, np.ndarray]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if not (self.path / "tokenizer").exists():
            raise InputError(
                f"{self.path} is damaged: its folder tokenizer is gone. Copy the "
                "corpus again or prepare it again"
            )
        tokenizer = load_tokenizer(self.path / "tokenizer")
        if tokenizer.hash != self.about["tokenizer"]["hash"]:
            raise InputError(
                f"{self.path / 'tokenizer'} is not the tokenizer the corpus was made "
                f"with (hash {tokenizer.hash}, corpus "
                f"{self.about['tokenizer']['hash']}): prepare the corpus again"
            )
        return tokenizer

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.about["dtype"])

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the segmentations that are stored: words, phrases, ..."""
        return tuple(self.about["units"])

    @cached_property
    def hides_words(self) -> str:
        """Why neither what is stored nor the pieces tell where words begin; "" where
        they do. In text without spaces they do not."""
        if "words" in self.units:
            return ""
        if not self.tokenizer.tells_starts:
            return "a piece of its tokenizer does not tell whether it begins one"
        vocab, counts = self.tokenizer.vocab, self.index["counts"]
        alone = [n for n, piece in enumerate(vocab) if IDEOGRAPH.fullmatch(piece)]
        if counts[alone].sum() >= counts.sum() / 2:
            return "most of its pieces are single ideographs"
        sizes = self.word_sizes()
        if sizes[sizes > LONG_WORD].sum() >= sizes.sum() / 2:
            return f"most of its pieces lie in words of more than {LONG_WORD} pieces"
        return ""

    def word_sizes(self) -> np.ndarray:
        """Pieces of each word, as pieces alone tell, in a few records from its first to
        its last."""
        few = np.unique(np.linspace(0, self.records - 1, SAMPLED, dtype=int))
        sizes = self.index["pieces"][few].tolist()
        read = map(self.read_record, few, [0] * len(few), sizes)
        ids = np.concatenate([columns["ids"] for columns in read])
        begins = np.flatnonzero(self.tokenizer.starts[ids])
        return np.diff(begins, prepend=0, append=len(ids))

    @cached_property
    def columns(self) -> Columns:
        word_id = self.about.get("similar", {}).get("dtype")
        return columns_of_pieces(self.dtype, self.units, word_id)

    @cached_property
    def similar(self) -> Similar | None:
        """The table that `word_id` refers to, if there is one."""
        if "similar" not in self.about:
            return None
        if not (self.path / "similar").is_dir():
            raise InputError(
                f"{self.path}: its folder similar, the table of its words, is gone: "
                "copy the corpus again or prepare it again"
            )
        table = load_similar(self.path / "similar")
        if table.hash != self.about["similar"]["hash"]:
            raise InputError(
                f"{self.path / 'similar'} is not the table the corpus was made with: "
                "copy the corpus again or prepare it again"
            )
        return table

    @property
    def records(self) -> int:
        return len(self.index["pieces"])

    @cached_property
    def remote(self) -> bool:
        """Whether it lies in a bucket, where a read takes its time."""
        return is_bucket(self.path)

    @cached_property
    def record_starts(self) -> np.ndarray:
        """Number of the first piece of each record, and the total at the end."""
        return np.concatenate([[0], np.cumsum(self.index["pieces"])])

    @cached_property
    def frequent_id(self) -> int:
        """The most frequent piece that can be predicted: not a special one."""
        counts = self.index["counts"].copy()
        counts[list(self.tokenizer.special_ids)] = 0
        return int(counts.argmax())

    @cached_property
    def shards(self) -> "list[Shard]":
        return [Shard(self.path / shard_name(n)) for n in range(self.about["shards"])]

    @property
    def bytes_read(self) -> int:
        """From the shards, since the corpus was opened."""
        return sum(shard.bytes_read for shard in self.shards)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Pieces start..stop, whatever records and documents they lie in."""
        return self.read_columns(start, stop)["ids"]

    def read_columns(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """The same as {"ids": ...}, for each stored unit {unit: bool array}, and
        {"word_id": ...} if there are any."""
        first = int(np.searchsorted(self.record_starts, start, side="right")) - 1
        last = int(np.searchsorted(self.record_starts, stop, side="left")) - 1
        parts = []
        for record in range(first, last + 1):
            begin = int(self.record_starts[record])
            size = int(self.index["pieces"][record])
            low, high = max(start - begin, 0), min(stop - begin, size)
            parts.append(self.read_record(record, low, high))
        names = parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def read_record(self, record: int, low: int, high: int) -> dict[str, np.ndarray]:
        """Pieces low..high of one record; pages that lie wholly inside are checked.

        Pages at the ends of a read are looked at by `verify` alone.
        """
        shard = self.shards[self.index["shard"][record]]
        found = {}
        for name, dtype in self.columns.items():
            first, last = low // 8, -(-high // 8)
            if dtype is not None:
                first, last = low * dtype.itemsize, high * dtype.itemsize
            at = int(self.index[f"{name}_at"][record])
            found[name] = shard.read(at + first, last - first)
        self.check(record, low, high, found, shard)
        columns = {}
        for name, dtype in self.columns.items():
            if dtype is not None:
                columns[name] = np.frombuffer(found[name], dtype)
            else:
                bits = np.unpackbits(np.frombuffer(found[name], np.uint8))
                unit = name.removeprefix("starts/")
                columns[unit] = bits[low % 8 :][: high - low].astype(bool)
        return columns

    def check(self, record, low, high, found: dict[str, bytes], shard: "Shard"):
        size = int(self.index["pieces"][record])
        first, last = (
            -(-low // PAGE),
            (high // PAGE if high < size else -(-high // PAGE)),
        )
        if first >= last:
            return
        begin = first * PAGE
        whole = {}  # from where the first whole page begins
        for name, dtype in self.columns.items():
            skipped = begin // 8 - low // 8
            if dtype is not None:
                skipped = (begin - low) * dtype.itemsize
            whole[name] = found[name][skipped:]
        checksums = page_checksums(whole, self.columns)[: last - first]
        start = self.page_starts[record]
        wrong = np.flatnonzero(
            checksums != self.index["pages"][start + first : start + last]
        )
        if len(wrong):
            raise damaged(shard, f"page {first + wrong[0]} of record {record}")

    def verify(self) -> None:
        """Reads everything once and raises where a single bit is another one."""
        records = tqdm(range(self.records), desc="checksums", disable=None, leave=False)
        for record in records:
            self.sentences(record)
            self.read_record(record, 0, int(self.index["pieces"][record]))

    @cached_property
    def page_starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(-(-self.index["pieces"] // PAGE))])

    def sentences(self, record: int) -> tuple[np.ndarray, np.ndarray]:
        """Of one record: pieces of each sentence, sentences of each document."""
        shard = self.shards[self.index["shard"][record]]
        columns = []
        for name in ("sentences", "documents"):
            at, size, crc = (
                int(self.index[f"{name}_{what}"][record])
                for what in ("at", "bytes", "crc")
            )
            data = shard.read(at, size)
            if zlib.crc32(data) != crc:
                raise damaged(shard, f"`{name}` of record {record}")
            columns.append(unpack_counts(data))
        return columns[0], columns[1]


def damaged(shard: "Shard", what: str) -> InputError:
    return InputError(
        f"{shard.path} is damaged: the checksum of {what} is wrong. Copy the corpus "
        "again or prepare it again"
    )


class Shard:
    """One file, read at any place, by several threads at a time."""

    def __init__(self, path: epath.Path):
        self.path, self.bytes_read = path, 0
        self.local = not is_bucket(path)
        self.lock = threading.Lock()

    def written(self) -> float:
        """When, in seconds since 1970."""
        try:
            return self.path.stat().mtime
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error}") from None

    def read(self, offset: int, size: int) -> bytes:
        # Opened for each read: there may be more shards than open files allowed.
        try:
            if self.local:
                file = os.open(self.path, os.O_RDONLY)
                try:
                    data = os.pread(file, size, offset)
                finally:
                    os.close(file)
            else:
                data = read_range(self.path, offset, size)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error}") from None
        with self.lock:
            self.bytes_read += len(data)
        if len(data) != size:
            raise InputError(
                f"{self.path} ends early: copy or prepare the corpus again"
            )
        return data


def pack_counts(counts: np.ndarray) -> bytes:
    """Small numbers as bytes: n is n // 255 times 255, then n % 255."""
    counts = np.asarray(counts, np.int64)
    ends = np.cumsum(counts // 255 + 1) - 1
    packed = np.full(ends[-1] + 1 if len(ends) else 0, 255, np.uint8)
    packed[ends] = counts % 255
    return packed.tobytes()


def unpack_counts(data: bytes) -> np.ndarray:
    packed = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(packed != 255)
    begins = np.concatenate([[0], ends[:-1] + 1])
    return (ends - begins) * 255 + packed[ends]


def columns_of_pieces(
    dtype: np.dtype, units: Sequence[str], word_id: str | np.dtype | None = None
) -> Columns:
    columns = {"ids": dtype} | {f"starts/{unit}": None for unit in units}
    return columns | ({} if word_id is None else {"word_id": np.dtype(word_id)})


def page_checksums(found: dict[str, bytes], columns: Columns) -> np.ndarray:
    """One for each page of a stretch: its ids, then its part of the other columns."""
    parts = [
        (memoryview(found[name]), PAGE // 8 if dtype is None else PAGE * dtype.itemsize)
        for name, dtype in columns.items()
    ]
    data, wide = parts[0]
    checksums = []
    for number in range(-(-len(data) // wide)):
        crc = 0
        for data, wide in parts:
            crc = zlib.crc32(data[number * wide :][:wide], crc)
        checksums.append(crc)
    return np.asarray(checksums, np.uint32)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.tfrecord"


def open_corpus(path: str | epath.Path) -> Corpus:
    """A corpus written by `prepare`, checked for completeness."""
    path = epath.Path(path)
    if not (path / "corpus.json").exists():
        what = "is not a prepared corpus" if path.exists() else "does not exist"
        raise InputError(
            f"data {path} {what}; make one with "
            f"`bert_jax prepare --tokenizer DIR --out {path} INPUT...`"
        )
    try:
        about = json.loads((path / "corpus.json").read_text())
        found = about.get("format")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error}): prepare it again") from None
    if found != FORMAT:
        raise InputError(
            f"{path} has format {found}, this version reads {FORMAT}: prepare it again"
        )
    try:
        check_files(path, about["files"])
        with (path / "index.npz").open("rb") as file:
            data = file.read()
        if zlib.crc32(data) != about["index"]:
            raise ValueError("the checksum of index.npz is wrong")
        index = read_index(data)
    except InputError:
        raise
    except Exception as error:  # numpy raises many types for a damaged file
        raise InputError(f"{path} is damaged ({error}): prepare it again") from None
    return Corpus(path, about, index)


def check_files(path: epath.Path, sizes: dict[str, int]) -> None:
    """Raises for one that is missing or too short; asks for many at a time."""

    def size_of(name: str) -> int | None:
        try:
            return (path / name).stat().length
        except OSError:
            return None

    with ThreadPoolExecutor(16) as pool:
        for (name, size), found in zip(
            sizes.items(), pool.map(size_of, sizes), strict=True
        ):
            if found != size:
                raise InputError(
                    f"{path / name} is missing or not {size} bytes long: prepare the "
                    "corpus again"
                )


def read_index(data: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def check_same_tokenizer(corpus: Corpus, digest: str, what: str) -> None:
    """Raises where the corpus was not made with the tokenizer that `what` has."""
    if corpus.about["tokenizer"]["hash"] != digest:
        raise InputError(
            f"{corpus.path} was prepared with another tokenizer than {what} (hash "
            f"{corpus.about['tokenizer']['hash']}, there {digest}): prepare it with "
            "the same one"
        )


def similar_words(corpus: Corpus, path: str = "") -> Similar:
    """The table that says which words are similar to those of the corpus: its own, or
    another one, at `path`, of the same words."""
    own = corpus.similar
    if own is None:
        raise InputError(
            f"config.objective.replace=similar: {corpus.path} has no column word_id; "
            "make a table with `bert_jax similar` and the corpus with "
            "`bert_jax prepare --words TABLE`"
        )
    if not path:
        return own
    table = load_similar(path)
    field = f"config.objective.similar={path}"
    table.check_tokenizer(corpus.about["tokenizer"]["hash"], field)
    check_same_words(corpus, table, field)
    return table


def check_same_words(corpus: Corpus, table: Similar, what: str) -> None:
    """Raises where the corpus numbers words in another way than the table."""
    own = corpus.similar
    if own is None or own.numbering != table.numbering:
        raise InputError(
            f"{corpus.path} was prepared with other words than those of {what}: "
            "prepare it with --words of the same table"
        )
