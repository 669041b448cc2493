"""Tensors to parameters and back: everything is accounted for, or it raises."""

import jax
import numpy as np
import pytest
import torch
import transformers

from bert_jax.convert.engine import (
    canonical,
    class_for,
    flatten,
    heads_in,
    to_ours,
    to_theirs,
    unflatten,
)
from bert_jax.convert.tables import LAYOUTS
from bert_jax.errors import InputError, InputWarning
from bert_jax.models.arch import Arch
from bert_jax.models.model import param_shapes
from tests.convert.test_tables import LIVE_CASES, SMALL, tiny
from tests.models.made import drawn_params
from tests.reference import HEADS, tensors_of, their_config

ARCH = Arch(211, width=36, layers=2, heads=3, inner=50, max_positions=40, types=3)
BERT = LAYOUTS["bert"]
TOKEN = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"
BODIES = {
    "BertModel": ({}, ("pooler",)),
    "BertModel without pooler": ({"add_pooling_layer": False}, ()),
}


def their_tensors(kind: str, **options) -> dict[str, np.ndarray]:
    model = getattr(transformers, kind)._from_config(their_config(ARCH), **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return tensors_of(model)


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    return their_tensors("BertForPreTraining")


@pytest.fixture
def tensors(stored) -> dict[str, np.ndarray]:
    return dict(stored)


@pytest.fixture(scope="module")
def whole(stored) -> dict:
    return ours(stored)


def ours(tensors: dict, arch: Arch = ARCH, **options) -> dict:
    return to_ours(tensors, arch, BERT, source="somewhere", **options)


def import_error(tensors: dict, arch: Arch = ARCH, **options) -> str:
    with pytest.raises(InputError) as raised:
        ours(tensors, arch, **options)
    assert str(raised.value).startswith("somewhere:\n")
    return str(raised.value)


def check_same(a: dict, b: dict) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


# There and back.

CASES = [(name, heads) for name, heads in LIVE_CASES if "," not in name or not heads]


@pytest.mark.parametrize(("name", "heads"), CASES)
def test_there_and_back_is_bit_equal(name: str, heads: tuple[str, ...]):
    layout = LAYOUTS[SMALL[name][0]]
    _, _, model, arch = tiny(name, heads)
    arch = arch.but(vocab_multiple=128)
    theirs = tensors_of(model)
    params = to_ours(
        theirs, arch, layout, source="", architectures=(layout.classes[heads],)
    )
    assert len(params["embed"]["token"]) == 128  # padded from 37
    back, rest = to_theirs(params, arch, layout, heads=heads)
    assert not rest
    tied = layout.repeats(arch, heads)
    expected = {
        layout.full_name(name): tensor
        for name, tensor in theirs.items()
        if layout.full_name(name) not in tied and not layout.is_ignored(name)
    }
    assert back.keys() == expected.keys()
    for name, tensor in back.items():
        assert tensor.flags["C_CONTIGUOUS"]
        np.testing.assert_array_equal(tensor, expected[name], strict=True)


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_with_and_without_prefix(kind: str):
    options, heads = BODIES[kind]
    bare = their_tensors("BertModel", **options)
    assert not any(name.startswith("bert.") for name in bare)
    params = ours(bare)
    assert set(params) == {"embed", "stack", *heads}
    full = {f"bert.{name}": tensor for name, tensor in bare.items()}
    check_same(params, ours(full))
    back, rest = to_theirs(params, ARCH, BERT, heads=heads)
    assert not rest
    assert back.keys() == full.keys()


def test_kernels_are_transposed_and_layers_stacked(tensors, whole):
    kernels = whole["stack"]["layers"]["ffn"]["inner"]["kernel"]
    assert kernels.shape == (2, 36, 50)
    for n in range(2):
        theirs = tensors[f"bert.encoder.layer.{n}.intermediate.dense.weight"]
        np.testing.assert_array_equal(kernels[n], theirs.T)
    np.testing.assert_array_equal(whole["embed"]["token"][:211], tensors[TOKEN])
    np.testing.assert_array_equal(whole["embed"]["token"][211:], 0)
    assert len(whole["embed"]["token"]) == 256


def test_joint_kernels_are_split_in_order():
    _, _, model, arch = tiny("gpt2", ("lm",))
    params = to_ours(tensors_of(model), arch, LAYOUTS["gpt2"], source="")
    attention = params["stack"]["layers"]["attention"]
    for n, layer in enumerate(model.transformer.h):
        parts = layer.attn.c_attn.weight.detach().numpy().reshape(15, 3, 15)
        for i, name in enumerate("qkv"):
            np.testing.assert_array_equal(attention[name]["kernel"][n], parts[:, i])


def test_flat_names_there_and_back(whole):
    flat = flatten(whole)
    assert "stack/layers/attention/q/kernel" in flat
    check_same(unflatten(flat), whole)


# Names of other times.


def test_old_names(tensors, whole):
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    assert sum("gamma" in name for name in old) == 6
    old["bert.embeddings.position_ids"] = np.arange(40)[None]
    check_same(ours(old), whole)


def test_a_tensor_under_two_names(tensors):
    name = "bert.embeddings.LayerNorm"
    both = {f"{name}.gamma": tensors[f"{name}.weight"]}
    message = f"gamma is another name of {name}.weight, which is there too"
    with pytest.raises(InputError, match=message):
        canonical(tensors | both, BERT)


def test_buffers_are_no_parameters():
    _, _, model, arch = tiny("gpt2", ("lm",))
    layout, tensors = LAYOUTS["gpt2"], tensors_of(model)
    old = {
        f"transformer.h.{n}.attn.{name}": np.ones((1, 1, 19, 19), np.float32)
        for n in range(2)
        for name in ("bias", "masked_bias")
    }
    check_same(
        to_ours(tensors | old, arch, layout, source=""),
        to_ours(tensors, arch, layout, source=""),
    )


# Tensors that repeat another.


def test_tied_decoder_present_or_not(tensors, whole):
    ties = BERT.repeats(ARCH, HEADS)
    assert DECODER in ties
    for repeat, original in ties.items():
        pair = tensors | {repeat: tensors[original]}
        for left_out in (repeat, original):
            some = {name: value for name, value in pair.items() if name != left_out}
            check_same(ours(some), whole)


def test_tied_but_different(tensors):
    other = tensors[TOKEN].copy()
    other[5, 5] += 1e-6
    text = import_error(tensors | {DECODER: other})
    assert f"{DECODER} differs from {TOKEN}, to which it is tied" in text


# Which heads there are.


def named(heads: tuple[str, ...]) -> set[str]:
    """Tensors of the class with these heads."""
    tree = param_shapes(ARCH, heads=heads)
    blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, bool), tree)
    return set(to_theirs(blank, ARCH, BERT, heads=heads)[0])


@pytest.mark.parametrize(
    ("heads", "architectures", "found"),
    [
        # `classifier` serves three classes: what config.json says decides.
        (("pooler", "classify"), (), ("pooler", "classify")),
        (("pooler", "classify"), ("BertForMultipleChoice",), ("pooler", "choice")),
        (("pooler", "classify"), ("BertForTokenClassification",), ("pooler", "tag")),
        # Without a pooler it can be one of them only.
        (("tag",), (), ("tag",)),
        (("tag",), ("BertForSequenceClassification",), ("tag",)),
        # What is there counts, whatever config.json says.
        (("lm", "pooler", "nsp"), ("BertModel",), ("lm", "pooler", "nsp")),
        (("lm",), ("BertForPreTraining",), ("lm",)),
        (("span",), ("Another",), ("span",)),
        ((), ("BertModel",), ()),
    ],
)
def test_which_heads(heads, architectures, found):
    assert heads_in(named(heads), ARCH, BERT, architectures) == found


def test_older_checkpoints_have_the_pooler_beside_any_head():
    pooler = named(("pooler",)) - named(())
    for heads in (("lm",), ("tag",), ("span",)):
        there, cls = named(heads) | pooler, BERT.classes[heads]
        found = heads_in(there, ARCH, BERT, (cls,))
        assert set(found) == {*heads, "pooler"}


def test_older_classifiers_have_a_pooler_that_nothing_reads():
    """RoBERTa's classes bring one of their own; the body's is in files all the same."""
    layout, heads = LAYOUTS["roberta"], ("pooler", "classify")
    arch = ARCH.but(position_offset=2, types=1)
    params = drawn_params(arch, heads=heads)
    tensors, _ = to_theirs(params, arch, layout, heads=heads)
    spare = {"roberta.pooler.dense.weight": np.zeros((36, 36), np.float32)}
    spare |= {"roberta.pooler.dense.bias": np.zeros(36, np.float32)}
    with pytest.warns(InputWarning, match="not read.*another: .*roberta.pooler.dense"):
        found = to_ours(tensors | spare, arch, layout, source="there")
    check_same(found, params)


@pytest.mark.parametrize(
    ("heads", "reference"),
    [
        ((), "BertModel"),
        (("pooler",), "BertModel"),
        (("lm",), "BertForMaskedLM"),
        (("lm", "pooler"), "BertForMaskedLM"),
        (("lm", "pooler", "nsp"), "BertForPreTraining"),
        (("pooler", "nsp"), "BertForNextSentencePrediction"),
        (("pooler", "sop"), "BertModel"),
        (("lm", "pooler", "nsp", "tag"), "BertForPreTraining"),
        (("rtd", "tag"), "BertForTokenClassification"),
    ],
)
def test_the_class_that_knows_most(heads, reference):
    params = param_shapes(ARCH, heads=heads)
    assert BERT.classes[class_for(BERT, params, ARCH)] == reference


# What does not fit.


def test_all_problems_are_listed_at_once(tensors):
    lost = [
        "bert.encoder.layer.1.attention.self.key.bias",
        "bert.pooler.dense.weight",
        "cls.predictions.transform.LayerNorm.bias",
    ]
    some = {name: value for name, value in tensors.items() if name not in lost}
    some["bert.encoder.layer.2.output.dense.bias"] = np.zeros(36, np.float32)
    some["heads.weight"] = np.zeros((2, 36), np.float32)
    some["cls.predictions.bias"] = np.zeros(12, np.float32)
    text = import_error(some)
    for name in lost:
        assert name in text.partition("unexpected")[0]
    listed = "bert.encoder.layer.2.output.dense.bias, heads.weight"
    assert f"unexpected tensors: {listed}" in text
    assert "cls.predictions.bias has shape (12,), config.json says (211,)" in text


def test_a_class_that_is_not_known(tensors):
    """Its type is known, but not what it has besides."""
    more = tensors | {"answer.weight": np.zeros((2, 36), np.float32)}
    text = import_error(more, architectures=("BertForRanking",))
    assert "unexpected tensors: answer.weight\nBertForRanking is not among" in text
    assert "BertForQuestionAnswering" in text
    check_same(ours(tensors, architectures=("BertForRanking",)), ours(tensors))


def test_a_model_with_more_layers_than_its_config_says(tensors):
    text = import_error(tensors, ARCH.but(layers=1))
    assert text.count("bert.encoder.layer.1.") == 16


def test_wrong_shapes_are_all_listed(tensors):
    text = import_error(tensors, ARCH.but(inner=51, vocab_size=210))
    assert f"{TOKEN} has shape (211, 36), config.json says (210, 36)" in text
    for n in range(2):
        name = f"bert.encoder.layer.{n}.intermediate.dense.weight"
        assert f"{name} has shape (50, 36), config.json says (51, 36)" in text


# What no class has a name for.


def test_what_has_no_name_is_kept_under_ours(whole):
    kernel = np.arange(72, dtype=np.float32).reshape(36, 2)
    sop = {"dense": {"kernel": kernel, "bias": np.ones(2, np.float32)}}
    tower = {
        "stack": {"one": np.zeros(3, np.float32)},
        "lm": {"bias": np.pad(np.ones(211, np.float32), (0, 45))},
    }
    params = whole | {"sop": sop, "generator": tower}
    theirs, rest = to_theirs(params, ARCH, BERT, heads=HEADS)
    assert theirs.keys() == to_theirs(whole, ARCH, BERT, heads=HEADS)[0].keys()
    assert {name: leaf.shape for name, leaf in rest.items()} == {
        "sop/dense/kernel": (36, 2),
        "sop/dense/bias": (2,),
        "generator/stack/one": (3,),
        "generator/lm/bias": (211,),  # as in theirs, without the surplus
    }
    check_same(ours(theirs, extra=rest), params)


def test_a_head_that_its_class_does_not_take(whole):
    some = {name: leaf for name, leaf in whole.items() if name != "nsp"}
    theirs, rest = to_theirs(some, ARCH, BERT, heads=("pooler",))
    assert {name.split("/")[0] for name in rest} == {"lm"}
    assert rest["lm/bias"].shape == (211,)
    check_same(ours(theirs, extra=rest), some)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"sop/dense/bias": np.zeros(3, np.float32)},
            r"sop/dense/bias has shape \(3,\), config.json says \(2,\)",
        ),
        ({"sop/dense/bias": None}, "missing tensors: sop/dense/bias"),
        ({"lm/decoder": np.zeros(2, np.float32)}, "unexpected tensors: lm/decoder"),
        ({"a/b": np.zeros(2), "a/b/c": np.zeros(2)}, "unexpected tensors: a/b$"),
        ({"tower/embed/token": np.zeros((9, 2))}, "unexpected .* tower/embed/token"),
        ({"/": np.zeros(2, np.float32)}, "unexpected tensors: /"),
        ({"cls.seq_relationship.bias": np.zeros(2)}, "relationship.bias is in both"),
        (
            {"nsp/dense/bias": np.zeros(2, np.float32)},
            "unexpected tensors: nsp/dense/bias",
        ),
    ],
)
def test_extra_that_does_not_fit(tensors, change: dict, text: str):
    extra = {
        "sop/dense/kernel": np.zeros((36, 2), np.float32),
        "sop/dense/bias": np.zeros(2, np.float32),
    } | change
    extra = {name: leaf for name, leaf in extra.items() if leaf is not None}
    with pytest.raises(InputError, match=text):
        ours(tensors, extra=extra)
