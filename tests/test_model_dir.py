"""`bert_jax.load`: what people call from Python."""

import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
import transformers

import bert_jax
from bert_jax.convert.hf import export_model
from bert_jax.data.tokenizers import train_bpe
from bert_jax.errors import InputError
from bert_jax.evaluate import evaluate
from bert_jax.fill import fill
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, init_params
from tests import tiny

CONFIG = transformers.BertConfig(
    vocab_size=100,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=80,
    max_position_embeddings=40,
    type_vocab_size=3,
    attn_implementation="eager",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    """A Hugging Face directory with weights that are not the initial ones."""
    folder = tmp_path_factory.mktemp("models") / "hf"
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tiny_tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.BertForPreTraining.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_call_gives_what_transformers_gives(folder, reference, side):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 100, (3, 17))
    types = rng.integers(0, 3, (3, 17))
    real = (np.arange(17) < np.array([17, 9, 4])[:, None]).astype(int)
    real = real if side == "right" else real[:, ::-1].copy()
    with torch.no_grad():
        want = reference(
            torch.tensor(ids),
            token_type_ids=torch.tensor(types),
            attention_mask=torch.tensor(real),
            output_hidden_states=True,
            output_attentions=True,
        )
    got = bert_jax.load(folder)(ids, types, real, attentions=True)
    at = real.astype(bool)
    for n, hidden in enumerate(want.hidden_states):
        assert np.abs(got["hidden"][n][at] - hidden.numpy()[at]).max() < 1e-5
    assert got["hidden"].shape == (4, 3, 17, 48)
    assert got["logits"].shape == (3, 17, 100)
    logits = want.prediction_logits.numpy()[at]
    assert np.abs(np.asarray(got["logits"])[at] - logits).max() < 1e-5
    nsp = want.seq_relationship_logits.numpy()
    if side == "right":  # the first token is padding otherwise
        assert np.abs(got["nsp_logits"] - nsp).max() < 1e-5
        pooled = reference.bert(
            torch.tensor(ids), torch.tensor(real), torch.tensor(types)
        ).pooler_output
        assert np.abs(got["pooled"] - pooled.detach().numpy()).max() < 1e-5
    for n, attention in enumerate(want.attentions):
        theirs = attention.numpy().transpose(0, 2, 1, 3)[at]
        ours = np.asarray(got["attentions"][n]).transpose(0, 2, 1, 3)[at]
        assert np.abs(ours - theirs).max() < 1e-5


def test_defaults_are_one_type_and_no_padding(folder):
    model = bert_jax.load(folder)
    ids = np.arange(20).reshape(2, 10)
    zeros, ones = np.zeros((2, 10)), np.ones((2, 10))
    plain, spelled = model(ids), model(ids, zeros, ones)
    assert "attentions" not in plain
    for name in plain:
        assert np.array_equal(plain[name], spelled[name])


def test_heads_that_were_not_saved_are_left_out(tmp_path, folder):
    model = transformers.BertModel(CONFIG, add_pooling_layer=False)
    model.save_pretrained(tmp_path / "body")
    assert set(bert_jax.load(tmp_path / "body")(np.ones((1, 4), int))) == {"hidden"}
    transformers.BertForMaskedLM(CONFIG).save_pretrained(tmp_path / "lm")
    out = bert_jax.load(tmp_path / "lm")(np.ones((1, 4), int))
    assert set(out) == {"hidden", "logits"}


def test_the_tokenizer_is_read_on_first_use(tmp_path):
    transformers.BertForMaskedLM(CONFIG).save_pretrained(tmp_path / "m")
    model = bert_jax.load(tmp_path / "m")
    assert model(np.ones((1, 4), int))["logits"].shape == (1, 4, 100)
    with pytest.raises(InputError, match="has no tokenizer"):
        _ = model.tokenizer
    tiny.make_tokenizer(pieces=90, folder=tmp_path).save(tmp_path / "m")
    with pytest.raises(InputError, match="has 90 pieces, the weights .* have 100"):
        _ = model.tokenizer


def test_the_preset_is_known_by_its_shape(tmp_path):
    config = transformers.BertConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "m")
    name = bert_jax.load(tmp_path / "m").preset.name
    assert name in ("bert-tiny", "bert_uncased_L-2_H-128_A-2")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (([1, 2],), "must be [B, S]"),
        (([[1, 100]],), "input_ids must be in 0..99, found 1 to 100"),
        (([[-1, 2]],), "input_ids must be in 0..99"),
        (([[1, 2]], [[0, 3]]), "token_type_ids must be in 0..2"),
        (([[1, 2]], None, [[1]]), "attention_mask has shape (1, 1)"),
        (([["a", "b"]],), "input_ids must be whole numbers, not <U1"),
        (([[1.5, 2.5]],), "input_ids must be whole numbers, not float64"),
        (([[1, 2]], None, [["a", "b"]]), "attention_mask must be whole numbers"),
        (
            (np.ones((1, 41), int),),
            "41 tokens in a row, the model has positions for 40",
        ),
    ],
)
def test_what_jax_would_clamp_is_an_error(folder, call, message):
    with pytest.raises(InputError) as caught:
        bert_jax.load(folder)(*call)
    assert message in str(caught.value)


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(InputError, match="nothing does not exist"):
        bert_jax.load(tmp_path / "nothing")
    with pytest.raises(InputError, match="neither a workdir nor a Hugging Face"):
        bert_jax.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="config.json is a file, not a workdir nor a"):
        bert_jax.load(tmp_path / "config.json")


def test_fill_gives_probabilities_of_the_softmax(folder, reference, tiny_tokenizer):
    model = bert_jax.load(folder)
    text = "the [MASK] likes a [MASK] house"
    blanks = fill(model, text, top=100)
    ids = [2, *tiny_tokenizer.encode(text, specials="parse"), 3]
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).prediction_logits[0]
    at = [n for n, i in enumerate(ids) if i == tiny_tokenizer.mask_id]
    assert len(blanks) == len(at) == 2
    for guesses, place in zip(blanks, at, strict=True):
        want = logits[place].softmax(-1).numpy()
        found = [guess["probability"] for guess in guesses]
        assert np.allclose(found, -np.sort(-want), atol=1e-6)
        best = guesses[0]
        assert best["id"] == want.argmax()
        assert best["piece"] == tiny_tokenizer.vocab[best["id"]]


def test_fill_whatever_the_blank_is_called(tmp_path):
    """RoBERTa's vocabulary has <mask>; [MASK] works as well."""
    text = ["the cat likes the red house " * 9]
    tokenizer = train_bpe(text, vocab_size=275, style="roberta", progress=False)
    arch = Arch(275, width=8, layers=1, heads=2, inner=16, max_positions=40)
    params = init_params(Model(arch), jax.random.key(0), heads=("lm",))
    export_model(tmp_path / "out", params, arch, tokenizer)
    model = bert_jax.load(tmp_path / "out")
    one, two = (fill(model, f"the{blank} likes") for blank in ("<mask>", " [MASK]"))
    assert one == two


def test_a_model_is_shown_in_a_line(folder):
    assert len(repr(bert_jax.load(folder))) < 2000


def test_fill_errors(folder, tmp_path):
    model = bert_jax.load(folder)
    with pytest.raises(InputError, match="no \\[MASK\\] in 'a cat'"):
        fill(model, "a cat")
    with pytest.raises(InputError, match="top=0 must be between 1 and 100"):
        fill(model, "a [MASK]", top=0)
    with pytest.raises(InputError, match="the model has positions for 40"):
        fill(model, "a [MASK] " + "cat " * 60)
    transformers.BertModel(CONFIG).save_pretrained(tmp_path / "body")
    with pytest.raises(InputError, match="no masked-LM head"):
        fill(bert_jax.load(tmp_path / "body"), "a [MASK]")
    sizes = dict(n_positions=40, n_embd=8, n_layer=1, n_head=2)
    gpt2 = transformers.GPT2Config(vocab_size=CONFIG.vocab_size, **sizes)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(InputError, match="reads from left to right: it cannot fill"):
        fill(bert_jax.load(tmp_path / "gpt2"), "a [MASK]")


def test_evaluate_scores_the_same_predictions_every_time(folder, tiny_corpus):
    first, second = (evaluate(folder, data=tiny_corpus.path, batch=8) for _ in "ab")
    assert first == second
    assert first["predictions"] > 100
    assert 0 < first["unigram_accuracy"] < 0.5
    other = evaluate(folder, data=tiny_corpus.path, batch=8, rows="doc")
    assert other["masked_lm_loss"] != first["masked_lm_loss"]


def test_evaluate_does_not_depend_on_the_batch(folder, tiny_corpus):
    eight, sixteen = (
        evaluate(folder, data=tiny_corpus.path, batch=n, length=40) for n in (8, 16)
    )
    assert eight.keys() == sixteen.keys()
    for name in eight:
        assert eight[name] == pytest.approx(sixteen[name], rel=1e-5)


def test_evaluate_refuses_what_it_cannot_score(
    folder, tiny_corpus, tiny_tokenizer, tmp_path
):
    with pytest.raises(InputError, match="--length 64: the model has positions for 40"):
        evaluate(folder, data=tiny_corpus.path, length=64)
    with pytest.raises(InputError, match="^--batch 0 must be at least 1$"):
        evaluate(folder, data=tiny_corpus.path, batch=0)
    transformers.BertModel(CONFIG).save_pretrained(tmp_path / "body")
    tiny_tokenizer.save(tmp_path / "body")
    with pytest.raises(InputError, match="has no head lm, which masked_lm scores"):
        evaluate(tmp_path / "body", data=tiny_corpus.path, length=40)


def test_a_body_without_pooler_goes_back_to_pytorch(tmp_path, tiny_tokenizer):
    theirs = transformers.BertModel(CONFIG, add_pooling_layer=False)
    theirs.save_pretrained(tmp_path / "body")
    model = bert_jax.load(tmp_path / "body")
    out = tmp_path / "out"
    done = export_model(out, model.params, model.arch, tiny_tokenizer)
    assert done.difference < 1e-5
    back = transformers.BertModel.from_pretrained(out, add_pooling_layer=False)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name])


def test_evaluate_refuses_data_of_another_tokenizer(folder, tmp_path):
    other = tiny.make_tokenizer(pieces=90, folder=tmp_path)
    corpus = tiny.make_corpus(tmp_path, tokenizer=other)
    with pytest.raises(InputError, match="prepared with another tokenizer than"):
        evaluate(folder, data=corpus.path)


def test_importing_bert_jax_imports_no_tensorflow_and_no_torch():
    code = (
        "import sys, bert_jax; print([m for m in ('tensorflow', 'torch', "
        "'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_params_are_plain_arrays(folder):
    params = bert_jax.load(folder).params
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
