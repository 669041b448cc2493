"""Capitalisation: was this word written with a capital letter?

    L = Σ -log p(capital? | text in small letters) / (number of words asked about)

Names and beginnings of sentences are capitalised, so a model without case learns what
case says (ERNIE 2.0, Sun et al. 2020, arXiv:1907.12412, section 4.2). The text must be
prepared with a cased vocabulary: a capitalised piece is shown as its form in small
letters, where the vocabulary has one. Asked are words of one piece whose shown form may
stand for either: of others the piece itself, or how the word is cut, would tell.

Differs from the paper in: its vocabulary has no case and case is noted beside the text;
here a name that the vocabulary has only capitalised is shown so and not asked about.
`capitalisation_asked` is the share of words that are asked about: with the vocabulary
of bert-base-cased 67 % of those in en_books, and 69 % of the capitalised ones.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.objectives.base import (
    Batch,
    Mean,
    Net,
    Objective,
    Terms,
    means_of,
    tokens_of,
    wrong_task,
)
from bert_jax.objectives.corrupt import edges_of_words

MARKS = ("##", "Ġ", "▁")  # before the letters of a piece: see data/tokenizers


def small_letters(vocab: Sequence[str]) -> tuple[int, ...]:
    """For each piece the id of its form in small letters, if it begins with a capital
    and there is one; else its own id."""
    ids = {piece: number for number, piece in enumerate(vocab)}

    def small(piece: str) -> str:
        mark = next((mark for mark in MARKS if piece.startswith(mark)), "")
        letters = piece.removeprefix(mark)
        return mark + letters.lower() if letters[:1].isupper() else piece

    return tuple(ids.get(small(piece), ids[piece]) for piece in vocab)


@dataclasses.dataclass(frozen=True)
class Capitalisation(Objective):
    name = "capitalisation"
    heads = ("capital",)
    columns = ("words",)

    # From the tokenizer.
    small: tuple[int, ...] = dataclasses.field(repr=False)  # small_letters(vocab)
    # Hyper-parameters.
    task: int = 0  # what is added to every token of this task

    def __post_init__(self):
        if self.small == tuple(range(len(self.small))):
            raise InputError(
                "capitalisation: no piece of the vocabulary has a form with a capital "
                "and one without; prepare the text with a cased tokenizer"
            )

    @property
    def weights(self) -> dict[str, float]:
        return {"capitalisation_loss": 1.0}

    def problems(self, arch: Arch, rows: str) -> list[str]:
        return wrong_task(self.task, arch)

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """ids in small letters; adds targets and weights [B, S]. Draws nothing."""
        small = np.asarray(self.small, np.int32)
        capital = small != np.arange(len(small))
        either = np.zeros(len(small), bool)
        either[small[capital]] = True
        ids = batch["ids"]
        shown = jnp.asarray(small)[ids]
        begins, ends = edges_of_words(batch["words"])
        asked = begins & ends & jnp.asarray(either)[shown]
        return {
            **batch,
            "ids": shown,
            "targets": jnp.asarray(capital)[ids].astype(jnp.int32),
            "weights": asked.astype(jnp.float32),
        }

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        return {"capitalisation_loss": batch["weights"].sum()}

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        tokens = tokens_of(batch, task=self.task)
        logits = net(tokens, heads=self.heads)["capital"]
        targets, weights = batch["targets"], batch["weights"]
        begins, _ = edges_of_words(batch["words"])
        means = means_of(self.name, logits, targets, weights)
        means["capitalisation_share"] = Mean.of(targets, weights)
        means["capitalisation_asked"] = Mean.of(weights, begins)
        return Terms(means)
