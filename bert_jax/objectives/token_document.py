"""Token-document relation: does this word occur in another part of the document?

    L = Σ -log p(comes again? | this half of the text) / (number of words)

Words that come again are common ones or what the text is about (ERNIE 2.0, Sun et al.
2020, arXiv:1907.12412, section 4.2). Each example is cut between two words into halves
that do not see each other, and every word of either is asked at its first piece whether
it occurs in the other half. For rows of one document each: doc.

Differs from the paper in: the other part is the other half of the row, not all of the
document; every word counts, also the commonest.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bert_jax.models.arch import Arch
from bert_jax.objectives.base import (
    TEXTS,
    Batch,
    Mean,
    Net,
    Objective,
    Terms,
    means_of,
    tokens_of,
    wrong_rows,
    wrong_task,
)
from bert_jax.objectives.corrupt import edges_of_words


@dataclasses.dataclass(frozen=True)
class TokenDocument(Objective):
    name = "token_document"
    heads = ("relation",)
    columns = ("words",)

    task: int = 0  # what is added to every token of this task

    @property
    def weights(self) -> dict[str, float]:
        return {"token_document_loss": 1.0}

    def problems(self, arch: Arch, rows: str) -> list[str]:
        return wrong_task(self.task, arch) + wrong_rows(self.name, rows, TEXTS)

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """Each half of an example is a group; adds targets and weights [B, S]. Draws
        nothing."""

        def one_row(ids, words, group):
            halves = halve(words, group)
            occurs, asked = comes_again(ids, words, group, halves)
            return {
                "group": halves,
                "targets": occurs.astype(jnp.int32),
                "weights": asked.astype(jnp.float32),
            }

        columns = (batch["ids"], batch["words"], batch["group"])
        return {**batch, **jax.vmap(one_row)(*columns)}

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        return {"token_document_loss": batch["weights"].sum()}

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        tokens = tokens_of(batch, task=self.task)
        logits = net(tokens, heads=self.heads)["relation"]
        targets, weights = batch["targets"], batch["weights"]
        means = means_of(self.name, logits, targets, weights)
        means["token_document_share"] = Mean.of(targets, weights)
        return Terms(means)


def halve(words: jax.Array, group: jax.Array) -> jax.Array:
    """Groups [S] of which each half has a number of its own, 0 still padding. The first
    half has as many words as the second, or one more."""
    same = group[:, None] == group
    within = jnp.where(same & (words > 0), words, 0)  # [S, S]
    highest = within.max(1)
    lowest = jnp.where(within > 0, within, highest[:, None]).min(1)
    # Words are numbered through the row: special tokens go with the word before them,
    # and [CLS], before which is an earlier example or nothing, with the first half.
    second = jax.lax.cummax(words) > (lowest + highest) // 2
    return jnp.where(group > 0, 2 * group - 1 + second, 0)


def comes_again(ids, words, group, halves) -> tuple[jax.Array, jax.Array]:
    """At each first piece of a word in [S]: whether the word occurs in the other half
    of its group, and whether it is asked: the other half must have words."""
    begins, ends = edges_of_words(words)

    def step(after: jax.Array, token) -> tuple[jax.Array, tuple]:
        """`after`, [S]: where the text from the next token to the end of its word is
        found; so, from the end on, where that from this token is."""
        piece, end, mine, half = token
        after = jnp.pad(after, (0, 1))[1:]
        equal = (ids == piece) & (ends == end) & (ends | after)
        others = begins & (group == mine) & (halves != half)
        return equal, ((equal & others).any(), others.any())

    tokens = (ids, ends, group, halves)
    nowhere = jnp.zeros(ids.shape, bool)
    _, (occurs, others) = jax.lax.scan(step, nowhere, tokens, reverse=True)
    return begins & occurs, begins & others
