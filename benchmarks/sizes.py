"""What the benchmark of the training step trains, and in which forms torch does it.

masked_lm       BERT; the form "all" scores every position, as BertForMaskedLM does with
                labels; "gathered" takes the predicted ones before the LM head, as we do
replaced_token  ELECTRA: a generator a quarter as wide, pieces sampled from what it
                says, and the discriminator, on the same embeddings; weight 50
permuted_lm     XLNet's two streams, without memory; "released" is XLNetLMHeadModel as
                it is, "lean" leaves out what it does beyond our step
"""

import dataclasses

import numpy as np

from bert_jax.models.arch import Arch
from bert_jax.presets import preset

S = 128  # length
DROPOUT, LR, DECAY, EPS, CLIP = 0.1, 1e-4, 0.01, 1e-6, 1.0
MASK_ID, SPECIAL_IDS, FIRST_WORD = 103, (0, 100, 101, 102, 103), 1000
PARTIAL = 6  # permuted_lm: one token in so many is predicted
HIDE, WEIGHT = 0.85, 50.0  # replaced_token: share seen as [MASK], and λ

OURS = "bert_jax"
FORMS = {
    "all": "LM head over every position",
    "gathered": "LM head over the predicted positions",
    "released": "as transformers has it",
    "lean": "dropout only where we have it, sinusoids projected once",
}
FORMS_OF = {
    "masked_lm": ("all", "gathered"),
    "replaced_token": ("gathered",),
    "permuted_lm": ("released", "lean"),
}
PEERS = tuple(f"torch-{how}-{form}" for how in ("eager", "compile") for form in FORMS)


@dataclasses.dataclass(frozen=True)
class Size:
    preset: str
    batch: int  # rows
    changes: dict = dataclasses.field(default_factory=dict)  # of the preset's arch

    @property
    def objective(self) -> str:
        return preset(self.preset).objective

    @property
    def arch(self) -> Arch:
        dropout = dict(dropout=DROPOUT, attention_dropout=DROPOUT)
        return preset(self.preset).arch.but(**self.changes, **dropout)

    @property
    def predicted(self) -> int:
        """P: predictions in a row."""
        return S // PARTIAL if self.objective == "permuted_lm" else round(0.15 * S)

    def peers(self, asked: tuple[str, ...] = PEERS) -> list[str]:
        """Those of the peers asked for that train its objective."""
        forms = FORMS_OF[self.objective]
        return [name for name in asked if name.rpartition("-")[2] in forms]

    def clean_ids(self) -> np.ndarray:
        """The same tokens for everyone: int32 [B, S]."""
        rng = np.random.default_rng(0)
        high = self.arch.vocab_size
        return rng.integers(FIRST_WORD, high, (self.batch, S), dtype=np.int32)


def shape(layers: int, width: int) -> dict:
    """Heads of 64, as everywhere in the family."""
    return dict(layers=layers, width=width, heads=width // 64, inner=4 * width)


ELECTRA, XLNET = "electra-small-discriminator", "xlnet-base-cased"
SIZES = {
    "mini": Size("bert-mini", 32),
    "small": Size("bert-small", 32),
    "base": Size("bert-base-uncased", 8),
    "rtd-mini": Size(ELECTRA, 32, shape(4, 256)),
    "rtd-small": Size(ELECTRA, 16),  # 12 layers x 256
    "permuted-mini": Size(XLNET, 32, shape(4, 256)),
    "permuted-small": Size(XLNET, 16, shape(4, 512)),
    "toy": Size("bert-tiny", 2),
    "rtd-toy": Size(ELECTRA, 2, shape(1, 64)),
    "permuted-toy": Size(XLNET, 2, shape(1, 64)),
}
