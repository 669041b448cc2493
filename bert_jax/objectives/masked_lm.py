"""Masked language model, with next-sentence prediction on rows of pairs.

    L = Σ w · -log p(x_i | corrupted x) / Σ w  +  λ · CE(next sentence)

15 % of the tokens are predicted; of these 80 % are shown as [MASK], 10 % as a random
piece, 10 % as they are (Devlin et al. 2019, arXiv:1810.04805, section 3.1 and A.1).
Differs from the release in: the corruption is drawn anew at every step; the number of
predictions is counted over a packed row, not over each example in it; the release
divides by Σ w + 1e-5.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bert_jax.errors import InputError
from bert_jax.models.tokens import Tokens
from bert_jax.objectives import corrupt
from bert_jax.objectives.base import Batch, Mean, Net
from bert_jax.objectives.losses import correct, cross_entropy


@dataclasses.dataclass(frozen=True)
class MaskedLM:
    name = "masked_lm"

    # From the tokenizer and the preset.
    vocab_size: int
    mask_id: int
    special_ids: tuple[int, ...]  # never predicted
    pair_head: str = "nsp"  # the head that scores pairs
    # Hyper-parameters.
    rate: float = 0.15  # share of the tokens that is predicted
    hide: float = 0.8  # share of these shown as [MASK]
    randomise: float = 0.1  # share of these shown as a random piece
    next_sentence: float = 1.0  # λ; 0 on rows that are not pairs

    def __post_init__(self):
        problems = [
            f"objective.{name}={getattr(self, name)} must be between 0 and 1"
            for name in ("rate", "hide", "randomise")
            if not 0 <= getattr(self, name) <= 1
        ]
        if self.rate == 0:
            problems.append("objective.rate=0 predicts nothing")
        if self.hide + self.randomise > 1:
            problems.append(
                f"objective.hide={self.hide} and objective.randomise={self.randomise} "
                "add up to more than 1"
            )
        if self.next_sentence < 0:
            problems.append(f"objective.next_sentence={self.next_sentence} is negative")
        if problems:
            raise InputError("\n".join(problems))

    @property
    def heads(self) -> tuple[str, ...]:
        return ("lm", "pooler", self.pair_head) if self.next_sentence else ("lm",)

    @property
    def weights(self) -> dict[str, float]:
        pairs = {"next_sentence_loss": self.next_sentence} if self.next_sentence else {}
        return {"masked_lm_loss": 1.0, **pairs}

    def slots(self, length: int) -> int:
        return int(corrupt.budget(length, self.rate)[-1])

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """Adds where, targets, weights [B, P]; ids [B, S] are the corrupted ones."""
        S = batch["ids"].shape[1]
        counts = corrupt.budget(S, self.rate)
        slots = self.slots(S)

        def one_row(key, ids, group):
            choose_key, replace_key = jax.random.split(key)
            special = jnp.isin(ids, jnp.asarray(self.special_ids))
            candidates = (group > 0) & ~special
            count = jnp.asarray(counts)[(group > 0).sum()]
            chosen = corrupt.choose(choose_key, candidates, count)
            where, weights = corrupt.positions_of(chosen, slots)
            shown = corrupt.replace(
                replace_key,
                ids,
                chosen,
                mask_id=self.mask_id,
                vocab_size=self.vocab_size,
                hide=self.hide,
                randomise=self.randomise,
            )
            return {
                "ids": shown,
                "where": where,
                "targets": ids[where],
                "weights": weights,
            }

        return {**batch, **jax.vmap(one_row)(keys, batch["ids"], batch["group"])}

    def terms(self, net: Net, batch: Batch) -> dict[str, Mean]:
        tokens = Tokens(
            ids=batch["ids"],
            types=batch["types"],
            positions=batch["positions"],
            group=batch["group"],
            rank=jnp.zeros_like(batch["ids"]),
        )
        first = batch["first"] if self.next_sentence else None
        out = net(tokens, where=batch["where"], first=first, heads=self.heads)
        targets, weights = batch["targets"], batch["weights"]
        means = {
            "masked_lm_loss": Mean.of(cross_entropy(out["lm"], targets), weights),
            "masked_lm_accuracy": Mean.of(correct(out["lm"], targets), weights),
        }
        if self.next_sentence:
            # A row holds up to G pairs; label -1 marks an empty slot.
            labels = jnp.maximum(batch["next_sentence"], 0)
            filled = batch["next_sentence"] >= 0
            means |= {
                "next_sentence_loss": Mean.of(
                    cross_entropy(out[self.pair_head], labels), filled
                ),
                "next_sentence_accuracy": Mean.of(
                    correct(out[self.pair_head], labels), filled
                ),
            }
        return means
