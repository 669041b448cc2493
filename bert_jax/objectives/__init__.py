"""Every objective by name."""

from bert_jax.objectives.capitalisation import Capitalisation
from bert_jax.objectives.causal_lm import CausalLM
from bert_jax.objectives.classify import Classify
from bert_jax.objectives.discourse_relation import DiscourseRelation
from bert_jax.objectives.ir_relevance import IRRelevance
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.permuted_lm import PermutedLM
from bert_jax.objectives.replaced_token import ReplacedToken
from bert_jax.objectives.sentence_distance import SentenceDistance
from bert_jax.objectives.sentence_reordering import SentenceReordering
from bert_jax.objectives.tag import Tag
from bert_jax.objectives.token_document import TokenDocument
from bert_jax.objectives.unilm import UniLM

OBJECTIVES = {
    kind.name: kind
    for kind in (
        *(MaskedLM, CausalLM, PermutedLM, ReplacedToken, UniLM),
        # The tasks of ERNIE 2.0 beside masked words.
        *(Capitalisation, TokenDocument, SentenceReordering, SentenceDistance),
        *(DiscourseRelation, IRRelevance),
        *(Classify, Tag),
    )
}
