"""How a reference layout names our parameters: one table per layout.

`{n}` stands for the number of a layer, whose parameters we store stacked. A fold says
what else differs: "transpose" for PyTorch's (out, in) kernels, "vocab" for a tensor
whose first axis we store padded to a multiple of `arch.vocab_multiple`.
"""

from typing import NamedTuple


class Rename(NamedTuple):
    ours: str  # path in the parameter tree
    theirs: str  # name of the tensor
    fold: str = ""


def linear(ours: str, theirs: str) -> list[Rename]:
    return [
        Rename(f"{ours}/kernel", f"{theirs}.weight", "transpose"),
        Rename(f"{ours}/bias", f"{theirs}.bias"),
    ]


def norm(ours: str, theirs: str) -> list[Rename]:
    return [
        Rename(f"{ours}/scale", f"{theirs}.weight"),
        Rename(f"{ours}/bias", f"{theirs}.bias"),
    ]


LAYER, THEIR_LAYER = "stack/layers", "bert.encoder.layer.{n}"

BERT = [
    Rename("embed/token", "bert.embeddings.word_embeddings.weight", "vocab"),
    Rename("embed/position", "bert.embeddings.position_embeddings.weight"),
    Rename("embed/type", "bert.embeddings.token_type_embeddings.weight"),
    *norm("embed/norm", "bert.embeddings.LayerNorm"),
    *linear(f"{LAYER}/attention/q", f"{THEIR_LAYER}.attention.self.query"),
    *linear(f"{LAYER}/attention/k", f"{THEIR_LAYER}.attention.self.key"),
    *linear(f"{LAYER}/attention/v", f"{THEIR_LAYER}.attention.self.value"),
    *linear(f"{LAYER}/attention/o", f"{THEIR_LAYER}.attention.output.dense"),
    *norm(f"{LAYER}/attention_norm", f"{THEIR_LAYER}.attention.output.LayerNorm"),
    *linear(f"{LAYER}/ffn/inner", f"{THEIR_LAYER}.intermediate.dense"),
    *linear(f"{LAYER}/ffn/outer", f"{THEIR_LAYER}.output.dense"),
    *norm(f"{LAYER}/ffn_norm", f"{THEIR_LAYER}.output.LayerNorm"),
    *linear("pooler/dense", "bert.pooler.dense"),
    *linear("lm/dense", "cls.predictions.transform.dense"),
    *norm("lm/norm", "cls.predictions.transform.LayerNorm"),
    Rename("lm/bias", "cls.predictions.bias", "vocab"),
    *linear("nsp/dense", "cls.seq_relationship"),
]

# Tensors that repeat another one; where present they must be equal to it.
BERT_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Buffers of old releases that hold 0, 1, 2, ...; nothing is lost by leaving them.
BERT_IGNORED = ("bert.embeddings.position_ids",)

# The reference class for the heads that are there, and the fields of its config.json.
BERT_CLASSES = {
    ("lm", "pooler", "nsp"): "BertForPreTraining",
    ("lm",): "BertForMaskedLM",
    ("pooler",): "BertModel",
    (): "BertModel",
}
BERT_CONFIG = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "types": "type_vocab_size",
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_std": "initializer_range",
}
ACTIVATIONS = {  # theirs -> ours
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
