"""The course of a run: what each step trains, and which batch it gets.

A run is a row of stages, each a dict of changes to the config (the 76-minute recipe of
LAMB: short rows, then long ones with a warm-up of their own, You et al. 2020,
arXiv:1904.00962). A stage may train several tasks, as many steps of each as it says,
evenly mixed (ERNIE 2.0's continual learning, Sun et al. 2020, arXiv:1907.12412).

    stages = ({"steps": 900, "length": 128},
              {"steps": 100, "length": 512, "optim.lr": 1e-3, "moments": "reset"})

    tasks = (("words", {"objective.choose": "word"}), ("order", {"rows": "order"}))
    stages = ({"steps": 50, "tasks": {"words": 50}},
              {"steps": 90, "tasks": {"words": 30, "order": 60}})

A stage that names a rate, a warm-up or a schedule has a schedule of its own, from its
first step to its last; one that does not goes on in that of the run. What step k
trains, and how many batches of the same rows came before, is a function of k alone.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property

import numpy as np
import optax
from ml_collections import ConfigDict

from bert_jax.config import Run, flatten, override, resolve, run_of
from bert_jax.errors import InputError, unknown
from bert_jax.optim import schedule_of

# What decides the rows of a batch: steps that agree in these go on in one stream.
STREAM = ("data", "rows", "across", "direction", "alpha", "length", "batch")
MOMENTS = ("keep", "reset")  # what a stage does to the optimizer's moments
OF_A_STAGE = ("steps", "tasks", "moments")  # beside the fields of a config
OF_A_SCHEDULE = ("optim.lr", "optim.warmup", "optim.schedule", "optim.power")


@dataclasses.dataclass(frozen=True)
class Leg:
    """Steps that are alike: those of a stage, or of one task in it."""

    stage: int
    task: str  # "" where the run has no tasks
    run: Run  # with the changes of the task and of the stage


@dataclasses.dataclass(frozen=True, eq=False)
class Course:
    legs: tuple[Leg, ...]
    leg_of: np.ndarray  # [steps], number of the leg of each step
    starts: tuple[int, ...]  # the step at which each stage begins, from 0
    moments: tuple[str, ...]  # of each stage: keep | reset
    rate: optax.Schedule  # the learning rate of the whole run

    @cached_property
    def stream_of(self) -> np.ndarray:
        """[steps]: number of the stream of batches that each step takes its own from.
        Legs that have the same rows share one."""
        rows = [tuple(getattr(leg.run, f) for f in STREAM) for leg in self.legs]
        return np.asarray([rows.index(its) for its in rows])[self.leg_of]

    @cached_property
    def batch_of(self) -> np.ndarray:
        """[steps]: how many earlier steps took a batch of the same stream."""
        found = np.zeros(len(self.stream_of), np.int64)
        for stream in set(self.stream_of.tolist()):
            mine = self.stream_of == stream
            found[mine] = np.arange(mine.sum())
        return found


def course_of(run: Run) -> Course:
    """The stages of a run; all that is wrong with them is told at once."""
    stages = run.stages or ({"steps": run.steps},)
    problems = wrong_forms(run)
    if problems:
        raise InputError("\n".join(problems))
    tasks = dict(run.tasks)
    problems = wrong_stages(run, stages, tasks) + wrong_tasks(run, stages, tasks)
    legs, parts = [], []
    for number, stage in enumerate(stages) if not problems else ():
        counts = stage.get("tasks", {"": stage["steps"]})
        own = {k: v for k, v in stage.items() if k not in OF_A_STAGE}
        if has_schedule(stage):
            own["steps"] = stage["steps"]
        parts.append(len(legs) + interleave(list(counts.values())))
        for task in counts:
            changes = {**tasks.get(task, {}), **own}
            try:
                legs.append(Leg(number, task, changed(run, changes)))
            except InputError as error:
                place = f"config.stages[{number}]" + (f", task {task}" if task else "")
                problems.append(f"{place}: {error}" if run.stages else str(error))
    for leg in legs:
        alone = sum(other.stage == leg.stage for other in legs) == 1
        if leg.run.objective.get("memory") and not alone:
            problems.append(
                f"config.stages[{leg.stage}], task {leg.task}: objective.memory is "
                "that of the step before, which trained another task: set it to 0"
            )
        # What a stage begins with is told to later ones (Objective.begin).
        second = leg.run.objective.get("phase") == "discriminator"
        if second and leg.stage == 0 and not run.init:
            problems.append(
                "config.objective.phase=discriminator begins with the weights of a "
                "generator: train that in a stage before (configs/electra_two_stage.py)"
                ", or give the run that did as config.init"
            )
    if problems:
        raise InputError("\n".join(problems))
    starts = np.cumsum([0, *(stage["steps"] for stage in stages)]).tolist()[:-1]
    rates = [
        rate_of(next(leg.run for leg in legs if leg.stage == number), stage, start)
        for number, (stage, start) in enumerate(zip(stages, starts, strict=True))
    ]
    return Course(
        tuple(legs),
        np.concatenate(parts),
        tuple(starts),
        tuple(stage.get("moments", "keep") for stage in stages),
        optax.join_schedules(rates, starts[1:]),
    )


def leg_at(config: dict, step: int | None) -> Run:
    """What a workdir was told, with the changes of the leg that trained step `step`."""
    run = run_of(config)
    course = course_of(run)
    return course.legs[course.leg_of[(step or 1) - 1]].run


def has_schedule(stage: Mapping) -> bool:
    return any(name in stage for name in OF_A_SCHEDULE)


def rate_of(run: Run, stage: Mapping, start: int) -> optax.Schedule:
    """The rate of a stage, by the number of steps since it began."""
    schedule = schedule_of(run.optim, run.steps)
    return schedule if has_schedule(stage) else lambda step: schedule(step + start)


def interleave(counts: list[int]) -> np.ndarray:
    """So many times 0, 1, ..., each spread evenly over all of them."""
    places = np.concatenate([(np.arange(n) + 0.5) / n for n in counts])
    which = np.repeat(np.arange(len(counts)), counts)
    return which[np.argsort(places, kind="stable")]


def changed(run: Run, changes: Mapping) -> Run:
    """The run with some fields changed, checked anew."""
    config = ConfigDict(run.as_dict())
    config.stages = config.tasks = ()
    override(config, dict(changes))
    return resolve(config)


def wrong_forms(run: Run) -> list[str]:
    """What is no stage, or no task."""
    problems = [
        f"config.stages[{number}] is no dict of changes with `steps`: {stage!r}"
        for number, stage in enumerate(run.stages)
        if not isinstance(stage, Mapping)
        or type(stage.get("steps")) is not int
        or stage["steps"] < 1
        or not isinstance(stage.get("tasks", {}), Mapping)
    ]
    return problems + [
        f"config.tasks[{number}] is no pair of a name and a dict of changes: {task!r}"
        for number, task in enumerate(run.tasks)
        if not isinstance(task, tuple | list)
        or len(task) != 2
        or not isinstance(task[0], str)
        or not isinstance(task[1], Mapping)
    ]


def wrong_fields(place: str, names, run: Run, allowed) -> list[str]:
    """Fields that a stage or a task may not set, or that there are none of."""
    fields = [*OF_A_STAGE, *(name for name, _ in flatten(run.as_dict()))]
    valid = [name for name in fields if allowed(name)]
    problems = []
    for name in names:
        if name.startswith("objective.") or name in valid:
            continue  # those of an objective are known only with its name
        if name in fields:
            problems.append(f"{place}: {name} cannot be set there")
        else:
            problems.append(unknown(place, name, valid))
    return problems


def wrong_tasks(run: Run, stages, tasks: dict) -> list[str]:
    problems = []
    if tasks and not run.stages:
        problems.append("config.tasks needs config.stages: how many steps of each task")
    used = {name for stage in stages for name in stage.get("tasks", {})}
    for name, changes in tasks.items():
        place = f"config.tasks, {name}"
        problems += wrong_fields(place, changes, run, task_may_change)
        if run.stages and name not in used:
            problems.append(f"{place}: no stage has steps of it")
    return problems


def wrong_stages(run: Run, stages, tasks: dict) -> list[str]:
    """What does not add up, or may not be changed."""
    problems = []
    for number, stage in enumerate(stages):
        place, steps = f"config.stages[{number}]", stage["steps"]
        if stage.get("moments", "keep") not in MOMENTS:
            problems.append(unknown(f"{place}.moments", stage["moments"], MOMENTS))
        problems += wrong_fields(place, stage, run, may_change)
        if tasks or "tasks" in stage:
            counts = stage.get("tasks", {})
            for task, count in counts.items():
                if task not in tasks:
                    problems.append(unknown(f"{place}.tasks", task, tasks))
                elif type(count) is not int or count < 1:
                    problems.append(f"{place}.tasks: {count!r} steps of {task}")
            whole = [count for count in counts.values() if type(count) is int]
            if sum(whole) != steps:
                problems.append(
                    f"{place}: the steps of its tasks add up to {sum(whole)}, not to "
                    f"its steps={steps}"
                )
    total = sum(stage["steps"] for stage in stages)
    if total != run.steps:
        problems.append(
            f"config.steps={run.steps}, but the stages add up to {total} steps"
        )
    return problems


def task_may_change(name: str) -> bool:
    """A rate, as all else of the optimizer, belongs to the stage."""
    return name in STREAM or name.startswith("objective.")


def may_change(name: str) -> bool:
    """Whether a stage may have a value of its own for a field of the config."""
    own = ("accumulate", "copies", *STREAM, *OF_A_STAGE)
    one = ("optim.name", "optim.variant")  # the form of the optimizer's state
    return name in own or (
        name.startswith(("objective.", "optim.")) and name not in one
    )
