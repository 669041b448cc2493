"""What objectives share that ask one question of each example, from its first token.

    L = Σ -log p(label | example) / (number of examples with a label)

A row holds up to G examples: `first` [B, G] says where each begins, the column of
labels [B, G] what is right, -1 where there is no example or no label.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from bert_jax.models.arch import Arch
from bert_jax.objectives.base import (
    Batch,
    Net,
    Objective,
    Terms,
    check_head,
    means_of,
    tokens_of,
    wrong_task,
)


@dataclasses.dataclass(frozen=True)
class Pooled(Objective):
    head = ""  # on the pooled vector; its parameters are this objective's alone
    labels = ""  # the column they are in

    task: int = 0  # what is added to every token of this task

    @property
    def heads(self) -> tuple[str, ...]:
        return ("pooler", self.head)

    @property
    def weights(self) -> dict[str, float]:
        return {f"{self.name}_loss": 1.0}

    @property
    def columns(self) -> tuple[str, ...]:
        return ("first", self.labels)

    def problems(self, arch: Arch, rows: str) -> list[str]:
        return wrong_task(self.task, arch)

    def check_labels(self, names: Sequence[str], arch: Arch) -> None:
        check_head(self.name, self.head, names, arch)

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """Adds targets and weights [B, G]; hides and draws nothing."""
        labels = batch[self.labels]
        weights = (labels >= 0).astype(jnp.float32)
        return {**batch, "targets": jnp.maximum(labels, 0), "weights": weights}

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        return {f"{self.name}_loss": batch["weights"].sum()}

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        tokens = tokens_of(batch, task=self.task)
        logits = net(tokens, first=batch["first"], heads=self.heads)[self.head]
        return Terms(means_of(self.name, logits, batch["targets"], batch["weights"]))
