"""The benchmarks run and say what they should."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def peers_of(*forms):
    return {f"torch-{how}-{form}" for how in ("eager", "compile") for form in forms}


POSITIVE = ("tokens_per_s", "best_step_s", "median_step_s", "first_step_s")
POSITIVE += ("share_of_peak", "step_megabytes", "peak_megabytes", "process_megabytes")
# Of a fresh model: a uniform guess of a piece; ELECTRA's also guesses 50 times whether
# a token was replaced, about as good as by chance.
FIRST_LOSS = {
    "toy": (math.log(30522), 0.5),
    "rtd-toy": (math.log(30522) + 50 * math.log(2), 2.0),
    "permuted-toy": (math.log(32000), 0.5),
}
PEERS = peers_of("all", "gathered")


def run(*options, name="train_step", **environment):
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, options)]
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "preset", "forms"),
    [
        ("toy", "bert-tiny", ("all", "gathered")),
        ("rtd-toy", "electra-small-discriminator", ("gathered",)),
        ("permuted-toy", "xlnet-base-cased", ("released", "lean")),
    ],
)
def test_train_step(size, preset, forms, tmp_path):
    out = tmp_path / "out.json"
    options = ["--sizes", size, "--rounds", "1", "--steps", "2", "--json", str(out)]
    done = run(*options)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    toy = report["sizes"][size]
    assert toy["preset"] == preset
    assert set(toy["matmul_flops_per_s"]) == {"numpy", "torch", "jax"}
    assert toy["measures_failed"] == {}
    peak = max(toy["matmul_flops_per_s"].values())
    peers = peers_of(*forms)
    assert set(toy["contenders"]) == {"bert_jax", *peers}
    for name, entry in toy["contenders"].items():
        assert entry["error"] is None
        assert all(entry[field] > 0 for field in POSITIVE), (name, entry)
        loss, off = FIRST_LOSS[size]
        assert entry["first_loss"] == pytest.approx(loss, abs=off)
        # The same model, number by number.
        assert entry["parameters"] == toy["contenders"]["bert_jax"]["parameters"]
        assert entry["peak_megabytes"] < entry["process_megabytes"]
        rate = toy["step_flops"] / entry["best_step_s"]
        assert entry["share_of_peak"] == pytest.approx(rate / peak)
    for name in peers:
        entry = toy["contenders"][name]
        assert entry["ratio"] > 0
        own = "XLNet's own" if size == "permuted-toy" else "sdpa"
        assert entry["attention"] == own
        assert name in done.stdout
    assert set(toy["best_torch"]) == set(forms)
    for form, best in toy["best_torch"].items():
        assert best["contender"] in peers
        assert best["contender"].endswith(form)
        those = [toy["contenders"][name] for name in peers if name.endswith(form)]
        assert best["ratio"] == min(peer["ratio"] for peer in those)
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
    options = ["--sizes", "toy", "rtd-toy", "--peers", "torch-eager-all"]
    done = run(*options, "--threads", "100000", "--steps", "0")
    assert done.returncode == 2
    assert "--sizes rtd-toy: none of --peers torch-eager-all trains" in done.stderr
    assert "torch-eager-gathered, torch-compile-gathered do" in done.stderr
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


@pytest.mark.slow
def test_startup(tmp_path):
    out = tmp_path / "out.json"
    done = run("--rounds", 1, "--json", out, name="startup", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    starts = report["best"]
    assert list(starts) == ["cold", "warm", "resumed"]
    for one in starts.values():
        assert 0 < one["parts"]["compiling the step"] < one["total"]
        # What is told is rounded; what takes next to no time is not told.
        assert sum(one["parts"].values()) == pytest.approx(one["total"], abs=0.6)
        assert all(seconds > 0 for seconds in one["step"].values())
    assert starts["cold"]["programs"]["read from the cache"] == 0
    assert starts["warm"]["programs"]["compiled"] == 0
    count = starts["cold"]["programs"]["compiled"]
    assert starts["warm"]["programs"]["read from the cache"] == count > 0
    assert all(f"{code}: " in done.stdout for code in report["imports"])


@pytest.mark.slow
def test_flash(monkeypatch):
    """At one length: less memory and less time than dense attention."""
    folder = Path(sys.prefix) / "libtpu"
    if not folder.is_dir():
        pytest.skip("the TPU compiler: `make test` installs libtpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    done = run("--lengths", 1024, name="flash", PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["1024", "dense"], ["1024", "flash"]]
    dense, flash = ([float(number) for number in row[2:]] for row in rows)
    assert flash[0] < 0.2 * dense[0]
    assert flash[1] < 0.5 * dense[1]
    assert dense[2] == 0
    # What is scheduled is more than the least that it can take.
    assert flash[2] > flash[3] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shapes", "32by128"), "error: --shapes 32by128: rows on a chip x tokens"),
        (("--ours", "arch.stack"), "error: --ours arch.stack: FIELD=VALUE"),
        (("--topology", "v9:4x4"), "error: unknown --topology, kind of chip 'v9'"),
    ],
)
def test_tpu_compile_names_a_bad_option(words, said):
    done = run(*words, name="tpu_compile")
    assert done.returncode == 1
    assert done.stderr.startswith(said)
