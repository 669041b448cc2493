"""UniLM: one model is a masked LM in four forms, which differ in who sees whom.

    L = Σ w · -log p(x_i | what i may see of the corrupted x) / Σ w  +  λ · CE(pair)

    form           share  a token sees                        types of A, B  rank
    bidirectional   1/3   all                                     0, 1       0
    seq2seq         1/3   part A; in part B also B up to itself   4, 5       0; position
    left_to_right   1/6   all up to itself                        2, 2       position
    right_to_left   1/6   all from itself on                      3, 3       -position

Each row is of one form, drawn for it. 15 % of the tokens are predicted, drawn one by
one or, in a fifth of the draws, two or three together, and shown as in BERT: a [MASK]
sees itself and what its form lets it see. Whether B follows A is asked of bidirectional
rows alone (Dong et al. 2019, arXiv:1905.03197, sections 2.2 to 2.5).

Differs from the paper in: a row of one direction is a pair, as the others are, where
theirs is one text; pairs serve all forms alike, so that B may be random text for
seq2seq, too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.tokens import Tokens, rank_of
from bert_jax.objectives import corrupt
from bert_jax.objectives.base import (
    Batch,
    Mean,
    Net,
    Objective,
    Terms,
    label_means,
    means_of,
)
from bert_jax.objectives.losses import cross_entropy

FORMS = ("bidirectional", "seq2seq", "left_to_right", "right_to_left")
TYPES = ((0, 1), (4, 5), (2, 2), (3, 3))  # of part A and part B, in each form
LENGTHS = (0.8, 0.1, 0.1)  # how probable it is that 1, 2, 3 tokens are chosen together


@dataclasses.dataclass(frozen=True)
class UniLM(Objective):
    name = "unilm"

    # From the tokenizer and the preset.
    vocab_size: int
    mask_id: int
    special_ids: tuple[int, ...]  # never predicted
    pair_head: str = "nsp"  # the head that scores pairs
    # Hyper-parameters. The shares of the forms are in proportion to each other.
    bidirectional: float = 1 / 3
    seq2seq: float = 1 / 3  # 0 on rows without a part B
    left_to_right: float = 1 / 6
    right_to_left: float = 1 / 6
    rate: float = 0.15  # share of the tokens that is predicted
    hide: float = 0.8  # share of these shown as [MASK]
    randomise: float = 0.1  # share of these shown as a random piece
    next_sentence: float = 1.0  # λ; 0 on rows that are not pairs

    def __post_init__(self):
        problems = corrupt.wrong_shares(self, weights=(*FORMS, "next_sentence"))
        if not any(getattr(self, form) for form in FORMS):
            named = ", ".join(f"objective.{form}" for form in FORMS)
            problems.append(f"{named} are all 0: no row has a form")
        if problems:
            raise InputError("\n".join(problems))

    def problems(self, arch: Arch, rows: str) -> list[str]:
        if arch.types >= 6:
            return []
        return [
            "unilm tells its forms by six types: config.arch.types="
            f"{arch.types} must be at least 6"
        ]

    @property
    def shares(self) -> np.ndarray:
        """Of each form; together 1."""
        shares = np.array([getattr(self, form) for form in FORMS])
        return shares / shares.sum()

    @property
    def pairs(self) -> bool:
        """Whether next-sentence prediction is a part of it."""
        return self.next_sentence > 0 and self.bidirectional > 0

    @property
    def heads(self) -> tuple[str, ...]:
        return ("lm", "pooler", self.pair_head) if self.pairs else ("lm",)

    @property
    def weights(self) -> dict[str, float]:
        also = {"next_sentence_loss": self.next_sentence} if self.pairs else {}
        return {"unilm_loss": 1.0, **also}

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """Adds form [B], rank [B, S], and where, targets, weights [B, P]; ids and types
        [B, S] are those of the form, next_sentence [B, G] is none elsewhere."""
        S = batch["ids"].shape[1]
        counts = corrupt.budget(S, self.rate)
        slots = int(counts[-1])
        below = np.cumsum(self.shares)[:-1].astype(np.float32)

        def one_row(key, ids, group):
            form_key, choose_key, replace_key = jax.random.split(key, 3)
            special = jnp.isin(ids, jnp.asarray(self.special_ids))
            candidates = (group > 0) & ~special
            count = jnp.asarray(counts)[(group > 0).sum()]
            chosen = corrupt.choose_words(
                choose_key, candidates, jnp.arange(S), count, lengths=LENGTHS
            )
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
            form = jnp.sum(jax.random.uniform(form_key) >= below)
            found = {"ids": shown, "where": where, "targets": ids[where]}
            return {**found, "weights": weights, "form": form}

        rows = jax.vmap(one_row)(keys, batch["ids"], batch["group"])
        rows |= in_form(rows["form"], batch["types"], batch["positions"])
        if self.pairs:
            asked = rows["form"][:, None] == FORMS.index("bidirectional")
            rows["next_sentence"] = jnp.where(asked, batch["next_sentence"], -1)
        return {**batch, **rows}

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        counts = {"unilm_loss": batch["weights"].sum()}
        if self.pairs:
            counts["next_sentence_loss"] = (batch["next_sentence"] >= 0).sum()
        return counts

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        fields = ("ids", "types", "positions", "group", "rank")
        tokens = Tokens(**{name: batch[name] for name in fields})
        first = batch["first"] if self.pairs else None
        out = net(tokens, where=batch["where"], first=first, heads=self.heads)
        targets, weights = batch["targets"], batch["weights"]
        means = means_of(self.name, out["lm"], targets, weights)
        loss = cross_entropy(out["lm"], targets)
        for number, form in enumerate(FORMS):
            if getattr(self, form):
                its = weights * (batch["form"] == number)[:, None]
                means[f"{form}_loss"] = Mean.of(loss, its)
        if self.pairs:
            pairs = out[self.pair_head], batch["next_sentence"]
            means |= label_means("next_sentence", *pairs)
        return Terms(means)


def in_form(
    form: jax.Array, types: jax.Array, positions: jax.Array
) -> dict[str, jax.Array]:
    """The types and ranks [B, S] of rows of these forms [B], which have type 0 in part
    A and 1 in part B.

    In a pair, ranks need only grow with the position in part B, and be more than 0
    there: the position itself does so, wherever B begins and whatever is packed.
    """
    of_a, of_b = jnp.asarray(TYPES, types.dtype)[form].T[:, :, None]
    ranks = (
        rank_of("all", positions),
        jnp.where(types == 1, positions, 0),
        rank_of("causal", positions),
        rank_of("backward", positions),
    )
    rank = sum(jnp.where(form[:, None] == n, r, 0) for n, r in enumerate(ranks))
    return {"types": jnp.where(types == 1, of_b, of_a), "rank": rank}
