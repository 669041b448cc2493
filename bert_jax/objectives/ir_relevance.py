"""IR relevance: does this title answer this query?

0 is strongly relevant (it was clicked), 1 weakly (it was found and not clicked), 2 not
at all (ERNIE 2.0, Sun et al. 2020, arXiv:1907.12412, section 4.2). The labels come with
the text, query as A and title as B: data/labelled.py. The paper's come from the log of
a search engine, which nobody else has.
"""

import dataclasses

from bert_jax.objectives.pooled import Pooled


@dataclasses.dataclass(frozen=True)
class IRRelevance(Pooled):
    name = "ir_relevance"
    head = "relevance"
    labels = "label"
