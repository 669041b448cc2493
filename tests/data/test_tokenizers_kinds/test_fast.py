"""encode_fast gives what encode_batch gives; test_real.py has real vocabularies."""

import numpy as np
import pytest

from bert_jax.data.tokenizers import (
    SPECIALS,
    WordPiece,
    fast,
    train_bpe,
    train_chars,
)


def check_fast(tokenizer, texts):
    ours = tokenizer.encode_fast(texts)
    assert all(ids.dtype == tokenizer.dtype for ids in ours)
    rows = zip(texts, ours, tokenizer.encode_batch(texts), strict=True)
    wrong = [(text, a.tolist(), b) for text, a, b in rows if a.tolist() != b]
    assert not wrong, f"{len(wrong)} texts differ, first {wrong[:2]!r}"


@pytest.mark.parametrize(
    "switches",
    [
        {"lowercase": True, "strip_accents": False},
        {"lowercase": False, "strip_accents": True},
        {"split_chinese": False},
    ],
)
def test_switches(fuzz, switches):
    pieces = [*"abcdefghABCDE0123456789.,é北京中", "##a", "##b", "##京", "ab", "abc"]
    check_fast(WordPiece([*SPECIALS, *pieces], **switches), fuzz)


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(fast, "CHUNKS", 10)
    tokenizer = WordPiece([*SPECIALS, *"abcdefghij", *(f"##{c}" for c in "abcdefghij")])
    texts = [f"{a}{b}, {b}{c} {'a' * 40}" for a in "abc" for b in "efg" for c in "hij"]
    for _ in range(2):
        for i in range(0, len(texts), 5):
            check_fast(tokenizer, texts[i : i + 5])
            assert len(tokenizer._memory) <= 10
            assert all(len(chunk) <= fast.LONGEST for chunk in tokenizer._memory)


def test_words_are_encoded_once(monkeypatch):
    tokenizer = train_bpe(["low lower lowest"], vocab_size=266, progress=False)
    seen = []
    encode = tokenizer._encode_part
    monkeypatch.setattr(
        tokenizer, "_encode_part", lambda part: seen.append(part) or encode(part)
    )
    check_fast(tokenizer, ["low lower, low.", "low low lower", " lower low low,"])
    assert sorted(seen) == [" low", " lower", ",", ".", "low"]


def test_empty():
    for tokenizer in (
        train_chars(["a"], progress=False),
        train_bpe(["ab ab"], vocab_size=262, progress=False),
    ):
        assert tokenizer.encode_fast([]) == []
        assert [ids.tolist() for ids in tokenizer.encode_fast(["", " "])] == [
            [],
            tokenizer.encode(" "),
        ]


def test_wide_ids():
    pieces = [chr(0x4E00 + i) for i in range(20000)]
    pieces += [chr(0x20000 + i) for i in range(42000)]
    pieces += [chr(0xAC00 + i) for i in range(5000)]
    tokenizer = WordPiece([*SPECIALS, *pieces], strip_accents=False)
    assert tokenizer.dtype == np.uint32
    check_fast(tokenizer, [f"{pieces[0]}{pieces[-1]} {pieces[-1]}"])
    assert tokenizer.encode_fast([pieces[-1]])[0].tolist() == [tokenizer.size - 1]
