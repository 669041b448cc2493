"""Buckets, gs://...: files by name, no folders, and every request takes its time.

Whole files go through etils.epath. A stretch of a file goes through fsspec, which asks
for just these bytes: a file opened by TensorFlow fetches half a megabyte at the least.
"""

import contextlib
import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from etils import epath

from bert_jax.errors import InputError


def is_bucket(path: str | os.PathLike) -> bool:
    """Also of a pathlib.Path, which leaves one slash: gs:/bucket."""
    return re.match(r"\w+:/", os.fspath(path)) is not None


@contextlib.contextmanager
def open_bucket(path: epath.Path) -> Iterator[BinaryIO]:
    """A file to be read from its beginning, as Python's own files are."""
    with path.open("rb") as file:
        yield io.BufferedReader(_Raw(file), 1 << 20)


class _Raw(io.RawIOBase):
    """TensorFlow's files have a read() and no more of what gzip or readline() need."""

    def __init__(self, file):
        self.file, self.at = file, 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer) -> int:
        data = self.file.read(len(buffer))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def read_range(path: epath.Path, offset: int, size: int) -> bytes:
    """Bytes offset..offset + size of a file; fewer where it ends before."""
    import fsspec

    try:
        system, name = fsspec.core.url_to_fs(str(path))
    except ImportError as error:
        raise InputError(
            f"{path}: {error} (for gs://: pip install 'bert_jax[gcs]')"
        ) from None
    return system.cat_file(name, start=offset, end=offset + size)


def upload(local: Path, out: epath.Path, *, last: str = "") -> None:
    """All files of a folder; the one named `last` makes it whole."""
    files = [path for path in local.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == last):
        target = out / path.relative_to(local)
        target.parent.mkdir(parents=True, exist_ok=True)
        epath.Path(path).copy(target, overwrite=True)


def download(path: epath.Path, folder: Path) -> None:
    """The files that lie in `path`, or the one that it is."""
    for found in path.iterdir() if path.is_dir() else [path]:
        if not found.is_dir():
            with found.open("rb") as file, open(folder / found.name, "wb") as copy:
                shutil.copyfileobj(file, copy)
