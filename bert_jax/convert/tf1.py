"""The TF1 checkpoints of Google's BERT, ALBERT, ELECTRA and XLNet, read by name.

What is read is given in the names and the layout of Hugging Face transformers, as if
it came from one of their directories; only the activation is another. Google's "gelu"
of BERT, ALBERT and XLNet is the tanh form, so it is "gelu_new" here, where the public
conversions of BERT and XLNet say "gelu", the erf form. ELECTRA's code has the erf form.
"""

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from bert_jax.convert.files import read_json
from bert_jax.errors import InputError, unknown

MARKS = {  # by which the variables of a kind are known
    "bert": "bert/encoder/layer_",
    "albert": "bert/encoder/transformer/",
    "electra": "electra/",
    "xlnet": "model/transformer/",
}
CLASSES = {
    "bert": "BertForPreTraining",
    "albert": "AlbertForPreTraining",
    "discriminator": "ElectraForPreTraining",
    "generator": "ElectraForMaskedLM",
    "xlnet": "XLNetLMHeadModel",
}
TOWERS = ("discriminator", "generator")
# State of the training: beside a parameter, or alone.
TRAINING = re.compile(
    r"(.*/)?(adam_[mv]|lamb_[mv]|Adam(_1)?|LAMB(_1)?|\w+Optimizer(_\d+)?|Momentum"
    r"|beta[12]_power|global_step|temperature)"
)
BERT_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "max_position_embeddings", "type_vocab_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"),
)
SIZES = {
    "bert": BERT_SIZES,
    "albert": (*BERT_SIZES, "embedding_size", "num_hidden_groups", "inner_group_num"),
    "xlnet": (
        *("n_token", "d_model", "n_layer", "n_head", "d_head", "d_inner"),
        "ff_activation",
    ),
}


# Tables: the name of a variable and of its tensor. Letters in braces are numbers. A
# name that ends in / or . goes on as in ENDS.

ENDS = dict.fromkeys(("kernel", "gamma", "output_weights", "weight"), "weight")
ENDS |= dict.fromkeys(("bias", "beta", "output_bias"), "bias")
EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings")
LAYER = (
    *("attention/self/query", "attention/self/key", "attention/self/value"),
    *("attention/output/dense", "attention/output/LayerNorm"),
    *("intermediate/dense", "output/dense", "output/LayerNorm"),
)


def embeddings(theirs: str, hf: str) -> dict[str, str]:
    rows = {f"{theirs}/{name}": f"{hf}.{name}.weight" for name in EMBEDDINGS}
    return rows | {f"{theirs}/LayerNorm/": f"{hf}.LayerNorm."}


def layers(theirs: str, hf: str) -> dict[str, str]:
    return {
        f"{theirs}/layer_{{n}}/{name}/": f"{hf}.layer.{{n}}.{name.replace('/', '.')}."
        for name in LAYER
    }


BERT = {
    **embeddings("bert/embeddings", "bert.embeddings"),
    **layers("bert/encoder", "bert.encoder"),
    "bert/pooler/dense/": "bert.pooler.dense.",
    "cls/predictions/": "cls.predictions.",
    "cls/predictions/transform/dense/": "cls.predictions.transform.dense.",
    "cls/predictions/transform/LayerNorm/": "cls.predictions.transform.LayerNorm.",
    "cls/seq_relationship/": "cls.seq_relationship.",
}

BLOCK = "bert/encoder/transformer/group_{g}/inner_group_{i}"
HF_BLOCK = "albert.encoder.albert_layer_groups.{g}.albert_layers.{i}"
MAPPING = "embedding_hidden_mapping_in"
ALBERT = {
    **embeddings("bert/embeddings", "albert.embeddings"),
    f"bert/encoder/{MAPPING}/": f"albert.encoder.{MAPPING}.",
    f"{BLOCK}/attention_1/self/query/": f"{HF_BLOCK}.attention.query.",
    f"{BLOCK}/attention_1/self/key/": f"{HF_BLOCK}.attention.key.",
    f"{BLOCK}/attention_1/self/value/": f"{HF_BLOCK}.attention.value.",
    f"{BLOCK}/attention_1/output/dense/": f"{HF_BLOCK}.attention.dense.",
    f"{BLOCK}/LayerNorm/": f"{HF_BLOCK}.attention.LayerNorm.",
    f"{BLOCK}/ffn_1/intermediate/dense/": f"{HF_BLOCK}.ffn.",
    f"{BLOCK}/ffn_1/intermediate/output/dense/": f"{HF_BLOCK}.ffn_output.",
    f"{BLOCK}/LayerNorm_1/": f"{HF_BLOCK}.full_layer_layer_norm.",
    "bert/pooler/dense/": "albert.pooler.",
    "cls/predictions/": "predictions.",
    "cls/predictions/transform/dense/": "predictions.dense.",
    "cls/predictions/transform/LayerNorm/": "predictions.LayerNorm.",
    "cls/seq_relationship/": "sop_classifier.classifier.",
}

XL, HF_XL = "model/transformer/layer_{n}", "transformer.layer.{n}"
XLNET = {
    "model/transformer/word_embedding/lookup_table": (
        "transformer.word_embedding.weight"
    ),
    "model/transformer/mask_emb/mask_emb": "transformer.mask_emb",
    **{  # each of all layers in one
        f"model/transformer/{name}": f"{HF_XL}.rel_attn.{name}"
        for name in ("r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")
    },
    **{f"{XL}/rel_attn/{x}/kernel": f"{HF_XL}.rel_attn.{x}" for x in "qkvor"},
    f"{XL}/rel_attn/LayerNorm/": f"{HF_XL}.rel_attn.layer_norm.",
    f"{XL}/ff/layer_1/": f"{HF_XL}.ff.layer_1.",
    f"{XL}/ff/layer_2/": f"{HF_XL}.ff.layer_2.",
    f"{XL}/ff/LayerNorm/": f"{HF_XL}.ff.layer_norm.",
    "model/lm_loss/": "lm_loss.",  # its weight only where the output is not tied
}

RTD, MLM = "discriminator_predictions", "generator_predictions"
HEADS = {
    "discriminator": {
        f"{RTD}/dense/": f"{RTD}.dense.",
        f"{RTD}/dense_1/": f"{RTD}.dense_prediction.",
    },
    "generator": {
        f"{MLM}/dense/": f"{MLM}.dense.",
        f"{MLM}/LayerNorm/": f"{MLM}.LayerNorm.",
        f"{MLM}/output_bias": "generator_lm_head.bias",
    },
}


def electra(scope: str, embedded: str) -> dict[str, str]:
    return {
        **embeddings(f"{embedded}/embeddings", "electra.embeddings"),
        f"{scope}/embeddings_project/": "electra.embeddings_project.",
        **layers(f"{scope}/encoder", "electra.encoder"),
    }


TABLES = {
    "bert": BERT,
    "albert": ALBERT,
    "xlnet": XLNET,
    # Of both towers: what the one that is read leaves over is known, too.
    "electra": {
        **electra("electra", "electra"),
        **electra("generator", "generator"),
        **HEADS["discriminator"],
        **HEADS["generator"],
    },
}


def tower_table(names: Collection[str], tower: str) -> dict[str, str]:
    """The generator has the embeddings, or all, of the discriminator if not its own."""
    scope = embedded = "electra"
    if tower == "generator":
        if f"{MLM}/output_bias" not in names:
            raise InputError(f"it has no generator ({MLM})")
        if any(name.startswith("generator/encoder/") for name in names):
            scope = "generator"
        if "generator/embeddings/word_embeddings" in names:
            embedded = "generator"
    return electra(scope, embedded) | HEADS[tower]


def rename(names: Collection[str], table: dict[str, str]) -> dict[str, str]:
    """The tensor's name of each variable that is in the table."""
    rows = []
    for theirs, hf in table.items():
        pattern = re.sub(r"\\{(\w)\\}", r"(?P<\1>\\d+)", re.escape(theirs))
        if theirs.endswith("/"):
            pattern, hf = f"{pattern}(?P<end>{'|'.join(ENDS)})", f"{hf}{{end}}"
        rows.append((re.compile(pattern), hf))
    found = {}
    for name in names:
        for pattern, hf in rows:
            if match := pattern.fullmatch(name):
                parts = {
                    k: ENDS.get(part, part) for k, part in match.groupdict().items()
                }
                found[name] = hf.format(**parts) if parts else hf
    return found


def read_config(directory: Path, kind: str) -> dict:
    """The file beside the checkpoint, in Hugging Face's words."""
    path = directory / f"{kind}_config.json"
    if not path.exists():
        raise InputError(f"{path} is missing: it has the sizes of the model")
    given = read_json(path)
    missing = [name for name in SIZES[kind] if name not in given]
    if missing:
        raise InputError(f"{path} does not say: {', '.join(missing)}")
    config = {name: given[name] for name in SIZES[kind]}
    activation = "ff_activation" if kind == "xlnet" else "hidden_act"
    if config[activation] == "gelu":
        config[activation] = "gelu_new"
    if kind == "xlnet":
        # Hugging Face has the biases of each layer in any case, and so has read_tf1.
        config |= {"vocab_size": config.pop("n_token"), "untie_r": True}
    return config


def electra_config(tensors: dict[str, np.ndarray]) -> dict:
    """From the shapes: no file comes with ELECTRA.

    The number of heads shows in no shape: it is one for 64 columns, the rule of
    ELECTRA's code, as what else shows in none is the default of that code.
    """
    needed = [f"electra.embeddings.{name}.weight" for name in EMBEDDINGS]
    needed.append("electra.encoder.layer.0.intermediate.dense.weight")
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise InputError(f"no variable for {', '.join(missing)}")
    (vocab, embedded), (positions, _), (types, _), (inner, width) = (
        tensors[name].shape for name in needed
    )
    numbers = [re.match(r"electra\.encoder\.layer\.(\d+)\.", name) for name in tensors]
    return {
        "vocab_size": vocab,
        "embedding_size": embedded,
        "hidden_size": width,
        "num_hidden_layers": 1 + max(int(match[1]) for match in numbers if match),
        "num_attention_heads": max(1, width // 64),
        "intermediate_size": inner,
        "max_position_embeddings": positions,
        "type_vocab_size": types,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "initializer_range": 0.02,
    }


def found_in(directory: Path) -> list[str]:
    return sorted(
        path.name.removesuffix(".index") for path in directory.glob("*.index")
    )


def is_tf1(directory: Path) -> bool:
    """Whether the folder holds a TensorFlow checkpoint; no file is opened."""
    return (directory / "checkpoint").is_file() or any(
        ".ckpt" in name or path.name.startswith(f"{name}.data-")
        for name in found_in(directory)
        for path in [directory, *directory.glob("*.data-*")]
    )


def newest(directory: Path) -> Path:
    """The checkpoint of the folder, without `.index`."""
    found, state = found_in(directory), directory / "checkpoint"
    if state.is_file():
        text = state.read_text(encoding="utf-8", errors="replace")
        named = re.search(r'^model_checkpoint_path: *"(.*)"', text, re.MULTILINE)
        if not named:
            raise InputError(f"{state} is damaged: it has no model_checkpoint_path")
        name = re.split(r"[/\\]", named[1])[-1]  # often a path of another machine
        if name not in found:
            raise InputError(
                f"{state} names {name}, but there is no {name}.index (found: "
                f"{', '.join(found) or 'none'}). Remove that file if another is meant"
            )
        return directory / name
    if not found:
        raise InputError(f"{directory} holds no TensorFlow checkpoint (*.index)")
    if len(found) > 1:
        raise InputError(
            f"{directory} holds several checkpoints and no file `checkpoint` that says "
            f"which is the newest: {', '.join(found)}. Leave only one of them there"
        )
    return directory / found[0]


def read_tf1(
    directory: Path, tower: str = "discriminator"
) -> tuple[dict, dict[str, np.ndarray]]:
    """A config.json and f32 tensors, as Hugging Face names them.

    `tower` says which of ELECTRA's two models. What only the training needs is not
    read; any other variable that is in no table is an error.
    """
    from bert_jax.data.records import tensorflow

    if tower not in TOWERS:
        raise InputError(unknown("tower", tower, TOWERS))
    tf, path = tensorflow(), newest(directory)
    try:
        return _read(tf.train.load_checkpoint(str(path)), directory, tower)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (tf.errors.OpError, IndexError, RuntimeError, ValueError) as error:
        # TensorFlow's types for a file that is cut short, changed or missing.
        raise InputError(f"{path} is damaged or incomplete: {error}") from None


def _read(reader, directory: Path, tower: str) -> tuple[dict, dict[str, np.ndarray]]:
    names = sorted(reader.get_variable_to_shape_map())
    names = [name for name in names if not TRAINING.fullmatch(name)]
    hub = "module/" if all(name.startswith("module/") for name in names) else ""
    stored = {name.removeprefix(hub): name for name in names}
    kinds = [k for k, mark in MARKS.items() if any(n.startswith(mark) for n in stored)]
    if len(kinds) != 1:
        some = ", ".join([*stored][:10]) + (", ..." if len(stored) > 10 else "")
        raise InputError(f"not one of {', '.join(MARKS)}; its variables are {some}")
    kind = kinds[0]
    nameless = set(stored) - set(rename(stored, TABLES[kind]))
    if nameless:
        listed = ", ".join(sorted(nameless))
        raise InputError(f"variables that {kind} does not have: {listed}")
    if kind != "electra" and tower == "generator":
        raise InputError(f"{kind} has no generator")

    table = tower_table(stored, tower) if kind == "electra" else TABLES[kind]
    config = {} if kind == "electra" else read_config(directory, kind)
    tensors = {}
    for name, hf in rename(stored, table).items():
        if hf in tensors:
            raise InputError(f"{name} is another name of {hf}, which is there too")
        tensor = np.asarray(reader.get_tensor(stored[name]), np.float32)
        if "{n}" in hf:  # one variable for all layers, equal in all without untie_r
            split = tensor.ndim == (4 if hf.endswith("seg_embed") else 3)
            parts = tensor if split else [tensor] * config["n_layer"]
            tensors |= {hf.format(n=n): part for n, part in enumerate(parts)}
        else:
            # XLNet's kernels by head stay as they are: there, they are no weight.
            turned = name.endswith("/kernel") and hf.endswith(".weight")
            tensors[hf] = tensor.T if turned else tensor
    if kind == "electra":
        config = electra_config(tensors)
    architecture = CLASSES[tower if kind == "electra" else kind]
    config |= {"architectures": [architecture], "model_type": kind}
    return config | {"layer_norm_eps": 1e-12}, tensors
