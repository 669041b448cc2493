"""What the processes of a run tell each other beside arrays."""

import itertools

import jax
import numpy as np

LONGEST = 1000  # bytes of what one tells
WAIT = 30 * 60 * 1000  # milliseconds until the others are given up

_waits = itertools.count()  # the same in every process: all wait in one order


def told_by_all(text: str) -> list[str]:
    """What each process says, in their order. A collective: all of them call it, none
    while another thread computes."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    said = text.encode()[:LONGEST].ljust(LONGEST, b"\0")
    all_said = multihost_utils.process_allgather(np.frombuffer(said, np.uint8))
    return [bytes(line).rstrip(b"\0").decode(errors="replace") for line in all_said]


def wait_for_all(what: str) -> None:
    """Until every process has come so far. It needs no device, so that a thread
    may wait while steps run."""
    if jax.process_count() == 1:
        return
    import orbax.checkpoint as ocp

    barrier = ocp.multihost.get_barrier_sync_fn()
    barrier(key=f"{what} ({next(_waits)})", timeout_ms=WAIT)
