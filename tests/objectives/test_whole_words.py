"""Whole words of real text, as one reads them: the column of words is not asked."""

import itertools
import lzma
import re

import numpy as np
import pytest

from bert_jax.data.prepare import prepare
from bert_jax.data.rows import Rows
from bert_jax.data.tokenizers import load_tokenizer
from tests.objectives.test_units import hidden_by

LINES, LENGTH = 250, 128
DRAWS = 8  # of hidden_by
END = "\0"  # a special token, in the text of a row
VOCABS = {
    "roberta": "vocabs/roberta-base-vocab.json",
    "albert": "sentencepiece_models/hf_fixtures_spiece.model",
    "chinese": "vocabs/bert-base-chinese-vocab.txt",
}
# By ALBERT's rule signs and digits begin a word: its words are runs of letters.
WORDS = {"roberta": f"Ġ[^Ġ{END}]*|[^Ġ{END}]+", "albert": "▁?[a-z]+"}
HAN = re.compile("[\u4e00-\u9fff]+")


def rows_of(tokenizer, folder, lines: list[str], **options) -> dict[str, np.ndarray]:
    """All rows of a text."""
    path = folder / "text.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    options |= dict(workers=0, progress=False)
    out = folder / "corpus"
    corpus = prepare([str(path)], tokenizer=tokenizer, out=out, **options)
    rows = Rows(corpus, "full", LENGTH)
    count = len(rows)
    return rows.build(range(count), [rows.read(0, count)] * count, count)


def english(shared_data, tokenizer, folder, name: str):
    """Rows of a book, and which of their pieces each word has."""
    with lzma.open(shared_data / "en_books/valid.txt.xz", "rt") as file:
        lines = [line.rstrip("\n") for line in itertools.islice(file, LINES)]
    batch = rows_of(tokenizer, folder, lines)
    words = []
    for ids in batch["ids"]:
        text, place_of = surface(tokenizer, ids)
        found = re.finditer(WORDS[name], text)
        words.append([sorted({*place_of[m.start() : m.end()]}) for m in found])
    return batch, words


def chinese(shared_data, tokenizer, folder):
    """The same of the People's Daily, which says where words end: of those of Chinese
    characters, so that a character is a piece. They are looked up in its text."""
    path = shared_data / "zh_peopledaily199801/199801.txt.xz"
    known = set(tokenizer.vocab)
    with lzma.open(path, "rt", encoding="utf-8") as file:
        tagged = [re.findall(r"(\S+)/", line) for line in itertools.islice(file, LINES)]
    lines = [[w for w in line if HAN.fullmatch(w) and known >= {*w}] for line in tagged]
    spaced = [" ".join(line) for line in lines]
    batch = rows_of(tokenizer, folder, spaced, words="spaces")
    gold = [word for line in lines for word in line]
    whole = "".join(gold)
    number = np.repeat(np.arange(len(gold)), [len(word) for word in gold])
    words = []
    for ids in batch["ids"]:
        text, place_of = surface(tokenizer, ids)
        at = [n for n, char in enumerate(text) if char != END]
        text = text.replace(END, "")
        assert whole.count(text) == 1
        start = whole.index(text)
        own = number[start : start + len(text)]
        places = np.asarray(place_of)[at]
        words.append([places[own == n].tolist() for n in np.unique(own)])
    return batch, words


def surface(tokenizer, ids: np.ndarray) -> tuple[str, list[int]]:
    """What a row reads, and for each character the place of its piece."""
    special = set(tokenizer.special_ids)
    pieces = [END if i in special else tokenizer.vocab[i] for i in ids.tolist()]
    return "".join(pieces), [n for n, piece in enumerate(pieces) for _ in piece]


@pytest.mark.parametrize("name", VOCABS)
def test_no_word_is_partly_chosen(shared_data, tmp_path, name):
    tokenizer = load_tokenizer(shared_data / VOCABS[name])
    given = (shared_data, tokenizer, tmp_path)
    batch, words = chinese(*given) if name == "chinese" else english(*given, name)
    special = np.isin(batch["ids"], tokenizer.special_ids)
    special = np.tile(special | (batch["group"] == 0), (DRAWS, 1))
    several = [
        (row, word)
        for row, own in enumerate(words * DRAWS)
        for word in own
        if len(word) > 1
    ]
    for choose in ("token", "word", "ngram", "span"):
        chosen = hidden_by(tokenizer, batch, choose=choose)
        assert not chosen[special].any()
        shares = [chosen[row, word].mean() for row, word in several]
        partly = sum(0 < share < 1 for share in shares)
        if choose == "token":
            assert partly > 1000
        else:
            assert partly == 0, choose
            assert shares.count(1.0) > 500
