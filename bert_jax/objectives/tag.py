"""Tagging: a label for each word, read at its first piece.

    L = Σ -log softmax(W h_i + b)[tag_i] / (number of words)

over the first pieces i of words; what stands elsewhere has tag -1 and does not count
(Devlin et al. 2019, section 5.3). Differs from the release in: no dropout on the last
states beside that of the last layer.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bert_jax.objectives.base import Batch, Mean, Net, Objective, Terms, tokens_of
from bert_jax.objectives.losses import correct, cross_entropy


@dataclasses.dataclass(frozen=True)
class Tag(Objective):
    name = "tag"
    heads = ("tag",)

    columns = ("tags",)

    order: str = "all"  # who sees whom: all | causal, as the model was pretrained

    @property
    def weights(self) -> dict[str, float]:
        return {"tag_loss": 1.0}

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        return batch

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        return {"tag_loss": (batch["tags"] >= 0).sum()}

    def logits(self, net: Net, batch: Batch) -> jax.Array:
        """[B, S, labels]"""
        return net(tokens_of(batch, order=self.order), heads=self.heads)["tag"]

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        logits, there = self.logits(net, batch), batch["tags"] >= 0
        tags = jnp.maximum(batch["tags"], 0)
        return Terms(
            {
                "tag_loss": Mean.of(cross_entropy(logits, tags), there),
                "tag_accuracy": Mean.of(correct(logits, tags), there),
            }
        )
