"""The family table: every member as a difference from its parent.

What changes the function or the loss is a preset; what changes only the run (data,
batch, steps, mesh) is a config. Names are spelled as on the Hugging Face hub, without
the organisation; members that are not there are spelled in the same way.
"""

import dataclasses

from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch


@dataclasses.dataclass(frozen=True)
class Preset:
    name: str
    arch: Arch
    objective: str  # file in objectives/
    tokenizer: str  # what its vocabulary is
    rows: str  # how text is laid out: a kind of data/plans.py
    paper: str
    reference: str  # class that computes the same; of transformers, unless it says
    layout: str  # how that class names things: a model_type of convert/tables.py
    pair_head: str = "nsp"  # what it calls the head for pairs of sentences
    hyper: dict = dataclasses.field(default_factory=dict)  # of the objective

    def but(self, name: str, **changes) -> "Preset":
        """A child: another name, and some fields of the preset or its arch changed."""
        own = {field.name for field in dataclasses.fields(self)}
        mine = {key: changes.pop(key) for key in own & set(changes)}
        return dataclasses.replace(
            self, name=name, arch=self.arch.but(**changes), **mine
        )


LARGE = dict(width=1024, layers=24, heads=16, inner=4096)
CASED = dict(tokenizer="wordpiece cased", vocab_size=28996)
CHINESE = dict(tokenizer="wordpiece chinese characters", vocab_size=21128)

BERT = Preset(
    name="bert-base-uncased",
    arch=Arch(),
    objective="masked_lm",
    tokenizer="wordpiece uncased",
    rows="pair",
    paper="Devlin et al. 2019, arXiv:1810.04805",
    reference="BertForPreTraining",
    layout="bert",
)


def bert() -> list[Preset]:
    many = "wordpiece multilingual"
    return [
        BERT,
        BERT.but("bert-large-uncased", **LARGE),
        BERT.but("bert-base-cased", **CASED),
        BERT.but("bert-large-cased", **CASED, **LARGE),
        BERT.but("bert-base-chinese", **CHINESE),
        BERT.but("bert-large-chinese", **CHINESE, **LARGE),
        BERT.but(
            "bert-base-multilingual-cased", tokenizer=f"{many} cased", vocab_size=119547
        ),
        BERT.but(
            "bert-base-multilingual-uncased",
            tokenizer=f"{many} uncased",
            vocab_size=105879,
        ),
    ]


def small_berts() -> list[Preset]:
    """The 24 miniatures, four of which have a name of their own; distilled shapes."""
    base = BERT.but("", paper="Turc et al. 2019, arXiv:1908.08962")
    named = {(2, 128): "tiny", (4, 256): "mini", (4, 512): "small", (8, 512): "medium"}
    members = []
    for layers in (2, 4, 6, 8, 10, 12):
        for width in (128, 256, 512, 768):
            size = dict(layers=layers, width=width, heads=width // 64, inner=4 * width)
            name = f"bert_uncased_L-{layers}_H-{width}_A-{width // 64}"
            members.append(base.but(name, **size))
            if (layers, width) in named:
                members.append(base.but(f"bert-{named[layers, width]}", **size))
    tiny = BERT.but("", paper="Jiao et al. 2020, arXiv:1909.10351", rows="full")
    mini = tiny.but("", paper="Wang et al. 2020, arXiv:2002.10957")
    narrow = dict(width=384, inner=1536)
    return [
        *members,
        tiny.but("TinyBERT_General_4L_312D", layers=4, width=312, inner=1200),
        tiny.but("TinyBERT_General_6L_768D", layers=6),
        mini.but("MiniLM-L12-H384-uncased", **narrow),
        mini.but("MiniLM-L6-H384-uncased", layers=6, **narrow),
    ]


def same_model_as_bert() -> list[Preset]:
    """Members that differ from BERT in text, vocabulary and objective only."""
    span = dict(paper="Joshi et al. 2020, arXiv:1907.10529", rows="doc")
    span["hyper"] = dict(choose="span", replace="run", boundary=1.0)
    whole_word = dict(paper="Cui et al. 2021, arXiv:1906.08101", **CHINESE)
    whole_word["hyper"] = dict(choose="word")
    mac = dict(paper="Cui et al. 2020, arXiv:2004.13922", rows="order", **CHINESE)
    mac["hyper"] = dict(choose="macbert", replace="similar")
    prefix = dict(paper="Dong et al. 2019, arXiv:1905.03197", types=6)
    prefix["objective"] = "unilm"
    return [
        BERT.but("spanbert-base-cased", **span, **CASED),
        BERT.but("spanbert-large-cased", **span, **CASED, **LARGE),
        BERT.but("chinese-bert-wwm", **whole_word),
        BERT.but("chinese-bert-wwm-ext", **whole_word),
        BERT.but("chinese-roberta-wwm-ext", **whole_word, rows="full"),
        BERT.but("chinese-roberta-wwm-ext-large", **whole_word, **LARGE, rows="full"),
        BERT.but("chinese-macbert-base", **mac),
        BERT.but("chinese-macbert-large", **mac, **LARGE),
        BERT.but("unilm-base-cased", **prefix, **CASED),
        BERT.but("unilm-large-cased", **prefix, **CASED, **LARGE),
    ]


def roberta() -> list[Preset]:
    base = BERT.but(
        "roberta-base",
        tokenizer="byte bpe",
        rows="full",
        paper="Liu et al. 2019, arXiv:1907.11692",
        reference="RobertaForMaskedLM",
        layout="roberta",
        vocab_size=50265,
        max_positions=514,
        position_offset=2,
        types=1,
        norm_eps=1e-5,
    )
    languages = base.but(
        "xlm-roberta-base",
        tokenizer="unigram multilingual",
        paper="Conneau et al. 2020, arXiv:1911.02116",
        reference="XLMRobertaForMaskedLM",
        layout="xlm-roberta",
        vocab_size=250002,
    )
    french = base.but(
        "camembert-base",
        tokenizer="unigram french",
        paper="Martin et al. 2020, arXiv:1911.03894",
        reference="CamembertForMaskedLM",
        layout="camembert",
        vocab_size=32005,
    )
    long = base.but(
        "longformer-base-4096",
        rows="doc",
        paper="Beltagy et al. 2020, arXiv:2004.05150",
        reference="LongformerForMaskedLM",
        layout="longformer",
        max_positions=4098,
        attention="window",
    )
    distilled = dict(paper="Sanh et al. 2019, arXiv:1910.01108", layers=6)
    return [
        base,
        base.but("roberta-large", **LARGE),
        base.but("distilroberta-base", **distilled),
        languages,
        languages.but("xlm-roberta-large", **LARGE),
        french,
        long,
        long.but("longformer-large-4096", **LARGE),
    ]


def distilbert() -> list[Preset]:
    base = BERT.but(
        "distilbert-base-uncased",
        paper="Sanh et al. 2019, arXiv:1910.01108",
        reference="DistilBertForMaskedLM",
        layout="distilbert",
        rows="full",
        layers=6,
        types=0,
        pooler="relu",
    )
    return [
        base,
        base.but("distilbert-base-cased", **CASED),
        base.but(
            "distilbert-base-multilingual-cased",
            tokenizer="wordpiece multilingual cased",
            vocab_size=119547,
        ),
    ]


def albert() -> list[Preset]:
    """With Google's gelu, the tanh form, also where a config.json says the other."""
    base = BERT.but(
        "albert-base-v1",
        tokenizer="unigram",
        rows="order",
        paper="Lan et al. 2020, arXiv:1909.11942",
        reference="AlbertForPreTraining",
        layout="albert",
        pair_head="sop",
        hyper=dict(choose="ngram"),
        vocab_size=30000,
        embed_width=128,
        share="all",
        activation="gelu_tanh",
    )
    sizes = {
        "base": {},
        "large": LARGE,
        "xlarge": dict(width=2048, layers=24, heads=16, inner=8192),
        "xxlarge": dict(width=4096, layers=12, heads=64, inner=16384),
    }
    none = dict(dropout=0.0, attention_dropout=0.0)
    return [
        base.but(
            f"albert-{size}-v{version}",
            **fields,
            **(none if size == "xxlarge" or version == 2 else {}),
        )
        for version in (1, 2)
        for size, fields in sizes.items()
    ]


def electra() -> list[Preset]:
    """Discriminators and generators, each as it is published, with its own tables."""
    base = BERT.but(
        "electra-base-discriminator",
        objective="replaced_token",
        hyper=dict(generator=1 / 3),
        rows="electra",
        paper="Clark et al. 2020, arXiv:2003.10555",
        reference="ElectraForPreTraining",
        layout="electra",
        pooler="gelu",
    )
    quarter = dict(generator=0.25)
    mlm = dict(reference="ElectraForMaskedLM", objective="masked_lm")
    mlm["hyper"] = dict(hide=0.85, randomise=0.0)
    small = dict(width=256, heads=4, inner=1024)
    return [
        base.but(
            "electra-small-discriminator", **small, embed_width=128, hyper=quarter
        ),
        base,
        base.but(
            "electra-large-discriminator", **LARGE, hyper=quarter | dict(rate=0.25)
        ),
        base.but("electra-small-generator", **mlm, **small, embed_width=128),
        base.but("electra-base-generator", **mlm, **small, embed_width=768),
        base.but(
            "electra-large-generator", **mlm, **small, embed_width=1024, layers=24
        ),
    ]


def ernie() -> list[Preset]:
    """Their epsilon is 1e-5, as in the published config.json files."""
    base = BERT.but(
        "ernie-1.0-base-zh",
        tokenizer="wordpiece chinese characters",
        paper="Sun et al. 2019, arXiv:1904.09223",
        reference="ErnieForPreTraining",
        layout="ernie",
        hyper=dict(choose="word"),  # unit=phrases, then entities, are its later stages
        vocab_size=18000,
        max_positions=513,
        activation="relu",
        norm_eps=1e-5,
    )
    second = BERT.but(
        "ernie-2.0-base-en",
        paper="Sun et al. 2020, arXiv:1907.12412",
        reference="ErnieForPreTraining",
        layout="ernie",
        hyper=dict(choose="word"),  # or objective.unit=phrases: knowledge masking
        types=4,
        task_types=16,
        norm_eps=1e-5,
    )
    third = second.but(
        "ernie-3.0-base-zh",
        tokenizer="wordpiece chinese characters",
        paper="Wang et al. 2021, arXiv:2112.12731",
        vocab_size=40000,
        max_positions=2048,
        task_types=3,
    )
    small = dict(layers=6, width=384, heads=12, inner=1536)
    return [
        base,
        second,
        second.but("ernie-2.0-large-en", **LARGE),
        third,
        third.but("ernie-3.0-medium-zh", layers=6),
        third.but("ernie-3.0-mini-zh", **small),
        third.but("ernie-3.0-micro-zh", **small | dict(layers=4)),
        third.but("ernie-3.0-nano-zh", **small | dict(layers=4, width=312, inner=1248)),
    ]


def nezha() -> list[Preset]:
    base = BERT.but(
        "nezha-cn-base",
        paper="Wei et al. 2019, arXiv:1909.00204",
        reference="NezhaForPreTraining of transformers 4.57",
        layout="nezha",
        position="functional",
        max_distance=64,
        **CHINESE,
    )
    english = dict(tokenizer="wordpiece uncased", vocab_size=30522, max_distance=127)
    return [
        base,
        base.but("nezha-cn-large", **LARGE),
        base.but("nezha-en-base", **english),
        base.but("nezha-en-large", **english, **LARGE),
    ]


def recurrent() -> list[Preset]:
    """Members with relative positions and a memory of the text before, as long as the
    releases train with. (Transformer-XL is tested with more: 1600, the base 640.)"""
    relative = dict(
        position="xl", embed_norm="none", attention_bias="none", norm_eps=1e-12
    )
    xlnet = BERT.but(
        "xlnet-base-cased",
        objective="permuted_lm",
        hyper=dict(memory=384),
        tokenizer="unigram cased",
        rows="stream",
        paper="Yang et al. 2019, arXiv:1906.08237",
        reference="XLNetLMHeadModel",
        layout="xlnet",
        vocab_size=32000,
        type_scheme="relative",
        streams=2,
        lm_head="bias",
        pool_from="last",
        **relative,
    )
    xl = BERT.but(
        "transfo-xl-wt103",
        objective="causal_lm",
        hyper=dict(memory=384),
        tokenizer="words",
        rows="stream",
        paper="Dai et al. 2019, arXiv:1901.02860",
        reference="TransfoXLLMHeadModel of transformers 4.57",
        layout="transfo-xl",
        vocab_size=267735,
        types=0,
        max_distance=1000,
        embed_scale="sqrt",
        order="causal",
        activation="relu",
        lm_head="bias",
        pooler="none",
        pool_from="last",
        attention_dropout=0.0,
        **relative | dict(norm_eps=1e-5),
    )
    return [
        xlnet,
        xlnet.but("xlnet-large-cased", **LARGE),
        xl.but("transfo-xl-wt103", width=1024, layers=18, heads=16, inner=4096),
        xl.but(
            "transfo-xl-wt103-base",
            **dict(width=410, layers=16, heads=10, inner=2100),
            position_biases="shared",
            hyper=dict(memory=150),
        ),
    ]


def gpt() -> list[Preset]:
    first = BERT.but(
        "openai-gpt",
        objective="causal_lm",
        tokenizer="bpe uncased",
        rows="stream",
        paper="Radford et al. 2018, Improving Language Understanding",
        reference="OpenAIGPTLMHeadModel",
        layout="openai-gpt",
        vocab_size=40478,
        types=0,
        embed_norm="none",
        order="causal",
        activation="gelu_tanh",
        norm_eps=1e-5,
        lm_head="bare",
        pooler="none",
        pool_from="last",
    )
    second = first.but(
        "gpt2",
        tokenizer="byte bpe",
        paper="Radford et al. 2019, Language Models are Multitask Learners",
        reference="GPT2LMHeadModel",
        layout="gpt2",
        vocab_size=50257,
        max_positions=1024,
        norm_place="pre",
        residual_init="depth",
    )
    sizes = {
        "medium": (24, 1024, 16),
        "large": (36, 1280, 20),
        "xl": (48, 1600, 25),
    }
    return [
        first,
        second,
        *(
            second.but(
                f"gpt2-{size}", layers=layers, width=width, heads=heads, inner=4 * width
            )
            for size, (layers, width, heads) in sizes.items()
        ),
    ]


FAMILIES = (
    *(bert, small_berts, same_model_as_bert, roberta, distilbert, albert, electra),
    *(ernie, nezha, recurrent, gpt),
)
PRESETS = {member.name: member for members in FAMILIES for member in members()}
ALIASES = {
    "bert-base": "bert-base-uncased",
    "bert-large": "bert-large-uncased",
}


def preset(name: str) -> Preset:
    """The preset of that name; an unknown one is an error with the nearest names."""
    if ALIASES.get(name, name) not in PRESETS:
        raise InputError(unknown("preset", name, [*PRESETS, *ALIASES]))
    return PRESETS[ALIASES.get(name, name)]
