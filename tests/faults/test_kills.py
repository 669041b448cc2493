"""One process that is really killed, at the worst moments, or told to end: the run ends
as if nobody had touched it. Random moments and several processes: test_hosts.py.
"""

import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoint import MANIFEST, files_in
from bert_jax.metrics import read_metrics
from tests import tiny

pytestmark = pytest.mark.slow
STEPS = 60
SETTINGS = {**tiny.SETTINGS, "steps": str(STEPS), "save_every": "7", "rows": "pair"}
NOTICE = 30  # seconds from SIGTERM to the end, as docs/tpu.md has it
# How a process is made to end itself, by a signal that it cannot see.
DIES = "import os, signal\ndef die(): os.kill(os.getpid(), signal.SIGKILL)\n"
MOMENTS = {
    "at start-up, when the workdir is claimed": """
from bert_jax.checkpoint import Checkpoints
Checkpoints.last_good = lambda self: die()
""",
    "while arrays are being written": """
import threading, time
from bert_jax.checkpoint import UNDER_WAY, Checkpoints
begin = Checkpoints.__enter__
def watched(self):
    def look():
        while not list(self.root.glob(UNDER_WAY)):
            time.sleep(0.0002)
        die()
    threading.Thread(target=look, daemon=True).start()
    return begin(self)
Checkpoints.__enter__ = watched
""",
    "when they are written, but not the manifest": """
from bert_jax import checkpoint
write, written = checkpoint.write_text, []
def text(path, content):
    if path.name == checkpoint.MANIFEST:
        written.append(path)
        if len(written) == 2:
            die()
    write(path, content)
checkpoint.write_text = text
""",
    "during evaluation": """
from bert_jax.evaluators.held_out import HeldOut
run, calls = HeldOut.run, []
def dies(self, params, **options):
    calls.append(params)
    step = self.step
    def last(*batch):
        step(*batch)
        die()
    if len(calls) == 2:
        self.step = last
    return run(self, params, **options)
HeldOut.run = dies
""",
}

# The first evaluation of a process: each batch takes as long as it is told.
SLOW_SCORING = """
import os, time
from pathlib import Path
from bert_jax.evaluators.held_out import HeldOut
run, pauses = HeldOut.run, os.environ["PAUSES"].split()
def slow(self, params, **options):
    step = self.step
    def late(*batch):
        means = step(*batch)
        Path(os.environ["SCORING"]).touch()
        time.sleep(float(pauses.pop(0)) if pauses else 0)
        return means
    self.step = late
    return run(self, params, **options)
HeldOut.run = slow
"""
NO_INPUT = """
import time
from bert_jax.lane import Lane
next_batch, calls = Lane.next_batch, []
def hangs(self, *arguments):
    calls.append(1)
    if len(calls) == 9:
        time.sleep(3600)
    return next_batch(self, *arguments)
Lane.next_batch = hangs
"""


def command(corpus, workdir, before: str = "", **changes: str) -> list[str]:
    """`before` is run before the command is."""
    fields = {**SETTINGS, "data": str(corpus.path)}
    fields |= {"eval.data": str(corpus.path), "eval.every": "12", **changes}
    code = f"{before}\nimport sys\nfrom bert_jax.cli import main\nmain(sys.argv[1:])\n"
    return [
        *(sys.executable, "-c", code, "train"),
        *("--config", "pretrain:bert-tiny", "--workdir", str(workdir)),
        *(f"--config.{name}={value}" for name, value in fields.items()),
    ]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    told = {"XLA_FLAGS": "", "BERT_JAX_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **told}


def start(corpus, workdir, environment, *before, **changes) -> subprocess.Popen:
    return subprocess.Popen(
        command(corpus, workdir, *before, **changes),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(corpus, workdir, environment) -> str:
    process = start(corpus, workdir, environment)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


def wait_for_step(workdir, step: int, process) -> None:
    """Until the metrics show `step`, or the run has ended."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        rows = read_metrics(workdir / "metrics.jsonl")
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.01)


def batches(workdir) -> list[tuple[int, str]]:
    rows = read_metrics(workdir / "metrics.jsonl")
    return [(row["step"], row["batch"]) for row in rows if row["kind"] == "train"]


def scores(workdir) -> list[dict]:
    rows = read_metrics(workdir / "metrics.jsonl")
    return [row for row in rows if row["kind"] == "eval"]


def parameters(workdir) -> list:
    return jax.tree.leaves(bert_jax.load(workdir, step=STEPS).params)


@pytest.fixture(scope="module")
def undisturbed(tiny_corpus, environment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(tiny_corpus, workdir, environment)
    assert len(batches(workdir)) == STEPS
    assert len({digest for _, digest in batches(workdir)}) == STEPS
    return workdir


def assert_undisturbed(workdir, undisturbed, what) -> None:
    """It ends with the same batches and the same parameters, bit for bit."""
    assert batches(workdir) == batches(undisturbed), what
    for ours, theirs in zip(parameters(workdir), parameters(undisturbed), strict=True):
        assert np.array_equal(ours, theirs), what


def test_killed_at_the_worst_moments_ends_bit_equal(
    tiny_corpus, environment, undisturbed, tmp_path
):
    """One run, killed four times; then its input hangs; then a bit of its newest
    checkpoint is flipped."""
    workdir = tmp_path / "run"
    folder, said = workdir / "checkpoints", []
    for moment in MOMENTS:
        process = start(tiny_corpus, workdir, environment, DIES + MOMENTS[moment])
        out, _ = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL, f"{moment}: {out}"
        said.append(out)
        left = {path.name: (path / MANIFEST).exists() for path in folder.glob("*")}
        unfinished = [name for name, whole in left.items() if not whole]
        if "start-up" in moment:
            assert (workdir / "run.json").exists()
            assert not left
        elif "arrays" in moment:
            assert unfinished == ["7.orbax-checkpoint-tmp"]
        elif "manifest" in moment:
            assert left == {"7": True, "14": False}
    at_once, at_seven, at_fourteen = said[1:]
    assert "resumed" not in at_once
    assert "checkpoint 7 was not finished: removed" in at_seven
    assert "checkpoint 14 is not usable: it was not finished" in at_fourteen
    assert "resumed at step 7" in at_fourteen
    assert "step 12: " in at_fourteen  # the first evaluation; the second is at 24
    assert "step 24: " not in at_fourteen
    stalls = dict(stall_after="5")
    process = start(tiny_corpus, workdir, environment, NO_INPUT, **stalls)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 75, out
    begin = int(out.split("resumed at step ")[1].split(":")[0])
    assert f"error: step {begin + 9} has waited " in out
    assert f"longer than config.stall_after=5: {tiny_corpus.path} cannot be read" in out
    whole = [int(path.parent.name) for path in folder.glob(f"*/{MANIFEST}")]
    newest, older = sorted(whole, reverse=True)[:2]
    largest = max(files_in(folder / str(newest)), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    out = finish(tiny_corpus, workdir, environment)
    assert f"checkpoint {newest} is not usable: " in out
    assert "was altered (other hash)" in out
    assert f"resumed at step {older}" in out
    assert_undisturbed(workdir, undisturbed, "the worst moments")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
def test_a_signal_saves_and_exits(
    tiny_corpus, environment, undisturbed, tmp_path, number, code
):
    workdir = tmp_path / "run"
    process = start(tiny_corpus, workdir, environment)
    wait_for_step(workdir, 5, process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=150)
    assert process.returncode == code, out
    assert "stopped at step" in out
    stopped = int(out.split("stopped at step ")[1].split()[0])
    assert stopped < STEPS
    assert bert_jax.load(workdir).step == stopped
    assert f"resumed at step {stopped}" in finish(tiny_corpus, workdir, environment)
    for ours, theirs in zip(parameters(workdir), parameters(undisturbed), strict=True):
        assert np.array_equal(ours, theirs)


def test_sigterm_breaks_an_evaluation_off(
    tiny_corpus, environment, undisturbed, tmp_path
):
    """It would take a hundred seconds more; its scores are made up for."""
    workdir, scoring = tmp_path / "run", tmp_path / "scoring"
    told = {**environment, "SCORING": str(scoring), "PAUSES": "3 100"}
    process = start(tiny_corpus, workdir, told, SLOW_SCORING)
    deadline = time.monotonic() + 300
    while not scoring.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=300)
    took = time.monotonic() - begin
    assert process.returncode == 75, out
    assert took < NOTICE
    assert "stopped at step 12 and saved" in out
    assert bert_jax.load(workdir).step == 12  # no multiple of save_every
    assert scores(workdir) == []
    assert "resumed at step 12" in finish(tiny_corpus, workdir, environment)
    assert scores(workdir) == scores(undisturbed) != []
    assert_undisturbed(workdir, undisturbed, "SIGTERM")


def test_a_disk_that_fills_up(tiny_corpus, environment, undisturbed, tmp_path):
    """No file may grow beyond 30 kB: what a write to a full disk looks like."""
    workdir = tmp_path / "run"
    limited = [
        *("bash", "-c", 'ulimit -f 30; trap "" XFSZ; exec "$@"', "bash"),
        *command(tiny_corpus, workdir),
    ]
    # The compiler's cache is on the same disk; it must not be what fails.
    done = subprocess.run(
        limited, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the checkpoint of step 7 could not be written" in done.stderr
    # Threads of Orbax log the failed write itself, before or after our last line, which
    # comes without a traceback.
    ours = [line for line in done.stderr.splitlines() if "run the same command" in line]
    assert len(ours) == 1
    assert ours[0].endswith("Make room and run the same command.")
    assert "cli.py" not in done.stderr
    assert not (workdir / "checkpoints/7").exists()
    finish(tiny_corpus, workdir, environment)
    for ours, theirs in zip(parameters(workdir), parameters(undisturbed), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_killed_export_leaves_nothing(undisturbed, environment, tmp_path):
    """Killed at the moment the weights are being written."""
    code = (
        "import os, signal, sys\n"
        "from bert_jax.convert import files\n"
        "from bert_jax.cli import main\n"
        "save = files.save_file\n"
        "def save_then_die(*args, **kwargs):\n"
        "    save(*args, **kwargs)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.save_file = save_then_die\n"
        "main(['export', *sys.argv[1:]])\n"
    )
    out = tmp_path / "exported"
    arguments = [sys.executable, "-c", code, str(undisturbed), str(out)]
    done = subprocess.run(arguments, env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    arguments[2] = (
        "import sys; from bert_jax.cli import main; main(['export', *sys.argv[1:]])"
    )
    subprocess.run(arguments, env=environment, capture_output=True, check=True)
    assert (out / "model.safetensors").exists()
