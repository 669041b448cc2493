"""Classification: one label for a text or a pair.

    L = Σ -log softmax(W pooled + b)[label] / (number of examples)

Finetuning is the one step with this objective: nothing is hidden (Devlin et al. 2019,
section 4.1). The pooled token is the one that the architecture says stands for a row,
[CLS] or the last. Differs from the release in: no dropout on the pooled vector.
"""

import dataclasses

from bert_jax.objectives.labels import Labels


@dataclasses.dataclass(frozen=True)
class Classify(Labels):
    name = "classify"
    heads = ("pooler", "classify")
    column = "label"
