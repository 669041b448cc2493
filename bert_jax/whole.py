"""Folders and files that are there whole or not at all, whatever kills the process."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from bert_jax.errors import InputError

LOCK = ".lock"


@contextlib.contextmanager
def whole_folder(
    out: str | Path, *, same: Callable[[Path], bool] = lambda scratch: False
) -> Iterator[Path]:
    """A scratch folder that becomes `out` when the block ends without an error.

    An `out` that exists and is not empty is refused before anything is done. What a
    killed or interrupted process left behind is cleared away by the next one, unless
    `same` says that it is gone on with.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already: choose another name or remove it")
    scratch = out.parent / f".{out.name}.partial"
    with locked(scratch):
        if not same(scratch):
            for left in scratch.iterdir():
                if left.name != LOCK:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield scratch
            (scratch / LOCK).unlink()
            if out.exists():
                out.rmdir()  # empty, checked above
            os.rename(scratch, out)
        except InputError:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        finally:
            if not same(scratch):
                shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Makes a folder and keeps other processes of this machine out of it.

    Where another one is in it, waits until it is done, or raises.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "a")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            raise InputError(f"{folder} is in use by another process") from None
        yield


def cache_folder() -> Path:
    """Where things are kept that can be made again."""
    return Path(os.environ.get("BERT_JAX_CACHE") or "~/.cache/bert_jax").expanduser()


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
