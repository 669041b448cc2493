"""WordPiece against transformers, against a plain reading of its rules, and on disk."""

import itertools
import json
import os
import random
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
import transformers

from bert_jax.data.tokenizers import (
    PREFIX,
    SPECIALS,
    WordPiece,
    load_tokenizer,
    train_wordpiece,
)
from bert_jax.errors import InputError

SWITCHES = list(itertools.product((True, False), repeat=2))
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "Café, naïve, Ünlü, Ångström: ACCENTS and CAPITALS everywhere (even ÉCOLE)!",
    "unaffable undoing untied ties tied unities united the unions of the nations",
    "the lower the slower the slowest the lowest: low, lower, lowest, slow, slower.",
    "北京是中国的首都。 上海在东方 ひらがな カタカナ 한국어",
    "Emoji 😀 🤖 stay, numbers 1234567890 too; a-b_c+d=e^f|g~h`i $5 #6 %7 &8 *9 @0",
]
CJK = [
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
]


# The rules of google-research/bert, written down once more.


def is_dropped(char):
    control = unicodedata.category(char) in ("Cc", "Cf") and char not in "\t\n\r"
    return control or char in "\0\ufffd"


def is_space(char):
    return char in "\t\n\r" or unicodedata.category(char) == "Zs"


def is_punctuation(char):
    printable = char.isascii() and 32 < ord(char) < 127 and not char.isalnum()
    return printable or unicodedata.category(char).startswith("P")


def is_cjk(char):
    return any(first <= ord(char) <= last for first, last in CJK)


def words_of(text, *, lowercase, strip_accents):
    text = "".join(" " if is_space(c) else c for c in text if not is_dropped(c))
    text = "".join(f" {c} " if is_cjk(c) else c for c in text)
    if lowercase:  # by character: see test_known_differences for the final sigma
        text = "".join(c.lower() for c in text)
    if strip_accents:
        text = unicodedata.normalize("NFD", text)
        text = "".join(c for c in text if unicodedata.category(c) != "Mn")
    return "".join(f" {c} " if is_punctuation(c) else c for c in text).split()


def pieces_of(word, vocab):
    pieces, start = [], 0
    while start < len(word):
        prefix = PREFIX if start else ""
        for end in range(len(word), start, -1):
            if prefix + word[start:end] in vocab:
                break
        else:
            return ["[UNK]"]
        pieces.append(prefix + word[start:end])
        start = end
    return pieces if len(word) <= 100 else ["[UNK]"]


def oracle(texts, tokenizer):
    ids = {piece: i for i, piece in enumerate(tokenizer.vocab)}
    switches = {
        "lowercase": tokenizer.lowercase,
        "strip_accents": tokenizer.strip_accents,
    }
    for text in texts:
        words = words_of(text, **switches)
        yield [ids[piece] for word in words for piece in pieces_of(word, ids)]


def settled_characters():
    """Characters on which the library and Python's unicodedata cannot disagree.

    The library knows Unicode 8, Python a later one; what kept its category since 3.2
    is the same in both. Private use is left out: see test_known_differences.
    """
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        category = unicodedata.category(char)
        settled = category == unicodedata.ucd_3_2_0.category(char)
        if settled and category not in ("Cs", "Co", "Cn"):
            yield char


@pytest.fixture(scope="module")
def texts():
    """Every settled character inside a word, all categories mixed, and odd cases."""
    rng = random.Random(0)
    by_category = {}
    for char in settled_characters():
        by_category.setdefault(unicodedata.category(char), []).append(char)
    assert len(by_category) == 27  # 30 less Cs, Co, Cn
    inside = [f"a{char}b" for chars in by_category.values() for char in chars]
    pools = [*by_category.values(), *[list("abcdefgh ABC.,1")] * 40]
    mixed = [
        "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randrange(60)))
        for _ in range(1500)
    ]
    odd = [
        *("", " ", "\n", "\0", "\ufffd", "\u00a0", "\u3000", "\u2028x\u2029y", "\x85"),
        *("a\u200bb", "a\u200db", "a\u00adb", "a\ufeffb", "\uffff", "a\ufdd0b"),
        *("👩‍👩‍👧‍👦 🇫🇷 👍🏽 ❤️ ☺", "1️⃣", "ﬁne ﬂow ½ ² Ⅷ ™", "e\u0301 é É E\u0301"),
        *("İstanbul I ı ẞ ß ǅ", "중국 ㄱ ｶﾞ ガ カ\u3099", "ᾈ ᾼ ΐ", "日本語kana混じり"),
        *("w" * 100, "w" * 101, "the" * 33 + "t", "the" * 34, "é" * 100, "é" * 101),
        *("don't.stop--now...", "##ing ## #", "[unused1] [ MASK ]", "$a+b=c^d`|~"),
    ]
    return [*inside, *mixed, *odd, *SENTENCES]


def train(*, lowercase=True, strip_accents=None, vocab_size=260):
    return train_wordpiece(
        SENTENCES,
        vocab_size=vocab_size,
        lowercase=lowercase,
        strip_accents=strip_accents,
        progress=False,
    )


@pytest.fixture(scope="module")
def small():
    return train()


def toy(*pieces, **switches):
    return WordPiece([*SPECIALS, *pieces], **switches)


def real(shared_data, name):
    path = shared_data / "vocabs" / f"bert-base-{name}-vocab.txt"
    return load_tokenizer(path, lowercase=name == "uncased")


def check_parity(tokenizer, reference, texts):
    ours = tokenizer.encode_batch(texts)
    theirs = reference(texts, add_special_tokens=False)["input_ids"]
    rows = zip(texts, ours, theirs, oracle(texts, tokenizer), strict=True)
    wrong = [(text, a, b, c) for text, a, b, c in rows if not a == b == c]
    assert not wrong, f"{len(wrong)} texts differ, first {wrong[:3]!r}"


@pytest.mark.parametrize(("lowercase", "strip_accents"), SWITCHES)
def test_parity_trained(texts, lowercase, strip_accents):
    tokenizer = train(lowercase=lowercase, strip_accents=strip_accents)
    reference = transformers.BertTokenizer(
        vocab={piece: i for i, piece in enumerate(tokenizer.vocab)},
        do_lower_case=lowercase,
        strip_accents=strip_accents,
    )
    check_parity(tokenizer, reference, texts)


@pytest.mark.parametrize(
    ("name", "size"), [("uncased", 30522), ("cased", 28996), ("chinese", 21128)]
)
def test_parity_real(shared_data, texts, name, size):
    tokenizer = real(shared_data, name)
    assert tokenizer.size == size
    assert tokenizer.special_ids == (0, 100, 101, 102, 103)
    reference = transformers.BertTokenizer(
        vocab={piece: i for i, piece in enumerate(tokenizer.vocab)},
        do_lower_case=tokenizer.lowercase,
    )
    check_parity(tokenizer, reference, texts)


def test_real_ids(shared_data):
    tokenizer = real(shared_data, "uncased")
    ids = [1996, 6207, 2003, 14477, 20961, 3468, 1012]
    assert tokenizer.encode("The apple is UNAFFABLE.") == ids
    assert tokenizer.decode([101, *ids, 102]) == "[CLS] the apple is unaffable. [SEP]"


def test_known_differences():
    """The library's departures from the release, as the module says: pinned."""
    tokenizer = toy("a", "##b", "ab", "b", "σ", "ς", "##σ", "##ς", "𞥞", "𫠠")
    ids = {piece: i for i, piece in enumerate(tokenizer.vocab)}
    assert tokenizer.encode("a\ue000b") == [ids["ab"]]  # private use dropped
    assert tokenizer.encode("ΣΣ") == [ids["σ"], ids["##σ"]]  # release: σς
    assert tokenizer.encode("a𞥞b") == [tokenizer.unk_id]  # punctuation of Unicode 9
    assert tokenizer.encode("a\U0002b820b") == [tokenizer.unk_id]  # a CJK ideograph
    assert tokenizer.encode("a\U0002b920b") == [ids["a"], tokenizer.unk_id, ids["b"]]


def test_pieces_join_to_the_normalised_text(small, texts):
    joined = 0
    for text, ids in zip(texts, small.encode_batch(texts), strict=True):
        if small.unk_id in ids:
            continue
        pieces = [small.vocab[i].removeprefix(PREFIX) for i in ids]
        assert "".join(pieces) == "".join(
            words_of(text, lowercase=True, strip_accents=True)
        )
        joined += len(ids) > 1
    assert joined > 200


def test_encode_forms_agree(small):
    ids = small.encode_batch(SENTENCES)
    assert ids == [small.encode(text) for text in SENTENCES]
    assert ids == [small.encode_offsets(text)[0] for text in SENTENCES]
    assert small.encode_batch([]) == []


def test_offsets():
    tokenizer = toy("cafe", "un", "##tie", "##d", "北")
    text = "  Café\u200b UNtied北"
    ids, offsets = tokenizer.encode_offsets(text)
    assert [tokenizer.vocab[i] for i in ids] == ["cafe", "un", "##tie", "##d", "北"]
    places = [text[start:end] for start, end in offsets]
    assert places == ["Café", "UN", "tie", "d", "北"]


def test_specials_in_raw_text():
    tokenizer = toy("the", "[", "]", "mask", "sat")
    text = "The [MASK] sat"
    assert tokenizer.encode(text, specials="parse") == [5, tokenizer.mask_id, 9]
    assert tokenizer.encode(text) == tokenizer.encode_batch([text])[0]
    assert tokenizer.encode(text) == [5, 6, 8, 7, 9]
    assert tokenizer.encode("[PAD][CLS]", specials="parse") == [0, 2]
    assert not {0, 2, 3, 4} & set(tokenizer.encode("".join(SPECIALS)))
    with pytest.raises(InputError, match=r"unknown specials 'pars'.*mean parse\?"):
        tokenizer.encode(text, specials="pars")


def test_decode():
    tokenizer = toy("the", "un", "##tie", "##d", ".")
    ids = np.array([2, 5, 6, 7, 8, 4, 9, 3])
    assert tokenizer.decode(ids) == "[CLS] the untied [MASK]. [SEP]"
    assert tokenizer.decode([]) == ""


def test_word_numbers():
    tokenizer = toy("un", "##tie", "##d", ".")
    un, tie, d, stop = 5, 6, 7, 8
    assert tokenizer.starts.tolist() == [True] * 6 + [False, False, True]
    cases = {
        (2, un, tie, d, un, stop, 3): [0, 1, 1, 1, 2, 3, 4],
        (tie, d, un, tie): [0, 0, 1, 1],  # a row cut inside a word
        (): [],
    }
    for ids, expected in cases.items():
        numbers = tokenizer.word_numbers(list(ids))
        assert numbers.dtype == np.int32
        assert numbers.tolist() == expected
    batch = tokenizer.word_numbers(np.array([[un, tie], [d, un]]))
    assert batch.tolist() == [[0, 0], [0, 1]]


def test_hash():
    base = toy("a", "b")
    assert base.hash == toy("a", "b", lowercase=True, strip_accents=True).hash
    assert len(base.hash) == 16
    assert int(base.hash, 16)
    others = [
        toy("b", "a"),
        toy("a", "c"),
        toy("a"),
        toy("ab"),
        toy("a", "b", lowercase=False),
        toy("a", "b", strip_accents=False),
        toy("a", "b", lowercase=False, strip_accents=True),
        toy("a", "b", split_chinese=False),
    ]
    assert len({base.hash, *(other.hash for other in others)}) == 9


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize(("lowercase", "strip_accents"), SWITCHES)
def test_round_trip(tmp_path, texts, lowercase, strip_accents, with_config):
    tokenizer = train(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.save(tmp_path)
    if with_config:
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(reference, transformers.BertTokenizer)
    assert len(reference) == tokenizer.size
    for name in ("pad", "unk", "cls", "sep", "mask"):
        ours = getattr(tokenizer, f"{name}_id")
        assert getattr(reference, f"{name}_token_id") == ours
        assert tokenizer.vocab[ours] == f"[{name.upper()}]"
    sample = [*texts[::50], *SENTENCES, "École ÉCOLE école"]
    ids = tokenizer.encode_batch(sample)
    assert reference(sample, add_special_tokens=False)["input_ids"] == ids
    marked = "The [MASK] École"
    middle = tokenizer.encode(marked, specials="parse")
    row = [tokenizer.cls_id, *middle, tokenizer.sep_id]
    pair = reference(marked, marked)
    assert pair["input_ids"] == [*row, *row[1:]]
    assert pair["token_type_ids"] == [0] * len(row) + [1] * (len(row) - 1)
    assert reference.decode(row) == tokenizer.decode(row)

    for missing in ([], ["vocab.txt"], ["tokenizer.json"]):
        folder = tmp_path / f"without-{len(missing)}-{''.join(missing)}"
        tokenizer.save(folder)
        for name in missing:
            (folder / name).unlink()
        again = load_tokenizer(folder)
        assert again.hash == tokenizer.hash
        assert again.encode_batch(sample) == ids
    # tokenizer.json alone has the switches too.
    (folder / "tokenizer_config.json").unlink()
    tokenizer._parsing.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).hash == tokenizer.hash


def test_loads_what_transformers_saves(tmp_path, small):
    ids = {piece: i for i, piece in enumerate(small.vocab)}
    reference = transformers.BertTokenizer(vocab=ids, do_lower_case=False)
    reference.save_pretrained(tmp_path)
    expected = WordPiece(small.vocab, lowercase=False)
    assert load_tokenizer(tmp_path).hash == expected.hash


def test_where_switches_come_from(tmp_path):
    vocab = [*SPECIALS, "a"]
    toy("a", lowercase=True).save(tmp_path)
    config = tmp_path / "tokenizer_config.json"

    def switches(**arguments):
        loaded = load_tokenizer(tmp_path, **arguments)
        assert loaded.vocab == vocab
        return loaded.lowercase, loaded.strip_accents, loaded.split_chinese

    assert switches() == (True, True, True)
    config.write_text('{"do_lower_case": false, "strip_accents": null}')
    assert switches() == (False, False, True)
    assert switches(lowercase=True) == (True, True, True)
    assert switches(strip_accents=True) == (False, True, True)
    config.write_text('{"tokenize_chinese_chars": false}')
    assert switches() == (True, True, False)
    (tmp_path / "tokenizer.json").unlink()
    config.unlink()
    assert switches() == (True, True, True)
    file = load_tokenizer(tmp_path / "vocab.txt", lowercase=False)
    assert (file.lowercase, file.strip_accents) == (False, False)


def test_vocab_file_lines(tmp_path):
    """Windows line ends, no last line end, and U+2028 as a piece, not a line end."""
    path = tmp_path / "vocab.txt"
    pieces = [*SPECIALS, "\u2028", "a"]
    path.write_bytes("\r\n".join(pieces).encode())
    assert load_tokenizer(path).vocab == pieces
    path.write_bytes("".join(f"{piece}\n" for piece in pieces).encode())
    assert load_tokenizer(path).vocab == pieces


def test_old_tokenizer_json(tmp_path, small):
    """Older files name no model type; truncation and padding are not part of ids."""
    small.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["model"]["type"]
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).hash == small.hash
    assert len(load_tokenizer(tmp_path).encode("the dog the dog")) == 4


def test_trained_by_hand():
    """Merges by count: ab 5, then cd and abe 2 each, where the older pair wins."""
    texts = iter(["ab ab AB, cd", "abe abe cd"])  # can be read only once
    tokenizer = train_wordpiece(texts, vocab_size=17, progress=False)
    characters = [",", "a", "b", "c", "d", "e", "##b", "##d", "##e"]
    assert tokenizer.vocab == [*SPECIALS, *characters, "ab", "cd", "abe"]


@pytest.mark.parametrize(("lowercase", "strip_accents"), SWITCHES)
def test_trained_vocabulary(lowercase, strip_accents):
    tokenizer = train(lowercase=lowercase, strip_accents=strip_accents, vocab_size=250)
    assert tokenizer.size == len(set(tokenizer.vocab)) == 250
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    ids = tokenizer.encode_batch(SENTENCES)
    assert not any(tokenizer.unk_id in row for row in ids)
    text = "".join(tokenizer.vocab[5:])
    assert ("É" in text) == (not lowercase and not strip_accents)
    assert ("é" in text) == (not strip_accents)
    assert ("E" in text) == (not lowercase)


def test_strip_accents_defaults_to_lowercase():
    assert train().strip_accents is True
    assert train(lowercase=False).strip_accents is False


def test_training_is_deterministic():
    """Random words make many ties; the library alone gives two results of two runs."""
    code = """
import random
from bert_jax.data.tokenizers import train_wordpiece
rng = random.Random(0)
words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(2000)]
texts = [" ".join(words[i : i + 10]) for i in range(0, 2000, 10)]
print(train_wordpiece(texts, vocab_size=500, progress=False).hash)
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


def test_import_is_light():
    code = (
        "import sys, bert_jax.data.tokenizers; "
        "heavy = {'tensorflow', 'torch', 'transformers', 'jax', 'sentencepiece'}; "
        "print(heavy & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stderr


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        ([], 100, "training text is empty"),
        ([" \n", "\u200b"], 100, "training text is empty"),
        (["ab cb"], 8, r"vocab_size=8 is too small.*alphabet of 4 .*at least 9"),
        (["ab cb"], 12, r"vocab_size=12 is too large: only 11 pieces"),
    ],
)
def test_training_errors(texts, vocab_size, message):
    with pytest.raises(InputError, match=message):
        train_wordpiece(texts, vocab_size=vocab_size, progress=False)


def test_smallest_and_largest_vocabulary():
    for vocab_size in (9, 11):
        tokenizer = train_wordpiece(["ab cb"], vocab_size=vocab_size, progress=False)
        assert tokenizer.size == vocab_size


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_path_errors(tmp_path):
    with pytest.raises(InputError, match=r"nowhere does not exist; give a directory"):
        load_tokenizer(tmp_path / "nowhere")
    looked = r"spiece.model, sentencepiece.bpe.model, tokenizer.json, vocab.txt"
    with pytest.raises(InputError, match=f"looked for {looked}"):
        load_tokenizer(tmp_path)
    toy("a").save(tmp_path)
    with pytest.raises(InputError, match=r"tokenizer.json is neither a directory nor"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([*SPECIALS, *"abab"], r"vocab.txt: 2 pieces occur more than once: 'a', 'b'"),
        ([*SPECIALS, *"abcdefghijkl" * 2], r"12 pieces .*'i', 'j', \.\.\.; every"),
        (["once", "upon", "", ""], r"vocab.txt: no special tokens \[PAD\], \[UNK\]"),
        (["[PAD]", "[UNK]", "a"], r"vocab.txt: no special tokens \[CLS\], \[SEP\], \["),
        ([b"\xff\xfe"], r"vocab.txt is not UTF-8 text"),
    ],
)
def test_vocab_errors(tmp_path, content, message):
    lines = [line.encode() if isinstance(line, str) else line for line in content]
    (tmp_path / "vocab.txt").write_bytes(b"\n".join(lines))
    for path in (tmp_path, tmp_path / "vocab.txt"):
        with pytest.raises(InputError, match=message):
            load_tokenizer(path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model": ', "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[1]", "does not hold a JSON object"),
    ],
)
def test_broken_json(tmp_path, name, content, message):
    toy("a").save(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name} {message}.*copy or save it again"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("model"), r"is not a file of the tokenizers library"),
        (
            lambda c: c.update(
                model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
            ),
            r"model type WordLevel is not supported; valid: WordPiece, BPE",
        ),
        (
            lambda c: (
                c.update(normalizer=None),
                c["model"].update(max_input_chars_per_word=7),
            ),
            r"normalizer.type is None \(valid: 'BertNormalizer'\); .*"
            r"max_input_chars_per_word is 7 \(valid: 100\)",
        ),
        (
            lambda c: c["added_tokens"].append(
                c["added_tokens"][0] | {"id": 6, "content": "<new>"}
            ),
            r"added tokens are not supported: <new>; give",
        ),
        (
            lambda c: c["model"]["vocab"].update(a=9),
            r"the ids of its 6 pieces are not 0 to 5",
        ),
    ],
)
def test_foreign_tokenizer_json(tmp_path, change, message):
    toy("a").save(tmp_path)
    edit_json(tmp_path / "tokenizer.json", change)
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"added_tokens_decoder": [{"content": "x"}]},
        {"added_tokens_decoder": {"5": "x"}},
        {"added_tokens_decoder": {"5": {"content": 3}}},
        {"do_lower_case": "yes"},
        {"tokenizer_class": 3},
    ],
)
def test_configs_of_another_form(change, tmp_path):
    toy("a").save(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", lambda c: c.update(change))
    with pytest.raises(InputError, match=r"tokenizer_config\.json cannot be used: "):
        load_tokenizer(tmp_path)


def test_added_tokens_of_the_config(tmp_path):
    toy("a").save(tmp_path)
    added = {"4": {"content": "[MASK]"}, "6": {"content": "<new>"}}
    change = {"added_tokens_decoder": added}
    edit_json(tmp_path / "tokenizer_config.json", lambda c: c.update(change))
    with pytest.raises(InputError, match=r"not supported: <new>; give"):
        load_tokenizer(tmp_path)
