"""Directories of transformers: read whatever form they have, written whole or not."""

import builtins
import json
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import bert_jax
from bert_jax.convert import files, hf
from bert_jax.convert.engine import to_ours
from bert_jax.convert.tables import LAYOUTS
from bert_jax.data.tokenizers import SPECIALS, WordPiece
from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from tests.convert.test_members import make_params
from tests.reference import HEADS, tensors_of, their_config

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
BERT = LAYOUTS["bert"]
TOKEN = "bert.embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    model = transformers.BertForPreTraining._from_config(their_config(ARCH)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def saved_once(reference, tmp_path_factory) -> Path:
    """A directory as transformers writes it."""
    folder = tmp_path_factory.mktemp("models") / "saved"
    reference.save_pretrained(folder)
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    folder = tmp_path / "saved"
    folder.mkdir()
    for path in saved_once.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def whole(reference) -> dict:
    return ours(tensors_of(reference))


@pytest.fixture(scope="module")
def tokenizer() -> WordPiece:
    return WordPiece([*SPECIALS, *(f"w{n}" for n in range(ARCH.vocab_size - 5))])


@pytest.fixture(scope="module")
def params() -> dict:
    return make_params(ARCH, heads=HEADS)


@pytest.fixture(scope="module")
def with_order() -> dict:
    return make_params(ARCH, heads=(*HEADS, "sop"))


def ours(tensors: dict[str, np.ndarray]) -> dict:
    return to_ours(tensors, ARCH, BERT, source="the reference")


def check_same(a: dict, b: dict) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def change_config(folder: Path, change: dict) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


# Reading: weights.


def test_import_what_transformers_writes(saved_once: Path, whole):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arch, params, layout = hf.import_model(saved_once)
    assert arch == ARCH
    assert layout is BERT
    check_same(params, whole)


def save_torch(model, folder: Path, *, files: int) -> None:
    tensors = model.state_dict()
    if files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    where = {name: f"part-{n % files}.bin" for n, name in enumerate(tensors)}
    for file in set(where.values()):
        torch.save({n: tensors[n] for n in tensors if where[n] == file}, folder / file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("whole", "float16"),
        ("whole", "bfloat16"),
        ("shards", "float32"),
        ("shards", "bfloat16"),
        ("pickle", "float16"),
        ("pickled shards", "float32"),
    ],
)
def test_every_form_of_weights(reference, saved: Path, form: str, dtype: str):
    (saved / "model.safetensors").unlink()
    config = transformers.BertConfig.from_pretrained(saved)
    model = transformers.BertForPreTraining(config)
    model.load_state_dict(reference.state_dict())
    model.to(getattr(torch, dtype))
    match form:
        case "whole":
            model.save_pretrained(saved)
        case "shards":
            model.save_pretrained(saved, max_shard_size="20KB")
            assert len(list(saved.glob("model-*.safetensors"))) > 1
        case "pickle":
            save_torch(model, saved, files=1)
        case "pickled shards":
            save_torch(model, saved, files=3)
    params = hf.import_model(saved)[1]
    stored = {name: value.float().numpy() for name, value in model.state_dict().items()}
    check_same(params, ours(stored))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


def test_a_pickle_with_a_shape(saved: Path):
    """Tensors and more than that: nothing of it is used."""
    (saved / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(2), "shape": (2,)}, saved / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin .*more than tensors"):
        hf.import_model(saved)


def test_no_weights(saved: Path):
    (saved / "model.safetensors").unlink()
    with pytest.raises(InputError, match="holds no weights"):
        hf.import_model(saved)


def test_no_config(saved: Path):
    (saved / "config.json").unlink()
    with pytest.raises(InputError, match="saved holds neither a config.json nor a Ten"):
        hf.import_model(saved)
    with pytest.raises(InputError, match="saved is neither a workdir nor a Hugging"):
        bert_jax.load(saved)


def test_weights_of_another_type(saved: Path):
    """A BERT that says it is a RoBERTa."""
    change_config(saved, {"model_type": "roberta", "hidden_act": "gelu"})
    with pytest.raises(InputError) as raised:
        hf.import_model(saved)
    wanted, _, unknown = str(raised.value).partition("unexpected tensors")
    assert "roberta.embeddings.word_embeddings.weight" in wanted
    assert TOKEN in unknown


def test_a_class_that_is_not_known(saved: Path):
    """Its type is, but not what it has besides."""
    path = saved / "model.safetensors"
    save_file(load_file(path) | {"ranker.weight": np.ones((2, 36), "f4")}, path)
    change_config(saved, {"architectures": ["BertForRanking"]})
    with pytest.raises(InputError) as raised:
        bert_jax.load(saved)
    text = "unexpected tensors: ranker.weight\nBertForRanking is not among the known cl"
    assert text in str(raised.value)


def test_more_pieces_than_the_embedding_has(saved: Path):
    change_config(saved, {"vocab_size": 212})
    text = rf"{TOKEN} has shape \(211, 36\), config.json says \(212, 36\)"
    with pytest.raises(InputError, match=text):
        hf.import_model(saved)


def test_a_tokenizer_of_another_size(saved: Path):
    WordPiece([*SPECIALS, "a"]).save(saved)
    model = bert_jax.load(saved)
    text = "the tokenizer has 6 pieces, the weights in .* have 211"
    with pytest.raises(InputError, match=text):
        _ = model.tokenizer


# Reading: config.json.


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "bart"}, "unknown model_type 'bart'.* Valid: albert, bert, "),
        ({"model_type": "roberto"}, "unknown model_type 'roberto'. Did you mean rob"),
        ({"model_type": ["bert"]}, "unknown model_type"),
        ({"model_type": None}, "config.json has no model_type, .* add one of albert"),
        ({"hidden_act": "silu"}, "unknown hidden_act 'silu'"),
        ({"hidden_act": ["gelu"]}, "unknown hidden_act"),
        ({"hidden_size": "36"}, "in our names.*arch.width='36' is not of type int"),
        ({"num_hidden_layers": None}, "arch.layers=None is not of type int"),
        ({"layer_norm_eps": True}, "arch.norm_eps=True is not of type float"),
        ({"hidden_dropout_prob": 1.5}, "arch.dropout=1.5 must be in"),
        ({"position_embedding_type": "relative_key"}, "only 'absolute' can be read"),
        ({"is_decoder": True}, "is_decoder=True: only False can be read"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map="),
        ({"id2label": 5}, "id2label=5: names by their numbers"),
        ({"num_labels": "two", "id2label": None}, "arch.labels='two' is not of type"),
        ({"num_attention_heads": 5}, "arch.width=36 is not a multiple of arch.heads=5"),
        (
            {"is_decoder": True, "hidden_act": "silu"},
            "is_decoder=True: .*\nunknown hidden_act",
        ),
    ],
)
def test_another_config(saved: Path, change: dict, text: str):
    change_config(saved, change)
    with pytest.raises(InputError, match=text) as raised:
        hf.import_model(saved)
    assert str(saved / "config.json") in str(raised.value)


@pytest.mark.parametrize("value", [None, [], "BertForPreTraining", 5, [5], ["Other"]])
def test_other_architectures(saved: Path, whole, value):
    change_config(saved, {"architectures": value})
    check_same(hf.import_model(saved)[1], whole)


def test_a_config_that_is_not_json(saved: Path):
    (saved / "config.json").write_text("{'a': 1}")
    with pytest.raises(InputError, match=r"config\.json is damaged, not JSON"):
        hf.import_model(saved)


def test_unknown_fields_make_one_warning(saved: Path, whole):
    strange = {"rotary": True, "window_layers": [1]}
    idle = {"_private": 1, "task_specific_params": {"a": 1}, "use_cache": False}
    change_config(saved, strange | idle | {"": None})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arch, params, _ = hf.import_model(saved)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert str(saved / "config.json") in text
    assert all(name in text for name in strange)
    assert not any(name in text for name in idle)
    assert arch == ARCH
    check_same(params, whole)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_config_there_and_back(tmp_path: Path, activation: str):
    arch = ARCH.but(activation=activation)
    config = hf.config_of(arch, BERT, ("pooler",), pad_id=0)
    assert hf.read_arch(config, source="") == (arch, BERT)
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.BertConfig.from_pretrained(tmp_path).to_dict()
    for name, value in their_config(arch).to_dict().items():
        if name not in ("architectures", "dtype", "transformers_version"):
            assert theirs[name] == value, name
    assert theirs["architectures"] == ["BertModel"]


# Export.


@pytest.mark.parametrize("kind", ["BertForPreTraining", "BertModel"])
def test_export(reference, tokenizer, tmp_path: Path, kind: str):
    model = reference if kind == "BertForPreTraining" else reference.bert
    params = ours(tensors_of(model))
    out = tmp_path / "made" / "model"
    done = hf.export_model(out, params, ARCH, tokenizer)
    assert (done.reference, done.unverified, done.extra) == (kind, "", ())
    assert 0 <= done.difference < 1e-4
    wanted = {"config.json", "model.safetensors", "tokenizer.json"}
    wanted |= {"tokenizer_config.json", "vocab.txt"}
    assert {path.name for path in out.iterdir()} == wanted
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    assert out.stat().st_mode & 0o777 == 0o755
    auto, report = getattr(transformers, kind).from_pretrained(
        out, output_loading_info=True
    )
    assert not any(report.values())
    for name, tensor in model.named_parameters():
        assert torch.equal(auto.get_parameter(name), tensor), name
    arch, back, _ = hf.import_model(out)
    assert arch == ARCH
    check_same(back, params)
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words.model_max_length == ARCH.max_positions
    assert words("w7 w0")["input_ids"] == [2, 12, 5, 3]
    assert words.vocab_size == ARCH.vocab_size


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


def test_export_with_padding_in_another_place(params, tokenizer, tmp_path: Path):
    """RoBERTa counts positions from padding's id, which transformers reads."""
    arch = ARCH.but(position_offset=2, max_positions=42, activation="gelu")
    text = "position_offset=2 is one more than the id of padding in a roberta, and .* 0"
    with pytest.raises(InputError, match=text):
        hf.export_model(tmp_path / "out", params, arch, tokenizer, layout="roberta")
    assert nothing_left(tmp_path / "out")


def test_export_of_what_the_class_does_not_compute(params, tokenizer, tmp_path: Path):
    arch = ARCH.but(order="causal")
    with pytest.raises(InputError, match="arch.order='causal': bert has 'all'"):
        hf.export_model(tmp_path / "out", params, arch, tokenizer)
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize(
    ("heads", "reference", "extra"),
    [
        (("pooler", "nsp"), "BertForNextSentencePrediction", ()),
        (("lm", "pooler"), "BertForMaskedLM", ("pooler",)),
        (("lm", "pooler", "sop"), "BertForMaskedLM", ("pooler", "sop")),
    ],
)
def test_export_of_heads(with_order, tokenizer, tmp_path, heads, reference, extra):
    some = {name: with_order[name] for name in ("embed", "stack", *heads)}
    done = hf.export_model(tmp_path / "out", some, ARCH, tokenizer)
    assert done.reference == reference
    names = [f"{head}/dense/{part}" for head in extra for part in ("bias", "kernel")]
    assert list(done.extra) == names
    assert (tmp_path / "out/extra.safetensors").exists() == bool(extra)
    check_same(hf.import_model(tmp_path / "out")[1], some)


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

    def wrong(*args, **options):
        theirs, rest = right(*args, **options)
        return error(theirs), rest

    monkeypatch.setattr(hf, "to_theirs", wrong)
    with pytest.raises(InputError, match=text):
        hf.export_model(tmp_path / "out", params, ARCH, tokenizer)
    assert nothing_left(tmp_path / "out")


def test_not_a_number_is_not_exported(params, tokenizer, tmp_path: Path):
    bias = np.full(36, np.nan, np.float32)
    params = params | {"pooler": {"dense": params["pooler"]["dense"] | {"bias": bias}}}
    with pytest.raises(InputError, match="PyTorch computes other logits"):
        hf.export_model(tmp_path / "out", params, ARCH, tokenizer)
    assert nothing_left(tmp_path / "out")


STEPS = {
    "write_safetensors": hf,
    "save_file": files,
    "config_of": hf,
    "set_max_length": hf,
    "check_export": hf,
}


@pytest.mark.parametrize("where", STEPS)
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

    monkeypatch.setattr(STEPS[where], where, fail)
    with pytest.raises(raised, match=text):
        hf.export_model(tmp_path / "out", params, ARCH, tokenizer)
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_export_without_torch(params, tokenizer, tmp_path, monkeypatch, library: str):
    real_import = builtins.__import__

    def without(name, *args):
        if name.split(".")[0] == library:
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    done = hf.export_model(tmp_path / "out", params, ARCH, tokenizer)
    monkeypatch.undo()
    assert done.difference is None
    assert done.unverified == "it is not installed (pip install 'bert_jax[torch]')"
    check_same(hf.import_model(tmp_path / "out")[1], params)


def test_tied_tensors_are_written_once(params, tokenizer, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(hf, "check_export", lambda *args: (None, "not asked"))
    hf.export_model(tmp_path / "out", params, ARCH, tokenizer)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors[TOKEN].shape == (211, 36)  # without our padding
    assert not set(BERT.repeats(ARCH, HEADS)) & set(tensors)
