"""One contender of benchmarks/train_step.py, or one measure, in a process of its own.

    python -m benchmarks.worker mini torch-eager-all --steps 3 --threads 2

Memory is that of /proc/self/status: getrusage counts what the parent had, too, whose
memory the child shares until it starts another program.
"""

import argparse
import ctypes
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.matmul import LIBRARIES, matmul_rate
from benchmarks.sizes import OURS, PEERS, SIZES, Size
from bert_jax.host_memory import keep_freed_memory

ROOT = Path(__file__).parents[1]
FLOPS = "flops"
MATMULS = tuple(f"matmul-{library}" for library in LIBRARIES)
WARM_UP = 2  # steps after the first, which compiles


def resident(field: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith(field)).split()[1])


def forget_peak() -> None:
    """Gives freed memory back to the system, and lets VmHWM begin anew."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def builder(name: str, *, threads: int) -> Callable[[Size], tuple[Callable, dict]]:
    """What makes the contender's step; its libraries are loaded by now."""
    if name == OURS:
        from benchmarks.ours import our_step

        return our_step
    from benchmarks.torch_forms import torch_step

    _, how, form = name.split("-")
    if how == "compile":  # the compiler is loaded when it is first used
        import torch._inductor.compile_fx  # noqa: F401
    return functools.partial(torch_step, how=how, form=form, threads=threads)


def train(size: Size, name: str, *, steps: int, threads: int) -> dict:
    """Times of the contender's steps in seconds, its first loss, and its memory."""
    keep_freed_memory()  # as `bert_jax train` does; for all contenders alike
    build = builder(name, threads=threads)
    forget_peak()
    before = resident("VmRSS")
    step, facts = build(size)

    def timed():
        start = time.perf_counter()
        loss = step()
        return time.perf_counter() - start, loss

    first, loss = timed()
    for _ in range(WARM_UP):
        step()
    times = [timed()[0] for _ in range(steps)]
    whole = resident("VmHWM")
    forget_peak()  # what compiled the step has left its own
    for _ in range(2):
        step()
    return {
        "first_step_s": first,
        "first_loss": float(loss),
        "steps_s": times,
        "step_megabytes": (resident("VmHWM") - before) / 1e6,
        "peak_megabytes": (whole - before) / 1e6,
        "process_megabytes": whole / 1e6,
        **facts,
    }


def work(size: Size, name: str, *, steps: int, threads: int) -> dict:
    if name == FLOPS:
        from benchmarks.ours import our_flops

        return {"step_flops": our_flops(size)}
    if name in MATMULS:
        rate = matmul_rate(name.partition("-")[2], threads=threads)
        return {"flops_per_s": rate}
    return train(size, name, steps=steps, threads=threads)


def run_worker(size: str, name: str, *, steps: int, threads: int, cache: Path) -> dict:
    """What `work` returns in a new process, or {"error": ...}."""
    command = [sys.executable, "-m", "benchmarks.worker", size, name]
    command += ["--steps", str(steps), "--threads", str(threads)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / size / name),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        return {"error": f"exit {done.returncode}: {done.stderr.strip()[-2000:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("name", choices=[OURS, *PEERS, *MATMULS, FLOPS])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    try:
        counts = {"steps": args.steps, "threads": args.threads}
        result = work(SIZES[args.size], args.name, **counts)
    except Exception as error:  # of whatever kind: it belongs in the results
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
