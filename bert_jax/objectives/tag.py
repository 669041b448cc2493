"""Tagging: a label for each word, read at its first piece.

    L = Σ -log softmax(W h_i + b)[tag_i] / (number of words)

over the first pieces i of words; what stands elsewhere has tag -1 and does not count
(Devlin et al. 2019, section 5.3). Differs from the release in: no dropout on the last
states beside that of the last layer.
"""

import dataclasses

from bert_jax.objectives.labels import Labels


@dataclasses.dataclass(frozen=True)
class Tag(Labels):
    name = "tag"
    heads = ("tag",)
    column = "tags"
