"""Masked language model: any choice of what is hidden, and what goes with it.

    L = Σ w · -log p(x_i | corrupted x) / Σ w  +  λ · CE(pair)  +  μ · L_boundary

15 % of the tokens are predicted; of these 80 % are shown as [MASK], 10 % as a random
piece, 10 % as they are (Devlin et al. 2019, arXiv:1810.04805, section 3.1 and A.1).
On rows of pairs: does B follow A, or which of them comes first (Lan et al. 2020)? The
boundary objective predicts each piece of a run of chosen ones once more, from the
states before and after the run and the piece's place in it (SpanBERT, Joshi et al.
2020, arXiv:1907.10529). With replace=similar a word is shown as a similar word and
[MASK] never (MacBERT, Cui et al. 2020, arXiv:2004.13922). ERNIE's units are columns:
choose=token, then choose=word with unit=phrases, then unit=entities (arXiv:1904.09223).

Differs from the releases in: the corruption is drawn anew at every step; the number of
predictions is counted over a packed row, not over each example in it, and is round(rate
· tokens) for all (SpanBERT rounds up, RoBERTa up or down by chance); a random piece may
be any of the vocabulary (RoBERTa: no special one). BERT's divides by Σ w + 1e-5,
SpanBERT's boundary loss by n + 1. SpanBERT's cuts the last word to meet its budget,
where here words stay whole and a row may have a few predictions less. ERNIE's chooses
each unit, and MacBERT's each word, with probability 15 %, where here the number of
pieces is what is 15 %.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch
from bert_jax.models.heads import SPAN_WORDS
from bert_jax.objectives import corrupt
from bert_jax.objectives.base import (
    Batch,
    Mean,
    Net,
    Objective,
    Terms,
    label_means,
    means_of,
    tokens_of,
    wrong_task,
)

CHOICES = ("token", *corrupt.LENGTHS)


@dataclasses.dataclass(frozen=True)
class MaskedLM(Objective):
    name = "masked_lm"

    # From the tokenizer and the preset.
    vocab_size: int
    mask_id: int
    special_ids: tuple[int, ...]  # never predicted
    pair_head: str = "nsp"  # the head that scores pairs
    # Hyper-parameters.
    rate: float = 0.15  # share of the tokens that is predicted
    choose: str = "token"  # token | word | ngram (ALBERT) | macbert | span (SpanBERT)
    unit: str = "words"  # column of the data: words, or phrases, entities
    # token | run: whether a run of chosen ones is shown alike; similar: word by word
    replace: str = "token"
    similar: str = ""  # folder of the table of similar words; "": the corpus's own
    hide: float = 0.8  # share of these shown as [MASK], or as a similar word
    randomise: float = 0.1  # share of these shown as a random piece, or word
    next_sentence: float = 1.0  # λ; 0 on rows that are not pairs
    boundary: float = 0.0  # μ
    task: int = 0  # what is added to every token of this task (ERNIE 2.0)
    # From the folder or the corpus: data.similar.Similar.
    table: Any = None

    def __post_init__(self):
        problems = corrupt.wrong_shares(self, weights=("next_sentence", "boundary"))
        choices = {"choose": CHOICES, "replace": ("token", "run", "similar")}
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                field = f"objective.{name}"
                problems.append(unknown(field, getattr(self, name), valid))
        if self.replace == "similar" and self.choose == "token":
            problems.append(
                "objective.replace=similar replaces words: objective.choose=token does "
                "not choose any; use word, ngram, macbert or span"
            )
        elif self.replace == "similar" and self.table is None:
            problems.append(
                "objective.replace=similar needs a table of similar words: `bert_jax "
                "similar` makes one, `bert_jax prepare --words TABLE` uses it"
            )
        if problems:
            raise InputError("\n".join(problems))

    @property
    def heads(self) -> tuple[str, ...]:
        pairs = ("pooler", self.pair_head) if self.next_sentence else ()
        return ("lm", *pairs, *(("sbo",) if self.boundary else ()))

    @property
    def weights(self) -> dict[str, float]:
        also = {
            "next_sentence_loss": self.next_sentence,
            "boundary_loss": self.boundary,
        }
        return {"masked_lm_loss": 1.0} | {name: w for name, w in also.items() if w}

    @property
    def columns(self) -> tuple[str, ...]:
        units = () if self.choose == "token" else (self.unit,)
        return (*units, "word_id") if self.replace == "similar" else units

    def problems(self, arch: Arch, rows: str) -> list[str]:
        return wrong_task(self.task, arch)

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """Adds where, targets, weights [B, P], and for the boundary objective spans
        [B, P, 3] and bounded [B, P], 1 where there is one; ids [B, S] are the corrupted
        ones."""
        S = batch["ids"].shape[1]
        counts = corrupt.budget(S, self.rate)
        slots = int(counts[-1])
        wanted = {"ids", "group", *self.columns}
        wanted |= {"words"} if self.replace == "similar" else set()

        def one_row(key, row):
            ids, group = row["ids"], row["group"]
            choose_key, replace_key = jax.random.split(key)
            special = jnp.isin(ids, jnp.asarray(self.special_ids))
            candidates = (group > 0) & ~special
            count = jnp.asarray(counts)[(group > 0).sum()]
            if self.choose == "token":
                chosen = corrupt.choose(choose_key, candidates, count)
            else:
                chosen = corrupt.choose_words(
                    choose_key,
                    candidates,
                    row[self.unit],
                    count,
                    lengths=corrupt.LENGTHS[self.choose],
                    merge=self.choose == "span",
                )
            where, weights = corrupt.positions_of(chosen, slots)
            shown = self.shown(replace_key, row, chosen)
            found = {"ids": shown, "where": where, "targets": ids[where]}
            found["weights"] = weights
            if self.boundary:
                left, right, place = corrupt.borders_of(chosen)[where].T
                inside = (left >= 0) & (right < S) & (place < SPAN_WORDS)
                # What lies outside is read from the edge, and does not count.
                left, right = jnp.clip(left, 0), jnp.clip(right, None, S - 1)
                inside &= group[left] == group[right]
                found["spans"] = jnp.stack([left, right, place], -1)
                found["bounded"] = weights * inside
            return found

        rows = jax.vmap(one_row)(keys, {name: batch[name] for name in wanted})
        return {**batch, **rows}

    def shown(self, key: jax.Array, row: Batch, chosen: jax.Array) -> jax.Array:
        """What the model sees of a row: ids [S]."""
        how = dict(mask_id=self.mask_id, vocab_size=self.vocab_size)
        how |= dict(hide=self.hide, randomise=self.randomise)
        if self.replace == "similar":
            words = (row["words"], row["word_id"])
            return corrupt.replace_by_similar(
                key, row["ids"], chosen, *words, table=self.table, **how
            )
        by_run = self.replace == "run"
        return corrupt.replace(key, row["ids"], chosen, by_run=by_run, **how)

    def scores(self, logits: jax.Array, batch: Batch) -> dict[str, Mean]:
        """Of the predicted pieces alone."""
        return means_of("masked_lm", logits, batch["targets"], batch["weights"])

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        counts = {"masked_lm_loss": batch["weights"].sum()}
        if self.next_sentence:
            counts["next_sentence_loss"] = (batch["next_sentence"] >= 0).sum()
        if self.boundary:
            counts["boundary_loss"] = batch["bounded"].sum()
        return counts

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        tokens = tokens_of(batch, task=self.task)
        first = batch["first"] if self.next_sentence else None
        spans = batch["spans"] if self.boundary else None
        out = net(
            tokens, where=batch["where"], first=first, spans=spans, heads=self.heads
        )
        means = self.scores(out["lm"], batch)
        if self.next_sentence:
            pairs = out[self.pair_head], batch["next_sentence"]
            means |= label_means("next_sentence", *pairs)
        if self.boundary:
            runs = out["sbo"], batch["targets"], batch["bounded"]
            means |= means_of("boundary", *runs)
        return Terms(means)
