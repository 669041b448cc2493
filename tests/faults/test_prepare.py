"""Preparing for real: processes that are killed, and how much memory they take."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.prepare import memory_of
from bert_jax.data.corpus import open_corpus
from tests import tiny
from tests.data.test_prepare import contents

pytestmark = pytest.mark.slow
ROOT = tiny.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save(folder / "tok")
    return folder / "tok"


def text(folder, *, megabytes: int):
    """Short documents, all different."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(20_000)]
    path = folder / f"{megabytes}.txt"
    with path.open("w") as file:
        while file.tell() < megabytes * 1e6:
            lines = (" ".join(rng.choices(words, k=30)) + "." for _ in range(400))
            file.write("\n".join(lines) + "\n\n")
    return path


def start(source, tokenizer, out, *options) -> subprocess.Popen:
    command = [sys.executable, "-m", "bert_jax", "prepare", "--tokenizer", tokenizer]
    command += ["--out", out, "--workers", "2", *options, source]
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process) -> str:
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    return out


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_and_run_again(number, tokenizer, tmp_path):
    source = text(tmp_path, megabytes=15)
    finish(start(source, tokenizer, tmp_path / "straight"))
    process = start(source, tokenizer, tmp_path / "out")
    shard = tmp_path / ".out.partial/shard-00000.tfrecord"
    deadline = time.monotonic() + 100
    while not (shard.exists() and shard.stat().st_size > 3e6):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, number)
    process.communicate(timeout=30)
    assert not (tmp_path / "out").exists()
    before = shard.stat().st_size
    finish(start(source, tokenizer, tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")
    whole = (tmp_path / "out/shard-00000.tfrecord").stat().st_size
    print(f"killed after {before / whole:.0%}")


def test_memory_does_not_grow_with_the_corpus(tokenizer, tmp_path):
    """The peak of all processes together, for a text and one ten times as long."""
    peaks = {}
    for megabytes in (60, 600):
        process = start(
            text(tmp_path, megabytes=megabytes), tokenizer, tmp_path / f"{megabytes}"
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(0.05)
        finish(process)
        peaks[megabytes] = peak
    print({n: f"{peak / 1e6:.0f} MB" for n, peak in peaks.items()})
    assert open_corpus(tmp_path / "600").about["pieces"] > 1e8
    assert peaks[600] < 1.2 * peaks[60]
