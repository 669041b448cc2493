"""Discourse relation: which word joins these two sentences, or how are they related?

The labels come with the text (data/labelled.py): the paper takes pairs of sentences
from Sileo et al. 2019 (arXiv:1903.11850), 174 markers such as "however" (ERNIE 2.0,
Sun et al. 2020, arXiv:1907.12412, section 4.2). As many classes as arch.labels.
"""

import dataclasses

from bert_jax.objectives.pooled import Pooled


@dataclasses.dataclass(frozen=True)
class DiscourseRelation(Pooled):
    name = "discourse_relation"
    head = "discourse"
    labels = "label"
