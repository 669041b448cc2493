"""Every objective by name."""

from bert_jax.objectives.masked_lm import MaskedLM

OBJECTIVES = {"masked_lm": MaskedLM}
