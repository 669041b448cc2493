"""From the command to the end of the first step of the demo's training.

    python -m benchmarks.startup --rounds 3

`bert_jax demo` is started in a process of its own and stopped after its first step:

    cold     the folder of compiled programs is empty
    warm     a new run with what the cold one compiled
    resumed  the command of the warm one again: it goes on from its checkpoint

Text, vocabulary and corpus are made once, before the first of them. The parts up to the
end of the step are what training itself says; JAX_LOG_COMPILES splits them further. CPU
seconds are those of all threads, user and system: on a machine that does other things
they say more than those of a clock. Of several rounds that with the least seconds
counts. Beside them stands what `import bert_jax` takes.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.train_step import cpu_name
from bert_jax.demo import make_data
from bert_jax.interrupt import AGAIN

DONE = re.compile(r"step \d+ is done after ([\d.]+) s: (.*)")
STEP = r"Finished {} .*train_step\)? .*in ([\d.]+) sec"
OF_THE_STEP = {
    "traced": STEP.format("tracing"),
    "lowered": STEP.format("jaxpr to MLIR module conversion"),
    "compiled, or read": STEP.format("XLA compilation of"),
}
IMPORTS = ("import bert_jax", "import bert_jax; bert_jax.load")


def cpu_seconds(pid: int) -> float | None:
    """User and system, so far; None where Linux does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(workdir: Path, cache: Path) -> dict:
    """One start of the demo: its seconds, in all and part by part."""
    command = [sys.executable, "-m", "bert_jax", "demo", "--workdir", str(workdir)]
    kept = {k: v for k, v in os.environ.items() if "PERSISTENT_CACHE" not in k}
    environment = {
        **kept,  # what is cached is by default
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_LOG_COMPILES": "true",
        "PYTHONUNBUFFERED": "1",
    }
    log = []
    begin = time.perf_counter()
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            if done := DONE.search(line):
                total, cpu = time.perf_counter() - begin, cpu_seconds(process.pid)
                process.send_signal(signal.SIGTERM)
                break
            log.append(line)
        process.communicate()  # it saves what it has
    log = "".join(log)
    if not done or process.returncode != AGAIN:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{log}")
    inside = float(done[1])
    parts = (part.rpartition(" ") for part in done[2].split(", "))
    compiled = log.count("Finished XLA compilation of")
    read = log.count("Persistent compilation cache hit")
    return {
        "total": total,
        "parts": {"Python, imports": total - inside}
        | {name: float(seconds) for name, _, seconds in parts},
        "step": {
            name: float(re.search(pattern, log)[1])
            for name, pattern in OF_THE_STEP.items()
        },
        "cpu": cpu,
        "programs": {"compiled": compiled - read, "read from the cache": read},
    }


def start_all(folder: Path) -> dict[str, dict]:
    """One round."""
    cache = folder / "cache"
    found = {}
    for kind in ("cold", "warm", "resumed"):
        workdir = folder / ("cold" if kind == "cold" else "warm")
        if kind != "resumed":
            shutil.copytree(folder.parent / "data", workdir)
        found[kind] = start(workdir, cache)
        print(f"{kind}: {found[kind]['total']:.1f} s", file=sys.stderr)
    return found


def import_seconds(code: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def table(best: dict[str, dict]) -> str:
    starts = best.values()
    rows = {}
    for name in dict.fromkeys(name for one in starts for name in one["parts"]):
        rows[name] = [one["parts"].get(name, 0.0) for one in starts]
        if name.startswith("compiling"):
            for its in OF_THE_STEP:
                rows[f"of that {its}"] = [one["step"][its] for one in starts]
    rows["in all"] = [one["total"] for one in starts]
    rows["CPU seconds of all threads"] = [one["cpu"] for one in starts]
    for name in best["cold"]["programs"]:
        rows[f"programs {name}"] = [one["programs"][name] for one in starts]
    lines = [f"| seconds | {' | '.join(best)} |", "|---|" + "---|" * len(best)]
    for name, values in rows.items():
        shown = (f"{x:.1f}" if isinstance(x, float) else f"{x}" for x in values)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results here")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds} must be at least 1")
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"load {load:.1f}: other jobs run, figures will be off", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        make_data(Path(scratch) / "data")
        rounds = []
        for number in range(given.rounds):
            folder = Path(scratch) / f"round-{number}"
            folder.mkdir()
            rounds.append(start_all(folder))
    best = {
        kind: min((one[kind] for one in rounds), key=lambda found: found["total"])
        for kind in rounds[0]
    }
    imports = {
        code: min(import_seconds(code) for _ in range(max(3, given.rounds)))
        for code in IMPORTS
    }
    print(table(best))
    for code, seconds in imports.items():
        print(f"{code}: {seconds:.2f} s")
    report = {"cpu": cpu_name(), "load": load, "best": best, "imports": imports}
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
