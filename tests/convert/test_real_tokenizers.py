"""Members with the tokenizer files that were released for them, on real lines.

Weights are random and tiny, for the released vocabulary. What is filled in is what
PyTorch finds from ids that AutoTokenizer made. No released vocabulary of XLM-R is at
hand: it and CamemBERT stand here with a small model in their numbering, and GPT with a
vocabulary of its kind, made from the lines.
"""

import functools
import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import bert_jax
from bert_jax.cli import main
from bert_jax.convert import hf
from bert_jax.convert.tables import LAYOUTS
from bert_jax.data.tokenizers import load_tokenizer
from bert_jax.errors import InputError
from bert_jax.fill import fill
from tests.convert.test_members import make_params
from tests.convert.test_tables import config_class
from tests.data.test_tokenizers_kinds.test_word_bpe import write_bare

SMALL_MODEL = "sentencepiece_models/hf_fixtures_test_sentencepiece.model"
VOCABS = {  # name: pieces, {file: where it is}, tokenizer_config.json
    "uncased": (30522, {"vocab.txt": "vocabs/bert-base-uncased-vocab.txt"}, {}),
    "cased": (
        28996,
        {"vocab.txt": "vocabs/bert-base-cased-vocab.txt"},
        {"do_lower_case": False},
    ),
    "chinese": (21128, {"vocab.txt": "vocabs/bert-base-chinese-vocab.txt"}, {}),
    **{
        name: (
            size,
            {
                "vocab.json": f"vocabs/{file}-vocab.json",
                "merges.txt": f"vocabs/{file}-merges.txt",
            },
            {},
        )
        for name, size, file in (
            ("roberta", 50265, "roberta-base"),
            ("gpt2", 50257, "gpt2"),
        )
    },
    **{
        name: (size, {"spiece.model": f"sentencepiece_models/{file}.model"}, {})
        for name, size, file in (
            ("albert", 30000, "hf_fixtures_spiece"),
            ("xlnet", 32000, "chinese_xlnet_spiece"),
        )
    },
    **{
        name: (
            size,
            {"sentencepiece.bpe.model": SMALL_MODEL},
            {"tokenizer_class": f"{kind}Tokenizer"},
        )
        for name, size, kind in (
            ("xlm-roberta", 1002, "XLMRoberta"),
            ("camembert", 1005, "Camembert"),
        )
    },
    "openai-gpt": (500, {}, {}),
}
BERT = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "hidden_size": 16,
    "max_position_embeddings": 130,
}
DISTILBERT = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
XL = {"n_layer": 1, "n_head": 2, "d_inner": 24, "d_model": 16}
GPT = {"n_layer": 1, "n_head": 2, "n_embd": 16}
MEMBERS = {  # name: type, vocabulary, config.json
    "bert": ("bert", "uncased", BERT),
    "bert-chinese": ("bert", "chinese", BERT),
    "roberta": ("roberta", "roberta", BERT),
    "xlm-roberta": ("xlm-roberta", "xlm-roberta", BERT),
    "camembert": ("camembert", "camembert", BERT),
    "longformer": ("longformer", "roberta", BERT | {"attention_window": 8}),
    "albert": ("albert", "albert", BERT | {"embedding_size": 8}),
    "electra": ("electra", "uncased", BERT | {"embedding_size": 8}),
    "distilbert": ("distilbert", "cased", DISTILBERT),
    "ernie": ("ernie", "chinese", BERT | {"use_task_id": True}),
    "xlnet": ("xlnet", "xlnet", XL),
    "gpt2": ("gpt2", "gpt2", GPT),
    "openai-gpt": ("openai-gpt", "openai-gpt", GPT),
}
LEFT_TO_RIGHT = ("gpt2", "openai-gpt")
WITH_BLANKS = [name for name in MEMBERS if name not in LEFT_TO_RIGHT]
ONE_EACH = ("bert", "bert-chinese", "distilbert", "roberta", "albert", "xlnet")
# Their class for the bare spiece.model cuts otherwise, as tests of tokenizers count.
UNIGRAM = ("albert", "xlnet")


@functools.cache
def read_lines(folder: Path) -> tuple[list[str], list[str]]:
    """English and Chinese ones, short enough for any of the vocabularies."""
    with lzma.open(folder / "en_books/valid.txt.xz", "rt", encoding="utf-8") as file:
        english = [line.strip() for line in file if 60 <= len(line) <= 90]
    path = folder / "zh_cluecorpussmall/CLUECorpusSmall_bert_sampled.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    chinese = [line for line in lines if 15 <= len(line) <= 20]
    assert min(len(english), len(chinese)) > 200
    return english[::4], chinese[::40]


def with_blanks(folder: Path) -> list[str]:
    """A line without one word, and a Chinese one without one character."""
    english, chinese = (lines[3] for lines in read_lines(folder))
    first, _, *rest = english.split()
    assert "\u4e00" <= chinese[6] <= "\u9fff"
    return [" ".join([first, "[MASK]", *rest]), f"{chinese[:6]}[MASK]{chinese[7:]}"]


def copy_tokenizer(vocab: str, source: Path, folder: Path) -> None:
    size, files, settings = VOCABS[vocab]
    if vocab == "openai-gpt":
        write_bare(folder, read_lines(source)[0], size)
    for file, where in files.items():
        shutil.copy(source / where, folder / file)
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_model(name: str):
    kind, vocab, config = MEMBERS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, LAYOUTS[kind].classes[("lm",)])
    theirs = config_class(kind)(**config, vocab_size=VOCABS[vocab][0])
    model = cls._from_config(theirs, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def make(shared_data: Path, tmp_path_factory):
    """name -> their model, and its directory."""

    @functools.cache
    def make(name: str) -> tuple[object, Path]:
        reference, folder = make_model(name), tmp_path_factory.mktemp("members") / name
        reference.save_pretrained(folder)
        copy_tokenizer(MEMBERS[name][1], shared_data, folder)
        return reference, folder

    return make


@pytest.fixture(scope="module")
def words(shared_data: Path, tmp_path_factory):
    """A vocabulary -> the tokenizer that transformers makes of what we save.

    From bare files it does not take the space before RoBERTa's <mask> along, as the
    released tokenizer does.
    """

    @functools.cache
    def words(vocab: str):
        folder = tmp_path_factory.mktemp("vocabs")
        copy_tokenizer(vocab, shared_data, folder)
        load_tokenizer(folder).save(folder / "saved")
        return transformers.AutoTokenizer.from_pretrained(folder / "saved")

    return words


@pytest.mark.parametrize("name", [*ONE_EACH, *LEFT_TO_RIGHT])
def test_ids_are_those_of_transformers(
    make, shared_data: Path, tmp_path: Path, monkeypatch, name: str
):
    reference, theirs = make(name)
    lines = [line for lines in read_lines(shared_data) for line in lines]
    model = bert_jax.load(theirs)
    tokenizer = model.tokenizer
    assert tokenizer.size == reference.config.vocab_size
    monkeypatch.setattr(hf, "check_export", lambda *args: (None, "not asked"))
    ours, layout = tmp_path / "ours", MEMBERS[name][0]
    hf.export_model(ours, model.params, model.arch, tokenizer, layout=layout)
    assert bert_jax.load(ours).tokenizer.hash == tokenizer.hash
    wrapped = [tokenizer.wrap(ids) for ids in tokenizer.encode_batch(lines)]
    ids, types = zip(*wrapped, strict=True)
    if name == "gpt2":  # which theirs does not end
        ids, types = ([row[:-1] for row in rows] for rows in (ids, types))
    for folder in [ours] if name in UNIGRAM else [theirs, ours]:
        auto = transformers.AutoTokenizer.from_pretrained(folder)
        found = auto(lines, return_token_type_ids=True)
        assert found["input_ids"] == list(ids)
        assert found["token_type_ids"] == list(types)
        if folder == ours and model.arch.max_length is not None:
            assert auto.model_max_length == model.arch.max_length


def their_guesses(
    reference, name: str, ids: list[int], places: list[int]
) -> np.ndarray:
    """Probabilities of all pieces at the blanks, [P, V]."""
    options, S = {}, len(ids)
    if name == "xlnet":
        # Nobody sees the blanks, and a query asks at each. The last piece has type 2.
        unseen = torch.zeros(1, S, S)
        unseen[:, :, places] = 1
        asked = torch.nn.functional.one_hot(torch.tensor([places]), S).float()
        types = torch.tensor([[*[0] * (S - 1), 2]])
        options = {"perm_mask": unseen, "target_mapping": asked}
        options |= {"token_type_ids": types}
    with torch.no_grad():
        logits = reference(torch.tensor([ids]), **options).logits[0]
    return (logits if name == "xlnet" else logits[places]).softmax(-1).numpy()


@pytest.mark.parametrize("name", WITH_BLANKS)
def test_fill(make, words, shared_data: Path, name: str):
    """The same pieces as PyTorch, in English and in Chinese."""
    (reference, folder), auto = make(name), words(MEMBERS[name][1])
    model = bert_jax.load(folder)
    for text in with_blanks(shared_data):
        (guesses,) = fill(model, text)
        ids = auto(text.replace("[MASK]", auto.mask_token))["input_ids"]
        assert 6 < len(ids) < 64
        blank = ids.index(auto.mask_token_id)
        (wanted,) = their_guesses(reference, name, ids, [blank])
        best = np.argsort(-wanted)[:5]
        assert [guess["id"] for guess in guesses] == best.tolist()
        assert [g["piece"] for g in guesses] == auto.convert_ids_to_tokens(best)
        np.testing.assert_allclose(
            [guess["probability"] for guess in guesses], wanted[best], rtol=1e-4
        )


@pytest.mark.parametrize("name", ["bert-chinese", "xlnet"])
def test_fill_several_blanks(make, words, shared_data: Path, capsys, name: str):
    """On the command line. None of XLNet's blanks sees another."""
    (reference, folder), auto = make(name), words(MEMBERS[name][1])
    text = with_blanks(shared_data)[1] + "[MASK]"
    main(["fill", str(folder), text, "--top", "3", "--json"])
    blanks = json.loads(capsys.readouterr().out)
    ids = auto(text.replace("[MASK]", auto.mask_token))["input_ids"]
    places = [n for n, i in enumerate(ids) if i == auto.mask_token_id]
    assert len(blanks) == len(places) == 2
    wanted = their_guesses(reference, name, ids, places)
    for guesses, probabilities in zip(blanks, wanted, strict=True):
        best = np.argsort(-probabilities)[:3].tolist()
        assert [guess["id"] for guess in guesses] == best


def test_fill_with_nezha(shared_data: Path, tmp_path: Path):
    """There is no class to compare with: what the logits say is what is found."""
    (tmp_path / "vocab").mkdir()
    copy_tokenizer("chinese", shared_data, tmp_path / "vocab")
    tokenizer = load_tokenizer(tmp_path / "vocab")
    config = BERT | {"model_type": "nezha", "vocab_size": tokenizer.size}
    arch, _ = hf.read_arch(config, source="")
    out = tmp_path / "out"
    params = make_params(arch, heads=("lm",))
    done = hf.export_model(out, params, arch, tokenizer, layout="nezha")
    assert done.unverified == "its class needs transformers 4.57"
    model = bert_jax.load(out)
    auto = transformers.BertTokenizer.from_pretrained(out)
    for text in with_blanks(shared_data):
        (guesses,) = fill(model, text)
        ids = auto(text)["input_ids"]
        logits = np.asarray(model([ids])["logits"])[0, ids.index(auto.mask_token_id)]
        assert [guess["id"] for guess in guesses] == np.argsort(-logits)[:5].tolist()


def test_the_vocabulary_of_another_member(make, shared_data: Path, tmp_path: Path):
    """The weights can be used; the tokenizer, which does not fit, cannot."""
    folder = tmp_path / "mixed"
    shutil.copytree(make("bert")[1], folder)
    copy_tokenizer("chinese", shared_data, folder)
    model = bert_jax.load(folder)
    assert model([[101, 102]])["logits"].shape == (1, 2, 30522)
    text = "the tokenizer has 21128 pieces, the weights in .* have 30522"
    with pytest.raises(InputError, match=text):
        fill(model, "a [MASK]")
    (folder / "vocab.txt").unlink()
    with pytest.raises(InputError, match="mixed has no tokenizer: looked for spiece"):
        fill(bert_jax.load(folder), "a [MASK]")
