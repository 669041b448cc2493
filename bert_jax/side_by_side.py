"""Jobs side by side, each in a process with cores of its own.

A small model does not fill many cores: two runs on one core each get further in an hour
than one after the other on both. A job must be one that can be gone on with, since it
may be ended at any moment.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import starmap
from multiprocessing.connection import wait
from pathlib import Path

from bert_jax.errors import InputError, fail
from bert_jax.interrupt import AGAIN, Interrupt

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def side_by_side(
    work: Callable[..., bool], jobs: dict[Path, tuple], *, workers: int
) -> Iterator[Path]:
    """A job is the file of what it prints, and what `work` is told, which says whether
    it finished or was interrupted. Yields each that is finished.

    After Ctrl-C or SIGTERM, and where a job fails, the others are asked to stop, and
    waited for; an error then says which failed and how.
    """
    cores = share_cores(workers)
    context = multiprocessing.get_context("spawn")
    waiting, running, failed = [*jobs], {}, []
    with Interrupt() as interrupt, contextlib.ExitStack() as at_end:
        at_end.callback(terminate, running)
        while running or waiting:
            while waiting and cores:
                log, its = waiting.pop(0), cores.pop()
                log.parent.mkdir(parents=True, exist_ok=True)
                told = (work, jobs[log], log, os.getpid())
                process = context.Process(target=do, args=told)
                with on_cores(its):  # a process has those of the one that starts it
                    process.start()
                running[process] = log, its
            wait([process.sentinel for process in running], timeout=0.5)
            for process in [p for p in running if p.exitcode is not None]:
                log, its = running.pop(process)
                cores.append(its)
                if process.exitcode == 0:
                    yield log
                elif process.exitcode != AGAIN and not interrupt.signal:
                    failed.append((log, process.exitcode))
            if failed or interrupt.signal:
                break
    if failed:
        raise InputError("\n".join(starmap(last_words, failed)))


def terminate(running: Iterable[multiprocessing.Process]) -> None:
    """Asks them to stop, once: they save what can be gone on with; and waits."""
    for process in running:
        process.terminate()
    for process in running:
        process.join()


def share_cores(workers: int) -> list[set[int]]:
    """As many sets of cores as workers, as large as each other."""
    there = sorted(os.sched_getaffinity(0))
    if not 1 <= workers <= len(there):
        raise InputError(f"--workers {workers}: from 1 to the {len(there)} cores here")
    each = len(there) // workers
    return [{*there[n * each : (n + 1) * each]} for n in range(workers)]


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def do(work: Callable[..., bool], told: tuple, log: Path, parent: int) -> None:
    """What a process does; when the one that started it dies, it is told to stop."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before we asked to be told
        sys.exit(AGAIN)
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        finished = work(*told)
    except InputError as error:
        fail(error)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0 if finished else AGAIN)


def last_words(log: Path, code: int) -> str:
    """Of a process that failed; one that was killed had none."""
    if code < 0:
        return f"{log}: it was ended by {signal.Signals(-code).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"{log}: {lines[-1]}"
