"""To and from the layout of transformers: everything is accounted for, or it raises."""

import builtins
import json
import pickle
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bert_jax.convert import hf, tables
from bert_jax.data.tokenizers import SPECIALS, WordPiece
from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.model import param_shapes
from tests.reference import (
    HEADS,
    fresh_params,
    reference_model,
    tensors_of,
    their_config,
)

ARCH = Arch(
    vocab_size=211,
    width=36,
    layers=2,
    heads=3,
    inner=50,
    max_positions=40,
    types=3,
    activation="gelu_tanh",
    norm_eps=1e-7,
    dropout=0.2,
    attention_dropout=0.3,
    init_std=0.03,
)
TOKEN = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"
KINDS = {
    "BertForPreTraining": ({}, HEADS),
    "BertForMaskedLM": ({}, ("lm",)),
    "BertModel": ({}, ("pooler",)),
    "BertModel without pooler": ({"add_pooling_layer": False}, ()),
}


@pytest.fixture(scope="module")
def models() -> dict:
    return {
        kind: reference_model(ARCH, kind=kind.split()[0], **options)
        for kind, (options, _) in KINDS.items()
    }


@pytest.fixture
def tensors(models) -> dict[str, np.ndarray]:
    return tensors_of(models["BertForPreTraining"])


@pytest.fixture
def saved(models, tmp_path: Path) -> Path:
    """A directory as transformers writes it."""
    models["BertForPreTraining"].save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def tokenizer() -> WordPiece:
    return WordPiece([*SPECIALS, *(f"w{n}" for n in range(ARCH.vocab_size - 5))])


def import_error(tensors: dict, arch: Arch = ARCH) -> str:
    with pytest.raises(InputError) as raised:
        hf.to_ours(tensors, arch, source="somewhere")
    assert str(raised.value).startswith("somewhere:\n")
    return str(raised.value)


# The engine.


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_bit_equal(models, kind: str):
    theirs = tensors_of(models[kind])
    params = hf.to_ours(theirs, ARCH, source="")
    heads = KINDS[kind][1]
    assert hf.heads_in(theirs) == heads
    shapes = param_shapes(ARCH, heads=heads)
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
    back = hf.to_theirs(params, ARCH)
    assert len(back) == len(list(models[kind].parameters()))
    prefix = "bert." if kind.startswith("BertModel") else ""
    for name, tensor in models[kind].named_parameters():
        np.testing.assert_array_equal(back.pop(prefix + name), tensor.detach().numpy())
    assert not back


def test_kernels_are_transposed_and_layers_stacked(tensors):
    params = hf.to_ours(tensors, ARCH, source="")
    kernels = params["stack"]["layers"]["ffn"]["inner"]["kernel"]
    assert kernels.shape == (2, 36, 50)
    for n in range(2):
        theirs = tensors[f"bert.encoder.layer.{n}.intermediate.dense.weight"]
        np.testing.assert_array_equal(kernels[n], theirs.T)
    np.testing.assert_array_equal(params["embed"]["token"][:211], tensors[TOKEN])
    np.testing.assert_array_equal(params["embed"]["token"][211:], 0)
    assert len(params["embed"]["token"]) == 256


def same(a: dict, b: dict) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_old_names(tensors):
    new = hf.to_ours(tensors, ARCH, source="")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    assert sum("gamma" in name for name in old) == 6
    old["bert.embeddings.position_ids"] = np.arange(40)[None]
    same(hf.to_ours(old, ARCH, source=""), new)


def test_a_tensor_under_two_names(tensors):
    both = {"embeddings.LayerNorm.gamma": tensors["bert.embeddings.LayerNorm.weight"]}
    message = "gamma is another name of bert.embeddings.LayerNorm.weight, which is"
    with pytest.raises(InputError, match=message):
        hf.to_ours(tensors | both, ARCH, source="")


def test_names_with_and_without_prefix(models):
    bare = tensors_of(models["BertModel"])
    assert not any(name.startswith("bert.") for name in bare)
    full = {f"bert.{name}": tensor for name, tensor in bare.items()}
    same(hf.to_ours(bare, ARCH, source=""), hf.to_ours(full, ARCH, source=""))


def test_tied_decoder_present_or_not(tensors):
    whole = hf.to_ours(tensors, ARCH, source="")
    for repeat, original in tables.BERT_TIED.items():
        pair = tensors | {repeat: tensors[original]}
        for left_out in (repeat, original):
            some = {name: value for name, value in pair.items() if name != left_out}
            same(hf.to_ours(some, ARCH, source=""), whole)


def test_tied_but_different(tensors):
    other = tensors[TOKEN].copy()
    other[5, 5] += 1e-6
    text = import_error(tensors | {DECODER: other})
    assert f"{DECODER} differs from {TOKEN}, to which it is tied" in text


def test_all_problems_are_listed_at_once(tensors):
    lost = [
        "bert.encoder.layer.1.attention.self.key.bias",
        "bert.pooler.dense.weight",
        "cls.predictions.transform.LayerNorm.bias",
    ]
    some = {name: value for name, value in tensors.items() if name not in lost}
    some["bert.encoder.layer.2.output.dense.bias"] = np.zeros(36, np.float32)
    some["classifier.weight"] = np.zeros((2, 36), np.float32)
    text = import_error(some)
    for name in lost:
        assert name in text.partition("unexpected")[0]
    listed = "bert.encoder.layer.2.output.dense.bias, classifier.weight"
    assert f"unexpected tensors: {listed}" in text


def test_a_transformer_with_more_layers_than_its_config_says(tensors):
    text = import_error(tensors, ARCH.but(layers=1))
    assert text.count("bert.encoder.layer.1.") == 16


def test_wrong_shapes_are_all_listed(tensors):
    text = import_error(tensors, ARCH.but(inner=51, vocab_size=210))
    assert f"{TOKEN} has shape (211, 36), config.json says (210, 36)" in text
    for n in range(2):
        name = f"bert.encoder.layer.{n}.intermediate.dense.weight"
        assert f"{name} has shape (50, 36), config.json says (51, 36)" in text


def test_a_parameter_without_a_name_is_not_exported(tensors):
    params = hf.to_ours(tensors, ARCH, source="")
    params["extra"] = {"one": np.zeros(1), "two": np.zeros(2)}
    with pytest.raises(InputError, match=r"no name in .*: extra/one, extra/two"):
        hf.to_theirs(params, ARCH)


# Reading directories.


def test_import_what_transformers_writes(saved: Path, tensors):
    arch, params = hf.import_model(saved)
    assert arch == ARCH
    same(params, hf.to_ours(tensors, ARCH, source=""))


def shard(directory: Path, *, names=("a.safetensors", "b.safetensors")) -> Path:
    """Splits model.safetensors in two with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    listed = sorted(tensors)
    parts = (listed[::2], listed[1::2])
    for name, part in zip(names, parts, strict=True):
        save_file({key: tensors[key] for key in part}, directory / name)
    index = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    return path


def test_shards(saved: Path, tensors):
    shard(saved)
    same(hf.import_model(saved)[1], hf.to_ours(tensors, ARCH, source=""))


@pytest.mark.parametrize("name", ["../x", "/tmp/x.safetensors", "sub/x.safetensors"])
def test_an_index_cannot_name_files_elsewhere(saved: Path, name: str):
    index = shard(saved)
    content = json.loads(index.read_text())
    content["weight_map"][TOKEN] = name
    index.write_text(json.dumps(content))
    with pytest.raises(InputError, match="outside its directory") as raised:
        hf.import_model(saved)
    assert repr(name) in str(raised.value)


def test_a_missing_shard(saved: Path):
    shard(saved)
    (saved / "b.safetensors").unlink()
    with pytest.raises(InputError, match=r"b\.safetensors is missing"):
        hf.import_model(saved)


def test_torch_file(saved: Path, tensors):
    (saved / "model.safetensors").unlink()
    halves = {name: torch.tensor(value) for name, value in tensors.items()}
    name = "cls.seq_relationship.bias"
    halves[name] = halves[name].bfloat16()
    torch.save(halves, saved / "pytorch_model.bin")
    params = hf.import_model(saved)[1]
    expected = hf.to_ours(tensors, ARCH, source="")
    expected["nsp"]["dense"]["bias"] = halves[name].float().numpy()
    same(params, expected)


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_not_run(saved: Path, tmp_path: Path):
    (saved / "model.safetensors").unlink()
    trace = tmp_path / "trace"
    pickle.loads(pickle.dumps(Malicious(trace)))
    assert trace.exists()  # it would work
    trace.unlink()
    torch.save({"weight": Malicious(trace)}, saved / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin .*holds more than") as e:
        hf.import_model(saved)
    assert not trace.exists()
    assert len(str(e.value)) < 500  # not the library's page of advice to switch it off


@pytest.mark.parametrize("content", [b"", b"not a pickle", None, {"a": 1}, [1, 2]])
def test_a_damaged_torch_file(saved: Path, tensors, content):
    (saved / "model.safetensors").unlink()
    path = saved / "pytorch_model.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is None:
        torch.save({TOKEN: torch.tensor(tensors[TOKEN])}, path)
        path.write_bytes(path.read_bytes()[:-100])
    else:
        torch.save(content, path)
    with pytest.raises(InputError, match=r"pytorch_model\.bin"):
        hf.import_model(saved)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_safetensors(saved: Path, keep: int):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        hf.import_model(saved)


def test_half_precision_safetensors(saved: Path, models):
    model = models["BertForPreTraining"]
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        model.to(torch.bfloat16).save_pretrained(saved)
        rounded = {name: value.float() for name, value in model.state_dict().items()}
    finally:
        model.float().load_state_dict(exact)
    expected = {name: value.numpy() for name, value in rounded.items()}
    params = hf.import_model(saved)[1]
    same(params, hf.to_ours(expected, ARCH, source=""))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


def test_no_weights(saved: Path):
    (saved / "model.safetensors").unlink()
    with pytest.raises(InputError, match="holds no weights"):
        hf.import_model(saved)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "roberta"}, "unknown model_type 'roberta'"),
        ({"model_type": None}, "unknown model_type 'None'"),
        ({"hidden_act": "silu"}, "unknown hidden_act 'silu'"),
        ({"hidden_act": ["gelu"]}, "unknown hidden_act"),
        ({"hidden_size": "36"}, "arch.width='36' is not of type int"),
        ({"num_hidden_layers": None}, "arch.layers=None is not of type int"),
        ({"layer_norm_eps": True}, "arch.norm_eps=True is not of type float"),
        ({"position_embedding_type": "relative_key"}, "only 'absolute' is a BERT"),
        ({"is_decoder": True}, "only encoders can be read"),
        ({"num_attention_heads": 5}, "arch.width=36 is not a multiple of arch.heads=5"),
    ],
)
def test_another_config(saved: Path, change: dict, text: str):
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=text):
        hf.import_model(saved)


def test_a_config_that_is_not_json(saved: Path):
    (saved / "config.json").write_text("{'a': 1}")
    with pytest.raises(InputError, match=r"config\.json is damaged, not JSON"):
        hf.import_model(saved)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_config_there_and_back(tmp_path: Path, activation: str):
    arch = ARCH.but(activation=activation)
    path = tmp_path / "config.json"
    hf.write_config(path, arch, reference="BertModel", pad_id=0)
    assert hf.read_arch(path) == arch
    theirs = transformers.BertConfig.from_pretrained(tmp_path).to_dict()
    for name, value in their_config(arch).to_dict().items():
        if name not in ("architectures", "dtype", "transformers_version"):
            assert theirs[name] == value, name


# Export.


@pytest.mark.parametrize("kind", list(KINDS)[:3])
def test_export(models, tokenizer, tmp_path: Path, kind: str):
    params = hf.to_ours(tensors_of(models[kind]), ARCH, source="")
    out = tmp_path / "made" / "model"
    difference = hf.export_model(out, params, ARCH, tokenizer)
    assert 0 <= difference < 1e-4
    wanted = {"config.json", "model.safetensors", "tokenizer.json"}
    wanted |= {"tokenizer_config.json", "vocab.txt"}
    assert {path.name for path in out.iterdir()} == wanted
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    assert out.stat().st_mode & 0o777 == 0o755
    auto, report = getattr(transformers, kind).from_pretrained(
        out, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in models[kind].named_parameters():
        assert torch.equal(auto.get_parameter(name), tensor), name
    same(hf.import_model(out)[1], params)
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words.model_max_length == ARCH.max_positions
    assert words("w7 w0")["input_ids"] == [2, 12, 5, 3]
    assert words.vocab_size == ARCH.vocab_size


@pytest.fixture(scope="module")
def params() -> dict:
    return fresh_params(ARCH)


def nothing_left(out: Path) -> bool:
    return not out.exists() and not list(out.parent.iterdir())


def test_export_into_an_empty_directory(params, tokenizer, tmp_path: Path):
    (tmp_path / "out").mkdir()
    hf.export_model(tmp_path / "out", params, ARCH, tokenizer)
    assert (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_export_overwrites_nothing(params, tokenizer, tmp_path: Path, kind: str):
    out = tmp_path / "out"
    mine = out if kind == "file" else out / "mine"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(InputError, match="out exists already"):
        hf.export_model(out, params, ARCH, tokenizer)
    assert mine.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [out]


def test_export_with_another_tokenizer(params, tmp_path: Path):
    small = WordPiece([*SPECIALS, "a"])
    with pytest.raises(InputError, match="tokenizer has 6 pieces, the weights 211"):
        hf.export_model(tmp_path / "out", params, ARCH, small)
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize("heads", [("nsp", "pooler"), ("lm", "pooler")])
def test_export_of_heads_no_class_has(params, tokenizer, tmp_path: Path, heads):
    some = {name: params[name] for name in ("embed", "stack", *heads)}
    with pytest.raises(InputError, match="no reference class has just the heads"):
        hf.export_model(tmp_path / "out", some, ARCH, tokenizer)
    assert nothing_left(tmp_path / "out")


def wrong_transpose(theirs: dict) -> dict:
    name = "bert.encoder.layer.1.attention.self.value.weight"
    return theirs | {name: np.ascontiguousarray(theirs[name].T)}


def wrong_number(theirs: dict) -> dict:
    name = "cls.predictions.bias"
    return theirs | {name: theirs[name] + np.float32(2e-4)}


def lost_tensor(theirs: dict) -> dict:
    return {name: theirs[name] for name in theirs if "pooler" not in name}


def extra_tensor(theirs: dict) -> dict:
    return theirs | {"classifier.bias": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (wrong_transpose, "PyTorch computes other logits"),
        (wrong_number, "PyTorch computes other logits"),
        (lost_tensor, "transformers did not match: bert.pooler.dense.bias"),
        (extra_tensor, "transformers did not match: classifier.bias"),
    ],
)
def test_a_wrong_export_leaves_nothing(
    params, tokenizer, tmp_path: Path, monkeypatch, error, text: str
):
    right = hf.to_theirs
    monkeypatch.setattr(hf, "to_theirs", lambda *args: error(right(*args)))
    with pytest.raises(InputError, match=text):
        hf.export_model(tmp_path / "out", params, ARCH, tokenizer)
    assert nothing_left(tmp_path / "out")


def test_not_a_number_is_not_exported(params, tokenizer, tmp_path: Path):
    bias = np.full(36, np.nan, np.float32)
    params = params | {"pooler": {"dense": params["pooler"]["dense"] | {"bias": bias}}}
    with pytest.raises(InputError, match="PyTorch computes other logits"):
        hf.export_model(tmp_path / "out", params, ARCH, tokenizer)
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize("where", ["save_file", "write_config", "verify"])
@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (OSError("disk full"), InputError, "out could not be written: disk full"),
        (SafetensorError("no room"), (InputError, SafetensorError), "no room"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_an_interrupted_export_leaves_nothing(
    params, tokenizer, tmp_path: Path, monkeypatch, where: str, error, raised, text
):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(hf, where, fail)
    with pytest.raises(raised, match=text):
        hf.export_model(tmp_path / "out", params, ARCH, tokenizer)
    assert nothing_left(tmp_path / "out")


def test_export_without_torch(params, tokenizer, tmp_path: Path, monkeypatch):
    real_import = builtins.__import__

    def no_torch(name, *args):
        if name.split(".")[0] == "torch":
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    assert hf.export_model(tmp_path / "out", params, ARCH, tokenizer) is None
    monkeypatch.undo()
    same(hf.import_model(tmp_path / "out")[1], params)


def test_a_torch_file_without_torch(saved: Path, monkeypatch):
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    real_import = builtins.__import__

    def no_torch(name, *args):
        if name == "torch":
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(InputError, match=r"needs PyTorch .* pip install"):
        hf.import_model(saved)
