"""A plan is made once, kept beside the data, and made again where it is damaged."""

import dataclasses
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data import plan_files, plans
from bert_jax.data.corpus import Corpus, open_corpus
from bert_jax.data.pairs import RULES
from bert_jax.data.plan_files import open_plan
from bert_jax.data.plans import KINDS
from tests.data.made import make_corpus


@pytest.fixture
def own(tmp_path, texts, tokenizer, monkeypatch):
    """A corpus without plans."""
    monkeypatch.setattr(plans, "BLOCK", 300)
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    return make_corpus(tmp_path / "own", texts[:12], tokenizer)


@pytest.fixture
def written(monkeypatch):
    """What is planned, not read."""
    found = []
    write = plan_files.write_plan

    def counted(folder, corpus, kind, length, seed, **options):
        found.append((kind, length, seed))
        write(folder, corpus, kind, length, seed, **options)

    monkeypatch.setattr(plan_files, "write_plan", counted)
    return found


def columns(plan) -> dict[str, np.ndarray]:
    return {name: np.asarray(getattr(plan, name)) for name in plan_files.COLUMNS}


def assert_equal(one, two) -> None:
    assert one.about == two.about
    assert (one.kind, one.length) == (two.kind, two.length)
    for name, column in columns(one).items():
        np.testing.assert_array_equal(column, getattr(two, name))
        assert column.dtype == getattr(two, name).dtype


@pytest.mark.parametrize("kind", KINDS)
def test_made_once_and_read_back(kind, own, written):
    one = open_plan(own, kind, 32, 0)
    assert_equal(one, open_plan(open_corpus(own.path), kind, 32, 0))
    assert written == [(kind, 32, 0)]
    open_plan(own, kind, 33, 0)
    other = open_plan(own, kind, 32, 1)
    drawn = [(kind, 32, 1)] if kind in RULES else []
    assert written == [(kind, 32, 0), (kind, 33, 0), *drawn]
    same = np.array_equal(one.a, other.a) and np.array_equal(one.b, other.b)
    assert same == (kind not in RULES)
    assert {path.name for path in (Path(own.path) / "plans").iterdir()} >= {
        f"{kind}-{length}" + (f"-{seed}" if kind in RULES else "") + "-v4"
        for length, seed in ((32, 0), (33, 0), (32, 1))
        if kind in RULES or seed == 0
    }


def test_a_plan_is_a_function_of_data_kind_length_and_seed(own, tmp_path, texts):
    again = make_corpus(tmp_path / "again", texts[:12], own.tokenizer)
    for kind in KINDS:
        assert_equal(open_plan(own, kind, 32, 7), open_plan(again, kind, 32, 7))


def test_in_the_cache_where_the_data_cannot_be_written(
    own, tmp_path, written, monkeypatch
):
    access = os.access

    def refused(path, mode):  # root may write anywhere
        return access(path, mode) and not (mode == os.W_OK and path == own.path)

    monkeypatch.setattr(os, "access", refused)
    one = open_plan(own, "pair", 32, 0)
    assert not (Path(own.path) / "plans").exists()
    assert list((tmp_path / "cache").rglob("plan.json"))
    assert_equal(one, open_plan(open_corpus(own.path), "pair", 32, 0))
    assert written == [("pair", 32, 0)]
    monkeypatch.setattr(Corpus, "remote", True)  # in a bucket likewise
    monkeypatch.setattr(os, "access", access)
    assert_equal(one, open_plan(open_corpus(own.path), "pair", 32, 0))
    assert written == [("pair", 32, 0)]
    monkeypatch.undo()


def test_a_plan_of_another_corpus_is_made_anew(own, written):
    open_plan(own, "full", 32, 0)
    other = dataclasses.replace(own, about=own.about | {"content": "0" * 16})
    assert open_plan(other, "full", 32, 0).about["content"] == "0" * 16
    assert len(written) == 2


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("change", [flip, lambda data: data[:3], lambda data: None])
@pytest.mark.parametrize(
    "name", ["plan.json", *(f"{c}.bin" for c in plan_files.COLUMNS)]
)
def test_a_damaged_plan_is_made_anew(name, change, own, written):
    plan = open_plan(own, "pair", 32, 0)
    before = columns(plan)
    path = Path(own.path) / "plans/pair-32-0-v4" / name
    data = change(path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    after = columns(open_plan(open_corpus(own.path), "pair", 32, 0))
    for name, column in before.items():
        np.testing.assert_array_equal(column, after[name])
    assert len(written) == 2


def test_an_interrupted_plan_is_made_anew(own, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(plan_files, "token_count", lambda part, kind: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_plan(own, "doc", 32, 0)
    assert open_plan(own, "doc", 32, 0).real > 0.5
    assert not list((Path(own.path) / "plans").glob(".doc*"))


PROGRAM = """
import hashlib, sys
from bert_jax.data import plan_files, plans
from bert_jax.data.corpus import open_corpus
plans.BLOCK = 300
write, made = plan_files.write_plan, []
def counted(*given, **options):
    made.append(given)
    write(*given, **options)
plan_files.write_plan = counted
corpus = open_corpus(sys.argv[1])
print("ready", flush=True)
plan = plan_files.open_plan(corpus, "pair", 32, 3)
digest = hashlib.sha256()
for name in plan_files.COLUMNS:
    digest.update(getattr(plan, name).tobytes())
print(len(made), digest.hexdigest())
"""


def test_two_processes_at_once(own):
    """Both wait at the door; one makes the plan, the other reads it."""
    folder = Path(own.path) / "plans"
    folder.mkdir()
    processes = []
    try:
        with open(folder / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for hash_seed in ("1", "2"):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", PROGRAM, str(own.path)],
                        env=os.environ | {"PYTHONHASHSEED": hash_seed},
                        cwd=Path(__file__).parents[2],
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            for process in processes:
                assert process.stdout.readline() == "ready\n"
                assert process.poll() is None
        results = [process.communicate(timeout=60)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
    (one, digest), (two, same) = results
    assert {one, two} == {"0", "1"}
    assert digest == same
