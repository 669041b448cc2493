"""The family table: every member as a difference from its parent.

What changes the function or the loss is a preset; what changes only the run (data,
batch, steps, mesh) is a config. Names are spelled as on the Hugging Face hub, without
the organisation.
"""

import dataclasses

from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch

BERT_PAPER = "Devlin et al. 2019, arXiv:1810.04805"
MINIATURES_PAPER = "Turc et al. 2019, arXiv:1908.08962"


@dataclasses.dataclass(frozen=True)
class Preset:
    name: str
    arch: Arch
    objective: str  # file in objectives/
    tokenizer: str  # what its vocabulary is
    rows: str  # how text is laid out: a kind of data/plans.py
    paper: str
    reference: str  # class in transformers that computes the same

    def but(
        self, name: str, *, paper: str = "", tokenizer: str = "", **arch
    ) -> "Preset":
        """A child: another name, and some fields of the arch changed."""
        return dataclasses.replace(
            self,
            name=name,
            arch=self.arch.but(**arch),
            paper=paper or self.paper,
            tokenizer=tokenizer or self.tokenizer,
        )


def family() -> dict[str, Preset]:
    base = Preset(
        name="bert-base-uncased",
        arch=Arch(),
        objective="masked_lm",
        tokenizer="wordpiece uncased",
        rows="pair",
        paper=BERT_PAPER,
        reference="BertForPreTraining",
    )
    large = dict(width=1024, layers=24, heads=16, inner=4096)
    cased = dict(tokenizer="wordpiece cased", vocab_size=28996)
    chinese = dict(tokenizer="wordpiece chinese characters", vocab_size=21128)
    members = [
        base,
        base.but("bert-large-uncased", **large),
        base.but("bert-base-cased", **cased),
        base.but("bert-large-cased", **cased, **large),
        base.but("bert-base-chinese", **chinese),
        base.but("bert-large-chinese", **chinese, **large),
        base.but(
            "bert-base-multilingual-cased",
            tokenizer="wordpiece multilingual cased",
            vocab_size=119547,
        ),
        base.but(
            "bert-base-multilingual-uncased",
            tokenizer="wordpiece multilingual uncased",
            vocab_size=105879,
        ),
    ]
    # The 24 miniatures; four of them have a name of their own.
    named = {(2, 128): "tiny", (4, 256): "mini", (4, 512): "small", (8, 512): "medium"}
    for layers in (2, 4, 6, 8, 10, 12):
        for width in (128, 256, 512, 768):
            size = dict(layers=layers, width=width, heads=width // 64, inner=4 * width)
            paper = MINIATURES_PAPER
            full_name = f"bert_uncased_L-{layers}_H-{width}_A-{width // 64}"
            members.append(base.but(full_name, paper=paper, **size))
            if (layers, width) in named:
                short = f"bert-{named[layers, width]}"
                members.append(base.but(short, paper=paper, **size))
    return {member.name: member for member in members}


PRESETS = family()
ALIASES = {"bert-base": "bert-base-uncased", "bert-large": "bert-large-uncased"}


def preset(name: str) -> Preset:
    """The preset of that name; an unknown one is an error with the nearest names."""
    if ALIASES.get(name, name) not in PRESETS:
        raise InputError(unknown("preset", name, [*PRESETS, *ALIASES]))
    return PRESETS[ALIASES.get(name, name)]
