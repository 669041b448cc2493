"""The machine's own f32 matrix-multiply peak: square products, the best of several.

Each library has its own kernels, and which is the fastest depends on the machine, so
all of them are asked, each in a process of its own, on the cores of the contenders.
"""

import time
from collections.abc import Callable

N, REPEATS = 2048, 10  # 16 MB an operand: beyond the caches, as weights of a step are
LIBRARIES = ("numpy", "torch", "jax")


def product(library: str, *, threads: int) -> Callable[[], object]:
    """Multiplies two matrices and waits for the result."""
    import numpy as np

    a, b = np.random.default_rng(0).standard_normal((2, N, N), dtype=np.float32)
    if library == "numpy":
        out = np.empty_like(a)
        return lambda: np.matmul(a, b, out=out)
    if library == "torch":
        import torch

        torch.set_num_threads(threads)
        a, b = torch.from_numpy(a), torch.from_numpy(b)
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)
    import jax

    a, b = jax.device_put((a, b))
    multiply = jax.jit(lambda a, b: a @ b)
    return lambda: multiply(a, b).block_until_ready()


def matmul_rate(library: str, *, threads: int) -> float:
    """FLOP/s of the fastest product."""
    multiply = product(library, threads=threads)
    times = []
    for _ in range(2 + REPEATS):
        start = time.perf_counter()
        multiply()
        times.append(time.perf_counter() - start)
    return 2 * N**3 / min(times[2:])
