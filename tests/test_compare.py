"""The bake-off at the size of a test: equal FLOPs, resuming, the report."""

import dataclasses
import gzip
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from bert_jax import compare as module
from bert_jax.compare import (
    check_budget,
    claim,
    compare,
    entry_run,
    make_plan,
)
from bert_jax.comparison import resolve_comparison
from bert_jax.config import load_config, override
from bert_jax.data.corpus import open_corpus
from bert_jax.data.pipeline import eval_batches
from bert_jax.data.rows import Rows
from bert_jax.errors import InputError
from bert_jax.evaluators.probe import Probe
from bert_jax.finetune import Finetune
from bert_jax.lane import Lane
from tests import tiny

FLOPS = 4e7
SCRIPT = "tokens <script>alert(1)</script>"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Text, a task of two classes and a task of tags, in the layout of the real ones:
    sentences with a cat are positive, animals are entities."""
    folder = tmp_path_factory.mktemp("data")
    for name, seed in (("train", 0), ("valid", 1)):
        tiny.write_text(folder / f"{name}.txt", documents=60, seed=seed)
    (folder / "glue_sst2").mkdir()
    (folder / "wnut17").mkdir()
    rng = random.Random(0)

    def sentence() -> list[str]:
        parts = (rng.choice(side) for side in (tiny.SUBJECTS, tiny.VERBS, tiny.OBJECTS))
        return " ".join(parts).split()

    def classes(count: int) -> str:
        words = [sentence() for _ in range(count)]
        lines = [f"{' '.join(w)}\t{int('cat' in w or 'dog' in w)}" for w in words]
        return "\n".join(["sentence\tlabel", *lines]) + "\n"

    def tags(count: int) -> str:
        animal = {"cat": "B-animal", "dog": "B-animal", "bird": "B-animal"}
        sentences = [
            "\n".join(f"{word}\t{animal.get(word, 'O')}" for word in sentence())
            for _ in range(count)
        ]
        return "\n\n".join(sentences) + "\n"

    packed = gzip.compress(classes(80).encode())
    (folder / "glue_sst2/train.tsv.gz").write_bytes(packed)
    (folder / "glue_sst2/dev.tsv").write_text(classes(40))
    (folder / "wnut17/wnut17train.conll").write_text(tags(80))
    (folder / "wnut17/emerging.dev.conll").write_text(tags(40))
    return folder


def make_config(data, **changes: str) -> ConfigDict:
    config = ConfigDict()
    config.data = str(data)
    config.text, config.held_out = ("train.txt",), ("valid.txt",)
    config.vocab_size, config.lowercase = 100, "yes"
    config.flops, config.points, config.seeds = FLOPS, 2, 2
    config.tasks = ("sst2", "wnut17")
    config.probe = {"layers": 1, "examples": 60, "sentences": 60}
    config.finetune = {"steps": 4, "batch": 8, "lr": 1e-3}
    size = {"layers": 1, "width": 16, "heads": 2, "inner": 32, "max_positions": 32}
    config.shared = {"arch": size, "length": 16, "batch": 8, "rows": "full"}
    config.shared.optim = {"lr": 1e-2, "warmup": 0.1}
    config.entries = (
        dict(name=SCRIPT, preset="bert-base-uncased"),
        dict(name="none", preset="bert-base-uncased", trained=False, seeds=1),
    )
    override(config, {name.replace("__", "."): v for name, v in changes.items()})
    return config


def run(config: ConfigDict, workdir):
    comparison = resolve_comparison(config)
    return compare(comparison, workdir, command="bert_jax <compare>", progress=False)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("compare") / "whole"
    return workdir, run(make_config(data), workdir)


def test_every_entry_has_the_budget(finished, data):
    """To half of 2 steps; more of them where one takes less. Padding is no token."""
    workdir, results = finished
    config = make_config(data)
    causal = {"objective.name": "causal_lm", "arch.order": "causal"}
    config.entries += (dict(name="causal", preset="bert-tiny", changes=causal),)
    comparison = resolve_comparison(config)
    corpus = open_corpus(workdir / "corpus/text")
    plans = [make_plan(comparison, entry, corpus) for entry in comparison.entries]
    masked, none, causal = (plan.describe() for plan in plans)
    for entry in (masked, causal):
        assert abs(entry["flops"] - FLOPS) <= entry["step_flops"]
        assert entry["flops"] == entry["steps"] * entry["step_flops"]
    assert masked["step_flops"] < causal["step_flops"]
    assert masked["steps"] > causal["steps"]
    assert none["flops"] == none["steps"] == none["tokens"] == 0
    rows = Rows(corpus, "full", 16)
    (batch,) = eval_batches(rows, size=len(rows))
    real = (batch["group"] > 0).mean()
    assert real < 0.99
    assert masked["tokens"] == pytest.approx(masked["steps"] * 8 * 16 * real, abs=0.5)
    assert abs(masked["flops"] - FLOPS) <= 0.02 * FLOPS
    for entry, plan in zip(results["entries"], (masked, none), strict=True):
        assert {name: entry[name] for name in plan} == plan


def test_everything_is_scored(finished):
    masked, none = finished[1]["entries"]
    assert [run["seed"] for run in masked["seeds"]] == [0, 1]
    assert [run["seed"] for run in none["seeds"]] == [0]
    for run in masked["seeds"]:
        probed = [(row["task"], row["step"]) for row in run["probe"]]
        assert probed == [
            (task, step)
            for step in (masked["steps"] // 2, masked["steps"])
            for task in ("sst2", "wnut17")
        ]
        assert [len(row["losses"]) for row in run["finetune"]] == [4, 4]
        assert 0 < run["held_out"]["masked_lm_accuracy"] < 1
    assert [row["step"] for row in none["seeds"][0]["probe"]] == [0, 0]
    assert none["seeds"][0]["held_out"] == {}
    scores = [
        row["score"]
        for entry in finished[1]["entries"]
        for run in entry["seeds"]
        for row in (*run["probe"], *run["finetune"])
    ]
    assert all(0 <= score <= 1 for score in scores)
    first, second = masked["seeds"]
    assert first["finetune"][0]["losses"] != second["finetune"][0]["losses"]


def test_a_killed_comparison_goes_on_to_the_same_results(
    finished, data, tmp_path, monkeypatch
):
    """Killed in pretraining, in an evaluation and while the report is written."""
    expected = (finished[0] / "results.json").read_bytes()
    workdir = tmp_path / "killed"

    class Killed(BaseException):
        pass

    def dies(function, *, calls: int):
        left = iter(range(calls))

        def call(*arguments, **options):
            if next(left, None) is None:
                raise Killed
            return function(*arguments, **options)

        return call

    from bert_jax.checkpoint import Checkpoints

    for place, name, calls in (
        (Checkpoints, "save", 1),  # of the second checkpoint of the first run
        (Finetune, "run", 1),
        (module, "write_report", 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, dies(getattr(place, name), calls=calls))
            with pytest.raises(Killed):
                run(make_config(data), workdir)
        written = workdir / "results.json"
        assert not written.exists() or written.read_bytes() != expected
    run(make_config(data), workdir)
    assert (workdir / "results.json").read_bytes() == expected
    for place, name in ((module, "train"), (Finetune, "run"), (Probe, "run")):
        monkeypatch.setattr(place, name, dies(None, calls=0))
    run(make_config(data), workdir)  # finished: there is nothing to be done again
    assert (workdir / "results.json").read_bytes() == expected


def test_a_stopped_comparison_goes_on_to_the_same_results(
    finished, data, tmp_path, monkeypatch
):
    """SIGTERM between two checkpoints: what is saved then takes the place of none that
    is probed."""
    config, workdir = make_config(data), tmp_path / "stopped"
    steps = finished[1]["entries"][0]["steps"]
    next_batch = Lane.next_batch

    def stops(self, course, step, feeds):
        if step == steps // 2 + 1:
            signal.raise_signal(signal.SIGTERM)
        return next_batch(self, course, step, feeds)

    with monkeypatch.context() as patch:
        patch.setattr(Lane, "next_batch", stops)
        assert run(config, workdir) is None
    run(config, workdir)
    expected = (finished[0] / "results.json").read_bytes()
    assert (workdir / "results.json").read_bytes() == expected


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="has one core")
def test_killed_workers_go_on_to_the_same_results(finished, data, tmp_path):
    """The command and its workers, by SIGKILL and by SIGTERM; and what two workers find
    is what one finds."""
    file = tmp_path / "config.py"
    file.write_text(
        "from tests.test_compare import make_config\n\n\n"
        f"def get_config():\n    return make_config({str(data)!r})\n"
    )
    root = str(Path(__file__).parents[1])
    told = {"XLA_FLAGS": "", "BERT_JAX_CACHE": str(tmp_path), "PYTHONPATH": root}

    def start(name: str) -> subprocess.Popen:
        words = ("compare", "--config", file, "--workdir", tmp_path / name)
        return subprocess.Popen(
            [sys.executable, "-m", "bert_jax", *words, "--workers", "2"],
            env={**os.environ, **told},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(name: str) -> dict:
        process = start(name)
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
        assert "[3/3]" in said
        return json.loads((tmp_path / name / "results.json").read_text())

    whole = finish("whole")
    for how, until in (
        (signal.SIGKILL, "runs/*/seed-0/metrics.jsonl"),
        (signal.SIGTERM, "scores/*/seed-1/probe-*"),
    ):
        process = start("killed")
        deadline = time.monotonic() + 150
        while not [*(tmp_path / "killed").glob(until)]:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(how)
        process.wait(timeout=60)
        assert not (tmp_path / "killed/results.json").exists() or how == signal.SIGTERM
    assert finish("killed") == whole
    for ours, theirs in zip(whole["entries"], finished[1]["entries"], strict=True):
        assert {**ours, "seeds": 0} == {**theirs, "seeds": 0}
        for one, other in zip(ours["seeds"], theirs["seeds"], strict=True):
            assert one["held_out"] == pytest.approx(other["held_out"], rel=1e-3)


def test_the_report_is_one_file_and_escapes_what_it_is_told(finished):
    workdir, _ = finished
    page = (workdir / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "bert_jax &lt;compare&gt;" in page
    sources = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]{1,30})""", page)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    for trace in ("http:", "https:", "url(", "@import", "<link", "<iframe"):
        assert trace not in page
    assert (workdir / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = (workdir / "table.md").read_text()
    assert "<script" not in table
    assert "| none |" in table
    assert "## Differences" in table  # the numbers: test_report.py


def test_another_comparison_is_refused(finished, data):
    workdir, _ = finished
    with pytest.raises(InputError, match=r"belongs to another comparison.*\nflops: "):
        run(make_config(data, flops="5e7"), workdir)
    config = make_config(data)
    config.entries = ({**config.entries[0], "seeds": 3},)
    with pytest.raises(InputError) as caught:
        run(config, workdir)
    assert f"entries.{SCRIPT}.seeds: 0 in the workdir, 3 now" in str(caught.value)
    assert "entries.none.seeds: 1 in the workdir, None now" in str(caught.value)


def test_a_refused_budget_can_be_mended(data, tmp_path):
    """In the same workdir, as long as nothing was trained; the corpus stays."""

    def told(**changes) -> dict:
        return dataclasses.asdict(resolve_comparison(make_config(data, **changes)))

    claim(tmp_path, told(flops="1e5"))
    with pytest.raises(InputError, match="\nvocab_size: 100 in the workdir, 90 now"):
        claim(tmp_path, told(vocab_size="90"))
    claim(tmp_path, told())
    claim(tmp_path, {**told(), "made": {"entries": {}, "tasks": {}}})
    claim(tmp_path, told())
    with pytest.raises(InputError, match="flops: 40000000.0 in the workdir"):
        claim(tmp_path, told(flops="1e5"))


def test_other_workers_are_told(data, tmp_path, capsys):
    """Once, of a comparison that has begun; of one of before nothing is known."""
    told = dataclasses.asdict(resolve_comparison(make_config(data)))
    made = {"made": {"entries": {}, "tasks": {}}}
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    for workers in (1, 2):
        claim(tmp_path / "new", {**told, "workers": workers})
    claim(tmp_path / "new", {**told, **made, "workers": 2})
    claim(tmp_path / "new", {**told, "workers": 2})
    claim(tmp_path / "old", told)
    claim(tmp_path / "old", {**told, **made})
    claim(tmp_path / "old", {**told, "workers": 2})
    assert capsys.readouterr().out == ""
    claim(tmp_path / "new", {**told, "workers": 1})
    claim(tmp_path / "new", {**told, **made, "workers": 1})
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith("begun with --workers 2, now it is 1: ")


def test_code_that_costs_otherwise_is_refused(finished, data, monkeypatch):
    workdir, _ = finished
    before = (workdir / "comparison.json").read_text()
    step_flops = module.step_flops
    with monkeypatch.context() as patch:
        more = lambda *a, **o: 1.01 * step_flops(*a, **o)  # noqa: E731
        patch.setattr(module, "step_flops", more)
        with pytest.raises(InputError) as caught:
            run(make_config(data), workdir)
    assert "the code counts FLOPs or reads tasks otherwise" in str(caught.value)
    assert f"made.entries.{SCRIPT}.step_flops: " in str(caught.value)
    assert "made.tasks" not in str(caught.value)
    assert (workdir / "comparison.json").read_text() == before


def test_other_examples_of_a_task_are_refused(finished, data, tmp_path):
    """The folder may move, and what is in it is looked at."""
    workdir, _ = finished
    moved = shutil.copytree(data, tmp_path / "moved")
    assert run(make_config(moved), workdir)
    path = moved / "glue_sst2/dev.tsv"
    path.write_text(path.read_text().replace("cat", "bird"))
    with pytest.raises(InputError) as caught:
        run(make_config(moved), workdir)
    assert "made.tasks.sst2.dev: " in str(caught.value)
    assert "made.tasks.sst2.train" not in str(caught.value)
    assert "made.entries" not in str(caught.value)


def test_a_comparison_of_an_older_version_is_refused(finished, data, tmp_path):
    """It does not tell what its steps took."""
    workdir = shutil.copytree(finished[0], tmp_path / "older")
    told = json.loads((workdir / "comparison.json").read_text())
    del told["made"]
    (workdir / "comparison.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match="of an older version"):
        run(make_config(data), workdir)


def refused(data, tmp_path, **changes):
    with pytest.raises(InputError) as caught:
        run(make_config(data, **changes), tmp_path / "new")
    return str(caught.value)


def test_a_budget_that_steps_miss_is_refused(finished, data):
    """2 steps at a time; the budget that is named does, for every entry."""
    corpus = open_corpus(finished[0] / "corpus/text")

    def check(flops: float) -> None:
        comparison = resolve_comparison(make_config(data, flops=str(flops)))
        plans = [make_plan(comparison, entry, corpus) for entry in comparison.entries]
        check_budget(comparison, plans)

    each = finished[1]["entries"][0]["step_flops"]
    check(6 * each)
    check(6 * each * 1.019)
    for flops in (6 * each * 1.03, 7 * each, each / 10):
        with pytest.raises(InputError) as caught:
            check(flops)
    said = str(caught.value)
    assert f"entry {SCRIPT!r}: 2 steps of" in said
    assert "2000.0% of the budget" in said
    enough = float(re.search(r"from config.flops=(\S+) on", said)[1])
    assert enough == pytest.approx(50 * each, rel=0.01)
    for flops in (51 * each, 53 * each):
        check(flops)


def test_what_is_not_there_is_said_before_anything_is_made(data, tmp_path):
    said = refused(data / "nowhere", tmp_path)
    assert "nowhere is no folder" in said
    said = refused(data, tmp_path, text="('absent.txt',)")
    assert "absent.txt: no such file" in said
    said = refused(data, tmp_path, tasks="('sst2', 'rte', 'cole')")
    assert "has no glue_rte/train.tsv, no glue_rte/dev.tsv" in said
    assert "unknown task 'cole'. Did you mean cola" in said
    said = refused(data, tmp_path, probe__layers="2")
    assert f"config.probe.layers=2: entry {SCRIPT!r} has 1" in said
    assert not (tmp_path / "new").exists()


def test_wrong_numbers_are_said_all_at_once(data):
    config = make_config(data, tasks="()", flops="nan")
    config.probe = {"layers": 0}
    config.finetune = {"lr": 0.0, "dropout": 1.0, "warmup": 5.0, "steps": 4}
    config.entries[1]["seeds"] = -1
    config.entries += (dict(name="?!", preset="bert-tiny"),)
    with pytest.raises(InputError) as caught:
        resolve_comparison(config)
    for said in (
        "config.tasks is empty",
        "config.flops=nan: at least 1, and finite",
        "probe.layers=0: at least 1",
        "finetune.lr=0.0 must be more than 0, and finite",
        "finetune.dropout=1.0 must be in [0, 1)",
        "finetune.warmup=5.0: below 1 a share",
        "entry 'none': seeds=-1 is negative",
        "entry '?!': no letter (a-z) and no digit in its name",
    ):
        assert said in str(caught.value)
    for wrong in ({"lr": math.inf}, {"lr": math.nan}, {"lr": -1e-3}):
        with pytest.raises(InputError, match="finetune.lr"):
            Finetune(**wrong)
    for wrong in ({"warmup": -0.1}, {"warmup": math.nan}):
        with pytest.raises(InputError, match="finetune.warmup"):
            Finetune(**wrong)
    Finetune(steps=4, warmup=4.0, dropout=0.0)


def test_entries_that_do_not_compare_are_refused(data):
    config = make_config(data)
    config.entries = (
        dict(name="a", preset="bert-tiny", changes={"arch.vocab_size": 50}),
        dict(name="A!", preset="bert-tiny", changes={"steps": 7}),
    )
    with pytest.raises(InputError) as caught:
        resolve_comparison(config)
    said = str(caught.value)
    assert "entry 'a' sets arch.vocab_size: the corpus, its vocabulary" in said
    assert "entry 'A!' sets steps" in said
    assert "entry 'a': another entry has the folder 'a' too" in said
    assert "entry 'A!': another entry has the folder 'a' too" in said
    config.entries = (dict(name="a", preset="bert-tiny", changed={}),)
    with pytest.raises(InputError, match=r"'entries\[0\].changed'. Did you mean"):
        resolve_comparison(config)


def test_an_unknown_preset_or_field_of_an_entry(data, tmp_path):
    config = make_config(data)
    config.entries = (dict(name="a", preset="bert-tiny", changes={"optim.lrr": 1}),)
    with pytest.raises(InputError, match=r"entry 'a': unknown config field 'optim.lrr"):
        run(config, tmp_path / "new")
    config.entries = (dict(name="a", preset="brt-tiny"),)
    with pytest.raises(InputError, match=r"unknown preset 'brt-tiny'"):
        run(config, tmp_path / "new")


def test_what_an_entry_lacks_is_said_before_any_is_trained(data, tmp_path, monkeypatch):
    """Also of the last one."""

    def never(*_, **__):
        raise AssertionError("something was trained")

    monkeypatch.setattr(module, "train", never)
    lacking = {
        "masked_lm needs phrases": {
            "objective.choose": "word",
            "objective.unit": "phrases",
        },
        "has no column word_id": {
            "objective.choose": "word",
            "objective.replace": "similar",
        },
        "config.batch=12 does not divide": {"batch": 12},
    }
    for number, (said, changes) in enumerate(lacking.items()):
        config = make_config(data)
        config.entries += (dict(name="last", preset="bert-tiny", changes=changes),)
        with pytest.raises(InputError, match=f"^entry 'last': .*{said}"):
            run(config, tmp_path / str(number))
        assert not (tmp_path / str(number) / "runs").exists()


def test_the_config_of_the_real_one(shared_data, monkeypatch):
    """All objectives at the same size, and the baseline."""
    monkeypatch.setenv("BERT_JAX_DATA", str(shared_data))
    comparison = resolve_comparison(load_config("compare"))
    runs = [entry_run(comparison, entry, "-") for entry in comparison.entries]
    assert {run.objective["name"] for run in runs} == {
        "masked_lm",
        "replaced_token",
        "permuted_lm",
        "causal_lm",
    }
    first, *others = (dataclasses.asdict(run.arch) for run in runs)
    found = {
        entry.name: {name for name in first if arch[name] != first[name]}
        for entry, arch in zip(comparison.entries[1:], others, strict=True)
    }
    for names in found.values():
        names.discard("vocab_size")  # that of the corpus, for all
    allowed = {"permutation": {"streams"}, "causal": {"order", "pool_from"}}
    assert {name: names for name, names in found.items() if names} == allowed
    assert {run.optim for run in runs} == {runs[0].optim}
    assert {(run.length, run.batch) for run in runs} == {(64, 32)}
