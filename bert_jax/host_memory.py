"""Memory of a CPU step that is given back at its end and asked for again at the next.

XLA allocates the temporaries of a step anew each time. glibc maps blocks of that size
from the kernel and unmaps them, so every step pays for hundreds of thousands of page
faults. Told to keep what was freed, it does not.
"""

import ctypes
import sys

M_ARENA_MAX, M_MMAP_MAX, M_TOP_PAD, M_TRIM_THRESHOLD = -8, -4, -2, -1


def keep_freed_memory() -> None:
    """Lets glibc's malloc reuse large blocks; elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # a C library other than glibc
        return
    mallopt(M_MMAP_MAX, 0)  # no block gets a mapping of its own
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # do not shrink the heap at every free
    mallopt(M_TOP_PAD, 64 << 20)  # grow it in large strides
    mallopt(M_ARENA_MAX, 1)  # other arenas cannot hold large blocks
