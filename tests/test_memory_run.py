"""Memory through the loop: what is carried is a part of a checkpoint."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoint import Checkpoints
from bert_jax.metrics import read_metrics
from bert_jax.train import train
from tests import tiny
from tests.models.made import TRANSFORMER_XL, XLNET

STREAM = dict(rows="stream", length=16, steps=4, save_every=2, objective__memory=20)
RUNS = {
    "causal_lm": STREAM,
    "permuted_lm": STREAM | dict(direction="both", objective__partial=3),
}
MEMBERS = {"causal_lm": TRANSFORMER_XL | dict(lm_head="bias"), "permuted_lm": XLNET}


def run_of(corpus, name: str, **changes):
    fields = MEMBERS[name] | dict(layers=1)
    arch = {f"arch__{field}": value for field, value in fields.items()}
    changes = arch | RUNS[name] | changes
    return tiny.make_run(corpus, objective__name=name, **changes)


def leaves(workdir, step: int | None = None) -> list[np.ndarray]:
    return jax.tree.leaves(bert_jax.load(workdir, step=step).params)


def same(one: list, other: list) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_going_on_remembers_what_was_read(tiny_corpus, tmp_path, monkeypatch, name):
    """Four steps, or two and two more from the checkpoint between them: the same bits.
    Where the memory in it is emptied, others."""
    run, straight = run_of(tiny_corpus, name), tmp_path / "straight"
    assert train(run, straight, progress=False)["finished"]
    assert not same(leaves(straight, 2), leaves(straight, 4))
    restore, seen = Checkpoints.restore, []

    def and_look(self, step, like):
        state = restore(self, step, like)
        seen.append((step, jax.device_get(state.carry)))
        return state

    def and_forget(self, step, like):
        state = restore(self, step, like)
        return state.replace(carry=jax.tree.map(jnp.zeros_like, state.carry))

    ends = {}
    for how in (and_look, and_forget):
        workdir = shutil.copytree(straight, tmp_path / how.__name__)
        shutil.rmtree(workdir / "checkpoints/4")
        monkeypatch.setattr(Checkpoints, "restore", how)
        assert train(run, workdir, progress=False)["finished"]
        ends[how] = leaves(workdir)
    ((step, carry),) = seen
    assert step == 2
    # Two rows were read: of 32 tokens the last 20 are remembered, or one row where the
    # text began again.
    kept = carry["group"].sum(1).tolist()
    assert set(kept) <= {16, 20}
    assert kept.count(20) >= 7
    assert np.abs(carry["states"][:, :, -16:]).max(-1).min() > 0
    assert same(ends[and_look], leaves(straight))
    assert not same(ends[and_forget], leaves(straight))
    old, new = (
        [row.get("batch") for row in read_metrics(folder / "metrics.jsonl")]
        for folder in (straight, tmp_path / "and_look")
    )
    assert old == new
    assert len(set(old)) == 4
