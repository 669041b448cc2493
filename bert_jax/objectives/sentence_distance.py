"""Sentence distance: how far apart are these two sentences?

0 is adjacent, 1 in the same document but not adjacent, 2 in different documents: next
sentence prediction with a third answer (ERNIE 2.0, Sun et al. 2020, arXiv:1907.12412,
section 4.2). For rows=distance: data/pairs.py draws the sentences.
"""

import dataclasses

from bert_jax.models.arch import Arch
from bert_jax.objectives.base import wrong_rows
from bert_jax.objectives.pooled import Pooled


@dataclasses.dataclass(frozen=True)
class SentenceDistance(Pooled):
    name = "sentence_distance"
    head = "distance"
    labels = "next_sentence"

    def problems(self, arch: Arch, rows: str) -> list[str]:
        wrong = wrong_rows(self.name, rows, ("distance",))  # pairs have other labels
        return super().problems(arch, rows) + wrong
