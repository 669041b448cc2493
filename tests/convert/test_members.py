"""Every member from a directory of transformers and back to one.

load, the same outputs; export, nothing missing and nothing unexpected; load again, the
same bits. NEZHA and Transformer-XL come from the stored numbers of release 4.57.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import bert_jax
from bert_jax.cli import main
from bert_jax.convert import hf
from bert_jax.convert.engine import BY_PIECE
from bert_jax.convert.tables import LAYOUTS
from bert_jax.data.tokenizers import SPECIALS, WordBPE, WordPiece, train_bpe
from bert_jax.errors import InputError
from bert_jax.fill import fill
from bert_jax.model_dir import LoadedModel
from bert_jax.models.arch import Arch
from bert_jax.models.heads import heads_of
from bert_jax.models.model import Model, param_shapes, path_name
from tests import goldens
from tests.convert.test_tables import LIVE, SMALL, config_class
from tests.reference import OUTPUT, excess

V = 37
MEMBERS = [n for n, (kind, _) in SMALL.items() if kind in LIVE and "," not in n]
OTHER_CLASSES = {  # where the one with the LM head does not show all
    "electra": ("rtd",),
    "gpt2": ("classify",),
    "roberta": ("pooler", "choice"),
}


@pytest.fixture
def step_by_step(monkeypatch):
    """No member is compiled as a whole: the steps that they share compile sooner."""

    def forward(model: LoadedModel, capture: tuple[str, ...], slots: int):
        def apply(params, tokens):
            options = {"heads": model.heads, "capture": capture}
            with jax.default_matmul_precision("highest"):  # as in `verify`
                return Model(model.arch).apply({"params": params}, tokens, **options)

        return apply

    monkeypatch.setattr(LoadedModel, "forward", forward)


def make_tokenizer(size: int, *, pad_id: int = 0) -> WordPiece:
    """Some pieces, with padding where RoBERTa counts its positions from."""
    words = [f"w{n}" for n in range(size - len(SPECIALS))]
    return WordPiece([*words[:pad_id], *SPECIALS, *words[pad_id:]])


def make_model(name: str, heads: tuple[str, ...]):
    """A model of theirs with parameters that are all different from zero and one."""
    kind, config = SMALL[name]
    if not {"classify", "tag"} & set(heads):
        config = {key: value for key, value in config.items() if key != "id2label"}
    if "pad_token_id" in LAYOUTS[kind].odd:  # as many tokens as the others take
        config = config | {"max_position_embeddings": 21}
    torch.manual_seed(0)
    cls = getattr(transformers, LAYOUTS[kind].classes[heads])
    pad = {"pad_token_id": 1 if "pad_token_id" in LAYOUTS[kind].odd else 0}
    model = cls._from_config(
        config_class(kind)(**config, **pad), attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.tie_weights()
    return model


def make_params(arch: Arch, **options) -> dict:
    """Random parameters of ours; the surplus of the vocabulary is zero."""
    rng = np.random.default_rng(0)

    def draw(path, leaf) -> np.ndarray:
        values = rng.normal(0, 0.3, leaf.shape).astype(np.float32)
        if path_name(path).endswith(BY_PIECE):
            values[arch.vocab_size :] = 0
        return values

    return jax.tree_util.tree_map_with_path(draw, param_shapes(arch, **options))


def same_rows(model: LoadedModel) -> dict[str, np.ndarray]:
    """Rows, some of them padded, as keywords that both sides know.

    Of the size that `verify` takes: what it compiles step by step serves here too.
    """
    rng, arch = np.random.default_rng(0), model.arch
    S = min(32, arch.max_length or 32)
    real = np.arange(S) < np.array([[S], [S - 3], [2], [S // 2]])
    ids = rng.integers(6, V, real.shape)
    given = {
        "input_ids": np.where(real, ids, max(0, arch.position_offset - 1)),
        "attention_mask": real.astype(int),
    }
    if arch.types > 1:
        given["token_type_ids"] = rng.integers(0, 2, real.shape)
    if arch.task_types:
        given["task_type_ids"] = rng.integers(0, arch.task_types, real.shape)
    if arch.attention == "window":
        given["global_attention_mask"] = (rng.random(real.shape) < 0.3) * real
    return given


def check_outputs(model: LoadedModel, reference, heads: tuple[str, ...]) -> None:
    """Every hidden state and the logits of heads, at real positions."""
    given = same_rows(model)
    real = given["attention_mask"] > 0
    several = "choice" in heads
    inputs = {
        name: torch.tensor(value.astype(np.int64)).reshape(
            (2, 2, -1) if several else value.shape
        )
        for name, value in given.items()
    }
    with torch.no_grad():
        theirs = reference(**inputs, output_hidden_states=True)
    ours = model(**given)
    states = [state.reshape(*real.shape, -1).numpy() for state in theirs.hidden_states]
    assert len(ours["hidden"]) == len(states) == model.arch.layers + 1
    for a, b in zip(ours["hidden"], states, strict=True):
        assert excess(a[real], b[real], **OUTPUT) <= 1
    for head in set(heads) - {"pooler"}:
        name = {"lm": "logits"}.get(head, f"{head}_logits")
        field = {
            "lm": "prediction_logits",
            "nsp": "seq_relationship_logits",
            "sop": "sop_logits",
        }.get(head, "")
        b = getattr(theirs, field, theirs.get("logits")).numpy()
        a = np.asarray(ours[name])
        if several:
            b = b.reshape(a.shape)
        assert a.shape == b.shape
        if a.shape[:2] == real.shape:
            a, b = a[real], b[real]
        if head != "classify" or model.arch.pool_from == "first":
            assert excess(a, b, **OUTPUT) <= 1
        else:  # theirs takes the last one of a row, be it padding or not
            assert excess(a[:1], b[:1], **OUTPUT) <= 1


def check_same(a: dict, b: dict) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def lm_class(kind: str) -> tuple[str, ...]:
    """The largest class with an LM head."""
    with_lm = [c for c in LAYOUTS[kind].classes if "lm" in c and "choice" not in c]
    return max(with_lm, key=len)


@pytest.mark.usefixtures("step_by_step")
@pytest.mark.parametrize(
    ("name", "heads"),
    [
        *((name, lm_class(SMALL[name][0])) for name in MEMBERS),
        *OTHER_CLASSES.items(),
    ],
)
def test_there_and_back(name: str, heads: tuple[str, ...], tmp_path: Path):
    kind = SMALL[name][0]
    layout, reference = LAYOUTS[kind], make_model(name, heads)
    reference.save_pretrained(tmp_path / "theirs")
    model = bert_jax.load(tmp_path / "theirs")
    assert model.preset.layout == kind
    bare = ("lm",) if model.arch.lm_head == "bare" else ()
    assert set(model.heads) == {*heads, *bare}
    check_outputs(model, reference, heads)

    tokenizer = make_tokenizer(V, pad_id=max(0, model.arch.position_offset - 1))
    out = tmp_path / "ours"
    done = hf.export_model(out, model.params, model.arch, tokenizer, layout=kind)
    assert done.reference == layout.classes[heads] == type(reference).__name__
    assert done.difference < 1e-5
    assert (done.unverified, done.extra) == ("", ())
    back, report = type(reference).from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    state = back.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for key, tensor in reference.state_dict().items():
        assert torch.equal(state[key], tensor), key
    config = transformers.AutoConfig.from_pretrained(out)
    assert config.architectures == [done.reference]

    again = bert_jax.load(out)
    assert again.arch == model.arch
    assert again.tokenizer.hash == tokenizer.hash
    check_same(again.params, model.params)


# Members that transformers no longer has: the naming of 4.57, not verified.

STORED = {
    ("nezha", "clipped"): ("pretraining", "NezhaForPreTraining"),
    ("nezha", "far"): ("pretraining", "NezhaForPreTraining"),
    ("transfo_xl", "clamped"): ("lm", "TransfoXLLMHeadModel"),
    ("transfo_xl", "untied"): ("lm", "TransfoXLLMHeadModel"),
}


@pytest.mark.parametrize(("member", "which"), STORED)
def test_stored_there_and_back(member: str, which: str, tmp_path: Path, capsys):
    kind, reference = STORED[member, which]
    arrays = goldens.load(member)[which]
    theirs, out = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    stored = json.loads(str(arrays[f"config/{kind}"]))
    if member == "transfo_xl":
        stored["mem_len"] = 0  # what it remembers is asked for, not a part of it
    (theirs / "config.json").write_text(json.dumps(stored))
    tensors = goldens.tensors_of(arrays, kind)
    save_file(tensors, theirs / "model.safetensors")
    model = bert_jax.load(theirs)
    make_tokenizer(model.arch.vocab_size).save(theirs)
    if member == "nezha":
        given, want = (goldens.below(arrays, f"{x}/right") for x in ("in", "out"))
        real = given["real"]
        found = model(given["ids"], given["types"], real.astype(int))
        logits, wanted = np.asarray(found["logits"])[real], want["lm"][real]
    else:
        given, want = (goldens.below(arrays, f"{x}/first") for x in ("in", "out"))
        real = np.ones(given["ids"].shape, bool)
        found = model(given["ids"])
        logits, wanted = jax.nn.log_softmax(found["logits"]), want["log_probs"]
    assert excess(logits, wanted, **OUTPUT) <= 1
    for a, b in zip(found["hidden"], want["hidden"], strict=True):
        assert excess(a[real], b[real], **OUTPUT) <= 1

    main(["export", str(theirs), str(out)])
    printed = capsys.readouterr().out
    assert f"to {out} as {reference}, NOT verified by PyTorch: its class" in printed
    assert "transformers 4.57" in printed
    written = load_file(out / "model.safetensors")
    repeats = LAYOUTS[model.preset.layout].repeats(model.arch, model.heads)
    assert {*written} - {*repeats} == {*tensors} - {*repeats}
    for name in {*tensors} & {*written}:
        np.testing.assert_array_equal(written[name], tensors[name])
    # Loading breaks Transformer-XL's ties, so that each tensor must be there.
    assert {*written} & {*repeats} == (set() if member == "nezha" else {*repeats})
    for name in {*written} & {*repeats}:
        np.testing.assert_array_equal(written[name], written[repeats[name]])
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [reference]
    same = set(config) & set(stored) - {"pad_token_id", "torch_dtype", "label2id"}
    assert len(same) > 12
    assert {name: config[name] for name in same} == {
        name: stored[name] for name in same
    }
    again = bert_jax.load(out)
    assert again.arch.but(labels=2) == model.arch.but(labels=2)
    check_same(again.params, model.params)


def test_fill_with_nezha(tmp_path: Path):
    """No torch to compare with: the best piece is the one of the logits."""
    arrays = goldens.load("nezha")["clipped"]
    (tmp_path / "config.json").write_text(str(arrays["config/pretraining"]))
    tensors = goldens.tensors_of(arrays, "pretraining")
    save_file(tensors, tmp_path / "model.safetensors")
    make_tokenizer(97).save(tmp_path)
    model = bert_jax.load(tmp_path)
    (guesses,) = fill(model, "w3 [MASK] w5 w6")
    ids = [2, 8, 4, 10, 11, 3]
    logits = np.asarray(model([ids])["logits"])[0, 2]
    assert [guess["id"] for guess in guesses] == np.argsort(-logits)[:5].tolist()


# Parameters that no class knows.

EXTRA = {  # name: heads, the class, what it does not know
    "bert": (("lm", "pooler", "nsp", "sop", "tag"), "BertForPreTraining", "sop tag"),
    "roberta": (("lm", "pooler"), "RobertaForMaskedLM", "pooler"),
    "distilbert": (("rtd", "span"), "DistilBertForQuestionAnswering", "rtd"),
    "albert": (("lm", "rtd"), "AlbertForMaskedLM", "rtd"),
    "openai-gpt": (("tag",), "OpenAIGPTLMHeadModel", "tag"),
    "nezha": (("lm", "span"), "NezhaForMaskedLM", "span"),
}


@pytest.mark.parametrize("name", EXTRA)
def test_what_no_class_knows_comes_back(name, tmp_path: Path, capsys, monkeypatch):
    heads, reference, unknown = EXTRA[name]
    kind, config = SMALL[name]
    arch, _ = hf.read_arch(config | {"model_type": kind}, source="")
    params = make_params(arch, heads=heads)
    tokenizer = make_tokenizer(V, pad_id=max(0, arch.position_offset - 1))
    first, second = tmp_path / "first", tmp_path / "second"
    if name != "bert":
        monkeypatch.setattr(hf, "check_export", lambda *args: (None, "not asked"))
    done = hf.export_model(first, params, arch, tokenizer, layout=kind)
    assert done.reference == reference
    assert {path.split("/")[0] for path in done.extra} == set(unknown.split())
    assert list(done.extra) == sorted(load_file(first / "extra.safetensors"))
    if kind in LIVE:
        cls = getattr(transformers, reference)
        _, report = cls.from_pretrained(first, output_loading_info=True)
        assert not any(report.values())
    model = bert_jax.load(first)
    assert model.heads == heads_of(params, arch)
    check_same(model.params, params)
    labels = arch.labels if {"classify", "tag"} & {*heads} else 2
    assert model.arch == arch.but(labels=labels)

    monkeypatch.setattr(hf, "check_export", lambda *args: (None, "not asked"))
    main(["export", str(first), str(second)])
    printed = capsys.readouterr().out
    assert f"in extra.safetensors, since {reference} has no place for them, " in printed
    assert "not verified by PyTorch: " in printed
    assert all(path in printed for path in done.extra)
    check_same(bert_jax.load(second).params, params)


def test_a_second_tower_comes_back(tmp_path: Path):
    """ELECTRA's generator beside the discriminator."""
    arch, _ = hf.read_arch(SMALL["electra"][1] | {"model_type": "electra"}, source="")
    small = arch.but(width=6, inner=8)
    towers, heads = (("generator", small),), ("rtd", "generator/lm")
    params = make_params(arch, heads=heads, towers=towers)
    out = tmp_path / "out"
    done = hf.export_model(out, params, arch, make_tokenizer(V), layout="electra")
    assert done.reference == "ElectraForPreTraining"
    assert {path.split("/")[0] for path in done.extra} == {"generator"}
    loaded = bert_jax.load(out)
    assert loaded.heads == ("rtd",)
    check_same(loaded.params, params)
    assert loaded([[3, 4]])["rtd_logits"].shape == (1, 2)


@pytest.mark.parametrize(
    "heads", [("lm",), ("pooler", "classify"), ("span",), ("pooler", "choice")]
)
def test_global_tokens_that_a_longformer_chooses(heads, tmp_path: Path):
    """None, the first, the question, or what follows it: as its classes do."""
    reference = make_model("longformer", heads)
    reference.config.sep_token_id = 4
    reference.save_pretrained(tmp_path)
    make_tokenizer(V, pad_id=1).save(tmp_path)
    model = bert_jax.load(tmp_path)
    assert model.tokenizer.sep_id == 4
    ids = np.random.default_rng(0).integers(6, V, (2, 16))
    ids[0, [5, 6, 15]] = ids[1, [3, 4, 15]] = 4
    given = torch.tensor(ids)
    with torch.no_grad():
        theirs = reference(
            given[None] if "choice" in heads else given, output_hidden_states=True
        ).hidden_states
    ours = model(ids)["hidden"]
    assert excess(ours[-1], theirs[-1].numpy(), **OUTPUT) <= 1
    if heads != ("lm",):  # they were not looked at in vain
        none = model(ids, global_attention_mask=np.zeros_like(ids))["hidden"]
        assert excess(none[-1], theirs[-1].numpy(), **OUTPUT) > 1
    if {"span", "choice"} & set(heads):
        ids[0, 5] = 7
        with pytest.raises(InputError, match="the question cannot be found: rows are"):
            model(ids)


def test_more_global_tokens_than_slots(tmp_path: Path, monkeypatch):
    reference = make_model("longformer", ("lm",))
    reference.save_pretrained(tmp_path)
    model = bert_jax.load(tmp_path)
    few = dataclasses.replace(model.preset, arch=model.arch.but(global_slots=2))
    model = dataclasses.replace(model, preset=few)
    ids = np.random.default_rng(0).integers(6, V, (2, 16))
    widely = np.zeros_like(ids)
    widely[0, :7] = widely[1, 3] = 1
    ours = model(ids, global_attention_mask=widely)["hidden"]
    with torch.no_grad():
        theirs = reference.base_model(
            torch.tensor(ids), global_attention_mask=torch.tensor(widely)
        ).last_hidden_state
    assert excess(ours[-1], theirs.numpy(), **OUTPUT) <= 1


def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path):
    """Else GPT-2 would wait for piece 50256 to end a text."""
    text = ["the cat likes the red house " * 9]
    tokenizer = train_bpe(text, vocab_size=260, style="gpt2", progress=False)
    arch, _ = hf.read_arch(SMALL["gpt2"][1] | {"model_type": "gpt2"}, source="")
    arch = arch.but(vocab_size=260, labels=2)
    params = make_params(arch, heads=("lm",))
    hf.export_model(tmp_path / "out", params, arch, tokenizer, layout="gpt2")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.eos_token_id == config.bos_token_id == tokenizer.sep_id == 259
    assert bert_jax.load(tmp_path / "out").arch == arch


def test_labels_keep_their_names(tmp_path: Path):
    names = ("sad", "so <so>", "好")
    config = SMALL["bert"][1] | {"id2label": dict(enumerate(names))}
    reference = transformers.BertForSequenceClassification(
        config_class("bert")(**config)
    )
    reference.save_pretrained(tmp_path / "theirs")
    make_tokenizer(V).save(tmp_path / "theirs")
    assert bert_jax.load(tmp_path / "theirs").labels == names
    main(["export", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    assert config.id2label == dict(enumerate(names))


@pytest.mark.parametrize("spoil", ["cut", "shape", "name"])
def test_extra_that_is_damaged(spoil: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(hf, "check_export", lambda *args: (None, "not asked"))
    arch, _ = hf.read_arch(SMALL["bert"][1] | {"model_type": "bert"}, source="")
    params = make_params(arch, heads=("lm", "span"))
    hf.export_model(tmp_path / "out", params, arch, make_tokenizer(V))
    path = tmp_path / "out/extra.safetensors"
    if spoil == "cut":
        path.write_bytes(path.read_bytes()[:-1])
        text = r"extra\.safetensors is damaged"
    else:
        extra = load_file(path)
        bias = extra.pop("lm/bias", None)
        assert bias is None
        bias = extra.pop("span/dense/bias")
        text = "missing tensors: span/dense/bias\nunexpected tensors: span/bias"
        extra |= {"span/bias": bias}
        if spoil == "shape":
            extra = {"span/dense/kernel": extra["span/dense/kernel"][:2]}
            extra |= {"span/dense/bias": bias}
            text = r"span/dense/kernel has shape \(2, 2\), config.json says \(15, 2\)"
        save_file(extra, path)
    with pytest.raises(InputError, match=text):
        bert_jax.load(tmp_path / "out")


def test_the_boundary_head_is_named_as_released(tmp_path: Path, monkeypatch):
    """SpanBERT's, which no class of transformers has."""
    monkeypatch.setattr(hf, "check_export", lambda *args: (None, "not asked"))
    arch, _ = hf.read_arch(SMALL["bert"][1] | {"model_type": "bert"}, source="")
    arch = arch.but(labels=2)
    params = make_params(arch, heads=("lm", "sbo"))
    done = hf.export_model(tmp_path / "out", params, arch, make_tokenizer(V))
    assert done.reference == "BertForMaskedLM"
    released = "cls.pair_target_predictions."
    assert all(name.startswith(released) for name in done.extra)
    assert f"{released}mlp_layer_norm.linear1.weight" in done.extra
    assert load_file(tmp_path / "out/extra.safetensors")[f"{released}bias"].shape == (
        V,
    )
    model = bert_jax.load(tmp_path / "out")
    assert model.arch == arch
    check_same(model.params, params)


# Members that cannot fill blanks.


@pytest.mark.parametrize("name", ["openai-gpt", "gpt2"])
def test_a_model_from_left_to_right(name: str, tmp_path: Path):
    text = ["the cat likes the red house " * 9]
    if name == "gpt2":
        tokenizer = train_bpe(text, vocab_size=260, style="gpt2", progress=False)
    else:
        letters = sorted({*"".join(text)} - {" "})
        ends = [f"{letter}</w>" for letter in letters]
        tokenizer = WordBPE(["<unk>", *letters, *ends, "th"], [("t", "h")])
    size = {"vocab_size": tokenizer.size}
    config = config_class(name)(**SMALL[name][1] | size)
    cls = getattr(transformers, LAYOUTS[name].classes[("lm",)])
    cls(config).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    model = bert_jax.load(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert model.tokenizer.encode_batch(text) == theirs(text)["input_ids"]
    with pytest.raises(InputError, match="reads from left to right: it cannot fill"):
        fill(model, "the [MASK]")
