"""Checkpoints: Orbax writes them, a manifest says whether they are whole.

    checkpoints/<step>/params      Orbax
    checkpoints/<step>/optimizer   Orbax: moments, step, seed, carry
    checkpoints/<step>/manifest.json

Orbax commits a directory by renaming it, but restores flipped bits without a word. So
after the commit the size and SHA-256 of every file are written, last of all; on
restore they are checked. A checkpoint without a manifest, or one that does not agree
with it, is set aside and the one before it is used.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax

from bert_jax.errors import InputError
from bert_jax.step import TrainState
from bert_jax.whole import write_text

MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints of one workdir. `say` is told what is set aside, and why.

    The last `keep` are kept. One that is not due, since the run was stopped between two
    that are, gives way to the next one instead of taking the place of an older one.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        keep: int = 1,
        every: int = 1,
        say: Callable[[str], None],
    ):
        self.root = Path(workdir).absolute() / "checkpoints"
        self.keep, self.every, self.say = keep, every, say

    def steps(self) -> list[int]:
        """Steps with a directory, whole or not, in order."""
        if not self.root.is_dir():
            return []
        return sorted(int(path.name) for path in self.root.iterdir() if is_step(path))

    def save(self, state: TrainState) -> None:
        step = int(state.step)
        folder = self.root / str(step)
        if (folder / MANIFEST).exists():
            return
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
        rest = besides_params(state)
        need = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        try:
            folder.mkdir(parents=True)
            for name, tree in (("params", state.params), ("optimizer", rest)):
                orbax().save(folder / name, tree)
                orbax().wait_until_finished()
            if jax.process_index() == 0:
                write_manifest(folder)
        except Exception as error:  # Orbax reports a full disk in several types
            shutil.rmtree(folder, ignore_errors=True)
            left = [step for step in self.steps() if self.problem(step) is None]
            raise InputError(self.cannot_save(step, error, need, left)) from error
        *before, last = self.steps()
        due = [step for step in before if step % self.every == 0]
        for old in {*before} - {*[*due, last][-self.keep :]}:
            shutil.rmtree(self.root / str(old))

    def cannot_save(self, step: int, error: Exception, need: int, left: list) -> str:
        free = shutil.disk_usage(self.root.parent).free
        reason = str(error).strip().split("\n")[0][:300]
        last = f"the last good one is step {left[-1]}" if left else "there is none yet"
        return (
            f"the checkpoint of step {step} could not be written to {self.root}: "
            f"{reason}\nIt needs about {need / 1e6:.0f} MB, {free / 1e6:.0f} MB are "
            f"free. Nothing else is lost: {last}. Make room and run the same command."
        )

    def problem(self, step: int) -> str | None:
        """Why a checkpoint cannot be trusted, or None."""
        folder = self.root / str(step)
        if not (folder / MANIFEST).exists():
            return "it was not finished (no manifest)"
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
        except ValueError:
            manifest = None
        if not isinstance(manifest, dict) or not manifest:
            return "its manifest is damaged"
        for name, (size, digest) in manifest.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if sha256(path) != digest:
                return f"{name} was altered (other hash)"
        return None

    def last_good(self) -> int | None:
        """The newest checkpoint that is whole; those that are not are set aside."""
        for step in reversed(self.steps()):
            reason = self.problem(step)
            if reason is None:
                return step
            self.say(
                f"checkpoint {step} is not usable: {reason}. "
                f"{self.set_aside(step)}; an older one is taken, if there is one."
            )
        return None

    def set_aside(self, step: int) -> str:
        """Keeps the newest damaged checkpoint, and none that was never finished."""
        folder = self.root / str(step)
        if not (folder / MANIFEST).exists():
            shutil.rmtree(folder)
            return "It was removed"
        for old in self.root.glob("*.damaged"):
            shutil.rmtree(old, ignore_errors=True)
        aside = self.root / f"{step}.damaged"
        os.rename(folder, aside)
        return f"It was moved to {aside}"

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of a step that `last_good` named, placed as `like` is."""
        params = restore(self.root / str(step) / "params", like.params)
        rest = restore(self.root / str(step) / "optimizer", besides_params(like))
        return like.replace(params=params, **rest)

    def good_params(self, step: int | None, like: dict) -> tuple[int, dict]:
        """Parameters of one step, or of the newest whole one; nothing is moved."""
        steps = self.steps()
        if step is not None and step not in steps:
            raise InputError(
                f"{self.root} has no step {step}; it has {steps or 'none'}"
            )
        for number in [step] if step is not None else reversed(steps):
            reason = self.problem(number)
            if reason is None:
                return number, restore(self.root / str(number) / "params", like)
            self.say(f"checkpoint {number} is not usable: {reason}")
        raise InputError(f"{self.root} has no usable checkpoint")


def besides_params(state: TrainState) -> dict:
    """What is saved beside the parameters."""
    rest = {"opt_state": state.opt_state, "step": state.step, "seed": state.seed}
    return rest if state.carry is None else rest | {"carry": state.carry}


def is_step(path: Path) -> bool:
    return path.is_dir() and path.name.isdigit()


def restore(path: Path, like):
    """What Orbax saved at `path`, with the shapes, types and placement of `like`: bare
    shapes go to the first device, wherever they were when they were saved."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or here
        ),
        like,
    )
    return orbax().restore(path, shapes)


@cache
def orbax():
    """Orbax, for the life of the process: closed after a failed write it would still
    be called back by that write."""
    import orbax.checkpoint as ocp  # takes half a second: not at start-up

    return ocp.StandardCheckpointer()


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        str(path.relative_to(folder)): [path.stat().st_size, sha256(path)]
        for path in files
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1))
