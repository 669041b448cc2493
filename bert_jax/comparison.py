"""What a comparison is told: entries, budget, corpus, tasks; checked all at once."""

import dataclasses
import math
import re
from pathlib import Path

from bert_jax.config import flatten
from bert_jax.data.tasks import task_problems
from bert_jax.errors import InputError, unknown
from bert_jax.evaluators.probe import Probe
from bert_jax.finetune import Finetune

# What is the same for all entries, or follows from the budget.
OURS = ("data", "steps", "seed", "init", "save_every", "keep", "eval.data")
OURS += ("eval.every", "arch.vocab_size", "stages", "tasks")


@dataclasses.dataclass(frozen=True)
class Entry:
    name: str
    preset: str
    changes: dict = dataclasses.field(default_factory=dict)  # fields of its config
    seeds: int = 0  # 0: as many as the comparison says
    trained: bool = True  # False: as it is initialised

    @property
    def folder(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything a comparison is told."""

    data: str  # folder of text and of tasks
    text: tuple[str, ...]  # inputs to learn from, in that folder
    held_out: tuple[str, ...]
    vocab_size: int  # of the WordPiece vocabulary
    lowercase: str  # yes | no
    flops: float  # for each entry and seed
    points: int  # checkpoints that are probed: at 1, 1/2, 1/4, ... of the budget
    seeds: int
    tasks: tuple[str, ...]
    probe: Probe
    finetune: Finetune
    shared: dict  # changes for all entries
    entries: tuple[Entry, ...]

    def __post_init__(self):
        problems = [
            f"config.{name}={getattr(self, name)}: at least 1, and finite"
            for name in ("flops", "points", "seeds", "vocab_size")
            if not 1 <= getattr(self, name) < math.inf
        ]
        if self.lowercase not in ("yes", "no"):
            problems.append(unknown("config.lowercase", self.lowercase, ("yes", "no")))
        if not Path(self.data).is_dir():
            problems.append(
                f"config.data={self.data} is no folder: give that of the text and of "
                "the tasks, --config.data=DIR, or set BERT_JAX_DATA"
            )
        if not self.tasks:
            problems.append("config.tasks is empty: there is nothing to score")
        problems += [p for task in self.tasks for p in task_problems(task, self.data)]
        if not self.entries:
            problems.append("config.entries is empty: there is nothing to compare")
        folders = [entry.folder for entry in self.entries]
        for entry in self.entries:
            if not entry.folder:
                problems.append(
                    f"entry {entry.name!r}: no letter (a-z) and no digit in its name, "
                    "to name its folder by"
                )
            elif folders.count(entry.folder) > 1:
                problems.append(
                    f"entry {entry.name!r}: another entry has the folder "
                    f"{entry.folder!r} too; give it another name"
                )
            if entry.seeds < 0:
                problems.append(
                    f"entry {entry.name!r}: seeds={entry.seeds} is negative; 0 is as "
                    "many as config.seeds"
                )
            ours = sorted({*entry.changes, *self.shared} & {*OURS})
            if ours:
                problems.append(
                    f"entry {entry.name!r} sets {', '.join(ours)}: the corpus, its "
                    "vocabulary and the budget are the same for all entries"
                )
        if problems:
            raise InputError("\n".join(problems))


def resolve_comparison(config) -> Comparison:
    """Checks the fields of a config file and freezes them."""
    given = config.to_dict()
    problems = []
    parts = {"probe": Probe, "finetune": Finetune}
    for name, kind in {"": Comparison, **parts}.items():
        valid = {field.name for field in dataclasses.fields(kind)}
        there = given.get(name, {}) if name else given
        prefix = f"{name}." if name else ""
        problems += [
            unknown("config field", prefix + field, [prefix + v for v in valid])
            for field in sorted({*there} - valid)
        ]
        missing = sorted(valid - {*there}) if kind is Comparison else []
        if missing:
            problems.append(f"the config lacks the fields {', '.join(missing)}")
    valid = {field.name for field in dataclasses.fields(Entry)}
    for number, entry in enumerate(given.get("entries", ())):
        where = f"entries[{number}]."
        problems += [
            unknown("config field", where + field, [where + v for v in valid])
            for field in sorted({*entry} - valid)
        ]
        if not {"name", "preset"} <= {*entry}:
            problems.append(f"config.entries[{number}] has no name or no preset")
    if problems:
        raise InputError("\n".join(problems))
    for name, kind in parts.items():
        try:
            given[name] = kind(**given[name])
        except InputError as error:
            problems.append(str(error))
    given["shared"] = dict(flatten(given["shared"]))
    given["entries"] = tuple(Entry(**entry) for entry in given["entries"])
    try:
        comparison = Comparison(**given)
    except InputError as error:
        problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))
    return comparison
