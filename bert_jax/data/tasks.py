"""Labelled tasks as rows: where the files are, what stands in them, how it is scored.

Files are relative to a folder of data such as `BERT_JAX_DATA`. (GLUE: Wang et al. 2019,
arXiv:1804.07461; WNUT-17: Derczynski et al. 2017.)
"""

import dataclasses
from pathlib import Path

from bert_jax.data.labelled import Columns, Labelled, read_labelled
from bert_jax.data.tokenizers import Tokenizer
from bert_jax.errors import InputError, unknown


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    metric: str  # of evaluators/scores.py
    columns: Columns
    train: str
    dev: tuple[str, ...]
    length: int  # tokens in a row, unless the model has fewer

    @property
    def objective(self) -> str:
        return "tag" if "tag" in self.columns else "classify"


TASKS = {
    task.name: task
    for task in (
        Task(
            "sst2",
            metric="accuracy",
            columns={"label": "label", "a": "sentence"},
            train="glue_sst2/train.tsv.gz",
            dev=("glue_sst2/dev.tsv",),
            length=48,
        ),
        Task(
            "cola",
            metric="matthews",
            columns={"label": 1, "a": 3},
            train="glue_cola/in_domain_train.tsv",
            dev=("glue_cola/in_domain_dev.tsv", "glue_cola/out_of_domain_dev.tsv"),
            length=32,
        ),
        Task(
            "rte",
            metric="accuracy",
            columns={"label": "label", "a": "sentence1", "b": "sentence2"},
            train="glue_rte/train.tsv",
            dev=("glue_rte/dev.tsv",),
            length=128,
        ),
        Task(
            "wnut17",
            metric="entity_f1",
            columns={"word": 0, "tag": 1},
            train="wnut17/wnut17train.conll",
            dev=("wnut17/emerging.dev.conll",),
            length=64,
        ),
    )
}


def task_problems(name: str, folder: str | Path) -> list[str]:
    """Why a task cannot be read: none, or what is not there."""
    if name not in TASKS:
        return [unknown("task", name, TASKS)]
    files = (TASKS[name].train, *TASKS[name].dev)
    missing = [file for file in files if not (Path(folder) / file).is_file()]
    return [f"task {name}: {folder} has no {', no '.join(missing)}"] if missing else []


def read_task(
    name: str, folder: str | Path, *, tokenizer: Tokenizer, length: int
) -> tuple[Task, Labelled, Labelled]:
    """A task with its training and its dev part, in rows of at most `length`."""
    problems = task_problems(name, folder)
    if problems:
        raise InputError("\n".join(problems))
    task, folder = TASKS[name], Path(folder)
    how = dict(
        tokenizer=tokenizer, length=min(length, task.length), columns=task.columns
    )
    train = read_labelled(folder / task.train, **how)
    dev = read_labelled([folder / p for p in task.dev], labels=train.labels, **how)
    return task, train, dev
