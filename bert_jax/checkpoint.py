"""Checkpoints: Orbax writes them while training goes on, a manifest says whether they
are whole.

    checkpoints/<step>/params           Orbax
    checkpoints/<step>/optimizer        Orbax: moments, step, seed, carry
    checkpoints/<step>/losses           Orbax: of the steps before, if config.spike=skip
    checkpoints/<step>/run.json         what was trained: config, preset, tokenizer
    checkpoints/<step>/manifest.N.json  size and SHA-256 of what process N > 0 wrote
    checkpoints/<step>/manifest.json    the same of all the rest; written last of all

The arrays are copied off the devices, then the next step may have their memory; a
thread sees to the rest, and what it meets is raised by the loop. Every process writes
and hashes its own shards. Orbax commits a directory by renaming it, but restores
flipped bits without a word: that is what the hashes are for. A checkpoint without a
manifest, or one that does not agree with it, is set aside and the one before it is
used.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import jax

from bert_jax.config import unlike
from bert_jax.errors import InputError
from bert_jax.processes import told_by_all, wait_for_all
from bert_jax.spikes import FEWEST
from bert_jax.step import TrainState
from bert_jax.whole import write_text

MANIFEST = "manifest.json"
ABOUT = "run.json"
UNDER_WAY = "*.orbax-checkpoint-tmp*"  # Orbax's names before the commit
UNFINISHED = "it was not finished (no manifest)"


class SaveError(InputError):
    """A checkpoint that could not be written. On several hosts it may be that one of
    them is gone: then all the others fail so."""


class Checkpoints:
    """The checkpoints of one workdir. `say` is told what is set aside, and why.

    The last `keep` are kept. One that is not due, since the run was stopped between two
    that are, gives way to the next one instead of taking the place of an older one.
    With `about`, the text of run.json, each says what it is, and one of another run,
    copied here, is refused. The end of a `with` block waits until all is written.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        keep: int = 1,
        every: int = 1,
        about: dict | None = None,
        say: Callable[[str], None],
    ):
        self.root = Path(workdir).absolute() / "checkpoints"
        self.keep, self.every, self.about, self.say = keep, every, about, say
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.under_way: Future | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        # What ends the run already is not hidden by another error.
        with contextlib.suppress(InputError) if kind else contextlib.nullcontext():
            self.wait()

    @property
    def chief(self) -> bool:
        return jax.process_index() == 0

    def steps(self) -> list[int]:
        """Steps with a directory, whole or not, in order."""
        if not self.root.is_dir():
            return []
        return sorted(int(path.name) for path in self.root.iterdir() if is_step(path))

    def save(self, state: TrainState) -> None:
        """Copies the state off the devices; it is written while the run goes on. Waits
        for the one before it, and raises what that met."""
        self.wait()
        step = int(state.step)
        need = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        more = {} if state.losses is None else {"losses": {"losses": state.losses}}
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            begin_writing(
                self.root / str(step),
                params=state.params,
                optimizer=besides_params(state),
                **more,
            )
        except Exception as error:  # Orbax reports a full disk in several types
            raise self.cannot_save(step, error, need) from error
        self.under_way = self.pool.submit(self.complete, step, need)

    def complete(self, step: int, need: int) -> None:
        """Until the checkpoint is whole; then older ones may go."""
        try:
            orbax_writer().wait_until_finished()
            self.write_manifest(step)
        except Exception as error:
            raise self.cannot_save(step, error, need) from error
        if self.chief:
            *before, last = self.steps()
            due = [step for step in before if step % self.every == 0]
            for old in {*before} - {*[*due, last][-self.keep :]}:
                shutil.rmtree(self.root / str(old), ignore_errors=True)

    def wait(self) -> None:
        """Until no save is under way; raises what it met."""
        done, self.under_way = self.under_way, None
        if done:
            done.result()

    def check(self) -> None:
        """Raises what a save met that has ended; waits for none."""
        if self.under_way and self.under_way.done():
            self.wait()

    def write_manifest(self, step: int) -> None:
        folder, me = self.root / str(step), jax.process_index()
        if not self.chief:
            text = json.dumps(manifest_of(folder, me), indent=1)
            write_text(folder / f"manifest.{me}.json", text)
        wait_for_all(f"manifests of step {step}")
        if self.chief:  # nobody else writes any more
            if self.about:
                write_text(folder / ABOUT, json.dumps(self.about, indent=2) + "\n")
            manifest = manifest_of(folder, me)
            # By name: a listing of a shared file system may be of a while ago.
            for other in range(1, jax.process_count()):
                name = f"manifest.{other}.json"
                manifest[name] = size_and_hash(folder / name)
            write_text(folder / MANIFEST, json.dumps(manifest, indent=1))

    def cannot_save(self, step: int, error: Exception, need: int) -> SaveError:
        """What is left of it is removed; where there are others, which may still write,
        by the next start."""
        if jax.process_count() == 1:
            shutil.rmtree(self.root / str(step), ignore_errors=True)
            self.clear()
        good = (n for n in self.steps() if n != step and self.is_finished(n))
        last = max(good, default=None)
        free = shutil.disk_usage(self.root.parent).free
        reason = str(error).strip().split("\n")[0]
        if len(reason) > 400:  # of long paths; the cause comes last
            reason = f"{reason[:150]} ... {reason[-250:]}"
        kept = f"the last good one is step {last}" if last else "there is none yet"
        return SaveError(
            f"the checkpoint of step {step} could not be written to {self.root}: "
            f"{reason}\nIt needs about {need / 1e6:.0f} MB, {free / 1e6:.0f} MB are "
            f"free. Nothing else is lost: {kept}. Make room and run the same command."
        )

    def clear(self) -> list[str]:
        """Removes what was not committed; its names."""
        left = sorted(self.root.glob(UNDER_WAY))
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return [path.name for path in left]

    def is_finished(self, step: int) -> bool:
        return (self.root / str(step) / MANIFEST).exists()

    def problem(self, step: int, *, part: int = 0, parts: int = 1) -> str | None:
        """Why a checkpoint cannot be trusted, or None. Of `parts` that read a share of
        the files each, this is number `part`."""
        folder = self.root / str(step)
        if not self.is_finished(step):
            return UNFINISHED
        listed = read_manifest(folder / MANIFEST)
        for name in [name for name in listed or () if name.startswith("manifest.")]:
            others = read_manifest(folder / name)
            listed = listed and others and listed | others
        if not listed:
            return "its manifest is damaged"
        for name in sorted(listed)[part::parts]:
            path, (size, digest) = folder / name, listed[name]
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if sha256(path) != digest:
                return f"{name} was altered (other hash)"
        return None

    def last_good(self) -> int | None:
        """The newest checkpoint that is whole, by the verdict of all processes; those
        that are not are set aside, and one of another run is an error."""
        self.wait()
        if self.chief:
            for name in self.clear():
                self.say(f"checkpoint {name.split('.')[0]} was not finished: removed")
        share = dict(part=jax.process_index(), parts=jax.process_count())
        older = self.steps()
        while True:
            step = int(told_by_all(str(max(older, default=-1)))[0])
            if step < 0:
                return None
            verdicts = told_by_all(self.problem(step, **share) or "")
            if UNFINISHED in verdicts[1:] and verdicts[0] != UNFINISHED:
                raise InputError(
                    f"process {verdicts.index(UNFINISHED)} does not see the checkpoint "
                    f"{self.root / str(step)} that process 0 sees: --workdir must be "
                    "in a file system that all hosts share"
                )
            reason = next(filter(None, verdicts), None)
            if reason is None:
                self.check_about(step)
                return step
            if self.chief:
                self.say(
                    f"checkpoint {step} is not usable: {reason}. "
                    f"{self.set_aside(step)}; an older one is taken, if there is one."
                )
            older = [number for number in older if number < step]

    def set_aside(self, step: int) -> str:
        """Keeps the newest damaged checkpoint, and none that was never finished."""
        folder = self.root / str(step)
        if not self.is_finished(step):
            shutil.rmtree(folder)
            return "It was removed"
        for old in self.root.glob("*.damaged"):
            shutil.rmtree(old, ignore_errors=True)
        aside = self.root / f"{step}.damaged"
        os.rename(folder, aside)
        return f"It was moved to {aside}"

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of a step that `last_good` named, placed as `like` is. Losses may
        be there and not wanted, or wanted and not there."""
        folder = self.root / str(step)
        params = restore(folder / "params", like.params)
        rest = restore(folder / "optimizer", besides_params(like))
        # As process 0 has it: a shared folder may lag.
        there = told_by_all(str((folder / "losses").is_dir()))[0] == "True"
        if like.losses is not None and there:
            rest |= restore(folder / "losses", {"losses": like.losses})
        elif like.losses is not None:
            self.say(
                f"checkpoint {step} was written without config.spike=skip: no step is "
                f"skipped for its loss before {FEWEST} losses are known"
            )
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
                self.check_about(number)
                return number, restore(self.root / str(number) / "params", like)
            self.say(f"checkpoint {number} is not usable: {reason}")
        raise InputError(f"{self.root} has no usable checkpoint")

    def check_about(self, step: int) -> None:
        """Raises where a checkpoint is not of this run, whatever folder it is in."""
        path = self.root / str(step) / ABOUT
        if self.about and path.exists():  # older ones do not say
            problems = unlike(json.loads(path.read_text()), self.about)
            if problems:
                raise InputError(
                    f"{path.parent} is a checkpoint of another run than the workdir it "
                    "is in:\n" + "\n".join(problems)
                )


def besides_params(state: TrainState) -> dict:
    """What is saved beside the parameters."""
    rest = {"opt_state": state.opt_state, "step": state.step, "seed": state.seed}
    return rest if state.carry is None else rest | {"carry": state.carry}


def is_step(path: Path) -> bool:
    return path.is_dir() and path.name.isdigit()


@cache
def orbax_writer():
    """Orbax, for the life of the process: closed after a failed write it would still
    be called back by that write."""
    import orbax.checkpoint as ocp  # takes half a second: not at start-up

    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())


def begin_writing(folder: Path, **trees) -> None:
    """Copies each tree to the host; it will be in the folder of its name. What a
    killed process left there is replaced."""
    import orbax.checkpoint as ocp

    items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    orbax_writer().save(folder, args=ocp.args.Composite(**items), force=True)


@cache
def orbax_reader():
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer()


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
    return orbax_reader().restore(path, shapes)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def writer(name: str) -> int:
    """The process that wrote a file of Orbax: its number is in the path, or it is 0."""
    found = re.search(r"process_(\d+)(/|$)", name)
    return int(found[1]) if found else 0


def manifest_of(folder: Path, process: int) -> dict[str, list]:
    names = (str(path.relative_to(folder)) for path in files_in(folder))
    return {
        name: size_and_hash(folder / name) for name in names if writer(name) == process
    }


def size_and_hash(path: Path) -> list:
    """What a manifest says of a file."""
    return [path.stat().st_size, sha256(path)]


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(path: Path) -> dict | None:
    """None if there is none that can be read."""
    try:
        manifest = json.loads(path.read_text())
    except (ValueError, OSError):
        return None
    return manifest if isinstance(manifest, dict) else None
