"""Permutation language model: each target from what precedes it in a random order.

    L = Σ_t -log p(x_{z_t} | x_{z_<t}, and all words that are not predicted) / targets

Every order of a text is a way to write its probability as a product, so a model that
learns them all sees both sides of a word, and nothing has to be hidden behind a [MASK].
Two streams share the weights: what is known as content, and queries, which know the
place of a target and not the target. Memory brings in the text before (XLNet, Yang et
al. 2019, arXiv:1906.08237; who sees whom is in permute.py, the carry in memory.py).

Differs from the release in: rows are plain stretches of a stream (config.rows=stream,
config.direction=both for its bi-directional data), not half a stretch and then a pair
of texts which no loss looks at; so the text moves on by whole rows, and memory is of
whole rows, where the release moves on by half a row and remembers that half. The vector
that every query begins with has no dropout.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.objectives.base import Batch, Net, Objective, Terms, means_of, tokens_of
from bert_jax.objectives.corrupt import positions_of
from bert_jax.objectives.memory import first_memory, memory_problems, read_on
from bert_jax.objectives.permute import permute


@dataclasses.dataclass(frozen=True)
class PermutedLM(Objective):
    name = "permuted_lm"
    heads = ("lm",)

    # From the tokenizer.
    special_ids: tuple[int, ...]  # functional: never predicted
    # Hyper-parameters.
    partial: int = 6  # K: one token in so many is predicted
    longest: int = 5  # pieces in a run of them, at the most
    memory: int = 0  # tokens of the text before that are seen; needs rows=stream

    def __post_init__(self):
        least = {"partial": 1, "longest": 1, "memory": 0}
        problems = [
            f"objective.{name}={getattr(self, name)} must be at least {low}"
            for name, low in least.items()
            if getattr(self, name) < low
        ]
        if problems:
            raise InputError("\n".join(problems))

    @property
    def weights(self) -> dict[str, float]:
        return {"permuted_lm_loss": 1.0}

    @property
    def columns(self) -> tuple[str, ...]:
        return ("continues",) if self.memory else ()

    def problems(self, arch: Arch, rows: str) -> list[str]:
        problems = memory_problems(self.memory, arch, rows)
        if arch.streams != 2:
            problems.append(
                "config.objective.name=permuted_lm asks by a second stream: it needs "
                f"config.arch.streams=2 (with config.arch.position='xl'), it is "
                f"{arch.streams}"
            )
        return problems

    def first_carry(self, model: Model, rows: int):
        return first_memory(model, rows, self.memory)

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """Adds rank [B, S] and where, targets, weights [B, P]; hides nothing."""
        slots = batch["ids"].shape[1] // self.partial

        def one_row(key, ids, group, words):
            special = jnp.isin(ids, jnp.asarray(self.special_ids))
            chosen, rank = permute(
                key,
                (group > 0) & ~special,
                group > 0,
                words,
                partial=self.partial,
                longest=self.longest,
            )
            where, weights = positions_of(chosen, slots)
            found = {"rank": rank, "where": where, "targets": ids[where]}
            return found | {"weights": weights}

        rows = jax.vmap(one_row)(keys, batch["ids"], batch["group"], batch["words"])
        return {**batch, **rows}

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        return {"permuted_lm_loss": batch["weights"].sum()}

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        tokens = tokens_of(batch).replace(rank=batch["rank"])
        asked = dict(where=batch["where"], streams=2, heads=self.heads)
        out, carry = read_on(net, tokens, carry, batch.get("continues"), **asked)
        means = means_of(self.name, out["lm"], batch["targets"], batch["weights"])
        return Terms(means, carry)
