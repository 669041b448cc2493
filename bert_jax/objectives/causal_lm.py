"""Language model in one direction: every token predicts its neighbour.

    L = Σ -log p(x_{i+1} | x_1 .. x_i) / (number of tokens that have a next one)

(Radford et al. 2018). Nothing is hidden from the input: a token cannot see what comes
after it, since its rank is its position; right to left, its rank is minus its position
and it predicts the one before. In a packed row each example is its own text. With
memory, left to right, it also sees the text before the row (Transformer-XL, Dai et al.
2019, arXiv:1901.02860; the carry is in memory.py). Differs from that release in: the
last token of a row does not predict the first of the next.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.objectives.base import Batch, Net, Objective, Terms, means_of, tokens_of
from bert_jax.objectives.memory import first_memory, memory_problems, read_on

ORDERS = {"forward": "causal", "backward": "backward"}  # by direction


@dataclasses.dataclass(frozen=True)
class CausalLM(Objective):
    name = "causal_lm"
    heads = ("lm",)

    direction: str = "forward"  # forward | backward: predicts the next, the one before
    memory: int = 0  # tokens of the text before that are seen; needs rows=stream

    def __post_init__(self):
        problems = []
        if self.direction not in ORDERS:
            problems.append(unknown("objective.direction", self.direction, ORDERS))
        if self.memory < 0:
            problems.append(f"objective.memory={self.memory} must be at least 0")
        if self.memory > 0 and self.direction == "backward":
            problems.append(
                f"objective.memory={self.memory} is of the text before a row, and "
                "objective.direction=backward reads the text after it: use one of them"
            )
        if problems:
            raise InputError("\n".join(problems))

    @property
    def order(self) -> str:
        return ORDERS[self.direction]

    @property
    def weights(self) -> dict[str, float]:
        return {"causal_lm_loss": 1.0}

    @property
    def columns(self) -> tuple[str, ...]:
        return ("continues",) if self.memory else ()

    def problems(self, arch: Arch, rows: str) -> list[str]:
        return memory_problems(self.memory, arch, rows)

    def first_carry(self, model: Model, rows: int):
        return first_memory(model, rows, self.memory)

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """Adds where, targets, weights [B, S-1]; draws nothing."""
        ids, group = batch["ids"], batch["group"]
        B, S = ids.shape
        together = (group[:, 1:] == group[:, :-1]) & (group[:, 1:] > 0)
        where = jnp.broadcast_to(jnp.arange(S - 1, dtype=jnp.int32), (B, S - 1))
        forward = self.direction == "forward"
        return {
            **batch,
            "where": where if forward else where + 1,
            "targets": ids[:, 1:] if forward else ids[:, :-1],
            "weights": together.astype(jnp.float32),
        }

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        return {"causal_lm_loss": batch["weights"].sum()}

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        tokens = tokens_of(batch, order=self.order)
        asked = dict(where=batch["where"], heads=self.heads)
        out, carry = read_on(net, tokens, carry, batch.get("continues"), **asked)
        means = means_of(self.name, out["lm"], batch["targets"], batch["weights"])
        return Terms(means, carry)
