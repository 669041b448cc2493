"""XLM-R's and CamemBERT's numbers for the pieces of a model, against transformers."""

import json
import shutil

import pytest
import sentencepiece
import transformers

from bert_jax.data.tokenizers import load_tokenizer, train_unigram
from bert_jax.errors import InputError

MODEL = "sentencepiece_models/hf_fixtures_test_sentencepiece.model"  # 1000 pieces
ALBERT = "sentencepiece_models/hf_fixtures_spiece.model"
# Texts in which transformers cuts as sentencepiece does; it does not where characters
# are rare.
PLAIN = ("en_books",)
CLASSES = {
    "xlm-roberta": transformers.XLMRobertaTokenizer,
    "camembert": transformers.CamembertTokenizer,
}


@pytest.fixture(params=CLASSES)
def folder(request, shared_data, tmp_path):
    """As on the hub: the model's file and the kind of model in config.json."""
    shutil.copy(shared_data / MODEL, tmp_path / "sentencepiece.bpe.model")
    config = {"model_type": request.param}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def ids_of(tokenizer, texts) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def test_the_same_ids(folder, real_texts):
    ours = load_tokenizer(folder)
    theirs = CLASSES[ours.style].from_pretrained(str(folder))
    roles = ("pad", "unk", "cls", "sep", "mask")
    for role in roles:
        number = getattr(theirs, f"{role}_token_id")
        assert getattr(ours, f"{role}_id") == number, role
    assert ours.size == len(theirs)
    assert ours.vocab == theirs.convert_ids_to_tokens(range(ours.size))
    saved = folder / "saved"
    ours.save(saved)
    again = load_tokenizer(saved)
    assert (again.style, again.hash, again.vocab) == (ours.style, ours.hash, ours.vocab)
    auto = transformers.AutoTokenizer.from_pretrained(str(saved))
    pieces = sentencepiece.SentencePieceProcessor(
        model_file=str(folder / "sentencepiece.bpe.model")
    )
    # fairseq's numbers, by their rule: 3 for what is unknown, others moved on.
    offset = {"xlm-roberta": 1, "camembert": 4}[ours.style]
    for where, texts in real_texts.items():
        texts = texts[::20]
        found = ours.encode_batch(texts)
        rule = [[i + offset if i else 3 for i in row] for row in pieces.encode(texts)]
        assert found == rule, where
        assert found == [row.tolist() for row in ours.encode_fast(texts)]
        assert found == [ids for ids, _ in ours.encode_offsets_batch(texts)]
        if where in PLAIN:
            assert found == ids_of(theirs, texts), where
            assert found == ids_of(auto, texts), where
    assert ours.encode("a <mask> b", specials="parse") == ids_of(theirs, "a <mask> b")
    # One text and two, as theirs puts them into a row.
    one, two = "This is a test", "I was born"
    assert ours.wrap(ours.encode(one))[0] == theirs(one)["input_ids"]
    assert auto(one, two)["input_ids"] == theirs(one, two)["input_ids"]


def test_another_model(shared_data, folder):
    style = load_tokenizer(folder).style
    with pytest.raises(InputError, match="no special tokens .* another style than"):
        load_tokenizer(shared_data / ALBERT, style=style)


def test_none_is_trained():
    with pytest.raises(InputError, match="is trained for 'xlm-roberta'.*Valid: albert"):
        train_unigram(["a text"], vocab_size=99, style="xlm-roberta", progress=False)
