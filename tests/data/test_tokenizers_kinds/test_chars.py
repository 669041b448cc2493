"""Characters as pieces: what is kept, and the same ids from BertTokenizer."""

import pytest
import transformers

from bert_jax.data.tokenizers import (
    SPECIALS,
    WordPiece,
    load_tokenizer,
    train_chars,
    train_wordpiece,
)
from bert_jax.errors import InputError

TEXTS = ["北京是中国的首都，北京！", "AB股 abc 2010年"]


def train(texts=TEXTS, **options):
    return train_chars(texts, progress=False, **options)


def test_every_character_is_a_piece():
    tokenizer = train(["北京北 aba", "b"])
    assert tokenizer.kind == "chars"
    # By count, then by piece: 北 2; the others 1.
    assert tokenizer.vocab == [*SPECIALS, "北", "##a", "##b", "a", "b", "京"]
    pieces = [tokenizer.vocab[i] for i in tokenizer.encode("京北ab")]
    assert pieces == ["京", "北", "a", "##b"]
    assert tokenizer.word_numbers(tokenizer.encode("京北ab")).tolist() == [0, 1, 2, 2]
    tokenizer = train(iter(TEXTS))  # can be read only once
    assert all(tokenizer.unk_id not in ids for ids in tokenizer.encode_batch(TEXTS))


def test_rare_characters_go():
    tokenizer = train(["北北京"], vocab_size=6)
    assert tokenizer.vocab == [*SPECIALS, "北"]
    assert tokenizer.encode("京北") == [tokenizer.unk_id, 5]


def test_switches():
    assert "A" in train(lowercase=False).vocab
    assert "A" not in train().vocab


def test_kind():
    assert WordPiece([*SPECIALS, "a", "##b"]).kind == "chars"
    assert WordPiece([*SPECIALS, "a", "##b", "ab"]).kind == "wordpiece"
    assert train_wordpiece(["ab ab"], vocab_size=9, progress=False).kind == "wordpiece"


def test_round_trip(tmp_path):
    tokenizer = train()
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.kind, again.hash) == ("chars", tokenizer.hash)
    ids = tokenizer.encode_batch(TEXTS)
    for reference in (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt")),
    ):
        assert reference(TEXTS, add_special_tokens=False)["input_ids"] == ids


def test_real_chinese(real_texts):
    """All of the text with its own characters: nothing unknown but endless words."""
    texts = real_texts["zh_cluecorpussmall"]
    tokenizer = train(texts)
    long = [text for text in texts if max(map(len, text.split()), default=0) > 100]
    unknown = [
        text
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True)
        if tokenizer.unk_id in ids
    ]
    assert set(unknown) <= set(long)
    assert train(texts).hash == tokenizer.hash


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        ([], None, "training text is empty"),
        ([" \u200b"], 10, "training text is empty"),
        (["北京"], 5, r"vocab_size=5 is too small: .*at least 6"),
        (["北京"], 8, r"vocab_size=8 is too large: .*only 7 pieces"),
    ],
)
def test_training_errors(texts, vocab_size, message):
    with pytest.raises(InputError, match=message):
        train(texts, vocab_size=vocab_size)
