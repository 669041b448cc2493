"""What an objective is: a value that corrupts a batch and scores the model on it.

The step knows nothing else of an objective. Its loss is the weighted sum of means,
each of them a total and a count over the whole batch, divided once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.heads import OUTPUTS
from bert_jax.models.model import Model
from bert_jax.models.tokens import Tokens, rank_of
from bert_jax.objectives.losses import correct, cross_entropy

Batch = Mapping[str, jax.Array]
TEXTS = ("doc",)  # kinds of rows whose examples are one document's text


@flax.struct.dataclass
class Mean:
    """A total and a count; sums over rows, steps and hosts stay exact."""

    total: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, values: jax.Array, weights: jax.Array) -> "Mean":
        """The mean of `values` where `weights` are not 0."""
        weights = weights.astype(jnp.float32)
        return cls((values * weights).sum(), weights.sum())

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> jax.Array:
        """total / count; 0 where nothing was counted."""
        return self.total / jnp.maximum(self.count, 1.0)


@flax.struct.dataclass
class Terms:
    """What an objective finds in a batch."""

    means: dict[str, Mean]
    carry: Any = None  # what it hands to the next step; None: nothing


class Net(Protocol):
    """The model with its parameters put in, as an objective calls it."""

    def __call__(self, tokens, **asked) -> dict:
        """What models.model.Model gives for these arguments."""


class Objective(Protocol):
    """A frozen dataclass; its fields are its hyper-parameters."""

    name: str  # its file; its first scores are called NAME_loss and NAME_accuracy
    order = "all"  # who sees whom in what it trains, as arch.order says it to others

    @property
    def heads(self) -> tuple[str, ...]:
        """Heads of the model it scores; TOWER/HEAD in another tower."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Which means make up the loss, and how much each counts."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a batch beside what every row has; `words` where single
        characters would not do."""
        return ()

    def towers(self, arch: Arch) -> tuple[tuple[str, Arch], ...]:
        """What the model must have beside its main tower, by name."""
        return ()

    def problems(self, arch: Arch, rows: str) -> list[str]:
        """Why it cannot train such a model on such rows: nothing, or what to change."""
        return []

    def check_labels(self, names: Sequence[str], arch: Arch) -> None:
        """Raises if labelled data have labels that its head does not have."""

    def begin(self, params: dict) -> dict:
        """The parameters with which a later stage that trains it begins."""
        return params

    def first_carry(self, model: Model, rows: int) -> Any:
        """What the first step is handed: arrays [rows, ...]; None: nothing."""
        return None

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """Hides part of a clean batch. Pure; one key a row; shapes static."""

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        """The count of each mean in the loss, known before the net is asked: so a batch
        may be scored part by part, each part's totals over the counts of the whole."""

    def terms(self, net: Net, batch: Batch, carry: Any = None) -> Terms:
        """Scores the net on a corrupted batch, or on some of its rows."""


def tokens_of(batch: Batch, *, order: str = "all", task: int = 0) -> Tokens:
    """The tokens of a batch, each seeing what the order says within its group, and
    told which task it is for (ERNIE)."""
    return Tokens(
        ids=batch["ids"],
        types=batch["types"],
        positions=batch["positions"],
        group=batch["group"],
        rank=rank_of(order, batch["positions"]),
        task=jnp.full_like(batch["ids"], task) if task else None,
    )


def wrong_task(task: int, arch: Arch) -> list[str]:
    """What is wrong with the number of a task (ERNIE), if anything."""
    if 0 <= task < max(1, arch.task_types):
        return []
    return [
        f"objective.task={task}: it must be in 0..{max(0, arch.task_types - 1)}, since "
        f"arch.task_types={arch.task_types}"
    ]


def wrong_rows(name: str, rows: str, valid: tuple[str, ...]) -> list[str]:
    """What is wrong with the kind of rows, if anything."""
    if rows in valid:
        return []
    return [f"{name} cannot use config.rows={rows}: set it to {' or '.join(valid)}"]


def means_of(
    name: str, logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> dict[str, Mean]:
    """NAME_loss and NAME_accuracy of logits [..., V], where weights [...] are not 0."""
    return {
        f"{name}_loss": Mean.of(cross_entropy(logits, targets), weights),
        f"{name}_accuracy": Mean.of(correct(logits, targets), weights),
    }


def label_means(name: str, logits: jax.Array, labels: jax.Array) -> dict[str, Mean]:
    """The same of labels [...], of which -1 is none."""
    return means_of(name, logits, jnp.maximum(labels, 0), labels >= 0)


def check_head(name: str, head: str, labels: Sequence[str], arch: Arch) -> None:
    """Raises where a file of examples has labels that the head has no output for."""
    most = OUTPUTS.get(head, arch.labels)
    if len(labels) > most:
        field = "" if head in OUTPUTS else " (arch.labels)"
        raise InputError(
            f"{name}: the data have {len(labels)} labels, {', '.join(labels)}; its "
            f"head has {most}{field}"
        )


def loss_of(
    objective: Objective,
    means: Mapping[str, Mean],
    counts: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    """The one number that is minimised. Where `means` are of some rows only, `counts`
    are those of the whole batch."""
    counts = counts or {name: mean.count for name, mean in means.items()}
    return sum(
        weight * Mean(means[name].total, counts[name]).value
        for name, weight in objective.weights.items()
    )
