"""Processes that are really killed: the run ends as if nobody had touched it."""

import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.metrics import read_metrics
from tests import tiny

pytestmark = pytest.mark.slow
STEPS = 60
SETTINGS = {**tiny.SETTINGS, "steps": str(STEPS), "save_every": "7", "rows": "pair"}


def command(corpus, workdir) -> list[str]:
    fields = {**SETTINGS, "data": str(corpus.path)}
    return [
        *(sys.executable, "-m", "bert_jax", "train"),
        *("--config", "pretrain:bert-tiny", "--workdir", str(workdir)),
        *(f"--config.{name}={value}" for name, value in fields.items()),
    ]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return {**os.environ, "XLA_FLAGS": "", "BERT_JAX_CACHE": str(cache)}


def start(corpus, workdir, environment) -> subprocess.Popen:
    return subprocess.Popen(
        command(corpus, workdir),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(corpus, workdir, environment) -> str:
    process = start(corpus, workdir, environment)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    return out


def wait_for_step(workdir, step: int, process) -> None:
    """Until the metrics show `step`, or the run has ended."""
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and process.poll() is None:
        rows = read_metrics(workdir / "metrics.jsonl")
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.01)


def batches(workdir) -> list[tuple[int, str]]:
    rows = read_metrics(workdir / "metrics.jsonl")
    return [(row["step"], row["batch"]) for row in rows if row["kind"] == "train"]


def parameters(workdir) -> list:
    return jax.tree.leaves(bert_jax.load(workdir, step=STEPS).params)


@pytest.fixture(scope="module")
def undisturbed(tiny_corpus, environment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(tiny_corpus, workdir, environment)
    assert len(batches(workdir)) == STEPS
    assert len({digest for _, digest in batches(workdir)}) == STEPS
    return workdir


@pytest.mark.parametrize("kills", [1, 2])
def test_killed_and_restarted_ends_bit_equal(
    tiny_corpus, environment, undisturbed, tmp_path, kills
):
    workdir = tmp_path / "run"
    rng = random.Random()  # another moment in every run of the test
    moments = sorted(rng.sample(range(3, STEPS - 3), kills))
    for moment in moments:
        process = start(tiny_corpus, workdir, environment)
        wait_for_step(workdir, moment, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, f"ended before step {moment}"
    out = finish(tiny_corpus, workdir, environment)
    if moments[-1] > 15:  # at least one checkpoint was written
        assert "resumed at step" in out
    assert batches(workdir) == batches(undisturbed), moments
    for ours, theirs in zip(parameters(workdir), parameters(undisturbed), strict=True):
        assert np.array_equal(ours, theirs), moments


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits(
    tiny_corpus, environment, undisturbed, tmp_path, number
):
    workdir = tmp_path / "run"
    process = start(tiny_corpus, workdir, environment)
    wait_for_step(workdir, 5, process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "stopped at step" in out
    stopped = int(out.split("stopped at step ")[1].split()[0])
    assert stopped < STEPS
    assert bert_jax.load(workdir).step == stopped
    assert f"resumed at step {stopped}" in finish(tiny_corpus, workdir, environment)
    for ours, theirs in zip(parameters(workdir), parameters(undisturbed), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_disk_that_fills_up(tiny_corpus, environment, undisturbed, tmp_path):
    """No file may grow beyond 30 kB: what a write to a full disk looks like."""
    workdir = tmp_path / "run"
    limited = [
        *("bash", "-c", 'ulimit -f 30; trap "" XFSZ; exec "$@"', "bash"),
        *command(tiny_corpus, workdir),
    ]
    # The compiler's cache is on the same disk; it must not be what fails.
    done = subprocess.run(
        limited, env=environment, capture_output=True, text=True, timeout=150
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
