"""Folders and files that are there whole or not at all, whatever kills the process."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bert_jax.errors import InputError


@contextlib.contextmanager
def whole_folder(out: str | Path) -> Iterator[Path]:
    """A scratch folder that becomes `out` when the block ends without an error.

    An `out` that exists and is not empty is refused before anything is done.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already: choose another name or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error}") from None
    try:
        scratch.chmod(0o755)
        yield scratch
        if out.exists():
            out.rmdir()  # empty, checked above
        os.rename(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes a folder and keeps other processes of this machine out of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{folder} is being trained by another process") from None
        yield


def write_text(path: Path, text: str) -> None:
    """Replaces a file, whole or not at all, also if the machine goes down."""
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()
