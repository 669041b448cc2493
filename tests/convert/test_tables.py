"""Every layout against the classes it describes, on tiny models.

NEZHA and Transformer-XL are no longer in `transformers`; what their classes held in
release 4.57.3 is written down here.
"""

import dataclasses
import functools
import json

import jax
import pytest
import torch
import transformers
from safetensors.torch import save_file

from bert_jax.convert import tables
from bert_jax.convert.tables import LAYOUTS, Layout
from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.heads import HEADS
from bert_jax.models.model import param_shapes, path_name

BERT = {
    "vocab_size": 37,
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 21,
    "max_position_embeddings": 19,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-7,
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.3,
    "initializer_range": 0.03,
    "id2label": {str(n): f"L{n}" for n in range(5)},
}
GPT = {
    "vocab_size": 37,
    "n_embd": 15,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 19,
    "id2label": BERT["id2label"],
}
XL = {
    "vocab_size": 37,
    "d_model": 12,
    "n_layer": 2,
    "n_head": 3,
    "d_inner": 21,
    "clamp_len": 7,
    "id2label": BERT["id2label"],
}
DISTILBERT = {
    "vocab_size": 37,
    "dim": 15,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 21,
    "max_position_embeddings": 19,
    "id2label": BERT["id2label"],
}
GROUPS = {"num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}
PLAIN_SOFTMAX = {"div_val": 1, "cutoffs": [], "mem_len": 0, "same_length": False}
SMALL = {  # name -> model type, config.json
    "bert": ("bert", BERT),
    "roberta": ("roberta", BERT),
    "xlm-roberta": ("xlm-roberta", BERT),
    "albert": ("albert", BERT | GROUPS | {"embedding_size": 7}),
    "albert, E = D": ("albert", BERT | {"embedding_size": 15}),
    "electra": ("electra", BERT | {"embedding_size": 7}),
    "electra, E = D": ("electra", BERT | {"embedding_size": 15}),
    "distilbert": ("distilbert", DISTILBERT),
    "ernie": ("ernie", BERT | {"hidden_act": "relu"}),
    "ernie with tasks": (
        "ernie",
        BERT | {"use_task_id": True, "task_type_vocab_size": 4},
    ),
    "xlnet": ("xlnet", XL),
    "openai-gpt": ("openai-gpt", GPT),
    "gpt2": ("gpt2", GPT),
    "gpt2, its inner width": ("gpt2", GPT | {"n_inner": 21}),
    "longformer": ("longformer", BERT | {"attention_window": 4}),
    "nezha": ("nezha", BERT | {"hidden_size": 12, "max_relative_position": 5}),
    "transfo-xl": (
        "transfo-xl",
        XL | PLAIN_SOFTMAX | {"d_embed": 12, "d_head": 4, "dropatt": 0.3},
    ),
    "transfo-xl, shared": (
        "transfo-xl",
        XL | PLAIN_SOFTMAX | {"d_embed": 12, "d_head": 4, "untie_r": False},
    ),
}
LIVE = [name for name, layout in LAYOUTS.items() if "4.57" not in layout.verified_by]
# Layouts that nothing is written for here take the fields of BERT.
SMALL |= {kind: (kind, BERT) for kind in LIVE if kind not in SMALL}
LIVE_CASES = [
    (name, heads)
    for name, (kind, _) in SMALL.items()
    if kind in LIVE
    for heads in LAYOUTS[kind].classes
]
RUN_ONLY = {"vocab_multiple", "stack", "remat", "global_slots"}


def config_class(model_type: str) -> type:
    return transformers.CONFIG_MAPPING[model_type]


def arch_of(layout: Layout, config: dict) -> Arch:
    return Arch(**layout.to_arch(config), vocab_multiple=1)


@functools.cache
def tree(arch: Arch, heads: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of our parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(arch, heads=heads))
    return {path_name(path): leaf.shape for path, leaf in leaves}


def their_shape(shapes: list[tuple[int, ...]], fold: str, arch: Arch) -> tuple:
    *rest, _ = shapes[0]
    shape = (*rest, sum(shape[-1] for shape in shapes))
    H, K = arch.heads, arch.width // arch.heads
    return {
        "transpose": shape[::-1],
        "row": (1, 1, *shape),
        "heads": (shape[0], H, K),
        "heads_out": (shape[-1], H, K),
    }.get(fold, shape)


def expected(layout: Layout, arch: Arch, heads: tuple[str, ...]) -> dict[str, tuple]:
    """What a checkpoint with these heads holds, by the layout."""
    ours, used, found = tree(arch, heads), set(), {}
    for row in layout.table(arch, heads).values():
        parts = row.ours if isinstance(row.ours, tuple) else (row.ours,)
        if not set(parts) <= set(ours):
            assert not set(parts) & set(ours)
            continue
        assert not used & set(parts)
        used |= set(parts)
        shapes, copies = [ours[part] for part in parts], 1
        if parts[0].startswith("stack/layers/"):
            copies = shapes[0][0]
            shapes = [shape[1:] for shape in shapes]
        names = row.names(copies, arch.group_layers)
        assert len(names) == copies
        assert not set(names) & set(found)
        found |= dict.fromkeys(names, their_shape(shapes, row.fold, arch))
    assert used == set(ours)
    return found


def compare(
    layout: Layout, arch: Arch, heads: tuple[str, ...], theirs: dict[str, tuple]
) -> None:
    full = {layout.full_name(name): shape for name, shape in theirs.items()}
    assert len(full) == len(theirs)
    repeats = layout.repeats(arch, heads)
    for repeat in set(repeats) & set(full):
        assert full[repeat] == full[repeats[repeat]]
    kept = {
        name: shape
        for name, shape in full.items()
        if name not in repeats and not layout.is_ignored(name)
    }
    assert kept == expected(layout, arch, heads)


def tiny(name: str, heads: tuple[str, ...]) -> tuple:
    """The class, options for it, a model with random weights and its Arch."""
    kind, config = SMALL[name]
    layout = LAYOUTS[kind]
    if not {"classify", "tag"} & set(heads):
        config = config | {"id2label": {"0": "no", "1": "yes"}}
    options = {}
    if heads == () and ("pooler",) in layout.classes:
        options = {"add_pooling_layer": False}
    cls = getattr(transformers, layout.classes[heads])
    model = cls(config_class(kind)(**config), **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return cls, options, model, arch_of(layout, config)


@pytest.mark.parametrize(("name", "heads"), LIVE_CASES)
def test_tensors_are_those_of_the_class(name, heads):
    layout = LAYOUTS[SMALL[name][0]]
    _, _, model, arch = tiny(name, heads)
    tensors = model.state_dict()
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    compare(layout, arch, heads, theirs)
    bare = heads in ((), ("pooler",))
    assert bare != any(name.startswith(layout.prefix) for name in theirs)
    for repeat, original in layout.repeats(arch, heads).items():
        if repeat in tensors:
            assert torch.equal(tensors[repeat], tensors[original])


@pytest.mark.parametrize(("name", "heads"), LIVE_CASES)
def test_kernels_are_turned_where_theirs_are(name, heads):
    """Shapes do not tell where a kernel is square."""
    layout = LAYOUTS[SMALL[name][0]]
    _, _, model, arch = tiny(name, heads)
    modules = {layout.full_name(name): part for name, part in model.named_modules()}
    tried = 0
    for row in layout.table(arch, heads).values():
        part = modules.get(row.names(1)[0].removesuffix(".weight"))
        if row.theirs.endswith(".weight") and part is not None:
            fold = {torch.nn.Linear: "transpose", torch.nn.Embedding: row.fold}
            assert row.fold == fold.get(type(part), "")
            tried += isinstance(part, torch.nn.Linear | transformers.Conv1D)
    assert tried


def test_output_kernel_of_xlnet():
    model = tiny("xlnet", ())[2].eval()
    attention = model.layer[0].rel_attn
    D, H, K = attention.o.shape
    row = LAYOUTS["xlnet"].table(Arch(), ())["stack/layers/attention/o/kernel"]
    assert row.fold == "heads_out"
    ours = attention.o.reshape(D, H * K).T
    heads, zero = torch.randn(5, 2, H, K), torch.zeros(5, 2, D)
    torch.testing.assert_close(
        attention.post_attention(zero, heads, residual=False),
        attention.layer_norm(heads.reshape(5, 2, H * K) @ ours),
    )


@pytest.mark.parametrize(("name", "heads"), LIVE_CASES)
def test_what_the_layout_holds_is_the_whole_model(name, heads, tmp_path):
    layout = LAYOUTS[SMALL[name][0]]
    cls, options, model, arch = tiny(name, heads)
    tensors = {layout.full_name(k): v for k, v in model.state_dict().items()}
    held = {k: tensors[k].clone() for k in expected(layout, arch, heads)}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(layout.to_config(arch, heads))
    (tmp_path / "config.json").write_text(config)
    back, report = cls.from_pretrained(tmp_path, output_loading_info=True, **options)
    assert not any(report.values())
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, tensors[layout.full_name(name)])


@pytest.mark.parametrize("kind", LIVE)
def test_no_class_is_forgotten(kind):
    """Of the classes that there are, only these are not ours."""
    layout = LAYOUTS[kind]
    name = layout.classes[()].removesuffix("Model")
    module = __import__(
        config_class(kind).__module__.replace("configuration", "modeling"),
        fromlist=["__all__"],
    )
    others = {"PreTrainedModel", "ForCausalLM", "LMHeadModel", "Layer"}
    others |= {"SelfAttention"} if kind == "longformer" else set()
    theirs = {cls for cls in module.__all__ if cls.startswith(name)}
    assert theirs - set(layout.classes.values()) <= {name + other for other in others}
    assert set(layout.classes.values()) <= theirs


# What classes of release 4.57.3 held: see the docstring.

NEZHA_LEFT_OUT = "embeddings.position_embeddings.weight"
TRANSFO_XL_LAYER = {
    "dec_attn.r_r_bias": (3, 4),
    "dec_attn.r_w_bias": (3, 4),
    "dec_attn.qkv_net.weight": (36, 12),
    "dec_attn.o_net.weight": (12, 12),
    "dec_attn.layer_norm.weight": (12,),
    "dec_attn.layer_norm.bias": (12,),
    "dec_attn.r_net.weight": (12, 12),
    "pos_ff.CoreNet.0.weight": (21, 12),
    "pos_ff.CoreNet.0.bias": (21,),
    "pos_ff.CoreNet.3.weight": (12, 21),
    "pos_ff.CoreNet.3.bias": (12,),
    "pos_ff.layer_norm.weight": (12,),
    "pos_ff.layer_norm.bias": (12,),
}
TRANSFO_XL_BODY = {
    "word_emb.emb_layers.0.weight": (37, 12),
    "pos_emb.inv_freq": (6,),
    **{f"layers.0.{name}": shape for name, shape in TRANSFO_XL_LAYER.items()},
    **{f"layers.1.{name}": shape for name, shape in TRANSFO_XL_LAYER.items()},
}
TRANSFO_XL_HEADS = {
    (): {},
    ("lm",): {"crit.out_layers.0.weight": (37, 12), "crit.out_layers.0.bias": (37,)},
    ("classify",): {"score.weight": (5, 12)},
}
GENERATION = """
    max_length min_length do_sample early_stopping num_beams temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size output_scores
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences num_beam_groups
    return_dict_in_generate forced_bos_token_id forced_eos_token_id diversity_penalty
    remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
"""
BASE_457 = """
    return_dict output_hidden_states output_attentions torchscript dtype pruned_heads
    tie_word_embeddings chunk_size_feed_forward is_encoder_decoder is_decoder
    cross_attention_hidden_size add_cross_attention tie_encoder_decoder architectures
    finetuning_task id2label label2id task_specific_params problem_type tokenizer_class
    prefix bos_token_id pad_token_id eos_token_id sep_token_id decoder_start_token_id
    _name_or_path transformers_version tf_legacy_loss use_bfloat16 model_type
"""
DEFAULTS_457 = {
    "nezha": {
        "vocab_size": 21128,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "max_relative_position": 64,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "classifier_dropout": 0.1,
        "use_cache": True,
        "tie_word_embeddings": True,
    },
    "transfo-xl": {
        "vocab_size": 267735,
        "cutoffs": [20000, 40000, 200000],
        "tie_projs": [False, True, True, True],
        "d_model": 1024,
        "d_embed": 1024,
        "d_head": 64,
        "d_inner": 4096,
        "div_val": 4,
        "pre_lnorm": False,
        "n_layer": 18,
        "n_head": 16,
        "mem_len": 1600,
        "same_length": True,
        "attn_type": 0,
        "clamp_len": 1000,
        "sample_softmax": -1,
        "adaptive": True,
        "dropout": 0.1,
        "dropatt": 0.0,
        "untie_r": True,
        "init": "normal",
        "init_range": 0.01,
        "proj_init_std": 0.01,
        "init_std": 0.02,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("heads", LAYOUTS["nezha"].classes)
def test_nezha_is_named_as_bert_without_positions(heads):
    _, config = SMALL["nezha"]
    bert, nezha = LAYOUTS["bert"], LAYOUTS["nezha"]
    bert_config = {k: v for k, v in config.items() if k != "max_relative_position"}
    theirs = {
        name.replace("bert.", "nezha."): shape
        for name, shape in expected(bert, arch_of(bert, bert_config), heads).items()
        if not name.endswith(NEZHA_LEFT_OUT)
    }
    compare(nezha, arch_of(nezha, config), heads, theirs)


@pytest.mark.parametrize("heads", LAYOUTS["transfo-xl"].classes)
@pytest.mark.parametrize("name", ["transfo-xl", "transfo-xl, shared"])
def test_transfo_xl_as_it_was(name, heads):
    body = dict(TRANSFO_XL_BODY)
    if "shared" in name:  # the layers' biases are there as well, all the same
        body |= {"r_w_bias": (3, 4), "r_r_bias": (3, 4)}
    if heads:
        body = {f"transformer.{name}": shape for name, shape in body.items()}
    layout, config = LAYOUTS["transfo-xl"], SMALL[name][1]
    arch = arch_of(layout, config)
    compare(layout, arch, heads, body | TRANSFO_XL_HEADS[heads])


# The fields of config.json.


def their_fields(kind: str) -> tuple[set[str], dict[str, object]]:
    """All fields that a config of this type has, and what it assumes of its own."""
    if kind in DEFAULTS_457:
        defaults = DEFAULTS_457[kind]
        return {*BASE_457.split(), *GENERATION.split(), *defaults}, defaults
    cls = config_class(kind)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    return {*cls().to_dict(), *vars(cls()), *defaults}, defaults


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_field_is_known(kind):
    names, _ = their_fields(kind)
    older = ["position_embedding_type", "pruned_heads", "directionality", "torch_dtype"]
    known = {*names, *older, *GENERATION.split()}
    assert LAYOUTS[kind].strange(dict.fromkeys(known)) == []
    assert LAYOUTS[kind].strange({"rotary": 1, "_name": 2}) == ["rotary"]


def test_generation_fields_are_bookkeeping():
    names = transformers.GenerationConfig._get_default_generation_params()
    assert set(names) <= tables.BOOKKEEPING


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_field_has_one_meaning(kind):
    layout = LAYOUTS[kind]
    read = [field.theirs for field in layout.config]
    read += [*layout.fixed, *tables.REFUSED, *layout.idle]
    assert len(read) == len(set(read))
    decided = set(read) | set(layout.odd)
    labels_and_padding = {"pad_token_id"} if "pad_token_id" in layout.odd else set()
    assert decided & tables.BOOKKEEPING == labels_and_padding
    assert set(layout.absent) <= set(layout.fixed)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_defaults_are_theirs(kind):
    layout = LAYOUTS[kind]
    _, defaults = their_fields(kind)
    for field in layout.config:
        assert field.default == defaults[field.theirs], field
    for name, value in layout.odd.items():
        assert value == (defaults | {"pad_token_id": 1})[name], name
    for name, values in (tables.REFUSED | layout.fixed).items():
        if name in defaults:
            assert layout.absent.get(name, values[0]) == defaults[name], name
    if kind in LIVE:
        assert layout.aliases == config_class(kind).attribute_map
        assert layout.odd.get("pad_token_id", 1) == 1
        assert (defaults["pad_token_id"] == 1) == ("pad_token_id" in layout.odd)


@pytest.mark.parametrize("kind", LIVE)
def test_an_empty_file_means_the_default_model(kind):
    layout = LAYOUTS[kind]
    assert layout.to_arch({}) == layout.to_arch(config_class(kind)().to_dict())


@pytest.mark.parametrize("kind", LIVE)
def test_the_default_model_is_written_with_their_defaults(kind):
    layout = LAYOUTS[kind]
    written = layout.to_config(Arch(**layout.to_arch({})))
    theirs = config_class(kind)().to_dict()
    theirs |= {"n_inner": 3072, "summary_proj_to_labels": "gpt" in kind}  # not said
    assert written.items() <= theirs.items()


@pytest.mark.parametrize("name", SMALL)
def test_config_there_and_back(name):
    kind, config = SMALL[name]
    layout = LAYOUTS[kind]
    arch = arch_of(layout, config)
    written = layout.to_config(arch, ("classify",))
    assert written["model_type"] == kind
    assert layout.strange(written) == []
    assert layout.to_arch(written) == layout.to_arch(config)
    assert set(layout.write(arch)) == set(layout.odd)
    for field, value in config.items():
        if field not in ("id2label", "dropatt"):
            assert written[field] == value
    if kind in LIVE:
        theirs = config_class(kind)(**written).to_dict()
        assert layout.to_arch(theirs) == layout.to_arch(config)
        assert layout.strange(theirs) == []


@pytest.mark.parametrize("name", SMALL)
def test_all_of_arch_is_decided(name):
    """Fields that a layout leaves alone are of no use to models of its type."""
    kind, config = SMALL[name]
    decided = LAYOUTS[kind].to_arch(config)
    left = {field.name for field in dataclasses.fields(Arch)} - set(decided) - RUN_ONLY
    useless = {"window", "max_distance", "position_biases", "groups", "group_layers"}
    useless -= {"max_distance"} if decided["position"] != "learned" else set()
    useless -= {"position_biases"} if decided["position"] == "xl" else set()
    useless -= {"window"} if decided["attention"] == "window" else set()
    useless -= {"groups", "group_layers"} if decided["share"] != "none" else set()
    useless |= {"max_positions"} if decided["position"] == "xl" else set()
    assert left == useless


@pytest.mark.parametrize("kind", LAYOUTS)
def test_heads(kind):
    layout = LAYOUTS[kind]
    assert list(layout.heads) == [head for head in HEADS if head in layout.heads]
    for heads in layout.classes:
        assert heads == tuple(head for head in HEADS if head in heads)
        assert set(heads) <= set(layout.heads)
    assert {*set().union(*layout.classes), *layout.unclassed} == set(layout.heads)


def test_labels():
    layout = LAYOUTS["bert"]
    assert layout.to_arch({})["labels"] == 2
    assert layout.to_arch({"num_labels": 4})["labels"] == 4
    assert layout.to_arch({"id2label": {"0": "a"}, "num_labels": 4})["labels"] == 1
    assert layout.to_arch({"id2label": None, "num_labels": 4})["labels"] == 4
    arch = Arch(labels=3)
    assert layout.to_config(arch, ("tag",))["id2label"]["2"] == "LABEL_2"
    # qa_outputs would have three outputs.
    assert "id2label" not in layout.to_config(arch, ("span",))


def test_aliases():
    layout = LAYOUTS["gpt2"]
    assert layout.to_arch({"hidden_size": 20})["width"] == 20
    assert layout.to_arch({"hidden_size": 20})["inner"] == 80
    same = {"n_token": 9, "vocab_size": 9}
    assert LAYOUTS["xlnet"].to_arch(same)["vocab_size"] == 9
    with pytest.raises(InputError, match="n_embd is there twice: 20, 21"):
        layout.to_arch({"hidden_size": 20, "n_embd": 21})


@pytest.mark.parametrize(
    ("kind", "config", "meant"),
    [
        ("bert", {"hidden_act": "gelu_fast"}, {"activation": "gelu_tanh"}),
        ("bert", {"pruned_heads": {}}, {}),
        ("openai-gpt", {"afn": "gelu"}, {"activation": "gelu_tanh"}),
        ("roberta", {"pad_token_id": 0}, {"position_offset": 1}),
        ("ernie", {"task_type_vocab_size": 9}, {"task_types": 0}),
        ("ernie", {"use_task_id": True}, {"task_types": 3}),
        ("electra", {"embedding_size": 256}, {"embed_width": 0}),
        ("albert", {"embedding_size": 4096}, {"embed_width": 4096}),
        ("albert", {"inner_group_num": 2}, {"layers": 24, "group_layers": 2}),
        ("longformer", {"attention_window": [8] * 12}, {"window": 8}),
        ("xlnet", {"clamp_len": 0}, {"max_distance": 0}),
        ("xlnet", {"dropout": 0.3}, {"attention_dropout": 0.3}),
        ("gpt2", {"n_inner": None, "n_embd": 24}, {"inner": 96}),
    ],
)
def test_meanings(kind, config, meant):
    assert LAYOUTS[kind].to_arch(config).items() >= meant.items()


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("bert", {"is_decoder": True}, "is_decoder=True: only False can be read"),
        ("bert", {"position_embedding_type": "relative_key"}, "only 'absolute'"),
        ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("bert", {"pruned_heads": {"0": [1]}}, "pruned_heads="),
        ("bert", {"auto_map": {"AutoModel": "a.B"}}, "auto_map="),
        ("bert", {"hidden_act": "silu"}, "unknown hidden_act 'silu'"),
        ("roberta", {"hidden_act": "gelu_new"}, "unknown hidden_act 'gelu_new'"),
        ("roberta", {"pad_token_id": None}, "pad_token_id=None"),
        ("openai-gpt", {"afn": "gelu_new"}, "unknown afn"),
        ("longformer", {"attention_window": [8, 16]}, r"attention_window=\[8, 16\]"),
        ("longformer", {"attention_window": [8] * 11}, "in all 12 layers"),
        ("xlnet", {"attn_type": "uni"}, "attn_type='uni'"),
        ("xlnet", {"bi_data": True}, "bi_data=True"),
        ("xlnet", {"d_head": 63}, "d_head=63"),
        ("xlnet", {"clamp_len": None}, "another kind is expected.*clamp_len=None"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by"),
        ("electra", {"summary_activation": "tanh"}, "summary_activation='tanh'"),
        ("transfo-xl", {}, "div_val=4.*\n.*cutoffs=.*\n.*mem_len=1600.*\n.*same_len"),
        ("transfo-xl", PLAIN_SOFTMAX | {"d_embed": 512}, "d_embed=512"),
        ("transfo-xl", PLAIN_SOFTMAX | {"d_head": 65}, "d_head=65"),
    ],
)
def test_what_cannot_be_read(kind, config, message):
    with pytest.raises(InputError, match=message):
        LAYOUTS[kind].to_arch(config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", {"norm_place": "pre"}, "arch.norm_place='pre': bert has 'post'"),
        ("bert", {"embed_width": 7}, "arch.embed_width=7: bert has 0"),
        ("roberta", {"activation": "relu"}, "activation='relu': roberta has 'gelu'$"),
        ("roberta", {"position_offset": 0}, "arch.position_offset=0"),
        ("albert", {"share": "attention"}, "share='attention': albert has 'all'"),
        ("albert", {"embed_width": 0}, "arch.embed_width=0"),
        ("electra", {"embed_width": 15}, "arch.embed_width=15"),
        ("distilbert", {"norm_eps": 1e-5}, "arch.norm_eps=1e-05"),
        ("openai-gpt", {"inner": 59}, "arch.inner=59"),
        ("openai-gpt", {"activation": "gelu"}, "has 'gelu_tanh' or 'relu'"),
        ("transfo-xl", {"activation": "gelu"}, "arch.activation='gelu'"),
        ("xlnet", {"position_biases": "shared"}, "arch.position_biases='shared'"),
        ("gpt2", {"order": "all"}, "arch.order='all'"),
    ],
)
def test_what_cannot_be_written(name, changes, message):
    kind, config = SMALL[name]
    arch = arch_of(LAYOUTS[kind], config).but(**changes)
    with pytest.raises(InputError, match=message):
        LAYOUTS[kind].to_config(arch)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_only_training_reads_is_never_refused(kind):
    name = next(name for name in SMALL if SMALL[name][0] == kind)
    arch = arch_of(LAYOUTS[kind], SMALL[name][1])
    residual = "same" if arch.residual_init == "depth" else "depth"
    changed = arch.but(dropout=0.4, attention_dropout=0.5, init_std=0.06)
    LAYOUTS[kind].to_config(changed.but(residual_init=residual))


OTHER_VALUES = {
    "chunk_size_feed_forward": 2,
    "classifier_dropout": 0.5,
    "classifier_dropout_prob": 0.5,
    "use_cache": False,
    "bos_token_id": 7,
    "eos_token_id": 8,
    "sep_token_id": 9,
    "sinusoidal_pos_embds": True,
    "qa_dropout": 0.5,
    "seq_classif_dropout": 0.5,
    "onnx_export": True,
    "mem_len": 2,
    "reuse_len": 2,
    "use_mems_eval": False,
    "use_mems_train": True,
    "same_length": True,
    "start_n_top": 2,
    "end_n_top": 2,
    "summary_first_dropout": 0.5,
    "summary_last_dropout": 0.5,
    "reorder_and_upcast_attn": True,
    "problem_type": "regression",
}
NOT_TRIED = """
    model_type architectures transformers_version dtype output_attentions
    output_hidden_states return_dict id2label label2id pad_token_id
"""


@pytest.mark.parametrize("kind", LIVE)
def test_bookkeeping_does_not_change_the_function(kind):
    layout = LAYOUTS[kind]
    _, config = SMALL[kind]
    names, _ = their_fields(kind)
    idle = names & (tables.BOOKKEEPING | set(layout.idle))
    cls = getattr(transformers, layout.classes[()])
    model = cls(config_class(kind)(**config)).eval()
    ids = torch.arange(16).reshape(2, 8) + 10

    with torch.no_grad():
        before = model(ids)[0]
        for name in sorted(idle - set(NOT_TRIED.split())):
            changed = config_class(kind)(**config, **{name: OTHER_VALUES[name]})
            other = cls(changed).eval()
            other.load_state_dict(model.state_dict())
            torch.testing.assert_close(other(ids)[0], before, msg=name)
