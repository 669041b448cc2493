"""Hosts that read something else are told what it is, before anything is computed."""

import dataclasses
import shutil
import threading

import pytest

from bert_jax import peers
from bert_jax.errors import InputError
from bert_jax.meeting import Hosts
from bert_jax.model_dir import content_of
from bert_jax.peers import Peers, assemble
from tests import tiny
from tests.ports import free_ports
from tests.test_meeting import together

TASKS = (
    ("pairs", {"rows": "labelled", "objective.name": "discourse_relation"}),
    ("words", {}),
)
STAGES = ({"steps": 6, "tasks": {"pairs": 2, "words": 4}},)


class Two:
    """Host 1 has looked at its data before host 0 does."""

    def __init__(self, workdir, monkeypatch):
        self.workdir, self.port, self.looked = workdir, free_ports(), threading.Event()
        meet = peers.meet

        def meet_later(hosts, *more):
            self.looked.set()
            return meet(hosts, *more)

        monkeypatch.setattr(peers, "meet", meet_later)

    def assemble(self, runs, corpora, held_out, *, between=lambda: None) -> list:
        def come(index: int):
            def work():
                if index == 0:
                    self.looked.wait(20)
                    between()
                hosts = Hosts(("localhost", "b"), index, self.port, 20.0)
                its = runs[index], self.workdir, corpora[index], held_out[index]
                return assemble(hosts, *its)

            return work

        found = together(come(0), come(1))
        for one in found:
            for line in one.lines.values() if isinstance(one, Peers) else ():
                line.close()
        return found


@pytest.fixture
def two(tmp_path, monkeypatch):
    return Two(tmp_path / "run", monkeypatch)


def assert_told(found: list, start: str) -> None:
    """Both hosts are told one thing, and the same."""
    assert all(isinstance(one, InputError) for one in found), found
    assert str(found[0]) == str(found[1])
    assert "\n" not in str(found[0])
    assert str(found[0]).startswith(f"host 1 (b) has another data: {start}")


def make_models(folder) -> dict:
    """A Hugging Face directory and a workdir, as far as their files go."""
    model, workdir = folder / "model", folder / "workdir"
    (workdir / "checkpoints/20").mkdir(parents=True)
    (workdir / "checkpoints/30").mkdir()  # not finished
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text("{}")
    (model / "vocab.txt").write_text("[PAD]\n")
    (workdir / "run.json").write_text("{}")
    (workdir / "checkpoints/20/manifest.json").write_text("{}")
    return {"model": model, "workdir": workdir}


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("model", "model.safetensors"),
        ("model", "vocab.txt"),
        ("workdir", "checkpoints/20/manifest.json"),
        ("workdir", "checkpoints/30/manifest.json"),
    ],
)
def test_weights_to_begin_with(two, tiny_corpus, tmp_path, kind, changed):
    """They may lie elsewhere; what they are has to be the same."""
    here = make_models(tmp_path)[kind]
    there = shutil.copytree(here, tmp_path / "copy")
    runs = [tiny.make_run(tiny_corpus, init=path) for path in (here, there)]
    both, none = [tiny_corpus] * 2, [None] * 2
    found = two.assemble(runs, both, none)
    assert [type(one) for one in found] == [Peers, Peers], found
    two.looked.clear()
    (there / changed).write_text('{"other": 1}')
    found = two.assemble(runs, both, none)
    ours, theirs = content_of(here), content_of(there)
    assert ours != theirs
    told = f"config.init is {theirs!r}, on host 0 (localhost) {ours!r}"
    assert_told(found, told)


def test_weights_that_one_has_and_the_other_has_not(two, tiny_corpus, tmp_path):
    model = make_models(tmp_path)["model"]
    paths = model, tmp_path / "nothing"
    runs = [tiny.make_run(tiny_corpus, init=path) for path in paths]
    found = two.assemble(runs, [tiny_corpus] * 2, [None] * 2)
    assert_told(found, "config.init is 'not there', on host 0 (localhost) '")


@pytest.mark.parametrize("task", ["labelled", "text"])
def test_data_of_a_task(two, tiny_corpus, tiny_tokenizer, tmp_path, task):
    """The path is the same on both, what it holds is not."""
    if task == "labelled":
        data = tmp_path / "pairs.tsv"
        data.write_text("yes\tthe cat\ta dog\n")
        tasks = ((TASKS[0][0], {**TASKS[0][1], "data": str(data)}), TASKS[1])
    else:
        data = tiny.make_corpus(tmp_path, tokenizer=tiny_tokenizer, seed=2).path
        tasks = (("pairs", {"data": str(data)}), TASKS[1])
    run = tiny.make_run(tiny_corpus, tasks=tasks, stages=STAGES)

    def change():
        if task == "labelled":
            data.write_text("no\tthe cat\ta dog\n")
        else:
            shutil.rmtree(data)
            shutil.copytree(tiny_corpus.path, data)

    found = two.assemble([run] * 2, [tiny_corpus] * 2, [None] * 2, between=change)
    assert_told(found, f"{task} {data} is '")


def test_data_of_a_task_that_are_not_there(two, tiny_corpus, tmp_path):
    tasks = ((TASKS[0][0], {**TASKS[0][1], "data": str(tmp_path / "no")}), TASKS[1])
    run = tiny.make_run(tiny_corpus, tasks=tasks, stages=STAGES)
    two.looked.set()
    (error, _) = two.assemble([run] * 2, [tiny_corpus] * 2, [None] * 2)
    assert str(error) == f"{tmp_path / 'no'} cannot be read: No such file or directory"


@pytest.mark.parametrize("which", ["text", "held-out text"])
def test_text(two, tiny_corpus, tiny_tokenizer, tmp_path, which):
    other = tiny.make_corpus(tmp_path, tokenizer=tiny_tokenizer, seed=3)
    run = tiny.make_run(tiny_corpus)
    corpora, held_out = [tiny_corpus] * 2, [tiny_corpus] * 2
    (corpora if which == "text" else held_out)[1] = other
    found = two.assemble([run] * 2, corpora, held_out)
    assert_told(found, f"{which} is '{other.about['content']}', on host 0 (localhost)")


def test_similar_words(two, tiny_corpus):
    """The table that a corpus was made with, whose pieces may be the same."""
    corpora = [
        dataclasses.replace(
            tiny_corpus, about={**tiny_corpus.about, "similar": {"hash": table}}
        )
        for table in ("one", "other")
    ]
    found = two.assemble([tiny.make_run(tiny_corpus)] * 2, corpora, [None] * 2)
    told = "similar words of the text is 'other', on host 0 (localhost) 'one'"
    assert_told(found, told)
