"""The benchmark runs, with every contender, and says what it should."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

POSITIVE = ("tokens_per_s", "best_step_s", "median_step_s", "first_step_s")
PEERS = {
    f"torch-{how}-{form}"
    for how in ("eager", "compile")
    for form in ("all", "gathered")
}


def run(*options, **environment):
    command = [sys.executable, "-m", "benchmarks.train_step", *options]
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_train_step(tmp_path):
    out = tmp_path / "out.json"
    options = ["--sizes", "toy", "--rounds", "1", "--steps", "2", "--json", str(out)]
    done = run(*options)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    toy = report["sizes"]["toy"]
    assert toy["preset"] == "bert-tiny"
    assert set(toy["contenders"]) == {"bert_jax", *PEERS}
    for name, entry in toy["contenders"].items():
        assert entry["error"] is None
        assert all(entry[field] > 0 for field in POSITIVE), (name, entry)
        # Fresh models on the same vocabulary: all start near a uniform guess.
        assert entry["first_loss"] == pytest.approx(math.log(30522), abs=0.5)
    for name in PEERS:
        entry = toy["contenders"][name]
        assert entry["ratio"] > 0
        assert entry["attention"] == "sdpa"
        assert name in done.stdout
    for form in ("all", "gathered"):
        best = toy["best_torch"][form]
        assert best["contender"] in PEERS
        assert best["contender"].endswith(form)
        peers = [toy["contenders"][name] for name in PEERS if name.endswith(form)]
        assert best["ratio"] == min(peer["ratio"] for peer in peers)
    assert {"cpu", "load", "versions", "rounds", "steps", "threads"} <= set(report)


@pytest.mark.slow
def test_a_contender_that_fails_is_reported(tmp_path):
    out = tmp_path / "out.json"
    options = ["--sizes", "toy", "--rounds", "1", "--steps", "1", "--json", str(out)]
    done = run(*options, CXX="/bin/false")  # torch.compile needs a compiler
    assert done.returncode == 1
    toy = json.loads(out.read_text())["sizes"]["toy"]
    for name in PEERS:
        entry = toy["contenders"][name]
        if "compile" in name:
            assert "No working C++ compiler" in entry["error"]
            assert "tokens_per_s" not in entry
        else:
            assert entry["error"] is None
    assert done.stdout.count("FAILED: ") == 2
    assert toy["best_torch"]["all"]["contender"] == "torch-eager-all"


@pytest.mark.slow
def test_train_step_names_a_bad_option():
    done = run("--sizes", "toy", "--threads", "100000", "--steps", "0")
    assert done.returncode == 2
    assert "--steps 0 must be at least 1" in done.stderr
    assert "--threads 100000" in done.stderr
