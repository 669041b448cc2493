"""Sentence reordering: the parts of a text are shuffled; in which order do they stand?

    L = Σ -log p(number of parts, their order | parts as shown) / (number of examples)

Each example is cut between words into m = 1..3 parts, which are shown in an order drawn
at random: one of 1! + 2! + 3! = 9 classes (ERNIE 2.0, Sun et al. 2020,
arXiv:1907.12412, section 4.2). Special tokens stay where they are, words stay whole. A
token's type is the number of its part as shown: without it, two parts swapped could be
three, and a text left alone could be of any number. For rows of one document each: doc.

Differs from the paper in: it does not say where parts end, nor how the model is told;
here each set of word borders is as likely as any other.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.models.arch import Arch
from bert_jax.objectives.base import TEXTS, Batch, wrong_rows
from bert_jax.objectives.corrupt import edges_of_words, positions_of
from bert_jax.objectives.pooled import Pooled

PARTS = 3
# Class c shows part p of the text at place PLACES[c, p]: first one part, then two, ...
PLACES = np.asarray(
    [
        [*places, *range(parts, PARTS)]
        for parts in range(1, PARTS + 1)
        for places in itertools.permutations(range(parts))
    ]
)
ORDERS = np.asarray([math.factorial(parts) for parts in range(PARTS + 1)])
FIRST = np.cumsum(ORDERS) - ORDERS - 1  # class of so many parts


@dataclasses.dataclass(frozen=True)
class SentenceReordering(Pooled):
    name = "sentence_reordering"
    head = "reorder"
    columns = ("words",)

    def problems(self, arch: Arch, rows: str) -> list[str]:
        problems = super().problems(arch, rows) + wrong_rows(self.name, rows, TEXTS)
        if arch.types < PARTS:
            problems.append(
                f"sentence_reordering numbers up to {PARTS} parts by types: "
                f"arch.types={arch.types} must be at least {PARTS}"
            )
        return problems

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """ids, words and types [B, S] as shown; adds first, targets and weights [B, G]
        of the first G examples of a row."""
        # As many as rows with labels have room for: see data/plans.py.
        slots = max(8, batch["ids"].shape[1] // 16)

        def one_row(key, ids, words, group, positions):
            part, label = draw(key, words, group)
            place = jnp.asarray(PLACES)[label, part]
            source = sort_text(words, group * PARTS + place)
            begins = (positions == 0) & (group > 0)
            first, weights = positions_of(begins, slots)
            return {
                "ids": ids[source],
                "words": words[source],
                "types": jnp.where(words > 0, place[source], 0),
                "first": first,
                "targets": label[first],
                "weights": weights,
            }

        columns = (batch[name] for name in ("ids", "words", "group", "positions"))
        return {**batch, **jax.vmap(one_row)(keys, *columns)}


def draw(
    key: jax.Array, words: jax.Array, group: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """For each token of [S] the number of its part, and the class of its example."""
    S = len(words)
    parts_key, cut_key, order_key = jax.random.split(key, 3)
    same = group[:, None] == group  # [S, S]
    before = jnp.arange(S)[:, None] > jnp.arange(S)
    begins, _ = edges_of_words(words)
    border = begins & (same & before & begins).any(1)  # not the first word's
    wanted = jax.random.randint(parts_key, (S + 1,), 1, PARTS + 1)[group]
    parts = jnp.minimum(wanted, 1 + (same & border).sum(1))
    # The borders of an example in random order: the first ones are cuts.
    noise = jnp.argsort(jax.random.uniform(cut_key, (S,)))
    rank = (same & border & (noise < noise[:, None])).sum(1)
    cuts = border & (rank < parts - 1)
    part = (same & cuts & ~before.T).sum(1)
    # n! divides PARTS!, so each order is as likely as any other.
    order = jax.random.randint(order_key, (S + 1,), 0, ORDERS[-1])[group]
    return part, jnp.asarray(FIRST)[parts] + order % jnp.asarray(ORDERS)[parts]


def sort_text(words: jax.Array, place: jax.Array) -> jax.Array:
    """Where each token of [S] is taken from, so that words stand by their place, those
    of a place as they stood, and special tokens (word 0) where they were."""
    text = words > 0
    order = jnp.argsort(jnp.where(text, place, jnp.iinfo(jnp.int32).max))
    return jnp.where(text, order[jnp.cumsum(text) - 1], jnp.arange(len(words)))
