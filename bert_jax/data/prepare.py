"""Raw text to a corpus on disk: tokenised, uncorrupted TFRecord shards and an index.

A record is one document: its name, the ids of its pieces in the smallest integer type
that fits, the length of each sentence, and one bit a piece that says whether it begins
a word. The index says where in which shard the ids of a document lie, so that any
stretch of text is read without reading what comes before it.

    DIR/corpus.json   what it is: tokenizer hash, totals, where it came from
    DIR/index.npz     per document: shard, byte offsets, pieces, sentences
    DIR/tokenizer/    the tokenizer it was made with
    DIR/shard-*.tfrecord
"""

import dataclasses
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bert_jax.data import sentences
from bert_jax.data.text import Document, byte_size, documents
from bert_jax.data.tokenizers import Tokenizer, load_tokenizer
from bert_jax.errors import InputError, unknown
from bert_jax.whole import whole_folder

FORMAT = 1
SPLITS = {"line": str.splitlines, "split": sentences.split}
SHARD_BYTES = 64 << 20
BATCH_CHARACTERS = 1 << 20  # text handed to the tokenizer at a time
RECORD_HEADER = 12  # length and its checksum, before a record's data
RECORD_FOOTER = 4


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A prepared corpus. Text is addressed by piece, counted through all documents."""

    path: Path
    about: dict  # corpus.json
    index: dict[str, np.ndarray]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.path / "tokenizer")
        if tokenizer.hash != self.about["tokenizer"]["hash"]:
            raise InputError(
                f"{self.path / 'tokenizer'} is not the tokenizer the corpus was made "
                f"with (hash {tokenizer.hash}, corpus "
                f"{self.about['tokenizer']['hash']}): prepare the corpus again"
            )
        return tokenizer

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Number of the first piece of each document, and the total at the end."""
        return np.concatenate([[0], np.cumsum(self.index["pieces"], dtype=np.int64)])

    @cached_property
    def frequent_id(self) -> int:
        """The most frequent piece that can be predicted: not a special one."""
        counts = self.index["counts"].copy()
        counts[list(self.tokenizer.special_ids)] = 0
        return int(counts.argmax())

    @cached_property
    def _shards(self) -> list[np.memmap]:
        names = [shard_name(n) for n in range(self.about["shards"])]
        return [np.memmap(self.path / name, np.uint8, "r") for name in names]

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Pieces start..stop of one document, and which of them begin a word."""
        document = int(np.searchsorted(self.document_starts, start, side="right")) - 1
        skip = start - int(self.document_starts[document])
        count = stop - start
        shard = self._shards[self.index["shard"][document]]
        dtype = np.dtype(self.about["dtype"])
        at = int(self.index["ids_at"][document]) + skip * dtype.itemsize
        ids = np.frombuffer(shard[at : at + count * dtype.itemsize], dtype)
        at = int(self.index["starts_at"][document]) + skip // 8
        bits = np.unpackbits(shard[at : at + (skip % 8 + count + 7) // 8])
        return ids, bits[skip % 8 : skip % 8 + count].astype(bool)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.tfrecord"


def open_corpus(path: str | Path) -> Corpus:
    """A corpus written by `prepare`, checked for completeness."""
    path = Path(path)
    if not (path / "corpus.json").is_file():
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
    for name, size in about["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            raise InputError(
                f"{file} is missing or not {size} bytes long: prepare the corpus again"
            )
    try:
        with np.load(path / "index.npz", allow_pickle=False) as arrays:
            index = dict(arrays)
    except Exception as error:  # numpy raises many types for a damaged file
        raise InputError(f"{path} is damaged ({error}): prepare it again") from None
    return Corpus(path, about, index)


def check_same_tokenizer(corpus: Corpus, digest: str, what: str) -> None:
    """Raises where the corpus was not made with the tokenizer that `what` has."""
    if corpus.about["tokenizer"]["hash"] != digest:
        raise InputError(
            f"{corpus.path} was prepared with another tokenizer than {what} (hash "
            f"{corpus.about['tokenizer']['hash']}, there {digest}): prepare it with "
            "the same one"
        )


def prepare(
    inputs: Sequence[str],
    *,
    tokenizer: Tokenizer,
    out: str | Path,
    sentences: str = "split",
    progress: bool = True,
) -> Corpus:
    """Writes the corpus of all documents of `inputs`, whole or not at all."""
    out = Path(out)
    if sentences not in SPLITS:
        raise InputError(unknown("sentences", sentences, SPLITS))
    with whole_folder(out) as scratch:
        found = documents(inputs)
        bar = tqdm(
            total=byte_size(inputs) if plain_files(inputs) else None,
            desc="prepare",
            unit="B",
            unit_scale=True,
            disable=not progress,
        )
        with bar:
            writer = Writer(scratch, tokenizer)
            for batch in in_batches(found):
                writer.add(batch, SPLITS[sentences])
                bar.update(sum(len(document.text.encode()) for document in batch))
        writer.finish(inputs=list(inputs), split=sentences)
    return open_corpus(out)


def plain_files(inputs: Sequence[str]) -> bool:
    """Whether bytes read can be compared with the bytes of text: not if compressed."""
    return not any(name.endswith((".gz", ".xz")) for name in inputs)


def in_batches(found: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents together until they make a good mouthful for the tokenizer."""
    batch, characters = [], 0
    for document in found:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class Writer:
    """Writes shards one document at a time and keeps the index."""

    def __init__(self, directory: Path, tokenizer: Tokenizer):
        self.directory, self.tokenizer = directory, tokenizer
        self.dtype = np.dtype("<u2" if tokenizer.size <= 1 << 16 else "<u4")
        self.columns = {
            "shard": array("i"),
            "ids_at": array("q"),
            "starts_at": array("q"),
            "pieces": array("q"),
            "sentences": array("q"),
        }
        self.lengths = array("q")
        self.counts = np.zeros(tokenizer.size, np.int64)
        self.shards, self.offset, self.records = 0, 0, None
        self.content = hashlib.sha256()

    def add(self, batch: list[Document], split) -> None:
        texts = [split(document.text) for document in batch]
        flat = self.tokenizer.encode_batch([text for group in texts for text in group])
        at = 0
        for document, group in zip(batch, texts, strict=True):
            encoded = [ids for ids in flat[at : at + len(group)] if ids]
            at += len(group)
            if encoded:
                self.write(document.name, encoded)

    def write(self, name: str, encoded: list[list[int]]) -> None:
        from tensorflow import train as pb

        ids = np.concatenate([np.asarray(part, self.dtype) for part in encoded])
        lengths = np.asarray([len(part) for part in encoded], "<u4")
        ids_bytes = ids.tobytes()
        starts_bytes = np.packbits(self.tokenizer.starts[ids]).tobytes()
        columns = {
            "name": name.encode(),
            "ids": ids_bytes,
            "sentences": lengths.tobytes(),
            "starts": starts_bytes,
        }
        example = pb.Example(
            features=pb.Features(
                feature={
                    column: pb.Feature(bytes_list=pb.BytesList(value=[value]))
                    for column, value in columns.items()
                }
            )
        )
        data = example.SerializeToString(deterministic=True)
        self.open_shard()
        begin = self.offset + RECORD_HEADER
        row = {
            "shard": self.shards - 1,
            # Wherever these bytes are found first, they are the bytes to read.
            "ids_at": begin + data.find(ids_bytes),
            "starts_at": begin + data.find(starts_bytes),
            "pieces": len(ids),
            "sentences": len(lengths),
        }
        for column, value in row.items():
            self.columns[column].append(value)
        self.lengths.extend(lengths.tolist())
        self.counts += np.bincount(ids, minlength=self.tokenizer.size)
        self.content.update(ids_bytes + lengths.tobytes())
        self.records.write(data)
        self.offset = begin + len(data) + RECORD_FOOTER

    def open_shard(self) -> None:
        """A shard to write to: a new one where the last is full."""
        if self.records is None or self.offset >= SHARD_BYTES:
            import tensorflow as tf

            if self.records is not None:
                self.records.close()
            path = self.directory / shard_name(self.shards)
            self.records = tf.io.TFRecordWriter(str(path))
            self.shards, self.offset = self.shards + 1, 0

    def finish(self, **about) -> None:
        if self.records is None:
            raise InputError("the input holds no text the tokenizer makes pieces of")
        self.records.close()
        lengths = np.asarray(self.lengths)
        fits = "<u2" if lengths.max() < 1 << 16 else "<u4"
        np.savez(
            self.directory / "index.npz",
            lengths=lengths.astype(fits),
            counts=self.counts,
            **{name: np.asarray(values) for name, values in self.columns.items()},
        )
        self.tokenizer.save(self.directory / "tokenizer")
        names = [shard_name(n) for n in range(self.shards)] + ["index.npz"]
        about = {
            "format": FORMAT,
            "tokenizer": {"hash": self.tokenizer.hash, "size": self.tokenizer.size},
            "content": self.content.hexdigest()[:16],
            "documents": len(self.columns["pieces"]),
            "sentences": len(lengths),
            "pieces": int(lengths.sum()),
            "unknown": int(self.counts[self.tokenizer.unk_id]),
            "dtype": self.dtype.str,
            "shards": self.shards,
            "files": {n: (self.directory / n).stat().st_size for n in names},
            **about,
        }
        text = json.dumps(about, indent=2) + "\n"
        (self.directory / "corpus.json").write_text(text)
