"""Left-to-right language model: every token predicts the next one.

    L = Σ -log p(x_{i+1} | x_1 .. x_i) / (number of tokens that have a next one)

(Radford et al. 2018). Nothing is hidden from the input: a token cannot see what comes
after it, since its rank is its position. In a packed row each example is its own text.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bert_jax.objectives.base import Batch, Mean, Net, Objective, Terms, tokens_of
from bert_jax.objectives.losses import correct, cross_entropy


@dataclasses.dataclass(frozen=True)
class CausalLM(Objective):
    name = "causal_lm"
    heads = ("lm",)

    @property
    def weights(self) -> dict[str, float]:
        return {"causal_lm_loss": 1.0}

    def slots(self, length: int) -> int:
        return length - 1

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """Adds where, targets, weights [B, S-1]; draws nothing."""
        ids, group = batch["ids"], batch["group"]
        B, S = ids.shape
        follows = (group[:, 1:] == group[:, :-1]) & (group[:, 1:] > 0)
        where = jnp.broadcast_to(jnp.arange(S - 1, dtype=jnp.int32), (B, S - 1))
        weights = follows.astype(jnp.float32)
        return {**batch, "where": where, "targets": ids[:, 1:], "weights": weights}

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        return {"causal_lm_loss": batch["weights"].sum()}

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        tokens = tokens_of(batch, order="causal")
        logits = net(tokens, where=batch["where"], heads=self.heads)["lm"]
        targets, weights = batch["targets"], batch["weights"]
        return Terms(
            {
                "causal_lm_loss": Mean.of(cross_entropy(logits, targets), weights),
                "causal_lm_accuracy": Mean.of(correct(logits, targets), weights),
            }
        )
