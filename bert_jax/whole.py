"""Folders and files that are there whole or not at all, whatever kills the process."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from etils import epath

from bert_jax.bucket import is_bucket, upload
from bert_jax.errors import InputError, UnfinishedError

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
    check_free(out)
    scratch = out.parent / f".{out.name}.partial"
    with locked(scratch):
        check_free(out)  # another process may have just finished it
        if not same(scratch):
            for left in scratch.iterdir():
                if left.name != LOCK:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield scratch
            if out.exists():
                out.rmdir()  # empty, checked above
            os.rename(scratch, out)
            (out / LOCK).unlink()
        except OSError as error:
            raise InputError(f"{out} could not be written: {error}") from error
        except InputError as error:
            if not isinstance(error, UnfinishedError):
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        finally:
            if not same(scratch):
                shutil.rmtree(scratch, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raises where a folder could not take the place of `out`."""
    if not os.path.lexists(out):
        return
    if not out.is_dir() or any(out.iterdir()):
        raise InputError(f"{out} exists already: choose another name or remove it")
    if out.is_symlink() or os.path.ismount(out) or out.samefile("."):
        raise InputError(f"{out} cannot be replaced: give a new folder inside it")


@contextlib.contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """As `whole_folder`, also in a bucket, to which it is copied at the end."""
    if not is_bucket(out):
        with whole_folder(out) as scratch:
            yield scratch
        return
    target = epath.Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{out} exists already: choose another name or remove it")
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)
        upload(Path(scratch), target)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Makes a folder and keeps other processes of this machine out of it.

    Where another one is in it, waits until it is done, or raises.
    """
    if is_bucket(folder):
        raise InputError(f"{folder} is in a bucket: give a folder of this machine")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "a")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise InputError(f"{folder} is in use by another process") from None
        except OSError as error:
            raise InputError(f"{folder} cannot be locked: {error}") from None
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
