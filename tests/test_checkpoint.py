"""Checkpoints: written while training goes on, whole or not there, on any mesh."""

import json
import re
import shutil
import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import bert_jax
from bert_jax import checkpoint, sharding
from bert_jax import train as loop
from bert_jax.checkpoint import MANIFEST, Checkpoints, SaveError, besides_params
from bert_jax.errors import InputError
from bert_jax.metrics import read_metrics
from bert_jax.step import TrainState
from bert_jax.train import train
from tests import tiny
from tests.test_memory_run import run_of

MESHES = {
    "8 data": {},
    "2x2x2": dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2),
    "2x4": dict(mesh__data=2, mesh__tensor=4),
    "8 fsdp": dict(mesh__data=1, mesh__fsdp=8),
}


def leaves(workdir, step: int) -> list[np.ndarray]:
    return jax.tree.leaves(bert_jax.load(workdir, step=step).params)


def losses(workdir) -> list[float]:
    rows = read_metrics(workdir / "metrics.jsonl")
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.fixture(scope="module")
def undisturbed(tiny_corpus, tmp_path_factory):
    """Eight steps on eight devices along the axis `data`, and what they hold at 4."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(make_run(tiny_corpus), workdir, progress=False)
    return workdir


def make_run(corpus, **changes):
    return tiny.make_run(corpus, steps=8, save_every=4, **changes)


@pytest.fixture(scope="module")
def reading_on(tiny_corpus, tmp_path_factory):
    """The same of XLNet, which carries what it read from step to step."""
    workdir = tmp_path_factory.mktemp("reading_on") / "run"
    train(make_run_that_reads_on(tiny_corpus), workdir, progress=False)
    return workdir


def make_run_that_reads_on(corpus, **changes):
    return run_of(corpus, "permuted_lm", steps=8, save_every=4, **changes)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *(("undisturbed", mesh) for mesh in [*MESHES, "1 device"]),
        ("reading_on", "2x2x2"),
    ],
)
def test_goes_on_on_another_mesh(
    request, tiny_corpus, tmp_path, monkeypatch, capsys, name, mesh
):
    """On the same one to the bit; on another losses to 1e-5 of what they are, and
    parameters to 1e-5."""
    undisturbed = request.getfixturevalue(name)
    make_its = make_run if name == "undisturbed" else make_run_that_reads_on
    workdir = shutil.copytree(undisturbed, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints/8")
    axes = MESHES.get(mesh, {})
    if mesh == "1 device":
        make, one = sharding.make_mesh, jax.devices()[:1]
        monkeypatch.setattr(loop, "make_mesh", lambda axes: make(axes, one))
    capsys.readouterr()
    train(make_its(tiny_corpus, **axes), workdir, progress=False)
    said = capsys.readouterr().out
    assert "resumed at step 4" in said
    assert f"{1 if mesh == '1 device' else 8} device(s)" in said
    pairs = zip(leaves(workdir, 8), leaves(undisturbed, 8), strict=True)
    if mesh == "8 data":
        assert losses(workdir) == losses(undisturbed)
        assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)
    else:
        np.testing.assert_allclose(losses(workdir), losses(undisturbed), rtol=1e-5)
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_what_a_mesh_saved_is_read_by_one_device(tiny_corpus, undisturbed, tmp_path):
    """Written in eight parts, with the moments; the other way round than above."""
    workdir = tmp_path / "run"
    split = make_run(tiny_corpus, **MESHES["2x2x2"])
    train(split, workdir, progress=False)
    shutil.rmtree(workdir / "checkpoints/8")
    train(make_run(tiny_corpus), workdir, progress=False)
    np.testing.assert_allclose(losses(workdir), losses(undisturbed), rtol=1e-5)
    for ours, theirs in zip(leaves(workdir, 8), leaves(undisturbed, 8), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def make_state(step: int = 1) -> TrainState:
    """A table in eight parts, and a number everywhere; both filled with the step."""
    mesh = sharding.make_mesh()
    split = jax.NamedSharding(mesh, PartitionSpec("data"))
    table = {"table": sharding.spread(np.full((8, 1000), step, np.float32), split)}
    number, seed = (
        sharding.spread(np.int32(n), sharding.replicated(mesh)) for n in (step, 7)
    )
    moments = jax.tree.map(jnp.copy, table)
    return TrainState(step=number, params=table, opt_state=moments, seed=seed)


@pytest.fixture
def held_up(monkeypatch):
    """Nothing is written before this event is set."""
    go, complete = threading.Event(), Checkpoints.complete

    def waits(self, *arguments):
        assert go.wait(60)
        complete(self, *arguments)

    monkeypatch.setattr(Checkpoints, "complete", waits)
    yield go
    go.set()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, held_up):
    """Steps that take the memory of what is being saved do not change it, and the next
    save waits: one is under way at most."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path, keep=9, say=print)
    state = make_state()
    checkpoints.save(state)
    for _ in range(30):
        before, state = state, step(state)
    assert before.params["table"].is_deleted()  # its memory was given away
    assert not (tmp_path / "checkpoints/1" / MANIFEST).exists()
    saved = threading.Thread(target=checkpoints.save, args=[state])
    saved.start()
    saved.join(0.2)
    assert saved.is_alive()
    held_up.set()
    saved.join(60)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 31]
    for number in checkpoints.steps():
        assert checkpoints.problem(number) is None
        found = checkpoints.restore(number, make_state())
        assert int(found.step) == number
        assert set(np.unique(found.params["table"])) == {number}
        assert set(np.unique(found.opt_state["table"])) == {number}


def test_the_end_waits_for_the_last_checkpoint(tmp_path, held_up):
    threading.Timer(0.3, held_up.set).start()
    with Checkpoints(tmp_path, say=print) as checkpoints:
        checkpoints.save(make_state())
        assert not (tmp_path / "checkpoints/1" / MANIFEST).exists()
    assert checkpoints.problem(1) is None


def test_what_a_save_met_is_raised_by_the_next_check(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, f"{'a/long/path/' * 50}: No space left on device")

    monkeypatch.setattr(checkpoint, "size_and_hash", full)
    checkpoints = Checkpoints(tmp_path, say=print)
    checkpoints.save(make_state())
    futures.wait([checkpoints.under_way])
    with pytest.raises(SaveError, match="could not be written.*No space left") as met:
        checkpoints.check()
    assert len(str(met.value)) < 900
    assert list((tmp_path / "checkpoints").iterdir()) == []
    checkpoints.check()  # told once
    checkpoints.save(make_state())
    with pytest.raises(ZeroDivisionError), checkpoints:
        _ = 1 / 0  # what the run ended with is told, not what came of it
    assert checkpoints.under_way is None


def test_what_was_not_committed_is_removed(tmp_path):
    said = []
    checkpoints = Checkpoints(tmp_path, say=said.append)
    checkpoints.save(make_state())
    checkpoints.wait()
    left = tmp_path / "checkpoints/2.orbax-checkpoint-tmp"
    left.mkdir()
    assert checkpoints.last_good() == 1
    assert said == ["checkpoint 2 was not finished: removed"]
    assert not left.exists()


def test_checkpoints_of_before_are_read(tmp_path):
    """As they were written by 0.1.0: one after the other, and no run.json."""
    import orbax.checkpoint as ocp

    state = make_state(5)
    folder = tmp_path / "checkpoints/5"
    folder.mkdir(parents=True)
    with ocp.StandardCheckpointer() as old:
        for name, tree in (
            ("params", state.params),
            ("optimizer", besides_params(state)),
        ):
            old.save(folder / name, tree)
            old.wait_until_finished()
    files = checkpoint.files_in(folder)
    manifest = {
        str(path.relative_to(folder)): [path.stat().st_size, checkpoint.sha256(path)]
        for path in files
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))
    checkpoints = Checkpoints(
        tmp_path, about={"config": {"preset": "bert-tiny"}}, say=print
    )
    assert checkpoints.last_good() == 5
    found = checkpoints.restore(5, make_state())
    assert set(np.unique(found.opt_state["table"])) == {5}


def test_a_checkpoint_of_another_run_is_refused(tiny_corpus, undisturbed, tmp_path):
    """Copied into a workdir, it says itself what it is."""
    workdir = shutil.copytree(undisturbed, tmp_path / "run")
    path = workdir / "checkpoints/8/run.json"
    about = json.loads(path.read_text())
    assert about["config"]["preset"] == "bert-tiny"
    assert about["corpus"]["tokenizer"]["hash"] == tiny_corpus.tokenizer.hash
    about["config"]["optim"]["lr"] = 2e-3  # as that of another run would say
    path.write_text(json.dumps(about))
    manifest = json.loads((path.parent / MANIFEST).read_text())
    manifest["run.json"] = checkpoint.size_and_hash(path)
    (path.parent / MANIFEST).write_text(json.dumps(manifest))
    told = "checkpoint of another run.*\n.*optim.lr: 0.002 in the workdir, 0.001 now"
    with pytest.raises(InputError, match=told):
        train(make_run(tiny_corpus), workdir, progress=False)
    with pytest.raises(InputError, match=told):
        bert_jax.load(workdir)
    assert bert_jax.load(workdir, step=4).step == 4


OTHER = "manifest.1.json"


def test_every_process_answers_for_its_own_files(tmp_path, monkeypatch):
    """Two processes, played by one: each hashes what it wrote, and one manifest that is
    missing, altered or cut short spoils the whole."""
    names = {
        "params/d/1": 0,
        "params/ocdbt.process_0/d/2": 0,
        "params/ocdbt.process_1/d/3": 1,
        "params/ocdbt.process_12/d/4": 12,
        "params/array_metadatas/process_1": 1,
    }
    assert {name: checkpoint.writer(name) for name in names} == names
    folder = tmp_path / "checkpoints/3"
    for name, process in names.items():
        if process < 2:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    # Process 0 comes while process 1 is still writing its manifest.
    scratch = folder / ".manifest.1.json.tmp"
    monkeypatch.setattr(
        checkpoint, "wait_for_all", lambda _: scratch.unlink(missing_ok=True)
    )
    for process in (1, 0):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        checkpoints = Checkpoints(tmp_path, say=print)
        assert checkpoints.problem(3) == checkpoint.UNFINISHED
        if process == 0:
            scratch.write_text("half")
        checkpoints.write_manifest(3)
    own, others = (json.loads((folder / f).read_text()) for f in (MANIFEST, OTHER))
    assert set(others) == {name for name, process in names.items() if process == 1}
    assert set(own) == {*(n for n, p in names.items() if p == 0), OTHER}
    assert checkpoints.problem(3) is None
    # Halves of the files find what is wrong with theirs.
    (folder / "params/ocdbt.process_1/d/3").write_text("altered")
    found = [checkpoints.problem(3, part=part, parts=2) for part in range(2)]
    assert [reason is None for reason in found].count(True) == 1
    assert re.search("d/3 has 7 bytes instead of", str(found))
    (folder / "params/ocdbt.process_1/d/3").write_text("params/ocdbt.process_1/d/3")
    assert checkpoints.problem(3) is None
    text = (folder / OTHER).read_text()
    assert "3" in text
    for damaged, reason in (
        (text.replace("3", "4", 1), "manifest.1.json was altered"),
        (text[:9], "its manifest is damaged"),
    ):
        (folder / OTHER).write_text(damaged)
        assert reason in checkpoints.problem(3)
    (folder / OTHER).unlink()
    assert checkpoints.problem(3) == "its manifest is damaged"


def test_one_process_finds_what_another_does_not(tmp_path, monkeypatch):
    """The verdict is that of all of them; and a workdir that only some of them see is
    no damaged checkpoint, and nothing is removed."""
    said = []
    checkpoints = Checkpoints(tmp_path, say=said.append, keep=2)
    for step in (1, 2):
        checkpoints.save(make_state(step))
    checkpoints.wait()
    answers = {"2": ["2", "2"], "1": ["1", "1"], "": ["", "d/7 was altered"]}

    def told_by_all(text):
        found = answers[text]
        if text == "":
            answers[""] = ["", ""]  # of the next checkpoint
        return found

    monkeypatch.setattr(checkpoint, "told_by_all", told_by_all)
    assert checkpoints.last_good() == 1
    assert said[0].startswith("checkpoint 2 is not usable: d/7 was altered. It was mov")
    answers[""] = ["", checkpoint.UNFINISHED]
    with pytest.raises(InputError, match="process 1 does not see.*all hosts share"):
        checkpoints.last_good()
    assert checkpoints.steps() == [1]
