"""The benchmarks run and say what they should."""

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


def run(*options, name="train_step", **environment):
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, options)]
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


@pytest.mark.slow
def test_input(tiny_corpus, tmp_path):
    out = tmp_path / "out.json"
    options = ["--batch", 4, "--seconds", 0.2, "--json", out]
    done = run(tiny_corpus.path, *options, name="input")
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    for case in ("full-512", "full-128", "doc-512", "pair-512", "pair-128"):
        assert report[case]["tokens_per_s"] > 0
        assert report[case]["first_batch_far_s"] > 0
        assert 0 < report[case]["real"] <= 1
    assert done.stdout.count("x ") >= 5


@pytest.mark.slow
def test_prepare(tiny_tokenizer, tmp_path):
    from tests import tiny

    tiny_tokenizer.save(tmp_path / "tok")
    text = tiny.write_text(tmp_path / "text.txt", documents=300)
    out = tmp_path / "out.json"
    options = ["--vocab", tmp_path / "tok/vocab.txt", "--megabytes", 0.02]
    options += ["--rounds", 1, "--json", out, "--peers", "tokenizer", "classic"]
    done = run(text, *options, name="prepare")
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert list(report) == ["ours", "tokenizer", "classic"]
    for found in report.values():
        assert found["megabytes_per_s"] > 0
        assert found["peak_megabytes"] > 10  # Python alone has that
    assert report["classic"]["disk_share"] > report["ours"]["disk_share"] > 0
