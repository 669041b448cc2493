"""What finetuning on labels shares: nothing is hidden, every label is asked for.

    L = Σ -log softmax(logits)[label] / (number of labels)

The labels are a column of the batch, one a row (classify.py) or one a token (tag.py);
-1 is none.
"""

import dataclasses
from collections.abc import Sequence

import jax

from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch
from bert_jax.objectives.base import (
    Batch,
    Net,
    Objective,
    Terms,
    check_head,
    label_means,
    tokens_of,
)

ORDERS = ("all", "causal")


@dataclasses.dataclass(frozen=True)
class Labels(Objective):
    column = ""  # the one they are in; the head has the name of the objective

    order: str = "all"  # who sees whom: all | causal, as the model was pretrained

    def __post_init__(self):
        if self.order not in ORDERS:
            raise InputError(unknown("objective.order", self.order, ORDERS))

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def weights(self) -> dict[str, float]:
        return {f"{self.name}_loss": 1.0}

    def check_labels(self, names: Sequence[str], arch: Arch) -> None:
        check_head(self.name, self.name, names, arch)

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        return batch

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        return {f"{self.name}_loss": (batch[self.column] >= 0).sum()}

    def logits(self, net: Net, batch: Batch) -> jax.Array:
        """[B, 1 or S, labels]"""
        return net(tokens_of(batch, order=self.order), heads=self.heads)[self.name]

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        logits = self.logits(net, batch)
        return Terms(label_means(self.name, logits, batch[self.column]))
