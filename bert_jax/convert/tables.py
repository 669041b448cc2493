"""How `transformers` writes each member of the family down: one layout per model type.

A layout is data, read in both directions: rows that pair a parameter of ours with a
tensor of theirs, and fields that pair a setting of ours with one of config.json. What
a layout has no words for is an error in either direction, never a silent change.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch

Heads = tuple[str, ...]  # in the order of models.heads.HEADS


class Rename(NamedTuple):
    """A parameter of ours and the tensor that holds it.

    A tuple of ours is joined on the last axis. Below stack/layers we store copies on
    axis 0: {n} is the number of a copy, {g} and {i} ALBERT's group and the layer inside
    it; a name without these holds the only copy. Then the fold, from theirs to ours:
    "transpose"; "vocab", we pad the first axis; "row", [1, 1, D] is [D]; "heads",
    [D, H, K] is [D, HK]; "heads_out", [D, H, K] is [HK, D].
    """

    ours: str | tuple[str, ...]
    theirs: str
    fold: str = ""

    def names(self, copies: int, group_layers: int = 1) -> list[str]:
        """The tensors of copy 0, 1, ..."""
        if not re.search("{[ngi]}", self.theirs):
            return [self.theirs]
        return [
            self.theirs.format(n=n, g=n // group_layers, i=n % group_layers)
            for n in range(copies)
        ]


class Field(NamedTuple):
    """A field of config.json that is a field of Arch."""

    ours: str
    theirs: str
    default: object  # what transformers assumes where the file does not say
    words: dict | None = None  # their value -> ours; the first that fits is written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    model_type: str
    prefix: str  # of the body's tensors; a checkpoint of the bare body may lack it
    body: list[Rename]  # a row is used where the Arch has its parameter
    shared: list[Rename] = dataclasses.field(default_factory=list)  # see `table`
    heads: dict[str, list[Rename]]  # a later head's row replaces an earlier one's
    classes: dict[Heads, str]  # the class that has just these heads
    tied: dict[str, str]  # tensor -> the tensor that it repeats
    write_tied: bool = False  # must be in the file too: loading breaks the tie
    ignored: tuple[str, ...] = ()  # regexes: how names of buffers without values end

    config: list[Field]
    arch: dict[str, object]  # what is the same in every model of this type
    # Fields that change the function, and the values at which it is ours. The first is
    # written, and assumed by transformers where the file does not say (but: `absent`).
    fixed: dict[str, tuple]
    absent: dict[str, object] = dataclasses.field(default_factory=dict)
    # Fields that need more than a pair, with what transformers assumes; and how they
    # are read, {field: value} -> {field of Arch: value}, and written.
    odd: dict[str, object] = dataclasses.field(default_factory=dict)
    read: Callable[[dict], dict] = lambda config: {}
    write: Callable[[Arch], dict] = lambda arch: {}
    idle: tuple[str, ...] = ()  # fields of this type that never change the function
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)  # of fields
    verified_by: str = "transformers"

    def table(self, arch: Arch, heads: Iterable[str]) -> dict:
        """ours -> its row, in a model with these heads."""
        rows = [*self.body]
        if arch.position_biases == "shared":
            rows += self.shared
        for head in self.heads:
            rows += self.heads[head] if head in heads else []
        return {row.ours: row for row in rows}

    def repeats(self, arch: Arch, heads: Iterable[str]) -> dict[str, str]:
        """tensor -> the tensor that it repeats, in a model with these heads."""
        named = {row.theirs for row in self.table(arch, heads).values()}
        return {
            name: original
            for repeat, original in self.tied.items()
            if repeat not in named
            for name in Rename("", repeat).names(arch.layers)
        }

    @property
    def unclassed(self) -> list[str]:
        """Heads that are named, and that no class has."""
        known = {head for heads in self.classes for head in heads}
        return [head for head in self.heads if self.heads[head] and head not in known]

    def full_name(self, name: str) -> str:
        """A tensor's name with the prefix that checkpoints of the bare body lack."""
        of_body = {
            row.theirs.removeprefix(self.prefix).split(".")[0]
            for rows in (self.body, self.shared, *self.heads.values())
            for row in rows
            if row.theirs.startswith(self.prefix)
        }
        return self.prefix + name if name.split(".")[0] in of_body else name

    def is_ignored(self, name: str) -> bool:
        return any(re.search(rf"(^|\.){ending}$", name) for ending in self.ignored)

    def strange(self, config: dict) -> list[str]:
        """The fields of a config.json of which nothing is known."""
        known = {*BOOKKEEPING, *REFUSED, *self.fixed, *self.odd, *self.idle}
        known |= {*self.aliases, *(field.theirs for field in self.config)}
        found = (name for name in config if not name.startswith("_"))
        return sorted(name for name in found if name not in known)

    def to_arch(self, config: dict) -> dict:
        """The fields of Arch that a config.json means."""
        config = self.without_aliases(config)
        problems = []
        for name, values in (REFUSED | self.fixed).items():
            value = config.get(name, self.absent.get(name, values[0]))
            if value not in values:
                can = " or ".join(map(repr, values))
                problems.append(f"{name}={value!r}: only {can} can be read")
        found = dict(self.arch)
        for field in self.config:
            value = config.setdefault(field.theirs, field.default)
            if field.words is None:
                found[field.ours] = value
            elif value in list(field.words):
                found[field.ours] = field.words[value]
            else:
                choices = map(str, field.words)
                problems.append(unknown(field.theirs, str(value), choices))
        labels, count = config.get("id2label"), config.get("num_labels", 2)
        if not isinstance(labels, dict | None):
            problems.append(f"id2label={labels!r}: names by their numbers are expected")
        if problems:
            raise InputError("\n".join(problems))
        found["labels"] = count if labels is None else len(labels)
        odd = self.odd | config
        try:
            return found | self.read(odd)
        except (TypeError, ZeroDivisionError):
            given = ", ".join(f"{name}={odd[name]!r}" for name in self.odd)
            raise InputError(f"a value of another kind is expected: {given}") from None

    def to_config(self, arch: Arch, heads: Iterable[str] = (), labels=()) -> dict:
        """The config.json of an Arch; with the labels where one of the heads has them
        (other heads have two outputs, but transformers would give them as many)."""
        arch = arch.definition
        must_be = {name: [value] for name, value in self.arch.items()}
        config: dict = {"model_type": self.model_type}
        for field in self.config:
            value = getattr(arch, field.ours)
            if field.words:
                must_be[field.ours] = ours = list(field.words.values())
                value = [*field.words][ours.index(value)] if value in ours else None
            config[field.theirs] = value
        problems = [
            f"arch.{name}={getattr(arch, name)!r}: {self.model_type} has "
            + " or ".join(map(repr, dict.fromkeys(values)))
            for name, values in must_be.items()
            if getattr(arch, name) not in values and name not in TRAINING
        ]
        if problems:
            raise InputError("\n".join(problems))
        config |= {name: values[0] for name, values in self.fixed.items()}
        if {"classify", "tag"} & {*heads}:
            labels = labels or [f"LABEL_{n}" for n in range(arch.labels)]
            config["id2label"] = {str(n): label for n, label in enumerate(labels)}
            config["label2id"] = {label: n for n, label in enumerate(labels)}
        return config | self.write(arch)

    def without_aliases(self, config: dict) -> dict:
        found: dict = {}
        for given, value in config.items():
            name = self.aliases.get(given, given)
            if found.setdefault(name, value) != value:
                raise InputError(f"{name} is there twice: {found[name]!r}, {value!r}")
        return found


def listed(*texts: str) -> tuple[str, ...]:
    return tuple(" ".join(texts).split())


# Fields of any config.json that change the function, and the values at which it is
# ours: those that transformers assumes, so that they need not be written.
REFUSED = {
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "position_embedding_type": ("absolute",),  # of older releases, as is the next
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
    "quantization_config": (None,),
    "auto_map": (None,),  # the model is code that comes with the checkpoint
}
# Fields that never change the function in evaluation; nor do those named _so.
BOOKKEEPING = frozenset(
    listed(
        # What the file is, and how it is run.
        "model_type architectures transformers_version dtype torch_dtype name_or_path",
        "attn_implementation experts_implementation chunk_size_feed_forward use_cache",
        "gradient_checkpointing torchscript use_bfloat16 xla_device tf_legacy_loss",
        "output_attentions output_hidden_states output_past return_dict",
        "tie_encoder_decoder tie_last_hidden_states",
        # Tokens, tasks and labels (whose number is read).
        "bos_token_id eos_token_id eos_token_ids pad_token_id sep_token_id",
        "cls_token_id mask_token_id unk_token_id decoder_start_token_id prefix",
        "tokenizer_class id2label label2id num_labels problem_type finetuning_task",
        "task_specific_params",
        # Dropout that is not in Arch, and what Google's BERT wrote for later use.
        "classifier_dropout classifier_dropout_prob hidden_dropout",
        "summary_first_dropout summary_last_dropout directionality pooler_fc_size",
        "pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head",
        "pooler_type",
        # How text is generated.
        "max_length min_length do_sample early_stopping num_beams num_beam_groups",
        "temperature top_k top_p typical_p epsilon_cutoff eta_cutoff",
        "repetition_penalty encoder_repetition_penalty length_penalty",
        "diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size",
        "bad_words_ids num_return_sequences output_scores return_dict_in_generate",
        "forced_bos_token_id forced_eos_token_id remove_invalid_values",
        "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens",
        "assistant_confidence_threshold assistant_lookbehind num_assistant_tokens",
        "num_assistant_tokens_schedule target_lookbehind",
    )
)
# Fields of Arch that only training reads: written where there is a word for them.
TRAINING = frozenset({"dropout", "attention_dropout", "init_std", "residual_init"})

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"} | {
    **{"gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh"},
    **dict.fromkeys(("gelu_python_tanh", "gelu_accurate", "gelu_fast"), "gelu_tanh"),
}
# Where the lm head has the exact gelu whatever the file says, the layers must too.
EXACT_GELU = {name: ours for name, ours in ACTIVATIONS.items() if ours == "gelu"}


# What layouts are made of.

LAYER = "stack/layers"
QKV = tuple(f"{LAYER}/attention/{name}" for name in "qkv")


def linear(ours: str, theirs: str, fold: str = "transpose") -> list[Rename]:
    """PyTorch keeps kernels as (out, in); GPT's own kind of layer has them as we do."""
    return [
        Rename(f"{ours}/kernel", f"{theirs}.weight", fold),
        Rename(f"{ours}/bias", f"{theirs}.bias"),
    ]


def norm(ours: str, theirs: str) -> list[Rename]:
    return [
        Rename(f"{ours}/scale", f"{theirs}.weight"),
        Rename(f"{ours}/bias", f"{theirs}.bias"),
    ]


def layer(theirs: str, *names: str, fold: str = "transpose") -> list[Rename]:
    """The parts of a layer, in our order; less than all are the last ones."""
    parts = listed("attention/q attention/k attention/v attention/o attention_norm")
    parts += listed("ffn/inner ffn/outer ffn_norm")
    rows = []
    for part, name in zip(parts[-len(names) :], names, strict=True):
        ours, its = f"{LAYER}/{part}", f"{theirs}.{name}"
        rows += norm(ours, its) if part.endswith("norm") else linear(ours, its, fold)
    return rows


def embeddings(theirs: str) -> list[Rename]:
    return [
        Rename("embed/token", f"{theirs}.word_embeddings.weight", "vocab"),
        Rename("embed/position", f"{theirs}.position_embeddings.weight"),
        Rename("embed/type", f"{theirs}.token_type_embeddings.weight"),
        Rename("embed/task", f"{theirs}.task_type_embeddings.weight"),
        *norm("embed/norm", f"{theirs}.LayerNorm"),
    ]


def bert_body(prefix: str) -> list[Rename]:
    return embeddings(f"{prefix}embeddings") + layer(
        f"{prefix}encoder.layer.{{n}}",
        *(f"attention.self.{name}" for name in ("query", "key", "value")),
        *listed("attention.output.dense attention.output.LayerNorm"),
        *listed("intermediate.dense output.dense output.LayerNorm"),
    )


def lm_head(dense: str, its_norm: str, bias: str) -> list[Rename]:
    rows = linear("lm/dense", dense) + norm("lm/norm", its_norm)
    return [*rows, Rename("lm/bias", bias, "vocab")]


# One name serves heads of three classes: it does not tell which one a checkpoint has.
TASK_HEADS = {
    "classify": linear("classify/dense", "classifier"),
    "tag": linear("tag/dense", "classifier"),
    "span": linear("span/dense", "qa_outputs"),
    "choice": linear("choice/dense", "classifier"),
}
# RoBERTa's kind of classification has its own pooler, GPT's none at all.
POOLED_CLASSIFY = [
    *linear("pooler/dense", "classifier.dense"),
    *linear("classify/dense", "classifier.out_proj"),
]
BARE_CLASSIFY = [Rename("classify/dense/kernel", "score.weight", "transpose")]

CLASSES = {
    (): "Model",
    ("lm",): "ForMaskedLM",
    ("pooler", "classify"): "ForSequenceClassification",
    ("tag",): "ForTokenClassification",
    ("span",): "ForQuestionAnswering",
    ("pooler", "choice"): "ForMultipleChoice",
}
WITH_POOLER = {**CLASSES, ("pooler",): "Model"}
GPT_CLASSES = {
    (): "Model",
    ("lm",): "LMHeadModel",
    ("lm", "choice"): "DoubleHeadsModel",
    ("classify",): "ForSequenceClassification",
}


def named(name: str, classes: dict[Heads, str]) -> dict[Heads, str]:
    return {heads: name + ending for heads, ending in classes.items()}


def bert_fields(
    vocab_size: int = 30522,
    *sizes: int,
    act: str = "gelu",
    drop: float = 0.1,
    words: dict = ACTIVATIONS,
) -> list[Field]:
    width, heads, inner = sizes or (768, 12, 3072)
    return [
        Field("vocab_size", "vocab_size", vocab_size),
        Field("width", "hidden_size", width),
        Field("layers", "num_hidden_layers", 12),
        Field("heads", "num_attention_heads", heads),
        Field("inner", "intermediate_size", inner),
        Field("max_positions", "max_position_embeddings", 512),
        Field("types", "type_vocab_size", 2),
        Field("activation", "hidden_act", act, words),
        Field("norm_eps", "layer_norm_eps", 1e-12),
        Field("dropout", "hidden_dropout_prob", drop),
        Field("attention_dropout", "attention_probs_dropout_prob", drop),
        Field("init_std", "initializer_range", 0.02),
    ]


def choices(*free: str, **changes) -> dict[str, object]:
    """BERT's choices with some changed, and without those that a file decides."""
    bert = {
        **{"position": "learned", "position_offset": 0, "type_scheme": "absolute"},
        **{"task_types": 0, "embed_width": 0, "embed_norm": "norm"},
        **{"embed_scale": "none", "streams": 1, "attention": "dense"},
        **{"attention_bias": "all", "norm_place": "post", "share": "none"},
        **{"order": "all", "lm_head": "transform", "pooler": "tanh"},
        **{"pool_from": "first", "residual_init": "same"},
    }
    return {name: bert[name] for name in bert if name not in free} | changes


CAUSAL = choices(
    types=0,
    embed_norm="none",
    order="causal",
    lm_head="bare",
    pooler="none",
    pool_from="last",
)


def summary(kind: str, activation: str | None, *, to_labels: bool) -> dict[str, tuple]:
    return {
        "summary_type": (kind,),
        "summary_use_proj": (True,),
        "summary_activation": (activation,),
        "summary_proj_to_labels": (to_labels,),
    }


def size_aliases(width: str, heads: str, layers: str) -> dict[str, str]:
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers")
    return dict(zip(names, (width, heads, layers), strict=True))


TIED_LM = {"tie_word_embeddings": (True,)}
IDS = (r"embeddings\.position_ids", r"embeddings\.token_type_ids")


def decoder_ties(theirs: str, prefix: str) -> dict[str, str]:
    return {
        f"{theirs}.decoder.weight": f"{prefix}embeddings.word_embeddings.weight",
        f"{theirs}.decoder.bias": f"{theirs}.bias",
    }


def must(holds: bool, field: str, value: object, why: str) -> None:
    if not holds:
        raise InputError(f"{field}={value!r}: {why}")


# BERT, and those that change little of it.


BOUNDARY = "cls.pair_target_predictions"


def boundary_head(theirs: str) -> list[Rename]:
    rows = [
        Rename("sbo/position", f"{theirs}.position_embeddings.weight"),
        Rename("sbo/bias", f"{theirs}.bias", "vocab"),
    ]
    for n in (1, 2):
        rows += linear(f"sbo/dense_{n}", f"{theirs}.mlp_layer_norm.linear{n}")
        rows += norm(f"sbo/norm_{n}", f"{theirs}.mlp_layer_norm.layer_norm{n}")
    return rows


def bert_like(model_type: str, name: str, **changes) -> Layout:
    prefix, predictions = f"{model_type}.", "cls.predictions"
    transform = f"{predictions}.transform"
    layout = Layout(
        model_type=model_type,
        prefix=prefix,
        body=bert_body(prefix),
        heads={
            "lm": lm_head(
                f"{transform}.dense", f"{transform}.LayerNorm", f"{predictions}.bias"
            ),
            "pooler": linear("pooler/dense", f"{prefix}pooler.dense"),
            "nsp": linear("nsp/dense", "cls.seq_relationship"),
            **TASK_HEADS,
            # As SpanBERT's release has it; no class of transformers does.
            "sbo": boundary_head(BOUNDARY),
        },
        classes=named(name, WITH_POOLER)
        | {("lm", "pooler", "nsp"): f"{name}ForPreTraining"}
        | {("pooler", "nsp"): f"{name}ForNextSentencePrediction"},
        tied=decoder_ties(predictions, prefix)
        | {f"{BOUNDARY}.decoder.weight": f"{prefix}embeddings.word_embeddings.weight"},
        ignored=IDS,
        config=bert_fields(),
        arch=choices(),
        fixed=TIED_LM,
    )
    return dataclasses.replace(layout, **changes)


BERT = bert_like("bert", "Bert")

ERNIE = bert_like(
    *("ernie", "Ernie"),
    arch=choices("task_types"),
    odd={"use_task_id": False, "task_type_vocab_size": 3},
    read=lambda config: {
        "task_types": config["task_type_vocab_size"] if config["use_task_id"] else 0
    },
    write=lambda arch: {
        "use_task_id": arch.task_types > 0,
        "task_type_vocab_size": arch.task_types or 3,
    },
)

NEZHA = bert_like(
    *("nezha", "Nezha"),
    ignored=(*IDS, r"relative_positions_encoding\.positions_encoding"),
    config=[
        *bert_fields(21128),
        Field("max_distance", "max_relative_position", 64),
    ],
    arch=choices(position="functional"),
    fixed=TIED_LM | {"use_relative_position": (True,)},
    verified_by="transformers 4.57",
)


# RoBERTa and its kin: positions are counted from the id of the padding.


def read_offset(config: dict) -> dict:
    pad = config["pad_token_id"]
    must(pad is not None, "pad_token_id", pad, "positions are counted from it")
    return {"position_offset": pad + 1}


def write_offset(arch: Arch) -> dict:
    offset = arch.position_offset
    must(offset > 0, "arch.position_offset", offset, "it is the padding's id plus 1")
    return {"pad_token_id": offset - 1}


def roberta_like(model_type: str, name: str, prefix: str, **changes) -> Layout:
    layout = Layout(
        model_type=model_type,
        prefix=prefix,
        body=bert_body(prefix),
        heads={
            "lm": lm_head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
            "pooler": linear("pooler/dense", f"{prefix}pooler.dense"),
            **TASK_HEADS,
            "classify": POOLED_CLASSIFY,
        },
        classes=named(name, WITH_POOLER),
        tied=decoder_ties("lm_head", prefix),
        ignored=IDS,
        config=bert_fields(words=EXACT_GELU),
        arch=choices("position_offset"),
        fixed=TIED_LM,
        odd={"pad_token_id": 1},
        read=read_offset,
        write=write_offset,
    )
    return dataclasses.replace(layout, **changes)


ROBERTA = roberta_like(
    *("roberta", "Roberta", "roberta."),
    config=bert_fields(50265, words=EXACT_GELU),
)
XLM_ROBERTA = roberta_like("xlm-roberta", "XLMRoberta", "roberta.")
CAMEMBERT = roberta_like("camembert", "Camembert", "roberta.")


def read_windows(config: dict) -> dict:
    windows, layers = config["attention_window"], config["num_hidden_layers"]
    sizes = windows if isinstance(windows, list) else [windows] * layers
    same = len(sizes) == layers and len({*sizes}) == 1
    must(same, "attention_window", windows, f"one size in all {layers} layers is read")
    return {"window": sizes[0]} | read_offset(config)


LONGFORMER = roberta_like(
    *("longformer", "Longformer", "longformer."),
    body=[
        *bert_body("longformer."),
        *(
            row
            for name in ("query", "key", "value")
            for row in linear(
                f"{LAYER}/attention/{name[0]}_global",
                f"longformer.encoder.layer.{{n}}.attention.self.{name}_global",
            )
        ),
    ],
    arch=choices("position_offset", attention="window"),
    odd={"pad_token_id": 1, "attention_window": 512},
    read=read_windows,
    write=lambda arch: {"attention_window": arch.window} | write_offset(arch),
    idle=listed("onnx_export attention_mode ignore_attention_mask"),
)


# ALBERT, ELECTRA, DistilBERT.


def write_albert(arch: Arch) -> dict:
    width = arch.embed_width
    must(width > 0, "arch.embed_width", width, "albert always projects its embeddings")
    layers = arch.layers // arch.group_layers
    return {"embedding_size": width, "num_hidden_layers": layers}


ALBERT = Layout(
    model_type="albert",
    prefix="albert.",
    body=[
        *embeddings("albert.embeddings"),
        *linear("project", "albert.encoder.embedding_hidden_mapping_in"),
        *layer(
            "albert.encoder.albert_layer_groups.{g}.albert_layers.{i}",
            *listed("attention.query attention.key attention.value attention.dense"),
            *listed("attention.LayerNorm ffn ffn_output full_layer_layer_norm"),
        ),
    ],
    heads={
        "lm": lm_head("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
        "pooler": linear("pooler/dense", "albert.pooler"),
        "sop": linear("sop/dense", "sop_classifier.classifier"),
        **TASK_HEADS,
    },
    classes=named("Albert", WITH_POOLER)
    | {("lm", "pooler", "sop"): "AlbertForPreTraining"},
    tied=decoder_ties("predictions", "albert."),
    ignored=IDS,
    config=[
        *bert_fields(30000, 4096, 64, 16384, act="gelu_new", drop=0.0),
        Field("groups", "num_hidden_groups", 1),
        Field("group_layers", "inner_group_num", 1),
    ],
    arch=choices("embed_width", share="all"),
    fixed=TIED_LM,
    odd={"embedding_size": 128, "num_hidden_layers": 12},
    read=lambda config: {
        "embed_width": config["embedding_size"],
        "layers": config["num_hidden_layers"] * config["inner_group_num"],
    },
    write=write_albert,
    idle=listed(
        "net_structure_type down_scale_factor gap_size num_memory_blocks layers_to_keep"
    ),
)


def read_electra(config: dict) -> dict:
    """There is a projection just where the two widths differ."""
    same = config["embedding_size"] == config["hidden_size"]
    return {"embed_width": 0 if same else config["embedding_size"]}


def write_electra(arch: Arch) -> dict:
    width = arch.embed_width
    why = "electra has no projection between equal widths; 0 is its word for that"
    must(width != arch.width, "arch.embed_width", width, why)
    return {"embedding_size": width or arch.width}


ELECTRA = Layout(
    model_type="electra",
    prefix="electra.",
    body=bert_body("electra.") + linear("project", "electra.embeddings_project"),
    heads={
        "lm": lm_head(
            "generator_predictions.dense",
            "generator_predictions.LayerNorm",
            "generator_lm_head.bias",
        ),
        "pooler": [],  # the heads that pool bring it
        "rtd": [
            *linear("rtd/dense", "discriminator_predictions.dense"),
            *linear("rtd/score", "discriminator_predictions.dense_prediction"),
        ],
        **TASK_HEADS,
        "classify": POOLED_CLASSIFY,
        "choice": linear("pooler/dense", "sequence_summary.summary")
        + TASK_HEADS["choice"],
    },
    classes=named("Electra", CLASSES | {("rtd",): "ForPreTraining"}),
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    ignored=IDS,
    config=bert_fields(30522, 256, 4, 1024, words=EXACT_GELU),
    arch=choices("embed_width", pooler="gelu"),
    fixed=TIED_LM | summary("first", "gelu", to_labels=False),
    odd={"embedding_size": 128},
    read=read_electra,
    write=write_electra,
)

DISTILBERT = Layout(
    model_type="distilbert",
    prefix="distilbert.",
    body=embeddings("distilbert.embeddings")
    + layer(
        "distilbert.transformer.layer.{n}",
        *listed("attention.q_lin attention.k_lin attention.v_lin attention.out_lin"),
        *listed("sa_layer_norm ffn.lin1 ffn.lin2 output_layer_norm"),
    ),
    heads={
        "lm": lm_head("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
        "pooler": linear("pooler/dense", "pre_classifier"),
        **TASK_HEADS,
    },
    classes=named("DistilBert", CLASSES),
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    ignored=IDS,
    config=[
        Field("vocab_size", "vocab_size", 30522),
        Field("width", "dim", 768),
        Field("layers", "n_layers", 6),
        Field("heads", "n_heads", 12),
        Field("inner", "hidden_dim", 3072),
        Field("max_positions", "max_position_embeddings", 512),
        Field("activation", "activation", "gelu", ACTIVATIONS),
        Field("dropout", "dropout", 0.1),
        Field("attention_dropout", "attention_dropout", 0.1),
        Field("init_std", "initializer_range", 0.02),
    ],
    arch=choices(types=0, norm_eps=1e-12, pooler="relu"),
    fixed=TIED_LM,
    # A table of sinusoids is stored like a learned one, and what is stored counts.
    idle=listed("sinusoidal_pos_embds qa_dropout seq_classif_dropout tie_weights_"),
    aliases=size_aliases("dim", "n_heads", "n_layers"),
)


# XLNet and Transformer-XL.


def write_distances(arch: Arch) -> dict:
    return {
        "d_head": arch.width // arch.heads,
        "clamp_len": arch.max_distance or -1,
    }


def read_xlnet(config: dict) -> dict:
    width, heads = config["d_model"], config["n_head"]
    size = config["d_head"] or width // heads
    why = f"only d_model={width} over n_head={heads} can be read"
    must(size * heads == width, "d_head", size, why)
    return {"max_distance": max(0, config["clamp_len"])}


def read_transfo_xl(config: dict) -> dict:
    width, table = config["d_model"], config["d_embed"]
    must(table == width, "d_embed", table, f"only d_model={width} can be read")
    return read_xlnet(config)


RELATIVE = "transformer.layer.{n}.rel_attn"

XLNET = Layout(
    model_type="xlnet",
    prefix="transformer.",
    body=[
        Rename("embed/token", "transformer.word_embedding.weight", "vocab"),
        Rename("embed/query", "transformer.mask_emb", "row"),
        *(
            Rename(f"{LAYER}/attention/{name}/kernel", f"{RELATIVE}.{name}", "heads")
            for name in "qkvr"
        ),
        Rename(f"{LAYER}/attention/o/kernel", f"{RELATIVE}.o", "heads_out"),
        Rename(f"{LAYER}/position/u", f"{RELATIVE}.r_w_bias"),
        Rename(f"{LAYER}/position/v", f"{RELATIVE}.r_r_bias"),
        Rename(f"{LAYER}/types/bias", f"{RELATIVE}.r_s_bias"),
        Rename(f"{LAYER}/types/table", f"{RELATIVE}.seg_embed"),
        *layer(
            "transformer.layer.{n}",
            *listed("rel_attn.layer_norm ff.layer_1 ff.layer_2 ff.layer_norm"),
        ),
    ],
    heads={
        "lm": [Rename("lm/bias", "lm_loss.bias", "vocab")],
        "pooler": linear("pooler/dense", "sequence_summary.summary"),
        **TASK_HEADS,
        "classify": linear("classify/dense", "logits_proj"),
        "choice": linear("choice/dense", "logits_proj"),
        "answer": [
            *linear("answer/start", "start_logits.dense"),
            *linear("answer/end_dense", "end_logits.dense_0"),
            *norm("answer/end_norm", "end_logits.LayerNorm"),
            *linear("answer/end", "end_logits.dense_1"),
            *linear("answer/class_dense", "answer_class.dense_0"),
            *linear("answer/class", "answer_class.dense_1")[:1],
        ],
    },
    classes=named("XLNet", CLASSES)
    | {("lm",): "XLNetLMHeadModel", ("span",): "XLNetForQuestionAnsweringSimple"}
    | {("answer",): "XLNetForQuestionAnswering"},
    tied={"lm_loss.weight": "transformer.word_embedding.weight"},
    config=[
        Field("vocab_size", "vocab_size", 32000),
        Field("width", "d_model", 1024),
        Field("layers", "n_layer", 24),
        Field("heads", "n_head", 16),
        Field("inner", "d_inner", 4096),
        Field("activation", "ff_activation", "gelu", ACTIVATIONS),
        Field("norm_eps", "layer_norm_eps", 1e-12),
        Field("dropout", "dropout", 0.1),
        Field("init_std", "initializer_range", 0.02),
    ],
    arch=choices(
        position="xl",
        position_biases="layer",
        types=2,
        type_scheme="relative",
        embed_norm="none",
        streams=2,
        attention_bias="none",
        lm_head="bias",
        pool_from="last",
    ),
    fixed=TIED_LM
    | {"attn_type": ("bi",), "bi_data": (False,), "start_n_top": (5,)}
    | summary("last", "tanh", to_labels=False),
    odd={"d_head": None, "clamp_len": -1},
    read=lambda config: {"attention_dropout": config["dropout"]} | read_xlnet(config),
    write=write_distances,
    # Memory: how much is handed back, not what is done with what is given. untie_r is
    # never read, same_length for attn_type "uni" only.
    idle=listed(
        "mem_len reuse_len use_mems_eval use_mems_train same_length untie_r end_n_top",
    ),
    aliases={"n_token": "vocab_size"} | size_aliases("d_model", "n_head", "n_layer"),
)

ATTENTION = "transformer.layers.{n}.dec_attn"
BIASES = {f"{LAYER}/position/u": "r_w_bias", f"{LAYER}/position/v": "r_r_bias"}

TRANSFO_XL = Layout(
    model_type="transfo-xl",
    prefix="transformer.",
    body=[
        Rename("embed/token", "transformer.word_emb.emb_layers.0.weight", "vocab"),
        Rename(
            tuple(f"{name}/kernel" for name in QKV),
            f"{ATTENTION}.qkv_net.weight",
            "transpose",
        ),
        Rename(f"{LAYER}/attention/o/kernel", f"{ATTENTION}.o_net.weight", "transpose"),
        Rename(f"{LAYER}/attention/r/kernel", f"{ATTENTION}.r_net.weight", "transpose"),
        *(Rename(ours, f"{ATTENTION}.{bias}") for ours, bias in BIASES.items()),
        *layer(
            "transformer.layers.{n}",
            *listed("dec_attn.layer_norm pos_ff.CoreNet.0 pos_ff.CoreNet.3"),
            "pos_ff.layer_norm",
        ),
    ],
    shared=[Rename(ours, f"transformer.{bias}") for ours, bias in BIASES.items()],
    heads={
        "lm": [Rename("lm/bias", "crit.out_layers.0.bias", "vocab")],
        "classify": BARE_CLASSIFY,
    },
    classes=named(
        "TransfoXL", {k: v for k, v in GPT_CLASSES.items() if "choice" not in k}
    ),
    tied={
        "crit.out_layers.0.weight": "transformer.word_emb.emb_layers.0.weight",
        **{f"{ATTENTION}.{bias}": f"transformer.{bias}" for bias in BIASES.values()},
    },
    write_tied=True,
    ignored=(r"pos_emb\.inv_freq",),
    config=[
        Field("vocab_size", "vocab_size", 267735),
        Field("width", "d_model", 1024),
        Field("layers", "n_layer", 18),
        Field("heads", "n_head", 16),
        Field("inner", "d_inner", 4096),
        Field("norm_eps", "layer_norm_epsilon", 1e-5),
        Field("dropout", "dropout", 0.1),
        Field("attention_dropout", "dropatt", 0.0),
        Field("init_std", "init_std", 0.02),
        Field("position_biases", "untie_r", True, {True: "layer", False: "shared"}),
    ],
    arch={
        **CAUSAL,
        "position": "xl",
        "embed_scale": "sqrt",
        "attention_bias": "none",
        "activation": "relu",
        "lm_head": "bias",
    },
    # No adaptive softmax. No memory of its own: where none is given it would attend to
    # mem_len zeros; and same_length without memory hides every token.
    fixed=TIED_LM
    | {"div_val": (1,), "cutoffs": ([],), "mem_len": (0,), "same_length": (False,)}
    | {"pre_lnorm": (False,), "attn_type": (0,), "sample_softmax": (-1, 0)},
    absent={"div_val": 4, "cutoffs": [20000, 40000, 200000]}
    | {"mem_len": 1600, "same_length": True},
    odd={"d_embed": 1024, "d_head": 64, "clamp_len": 1000},
    read=read_transfo_xl,
    write=lambda arch: {"d_embed": arch.width} | write_distances(arch),
    idle=listed(
        "adaptive proj_share_all_but_first tie_projs init init_range proj_init_std",
        "tgt_len ext_len tie_weight trainer_compatible",
    ),
    aliases=XLNET.aliases,
    verified_by="transformers 4.57",
)


# GPT and GPT-2.


def gpt_body(token: str, position: str) -> list[Rename]:
    fused = "transformer.h.{n}.attn.c_attn"
    joined = [
        Rename(tuple(f"{name}/{ours}" for name in QKV), f"{fused}.{theirs}")
        for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
    ]
    rest = listed("attn.c_proj ln_1 mlp.c_fc mlp.c_proj ln_2")
    return [
        Rename("embed/token", f"transformer.{token}.weight", "vocab"),
        Rename("embed/position", f"transformer.{position}.weight"),
        *joined,
        *layer("transformer.h.{n}", *rest, fold=""),
    ]


def gpt_fields(vocab_size: int, positions: int, activation: Field) -> list[Field]:
    return [
        Field("vocab_size", "vocab_size", vocab_size),
        Field("width", "n_embd", 768),
        Field("layers", "n_layer", 12),
        Field("heads", "n_head", 12),
        Field("max_positions", "n_positions", positions),
        activation,
        Field("norm_eps", "layer_norm_epsilon", 1e-5),
        Field("dropout", "resid_pdrop", 0.1),
        Field("attention_dropout", "attn_pdrop", 0.1),
        Field("init_std", "initializer_range", 0.02),
    ]


def write_gpt(arch: Arch) -> dict:
    why = f"openai-gpt has four times arch.width={arch.width}"
    must(arch.inner == 4 * arch.width, "arch.inner", arch.inner, why)
    return {"embd_pdrop": arch.dropout}


GPT = Layout(
    model_type="openai-gpt",
    prefix="transformer.",
    body=gpt_body("tokens_embed", "positions_embed"),
    heads={
        "lm": [],
        "classify": BARE_CLASSIFY,
        "choice": linear("choice/dense", "multiple_choice_head.summary"),
    },
    classes=named("OpenAIGPT", GPT_CLASSES),
    tied={"lm_head.weight": "transformer.tokens_embed.weight"},
    ignored=("position_ids", r"attn\.bias", r"attn\.masked_bias"),
    # Its "gelu" is the tanh form, and it knows no other word for that.
    config=gpt_fields(
        *(40478, 512),
        Field("activation", "afn", "gelu", {"gelu": "gelu_tanh", "relu": "relu"}),
    ),
    arch=CAUSAL,
    fixed=TIED_LM | summary("cls_index", None, to_labels=True),
    odd={"embd_pdrop": 0.1},
    read=lambda config: {"inner": 4 * config["n_embd"]},
    write=write_gpt,
    idle=listed("n_ctx n_special predict_special_tokens"),
    aliases={"max_position_embeddings": "n_positions"}
    | size_aliases("n_embd", "n_head", "n_layer"),
)

GPT2 = dataclasses.replace(
    GPT,
    model_type="gpt2",
    body=gpt_body("wte", "wpe") + norm("stack/final_norm", "transformer.ln_f"),
    heads={"lm": [], **TASK_HEADS, **GPT.heads},
    classes=named("GPT2", GPT_CLASSES)
    | {("tag",): "GPT2ForTokenClassification"}
    | {("span",): "GPT2ForQuestionAnswering"},
    tied={"lm_head.weight": "transformer.wte.weight"},
    config=gpt_fields(
        *(50257, 1024),
        Field("activation", "activation_function", "gelu_new", ACTIVATIONS),
    ),
    arch=CAUSAL | {"norm_place": "pre", "residual_init": "depth"},
    fixed=GPT.fixed
    | {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    odd={"n_inner": None, "embd_pdrop": 0.1},
    read=lambda config: {"inner": config["n_inner"] or 4 * config["n_embd"]},
    write=lambda arch: {"n_inner": arch.inner, "embd_pdrop": arch.dropout},
    idle=(*GPT.idle, "reorder_and_upcast_attn"),
)

LAYOUTS = {
    layout.model_type: layout
    for layout in (
        *(BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, LONGFORMER, ALBERT, ELECTRA),
        *(DISTILBERT, ERNIE, NEZHA, XLNET, TRANSFO_XL, GPT, GPT2),
    )
}
