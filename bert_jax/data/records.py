"""The records of a corpus as TFRecords, and the index that says where all of it lies.

What the index says of a record depends on the record alone, so parts of the index made
in different places are put together into the same index.
"""

import contextlib
import hashlib
import json
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bert_jax.data.corpus import (
    FORMAT,
    Columns,
    page_checksums,
    shard_name,
    unpack_counts,
)
from bert_jax.data.tokenizers import Tokenizer
from bert_jax.errors import InputError, UnfinishedError
from bert_jax.whole import write_text

SHARD_BYTES = 64 << 20
HEADER, FOOTER = 12, 4  # bytes of length and checksums around the data of a record


def tensorflow():
    """Imported with the first record: it takes seconds, while workers do their work."""
    import tensorflow

    return tensorflow


def serialise(columns: dict[str, bytes]) -> bytes:
    """A `tf.train.Example` of these columns, always the same bytes."""
    train = tensorflow().train
    features = {
        name: train.Feature(bytes_list=train.BytesList(value=[value]))
        for name, value in columns.items()
    }
    example = train.Example(features=train.Features(feature=features))
    return example.SerializeToString(deterministic=True)


def open_shard(path: Path):
    return tensorflow().io.TFRecordWriter(str(path))


def framed_size(data: bytes) -> int:
    return HEADER + len(data) + FOOTER


def whole_records(path: Path) -> Iterator[bytes]:
    """The records of a shard, up to one that was cut off or altered."""
    tf = tensorflow()
    with contextlib.suppress(tf.errors.DataLossError):
        yield from tf.data.TFRecordDataset(str(path)).as_numpy_iterator()


class Index:
    """What is known of records, one after the other."""

    def __init__(self, columns: Columns, vocab_size: int):
        self.columns = columns
        self.rows: dict[str, list[int]] = defaultdict(list)
        self.pages: list[np.ndarray] = []  # checksums
        self.counts = np.zeros(vocab_size, np.int64)  # of each id
        self.digests: list[bytes] = []
        self.ends: dict[int, int] = {}  # bytes of each shard

    def __len__(self) -> int:
        return len(self.digests)

    def enter(self, data: bytes, *, shard: int, offset: int) -> None:
        """A record that lies at `offset` of a shard."""
        feature = tensorflow().train.Example.FromString(data).features.feature
        columns = {name: feature[name].bytes_list.value[0] for name in feature}
        ids = np.frombuffer(columns["ids"], self.columns["ids"])
        row = {
            "shard": shard,
            "input": int(columns["input"]),
            "pieces": len(ids),
            "sentence_count": len(unpack_counts(columns["sentences"])),
            "document_count": len(unpack_counts(columns["documents"])),
        }
        digest = hashlib.sha256()
        names = ("ids", "sentences", "documents", *self.columns)
        for name in dict.fromkeys(names):
            # Wherever these bytes are found first, they are the bytes to read.
            row[f"{name}_at"] = offset + HEADER + data.find(columns[name])
            digest.update(columns[name])
        for name in ("sentences", "documents"):
            row[f"{name}_bytes"] = len(columns[name])
            row[f"{name}_crc"] = zlib.crc32(columns[name])
        for name, value in row.items():
            self.rows[name].append(value)
        self.pages.append(page_checksums(columns, self.columns))
        self.counts += np.bincount(ids, minlength=len(self.counts))
        self.digests.append(digest.digest())
        self.ends[shard] = offset + framed_size(data)

    def extend(self, other: "Index") -> None:
        """With the records that come next."""
        for name, values in other.rows.items():
            self.rows[name] += values
        self.pages += other.pages
        self.counts += other.counts
        self.digests += other.digests
        self.ends |= other.ends

    def write(self, folder: Path, tokenizer: Tokenizer, **about) -> None:
        """index.npz and corpus.json, beside shards that are complete."""
        rows = {
            name: np.asarray(self.rows[name], np.int64) for name in sorted(self.rows)
        }
        if not rows or not rows["pieces"].any():
            raise InputError("the input holds no text the tokenizer makes pieces of")
        path = folder / "index.npz"
        pages = np.concatenate(self.pages)
        np.savez_compressed(path, counts=self.counts, pages=pages, **rows)
        unk = tokenizer.unk_id
        files = {shard_name(shard): size for shard, size in self.ends.items()}
        files["index.npz"] = path.stat().st_size
        about = {
            "format": FORMAT,
            "tokenizer": {"hash": tokenizer.hash, "size": tokenizer.size},
            "content": hashlib.sha256(b"".join(self.digests)).hexdigest()[:16],
            "documents": int(rows["document_count"].sum()),
            "sentences": int(rows["sentence_count"].sum()),
            "pieces": int(rows["pieces"].sum()),
            "unknown": int(self.counts[unk]) if unk is not None else 0,
            "dtype": self.columns["ids"].str,
            "units": [
                name.removeprefix("starts/")
                for name, dtype in self.columns.items()
                if dtype is None
            ],
            "shards": len(self.ends),
            "files": files,
            "index": zlib.crc32(path.read_bytes()),
            **about,
        }
        write_text(folder / "corpus.json", json.dumps(about, indent=2) + "\n")


class Writer:
    """Writes records into shards, in order. Goes on after what is there."""

    def __init__(self, folder: Path, columns: Columns, vocab_size: int):
        self.folder = folder
        self.index = Index(columns, vocab_size)
        self.shards, self.offset, self.file = 0, 0, None
        self.go_on()

    def go_on(self) -> None:
        """Keeps whole records of an interrupted run; its last shard is copied."""
        last = next(self.folder.glob("last-*"), None)
        if last:  # interrupted while it was copied
            (self.folder / last.name.replace("last", "shard")).unlink(missing_ok=True)
        shards = sorted(self.folder.glob("shard-*"))
        if shards and not last:
            path = shards.pop()
            last = path.rename(path.with_name(path.name.replace("shard", "last")))
        for path in shards:
            self.shards, self.offset = self.shards + 1, 0
            for data in whole_records(path):
                self.enter(data)
            if self.offset != path.stat().st_size:
                raise InputError(
                    f"{path}, left by an interrupted run, is damaged: it was removed, "
                    "run the same command to start again"
                )
        if last:
            for data in whole_records(last):
                self.append(data)
            last.unlink()

    def append(self, data: bytes) -> None:
        """One record, which may hold no document: its number is that of its batch."""
        try:
            if self.file is None or self.offset >= SHARD_BYTES:
                self.close()
                self.shards, self.offset = self.shards + 1, 0
                self.file = open_shard(self.folder / shard_name(self.shards - 1))
            self.file.write(data)
            self.file.flush()
        except tensorflow().errors.OpError as error:
            free = shutil.disk_usage(self.folder).free
            raise UnfinishedError(
                f"{self.folder} cannot be written: {error.message} "
                f"({free / 1e6:.0f} MB are free). What is done is kept: make room and "
                "run the same command"
            ) from None
        self.enter(data)

    def enter(self, data: bytes) -> None:
        """A record that lies at the end of the last shard."""
        self.index.enter(data, shard=self.shards - 1, offset=self.offset)
        self.offset += framed_size(data)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
