"""config.spike=skip in the loop: a step is left out for the losses before it."""

import shutil
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax import checkpoint, lane, metrics, sharding, spikes
from bert_jax import train as loop
from bert_jax.checkpoint import Checkpoints
from bert_jax.metrics import read_metrics
from bert_jax.objectives.base import Mean, Terms
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.spikes import nothing_known
from bert_jax.train import train
from tests import tiny

LOUD = 10**6  # the number of row 0, where the loss is three times what it is


@pytest.fixture(scope="module")
def loud():
    """Batch 3 is loud; and two losses are enough to know what is usual."""
    next_batch, terms = lane.Lane.next_batch, MaskedLM.terms

    def numbered(self, course, step, feeds):
        batch = next_batch(self, course, step, feeds)
        rows = np.full_like(batch["row_id"], LOUD) if step == 2 else batch["row_id"]
        return batch | {"row_id": rows}

    def louder(self, net, batch, carry=None):
        found = terms(self, net, batch, carry)
        times = jnp.where(batch["row_id"][0] == LOUD, 3.0, 1.0)
        means = {
            name: Mean(mean.total * times, mean.count) if "loss" in name else mean
            for name, mean in found.means.items()
        }
        return Terms(means, found.carry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spikes, "FEWEST", 2)
        patch.setattr(lane.Lane, "next_batch", numbered)
        patch.setattr(MaskedLM, "terms", louder)
        yield


def run_with_loud_batch(corpus, workdir, **changes) -> list[str]:
    """Trains, or goes on; what was said of steps and checkpoints."""
    told, said = dict(steps=4, save_every=1, keep=9, spike="skip") | changes, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics.tqdm, "write", said.append)
        patch.setattr("builtins.print", lambda *of, **_: said.append(of[0]))
        assert train(tiny.make_run(corpus, **told), workdir, progress=False)["finished"]
    return [text for text in said if "spike" in text]


def numbers(workdir) -> list[dict]:
    """What does not go by the clock."""
    names = ("step", "loss", "skipped", "spikes", "usual_loss", "batch")
    rows = read_metrics(workdir / "metrics.jsonl")
    return [{name: row[name] for name in names if name in row} for row in rows]


def leaves(workdir, step: int) -> list[np.ndarray]:
    return jax.tree.leaves(bert_jax.load(workdir, step=step).params)


def same(one: list, other: list) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def stopped_at(step: int, workdir, copy):
    """A copy of a run of four steps, as it was when that one had been saved."""
    shutil.copytree(workdir, copy)
    for later in range(step + 1, 5):
        shutil.rmtree(copy / f"checkpoints/{later}")
    return copy


@pytest.fixture(scope="module")
def skipping(loud, tiny_corpus, tmp_path_factory):
    """A run of four steps that skips the third."""
    workdir = tmp_path_factory.mktemp("skipping") / "run"
    (said,) = run_with_loud_batch(tiny_corpus, workdir)
    assert said.startswith("step 3: a spike, its loss is ")
    assert said.endswith(" is usual; its update is left out")
    return workdir


def test_a_run_skips_the_step_whose_loss_stands_out(skipping):
    after = [leaves(skipping, step) for step in (1, 2, 3, 4)]
    moved = [not same(*pair) for pair in pairwise(after)]
    assert moved == [True, False, True]
    rows = numbers(skipping)
    assert [row["skipped"] for row in rows] == [0, 0, 1, 0]
    assert [row["spikes"] for row in rows] == [0, 0, 1, 0]
    first, second, third, _ = (row["loss"] for row in rows)
    assert third > 2.5 * first
    usual = [row["usual_loss"] for row in rows]
    assert usual[:2] == [0, 0]  # too few are known
    assert usual[2:] == pytest.approx([(first + second) / 2, max(first, second)])


def test_going_on_skips_for_what_was_before(
    skipping, tiny_corpus, tmp_path, monkeypatch
):
    """Two steps and two more are the four, to the bit. Where the losses in the
    checkpoint are forgotten, or asked for by nobody, step 3 moves the parameters."""
    said, restore = {}, Checkpoints.restore

    def forgets(self, step, like):
        return restore(self, step, like).replace(losses=like.losses)

    for how in ("remembers", "forgets", "says"):
        workdir = stopped_at(2, skipping, tmp_path / how)
        with monkeypatch.context() as patch:
            if how == "forgets":
                patch.setattr(Checkpoints, "restore", forgets)
            changes = {"spike": "say"} if how == "says" else {}
            said[how] = run_with_loud_batch(tiny_corpus, workdir, **changes)
        for step in (3, 4):
            alike = same(leaves(workdir, step), leaves(skipping, step))
            assert alike == (how == "remembers")
    assert numbers(tmp_path / "remembers") == numbers(skipping)
    assert [len(texts) for texts in said.values()] == [1, 0, 0]
    assert said["remembers"][0].startswith("step 3: a spike, its loss is ")


def test_a_workdir_may_begin_and_end_to_skip(skipping, tiny_corpus, tmp_path):
    """Its checkpoints hold losses where they are asked for. From the first of those
    that hold none, none is known."""
    stops = stopped_at(1, skipping, tmp_path / "stops")
    assert run_with_loud_batch(tiny_corpus, stops, spike="stop") == []

    def hold_losses(workdir) -> list[bool]:
        return [(workdir / f"checkpoints/{n}/losses").is_dir() for n in (1, 2, 3, 4)]

    assert hold_losses(stops) == [True, False, False, False]
    skips = stopped_at(2, stops, tmp_path / "skips")
    (said,) = run_with_loud_batch(tiny_corpus, skips)
    assert said == (
        "checkpoint 2 was written without config.spike=skip: no step is skipped for "
        "its loss before 30 losses are known"
    )
    assert hold_losses(skips) == [True, False, True, True]
    assert same(leaves(skips, 3), leaves(stops, 3))
    assert not same(leaves(skips, 3), leaves(skipping, 3))


def test_one_device_skips_what_eight_do(skipping, tiny_corpus, tmp_path, monkeypatch):
    make, one, workdir = sharding.make_mesh, jax.devices()[:1], tmp_path / "run"
    monkeypatch.setattr(loop, "make_mesh", lambda axes: make(axes, one))
    (said,) = run_with_loud_batch(tiny_corpus, workdir)
    assert said.startswith("step 3: a spike, its loss is ")
    assert same(leaves(workdir, 2), leaves(workdir, 3))
    for ours, theirs in zip(leaves(workdir, 4), leaves(skipping, 4), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    for ours, theirs in zip(numbers(workdir), numbers(skipping), strict=True):
        batches = ours.pop("batch"), theirs.pop("batch")
        assert batches[0] == batches[1]
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_tasks_skip_by_their_own_losses(loud, tiny_corpus, tmp_path):
    """Batch 3 is loud, and the first that its task has in its stage: of that nothing is
    known. Going on changes nothing."""
    changes = dict(
        tasks=(("one", {}), ("two", {"objective.rate": 0.3})),
        stages=(
            {"steps": 2, "tasks": {"one": 2}},
            {"steps": 2, "tasks": {"one": 1, "two": 1}},
        ),
    )
    workdir = tmp_path / "run"
    assert run_with_loud_batch(tiny_corpus, workdir, **changes) == []
    assert numbers(workdir)[2]["loss"] > 2.5 * numbers(workdir)[0]["loss"]
    copy = stopped_at(2, workdir, tmp_path / "copy")
    assert run_with_loud_batch(tiny_corpus, copy, **changes) == []
    assert same(leaves(copy, 4), leaves(workdir, 4))
    assert numbers(copy) == numbers(workdir)
    path, like = copy / "checkpoints/4/losses", {"losses": nothing_known(3)}
    losses = np.asarray(checkpoint.restore(path, like)["losses"])
    assert np.isfinite(losses).sum(1).tolist() == [2, 1, 1]
    assert losses[1, -1] == np.float32(numbers(copy)[2]["loss"])
