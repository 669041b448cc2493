"""Every objective by name."""

from bert_jax.objectives.causal_lm import CausalLM
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.permuted_lm import PermutedLM
from bert_jax.objectives.replaced_token import ReplacedToken

OBJECTIVES = {
    kind.name: kind for kind in (MaskedLM, CausalLM, PermutedLM, ReplacedToken)
}
