"""The start of a run: what was compiled is kept, and what it says of its time."""

import gc
import os
import re
import shutil
import subprocess
import sys

import jax
import pytest

from bert_jax.cli import use_compilation_cache
from bert_jax.errors import InputWarning
from bert_jax.startup import StartUp
from bert_jax.train import train
from tests import tiny

# `bert_jax ...`, and how often JAX asked for a program, found it, and kept a new one.
COUNTED = """
import collections, sys
from jax import monitoring
found = collections.Counter()
monitoring.register_event_listener(lambda name, **_: found.update([name]))
from bert_jax.cli import main
main(sys.argv[1:])
asked = ("compile_requests_use_cache", "cache_hits", "cache_misses")
print("counted", *(found["/jax/compilation_cache/" + name] for name in asked))
"""
COMPILE = """
from bert_jax.cli import use_compilation_cache
use_compilation_cache()
import jax
jax.jit(lambda x: x + 1)(1.0)
"""


def run(code: str, *words: str, **environment: str) -> str:
    """What a process of its own prints, on one device, by the defaults of JAX."""
    kept = {name: os.environ[name] for name in os.environ if "CACHE" not in name}
    kept |= {"XLA_FLAGS": ""} | environment
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_start_compiles_nothing(tiny_corpus, tmp_path):
    """Also nothing of what takes no time, and of scores and checkpoints."""
    fields = {**tiny.SETTINGS, "steps": 2, "data": tiny_corpus.path}
    fields["eval.data"] = tiny_corpus.path
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]

    def counted(workdir: str) -> list[int]:
        words = ("train", "--config", "pretrain:bert-tiny", "--workdir")
        cache = {"BERT_JAX_CACHE": str(tmp_path / "cache")}
        said = run(COUNTED, *words, tmp_path / workdir, *overrides, **cache)
        return [int(number) for number in said.rpartition("counted")[2].split()]

    asked, found, kept = counted("one")
    assert asked == kept > 10
    assert found == 0
    assert counted("two") == [asked, asked, 0]
    names = [path.name for path in (tmp_path / "cache/xla").iterdir()]
    assert any(name.startswith("jit_train_step-") for name in names)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "ours/xla"),
        ({"JAX_COMPILATION_CACHE_DIR": "{}/moved"}, "moved"),
        ({"JAX_COMPILATION_CACHE_DIR": ""}, None),
        ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, None),
        ({"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "99"}, None),
    ],
)
def test_where_what_was_compiled_is_kept(variables, folder, tmp_path):
    of = {name: value.format(tmp_path) for name, value in variables.items()}
    run(COMPILE, BERT_JAX_CACHE=str(tmp_path / "ours"), **of)
    kept = {
        str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("*-cache")
    }
    assert kept == ({folder} if folder else set())


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "file").write_text("")
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "file/xla"))
        with pytest.warns(InputWarning, match="file/xla cannot be written: the next"):
            use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir is None
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
        with pytest.warns(InputWarning, match="cannot be written"):
            use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_run_says_where_its_start_went(tiny_corpus, tmp_path, capsys):
    usual, workdir = gc.get_threshold(), tmp_path / "run"
    run = tiny.make_run(tiny_corpus, steps=2, save_every=1)
    for step in (1, 2):
        train(run, workdir, progress=False)
        assert gc.get_threshold() == usual
        said = re.findall(
            r"step (.*) is done after (.*) s: (.*)", capsys.readouterr().out
        )
        [(first, seconds, parts)] = said
        parts = dict(part.rsplit(" ", 1) for part in parts.split(", "))
        assert first == str(step)
        assert {"parameters", "compiling the step"} <= parts.keys()
        assert sum(map(float, parts.values())) == pytest.approx(float(seconds), abs=0.6)
        if step == 1:  # it goes on from there
            shutil.rmtree(workdir / "checkpoints/2")


def test_start_up(monkeypatch):
    usual = gc.get_threshold()
    clock = iter([10.0, 11.0, 11.01, 14.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    with StartUp() as started:
        assert gc.get_threshold() != usual
        for part in ("rows", "parameters", "rows", "first step"):
            started.done(part)
        assert started.over() == "4.0 s: rows 1.0, first step 3.0"
        assert gc.get_threshold() == usual
