"""Classification: one label for a text or a pair.

    L = Σ -log softmax(W pooled + b)[label] / (number of examples)

Finetuning is the one step with this objective: nothing is hidden (Devlin et al. 2019,
section 4.1). The pooled token is the one that the architecture says stands for a row,
[CLS] or the last. Differs from the release in: no dropout on the pooled vector.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bert_jax.objectives.base import Batch, Mean, Net, Objective, Terms, tokens_of
from bert_jax.objectives.losses import correct, cross_entropy


@dataclasses.dataclass(frozen=True)
class Classify(Objective):
    name = "classify"
    heads = ("pooler", "classify")

    columns = ("label",)

    order: str = "all"  # who sees whom: all | causal, as the model was pretrained

    @property
    def weights(self) -> dict[str, float]:
        return {"classify_loss": 1.0}

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        return batch

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        return {"classify_loss": (batch["label"] >= 0).sum()}

    def logits(self, net: Net, batch: Batch) -> jax.Array:
        """[B, 1, labels]"""
        tokens = tokens_of(batch, order=self.order)
        return net(tokens, heads=self.heads)["classify"]

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        logits, there = self.logits(net, batch), batch["label"] >= 0
        labels = jnp.maximum(batch["label"], 0)
        return Terms(
            {
                "classify_loss": Mean.of(cross_entropy(logits, labels), there),
                "classify_accuracy": Mean.of(correct(logits, labels), there),
            }
        )
