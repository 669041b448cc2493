"""Unigram: conventions, places, training and files; test_real.py compares it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from bert_jax.data.tokenizers import Unigram, load_tokenizer, train_unigram
from bert_jax.data.tokenizers.unigram import is_start
from bert_jax.data.tokenizers.unigram_text import align_text, change_text
from bert_jax.errors import InputError
from tests.data.test_tokenizers_kinds import release

ROOT = Path(__file__).parents[3]
LINES = [
    "The lower the slower the slowest the lowest: low, lower, lowest, slow, slower.",
    "In 1999, and in 2010, there were 1,000 men (and women) - so it was.",
    'Café, naïve: "quoted" 1999, 2010, 1999, 2010, 9, 9, 9, 9, 19, 29,',
]
TEXTS = [*LINES * 5, (ROOT / "LICENSE").read_text()]
STYLES = ["albert", "xlnet", "t5"]
SIZES = {"albert": 200, "xlnet": 220, "t5": 300}


def train(style="albert", **options):
    options = {"vocab_size": SIZES[style], "progress": False} | options
    return train_unigram(TEXTS, style=style, **options)


@pytest.fixture(scope="module", params=STYLES)
def small(request):
    return train(request.param)


def test_conventions(small):
    names = ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id")
    ids = tuple(getattr(small, name) for name in names)
    expected = {
        "albert": (0, 1, 2, 3, 4),
        "xlnet": (5, 0, 3, 4, 6),
        "t5": (0, 2, None, 1, None),
    }
    first = {
        "albert": ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "(", ")", '"', "-"],
        "xlnet": [
            *("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>"),
            *("<eop>", ".", "(", ")", '"', "-"),
        ],
        "t5": ["<pad>", "</s>", "<unk>"],
    }[small.style]
    assert ids == expected[small.style]
    assert small.vocab[: len(first)] == first
    assert small.size == SIZES[small.style] == len(set(small.vocab))
    count = {"albert": 5, "xlnet": 9, "t5": 3}[small.style]
    assert small.special_ids == (*range(count), *sorted(small.sentinels))
    assert small.joint == ""
    assert small.lowercase == (small.style == "albert")


def test_sentinels(shared_data):
    tokenizer = load_tokenizer(shared_data / "sentencepiece_models/t5-base.model")
    assert tokenizer.sentinels == tuple(range(32099, 31999, -1))
    assert tokenizer.vocab[32099] == "<extra_id_0>"
    assert tokenizer.vocab[32000] == "<extra_id_99>"
    row = tokenizer.encode("a <extra_id_0> b<extra_id_1>", specials="parse")
    assert [i for i in row if i >= 32000] == [32099, 32098]
    assert not [i for i in tokenizer.encode("a <extra_id_0>") if i >= 32000]


def test_digit_and_comma(shared_data):
    path = shared_data / "sentencepiece_models/hf_fixtures_spiece.model"
    tokenizer = load_tokenizer(path)

    def pieces(text):
        return [tokenizer.vocab[i] for i in tokenizer.encode(text)]

    assert "▁2010," in tokenizer.vocab
    assert pieces("In 2010, he") == ["▁in", "▁2010", ",", "▁he"]
    assert pieces("1,000") == ["▁1,000"]
    text = " in  2010, he"
    ids, places = tokenizer.encode_offsets(text)
    assert [text[a:b] for a, b in places] == ["in", "2010", ",", "he"]
    assert ids == tokenizer.encode(text)


def test_changes_of_the_text(fuzz):
    for lowercase in (True, False):
        for strip_accents in (True, False):
            switches = {"lowercase": lowercase, "strip_accents": strip_accents}
            for text in fuzz[-1700:]:
                changed, spans = align_text(text, **switches)
                assert changed == change_text(text, **switches)
                assert len(spans) == len(changed)
                if strip_accents:
                    assert changed == release.prepare(text, lowercase=lowercase)
                assert all(0 <= a < b <= len(text) for a, b in spans)
                assert [a for a, _ in spans] == sorted(a for a, _ in spans)
    text = "  ``É''\t\tĲ x "
    changed, spans = align_text(text, lowercase=True, strip_accents=True)
    assert changed == '"e" ij x'
    assert [text[a:b] for a, b in spans] == ["``", "É", "''", "\t\t", *"ĲĲ x"]


def test_offsets(small):
    text = "  The  naïve ``lowest'' 1999, (so)\n"
    ids, places = small.encode_offsets(text)
    assert ids == small.encode(text)
    shown = [text[start:end] for start, end in places]
    assert all(part == part.strip() for part in shown)
    assert "".join(shown) == "".join(text.split())
    assert small.encode_offsets_batch([]) == []
    assert small.encode_offsets("") == ([], [])
    assert small.encode_offsets_batch([text, ""])[0] == (ids, places)


def test_word_starts(small):
    rule = {
        **{
            "▁the": True,
            "▁": True,
            "the": False,
            "The": False,
            ",": True,
            "th-": False,
        },
        **{"9": True, "a9": True, "é": True, "北": True, "€": True, "<eop>": True},
    }
    assert {piece: is_start(piece) for piece in rule} == rule
    assert small.starts[list(small.special_ids)].all()
    ids = small.encode("slower slowest")
    assert small.word_numbers(ids)[-1] == 1
    assert small.starts.dtype == bool


def test_specials_in_raw_text(small):
    end = small.vocab[small.sep_id]
    assert small.sep_id not in small.encode(f"low {end} slow")
    row = small.encode(f"low {end} slow", specials="parse")
    assert row == [*small.encode("low"), small.sep_id, *small.encode("slow")]
    with pytest.raises(InputError, match=r"unknown specials 'pars'"):
        small.encode("low", specials="pars")


def test_decode(small):
    ids = small.encode("the lower (so) 1999, it")
    assert small.decode(np.array(ids)) == "the lower (so) 1999, it"
    assert small.decode([]) == ""
    end = small.vocab[small.sep_id]
    assert small.decode([*small.encode("the low"), small.sep_id]) == f"the low{end}"


def test_switches():
    accents = train(strip_accents=False)
    assert accents.encode("naïve") != accents.encode("naive")
    assert train().encode("Naïve") == train().encode("naive")
    cased = train(lowercase=False, vocab_size=220)
    assert cased.encode("The") != cased.encode("the")
    with pytest.raises(InputError, match="style t5 leaves the text as it is"):
        train("t5", lowercase=True)


def test_hash(small):
    model, style = small.model, small.style
    assert Unigram(model, style=style).hash == small.hash
    hashes = {small.hash, train(style, vocab_size=SIZES[style] - 1).hash}
    if style != "t5":
        hashes |= {
            Unigram(model, style=style, lowercase=not small.lowercase).hash,
            Unigram(model, style=style, strip_accents=False).hash,
        }
    if style == "xlnet":  # which has T5's special tokens too
        hashes.add(Unigram(model, style="t5").hash)
    assert len(hashes) == {"albert": 4, "xlnet": 5, "t5": 2}[style]


@pytest.mark.parametrize("with_config", [True, False])
def test_round_trip(tmp_path, small, with_config):
    small.save(tmp_path)
    if with_config:
        config = {"model_type": small.style}
        (tmp_path / "config.json").write_text(json.dumps(config))
    again = load_tokenizer(tmp_path)
    assert (again.hash, again.style) == (small.hash, small.style)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(reference) == small.size
    for name in ("pad", "unk", "cls", "sep", "mask"):
        ours = getattr(small, f"{name}_id")
        if name != "sep" or small.style != "t5":
            assert getattr(reference, f"{name}_token_id") == ours
    texts = [*LINES, "``Low''  and\tslow 9, 1999,\n(x-y) 北 ", ""]
    ids = small.encode_batch(texts)
    assert reference(texts, add_special_tokens=False)["input_ids"] == ids
    marked = f"low {small.vocab[small.special_ids[-1]]} slower"
    middle = small.encode(marked, specials="parse")
    row = {
        "albert": [small.cls_id, *middle, small.sep_id],
        "xlnet": [*middle, small.sep_id, small.cls_id],
        "t5": [*middle, small.sep_id],
    }[small.style]
    assert reference(marked)["input_ids"] == row
    assert reference.decode(ids[0]) == small.decode(ids[0])


def test_keeps_switches_on_disk(tmp_path):
    tokenizer = train(lowercase=False, strip_accents=False, vocab_size=220)
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.lowercase, again.strip_accents) == (False, False)
    assert again.hash == tokenizer.hash
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode_batch(TEXTS)
    assert reference(TEXTS, add_special_tokens=False)["input_ids"] == ids
    assert load_tokenizer(tmp_path, lowercase=True).lowercase is True


def test_style_is_found(tmp_path, small):
    path = tmp_path / "spiece.model"
    path.write_bytes(small.model)
    assert load_tokenizer(path).hash == small.hash
    assert load_tokenizer(tmp_path).hash == small.hash
    classes = {"albert": "AlbertTokenizer", "xlnet": "XLNetTokenizerFast"}
    config = {"tokenizer_class": classes.get(small.style, "T5Tokenizer")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).style == small.style
    if small.style != "xlnet":
        with pytest.raises(
            InputError, match=r"no special tokens .*, <cls>.*style than"
        ):
            load_tokenizer(path, style="xlnet")


def test_foreign_models(shared_data):
    folder = shared_data / "sentencepiece_models"
    with pytest.raises(InputError, match="style; give style=albert | xlnet | t5"):
        load_tokenizer(folder / "google_test_model.model")
    with pytest.raises(InputError, match="not supported: its type is bpe, not unigram"):
        load_tokenizer(folder / "hf_fixtures_test_sentencepiece_bpe.model")


def test_file_errors(tmp_path, small):
    path = tmp_path / "spiece.model"
    for content, message in [
        (b"", "is not a sentencepiece model: it has no pieces"),
        (b"no model at all", r"spiece.model is not a sentencepiece model \("),
        (small.model[:1000], r"is not a sentencepiece model \("),
    ]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            load_tokenizer(tmp_path)
    small.save(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match=r"tokenizer.json is a unigram tokenizer.*put"):
        load_tokenizer(tmp_path)
    path.write_bytes(small.model)
    config = {"added_tokens_decoder": {"9": {"content": "<new>"}}, "style": small.style}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="added tokens are not supported: <new>"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "training text is empty"),
        ([" \n", "\t"], {}, "training text is empty"),
        (TEXTS, {"vocab_size": 20}, r"vocab_size=20 is too small: .*at least \d\d$"),
        (TEXTS, {"vocab_size": 9000}, r"vocab_size=9000 is too large: only \d{3} "),
        (TEXTS, {"style": "alberta"}, r"unknown style .*Did you mean albert"),
        (TEXTS, {"style": "t5", "vocab_size": 90}, r"vocab_size=90 is too small"),
    ],
)
def test_training_errors(texts, options, message):
    options = {"vocab_size": 200, "progress": False} | options
    with pytest.raises(InputError, match=message):
        train_unigram(texts, **options)


def test_long_lines_are_not_left_out():
    """The trainer alone leaves out lines of more than 4,192 bytes."""
    text = " ".join(" ".join(TEXTS).split())
    tokenizer = train_unigram([text], vocab_size=200, progress=False)
    assert tokenizer.unk_id not in tokenizer.encode(LINES[0])
    tokenizer = train_unigram(["ab" * 9000], vocab_size=16, progress=False)
    assert tokenizer.unk_id not in tokenizer.encode("abab")


def test_training_is_deterministic():
    code = """
import random
from bert_jax.data.tokenizers import train_bpe, train_chars, train_unigram
rng = random.Random(0)
words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(2000)]
texts = [" ".join(words[i : i + 10]) for i in range(0, 2000, 10)]
print(train_unigram(texts, vocab_size=300, progress=False).hash)
print(train_bpe(texts, vocab_size=500, progress=False).hash)
print(train_chars(texts, progress=False).hash)
"""
    printed = set()
    for seed, threads in [("1", "1"), ("2", "2"), ("3", "4")]:
        env = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        printed.add(run.stdout)
    assert len(printed) == 1
