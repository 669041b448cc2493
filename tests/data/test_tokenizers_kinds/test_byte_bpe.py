"""Byte BPE: bytes, training and files; test_real.py compares it with others."""

import json
import random

import numpy as np
import pytest
import transformers

from bert_jax.data.tokenizers import ByteBPE, load_tokenizer, train_bpe
from bert_jax.data.tokenizers.byte_bpe import BYTES, FIRST, LAST
from bert_jax.errors import InputError

TEXTS = [
    "the lower the slower the slowest the lowest: low, lower, lowest, slow, slower.",
    "don't we'll they've it's I'm 123 4567 naïve café 北京 😀\n\n  tabs\tand   spaces ",
]
CLASSES = {
    "gpt2": transformers.GPT2Tokenizer,
    "roberta": transformers.RobertaTokenizer,
}


def train(style="roberta", vocab_size=320):
    return train_bpe(TEXTS, vocab_size=vocab_size, style=style, progress=False)


@pytest.fixture(scope="module", params=["roberta", "gpt2"])
def small(request):
    return train(request.param)


def real(shared_data, style):
    name = {"gpt2": "gpt2", "roberta": "roberta-base"}[style]
    return load_tokenizer(shared_data / f"vocabs/{name}-vocab.json")


@pytest.mark.parametrize(
    ("style", "size", "ids"),
    [
        ("gpt2", 50257, (None, None, None, 50256, None)),
        ("roberta", 50265, (1, 3, 0, 2, 50264)),
    ],
)
def test_real_ids(shared_data, style, size, ids):
    tokenizer = real(shared_data, style)
    names = ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id")
    assert tokenizer.size == size
    assert tuple(getattr(tokenizer, name) for name in names) == ids
    assert tokenizer.special_ids == tuple(sorted({i for i in ids if i is not None}))
    assert tokenizer.dtype == np.uint16
    expected = {"gpt2": [15496, 995], "roberta": [31414, 232]}[style]
    assert tokenizer.encode("Hello world") == expected


def test_bytes_are_lossless(small):
    """Any bytes have ids, one a byte at least, and these give them back."""
    rng = random.Random(0)
    first = small.vocab.index(BYTES[0])
    assert first >= 0
    by_byte = [small.vocab.index(char) for char in BYTES]
    for _ in range(200):
        data = rng.randbytes(rng.randrange(40))
        assert small.decode_bytes([by_byte[byte] for byte in data]) == data
    cut = small.encode("北")[:1]
    assert small.decode(cut) == "\ufffd"
    assert small.decode([]) == ""


def test_nothing_is_unknown(small, fuzz):
    for ids, text in zip(small.encode_batch(fuzz), fuzz, strict=True):
        assert small.decode(ids) == text
        assert not set(ids) & set(small.special_ids)


def test_specials_in_raw_text(small):
    end = small.vocab[small.sep_id]
    text = f"low {end}slow"
    assert small.encode(text) == small.encode_batch([text])[0]
    assert small.sep_id not in small.encode(text)
    parsed = [*small.encode("low "), small.sep_id, *small.encode("slow")]
    assert small.encode(text, specials="parse") == parsed
    if small.style == "roberta":  # which eats the space before it
        parsed = [*small.encode("low"), small.mask_id, *small.encode(" low")]
        assert small.encode("low <mask> low", specials="parse") == parsed


def test_offsets(small):
    text = " the  naïve ЖΩ\n"
    ids, places = small.encode_offsets(text)
    assert ids == small.encode(text)
    pieces = [small.vocab[i] for i in ids]
    assert "".join(text[a:b] for a, b in places if a < b).startswith("thena")
    for piece, (start, end) in zip(pieces, places, strict=True):
        assert text[start:end] == text[start:end].strip()
        if piece.lstrip("Ġ").isascii() and piece.isalnum():
            assert text[start:end] == piece.lstrip("Ġ")
    # A character of two bytes that are two pieces has two places, the same.
    cut = [text[a:b] for a, b in places if text.index("Ж") <= a < b]
    assert cut == [*"ЖЖΩΩ"]
    assert small.encode_offsets_batch([text, ""]) == [(ids, places), ([], [])]


def test_word_starts(small):
    assert small.joint == " "
    for piece, start in zip(small.vocab, small.starts, strict=True):
        special = piece in (*FIRST[small.style], *LAST[small.style])
        assert start == (piece.startswith("Ġ") or special)
    text = "the slower lowest, the slow"
    numbers = small.word_numbers(small.encode(text))
    assert numbers[-1] == 4  # the comma belongs to its word
    joined = [*small.encode("the"), *small.encode(f"{small.joint}low")]
    assert joined == small.encode("the low")


def test_trained_by_hand():
    """Bytes, then merges by count: ab 5, then c+d 2 and Ġ+ab 4, where count wins."""
    texts = iter(["ab ab ab", " abab", "cd", "cd"])
    tokenizer = train_bpe(texts, vocab_size=256 + 5 + 3, progress=False)
    assert tokenizer.vocab[:4] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert tokenizer.vocab[4:260] == sorted(BYTES)
    assert tokenizer.vocab[260:] == ["ab", "Ġab", "cd", "<mask>"]
    assert tokenizer.merges == [("a", "b"), ("Ġ", "ab"), ("c", "d")]
    gpt2 = train_bpe(["ab ab"], vocab_size=258, style="gpt2", progress=False)
    assert gpt2.vocab == [*sorted(BYTES), "ab", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("texts", "vocab_size", "style", "message"),
    [
        ([], 300, "gpt2", "training text is empty"),
        ([""], 300, "gpt2", "training text is empty"),
        (["ab"], 260, "roberta", r"vocab_size=260 is too small: .*at least 261"),
        (["ab"], 256, "gpt2", r"vocab_size=256 is too small: .*at least 257"),
        (["abc"], 300, "gpt2", r"vocab_size=300 is too large: only 259 pieces"),
        (["abc"], 300, "gtp2", r"unknown style .*'gtp2'. Did you mean gpt2\?"),
    ],
)
def test_training_errors(texts, vocab_size, style, message):
    with pytest.raises(InputError, match=message):
        train_bpe(texts, vocab_size=vocab_size, style=style, progress=False)


@pytest.mark.parametrize("with_config", [True, False])
def test_round_trip(tmp_path, fuzz, small, with_config):
    small.save(tmp_path)
    if with_config:
        config = {"model_type": small.style}
        (tmp_path / "config.json").write_text(json.dumps(config))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(reference, CLASSES[small.style])
    assert len(reference) == small.size
    sample = [*fuzz[::20], *TEXTS]
    ids = small.encode_batch(sample)
    assert reference(sample, add_special_tokens=False)["input_ids"] == ids
    assert reference.decode(ids[-1]) == small.decode(ids[-1]) == TEXTS[-1]
    marked = f"low {small.vocab[small.special_ids[-1]]} slower"
    middle = small.encode(marked, specials="parse")
    row = [0, *middle, 2] if small.style == "roberta" else middle
    assert reference(marked)["input_ids"] == row
    for missing in ([], ["tokenizer.json"], ["vocab.json", "merges.txt"]):
        folder = tmp_path / "-".join(["without", *missing])
        small.save(folder)
        for name in missing:
            (folder / name).unlink()
        again = load_tokenizer(folder)
        assert (again.hash, again.style) == (small.hash, small.style)
        assert again.encode_batch(sample) == ids


def test_loads_what_transformers_saves(tmp_path, small):
    small.save(tmp_path / "ours")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    reference.save_pretrained(tmp_path / "theirs")
    assert load_tokenizer(tmp_path / "theirs").hash == small.hash


def test_hash():
    base = train()
    vocab, merges = base.vocab, base.merges
    assert ByteBPE(vocab, merges, style="roberta").hash == base.hash
    swapped = [*vocab[:-3], vocab[-2], vocab[-3], vocab[-1]]
    others = [
        ByteBPE(swapped, merges, style="roberta"),
        ByteBPE(vocab, merges[:-1], style="roberta"),
        ByteBPE(vocab, [merges[1], merges[0], *merges[2:]], style="roberta"),
        ByteBPE([*vocab, "<|endoftext|>"], merges, style="roberta"),
        ByteBPE([*vocab, "<|endoftext|>"], merges, style="gpt2"),
    ]
    assert len({base.hash, *(other.hash for other in others)}) == 6


def test_style_is_found(tmp_path, small):
    """By the config, by the model's type, by the pieces; an argument counts first."""
    small.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).style == small.style
    (tmp_path / "config.json").write_text(json.dumps({"model_type": small.style}))
    assert load_tokenizer(tmp_path).style == small.style
    assert load_tokenizer(tmp_path / "vocab.json", style=small.style).hash == small.hash
    other = {"roberta": "gpt2", "gpt2": "roberta"}[small.style]
    with pytest.raises(InputError, match=f"is no {other} vocabulary: no pieces: <"):
        load_tokenizer(tmp_path, style=other)


def test_file_errors(tmp_path):
    tokenizer = train()
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="leaves the text as it is; lowercase cannot"):
        load_tokenizer(tmp_path, lowercase=True)
    merges = tmp_path / "merges.txt"
    merges.write_text("#version: 0.2\na b c\n")
    with pytest.raises(InputError, match=r"merges.txt: 1 merges are not two pieces"):
        load_tokenizer(tmp_path)
    merges.write_text("#version: 0.2\nxq qx\n")
    with pytest.raises(InputError, match="merges of pieces it does not have: xq qx"):
        load_tokenizer(tmp_path)
    merges.unlink()
    with pytest.raises(InputError, match=r"vocab.json needs its merges: merges.txt"):
        load_tokenizer(tmp_path / "vocab.json")
    merges.write_text("")
    ids = {piece: i for i, piece in enumerate(tokenizer.vocab)}
    for change, message in [
        ({"a": 9999}, r"ids of its 320 pieces are not 0 to 319"),
        ({"a": "x"}, r"ids of its 320 pieces are not 0 to 319"),
    ]:
        (tmp_path / "vocab.json").write_text(json.dumps(ids | change))
        with pytest.raises(InputError, match=message):
            load_tokenizer(tmp_path)
    few = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a"])}
    (tmp_path / "vocab.json").write_text(json.dumps(few))
    with pytest.raises(InputError, match=r"no pieces: <mask>, .*, \.\.\."):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=r"tell its style; give style=roberta \| gpt2"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
            r"not byte-level BPE: pre_tokenizer.add_prefix_space is True \(valid: F",
        ),
        (
            lambda c: c.update(normalizer={"type": "NFC"}),
            r"normalizer.type is 'NFC' \(valid: None\)",
        ),
        (
            lambda c: c["added_tokens"].append(
                c["added_tokens"][0] | {"id": 320, "content": "<new>"}
            ),
            r"added tokens are not supported: <new>; give",
        ),
    ],
)
def test_foreign_tokenizer_json(tmp_path, change, message):
    train().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path)
