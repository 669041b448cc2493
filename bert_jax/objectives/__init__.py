"""Every objective by name."""

from bert_jax.objectives.causal_lm import CausalLM
from bert_jax.objectives.masked_lm import MaskedLM

OBJECTIVES = {kind.name: kind for kind in (MaskedLM, CausalLM)}
