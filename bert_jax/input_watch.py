"""Batches that do not come: a disk, a bucket or a network that hangs.

The loop cannot look after itself while it is stuck in a read, so a thread does, once a
second. A batch that takes longer than a minute is said, once; after `stall_after`
seconds the process ends, with the status at which a launcher starts the same command
again: it goes on from the last checkpoint.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from bert_jax.interrupt import AGAIN

SAID_AFTER = 60  # seconds


class InputWatch:
    """`source` is what is read; stall_after=0 waits for ever. Every process looks after
    itself, and says so itself."""

    def __init__(
        self,
        source: str,
        stall_after: float,
        *,
        say: Callable[[str], None] = tqdm.write,
        end: Callable[[int], None] = os._exit,
    ):
        self.source, self.stall_after = source, stall_after
        self.say, self.end = say, end
        self.waits: tuple[int, float] | None = None  # a step, and since when it does
        self.took = 0.0  # seconds until the last batch came
        self.told = 0  # the last step of which it was said
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self) -> "InputWatch":
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self.thread.join()

    @contextlib.contextmanager
    def batch_of(self, step: int) -> Iterator[None]:
        """Around what gets the batch of a step."""
        begin = time.monotonic()
        self.waits = step, begin
        try:
            yield
        finally:
            self.waits = None
            self.took = time.monotonic() - begin

    def waiting(self) -> bool:
        return self.waits is not None

    def watch(self) -> None:
        while not self.over.wait(1.0):
            self.look()

    def look(self) -> None:
        waits = self.waits  # the loop may set it meanwhile
        if waits is None:
            return
        step, begin = waits
        waited = time.monotonic() - begin
        what = f"step {step} has waited {waited:.0f} s for its batch"
        if waited > SAID_AFTER and self.told != step:
            self.told = step
            self.say(f"{what} (reading {self.source})")
        if self.stall_after and waited > self.stall_after:
            sys.stdout.flush()
            sys.stderr.write(
                f"\nerror: {what}, longer than "
                f"config.stall_after={self.stall_after:g}: {self.source} cannot be "
                "read any more. The same command goes on from the last checkpoint.\n"
            )
            sys.stderr.flush()
            self.end(AGAIN)
