"""Where words begin in text that does not show it: Chinese, above all.

The model reads characters; whole-word, n-gram and span objectives need to know which
of them make a word. A segmenter takes the text of a document and returns the text the
model is to read and, for each unit, the places in it where one begins:

    pieces  nothing is stored: the tokenizer tells (## pieces, leading space)
    spaces  `人民 日报 社`: words are set apart by spaces, which are taken out
    tags    `江/nr  泽民/nr  在/p  [中央/n  电视台/n]nt`: words with tags, as in the
            People's Daily. Brackets join words to phrases; entities are names of people
            (nr), places (ns), bodies (nt) and others (nz), in brackets or not; every
            other word stands alone (ERNIE, Sun et al. 2019, arXiv:1904.09223)
    jieba   the segmenter of that name finds the words
"""

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

from bert_jax.errors import InputError

Borders = dict[str, list[int]]

# Chinese characters and kana, which are written without spaces.
IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f"
IDEOGRAPH = re.compile(f"[{IDEOGRAPHS}]")

_TAG = re.compile(r"/[A-Za-z]+[0-9]?$")
UNTAGGED = 50  # words of a document without a tag: it is not tagged text
_CLOSED = re.compile(r"\][A-Za-z]+$")
ENTITIES = ("nr", "ns", "nt", "nz")


def lay_out(lines: list[list[str]]) -> tuple[str, list[list[int]]]:
    """The text of lines of words, and where each word begins. A space between words of
    letters stays: the model would run them together."""
    plain, begins, at = [], [], 0
    for number, words in enumerate(lines):
        begins.append([])
        if number:
            plain.append("\n")
            at += 1
        for word in words:
            if plain and needs_space(plain[-1], word):
                plain.append(" ")
                at += 1
            begins[-1].append(at)
            plain.append(word)
            at += len(word)
    return "".join(plain), begins


def by_spaces(text: str) -> tuple[str, Borders]:
    plain, begins = lay_out([line.split() for line in text.split("\n")])
    return plain, {"words": [at for places in begins for at in places]}


def by_tags(text: str) -> tuple[str, Borders]:
    lines = [[read_item(item) for item in line.split()] for line in text.split("\n")]
    count = sum(map(len, lines))
    if count >= UNTAGGED and not any(item.tag for items in lines for item in items):
        raise InputError(
            f"words=tags: none of {count} words has a tag (word/POS): {text[:40]!r} ..."
        )
    plain, begins = lay_out([[item.word for item in items] for items in lines])
    borders = {"words": [], "phrases": [], "entities": []}
    for items, places in zip(lines, begins, strict=True):
        phrases, entities = joined(items)
        borders["words"] += places
        borders["phrases"] += [at for n, at in enumerate(places) if n not in phrases]
        borders["entities"] += [at for n, at in enumerate(places) if n not in entities]
    return plain, borders


class Item(NamedTuple):
    """A tagged word, with the bracket it may stand after or before."""

    word: str
    tag: str  # "" is none
    opens: bool
    closes: str | None  # the tag of what a bracket after it closes


def read_item(item: str) -> Item:
    opens = item.startswith("[") and len(item) > 1 and not item.startswith("[/")
    item = item[1:] if opens else item
    closed = _CLOSED.search(item)
    item = item[: closed.start()] if closed else item
    word = _TAG.sub("", item)
    tag = item[len(word) + 1 :]
    return Item(word, tag, opens, closed[0][1:] if closed else None)


def joined(items: list[Item]) -> tuple[set[int], set[int]]:
    """The words of a line that go on a phrase, and those that go on an entity."""
    phrases, entities, start = set(), set(), None
    for n, item in enumerate(items):
        if start is not None:
            phrases.add(n)
        elif item.opens:
            start = n
        if item.closes is not None and start is not None:
            if item.closes in ENTITIES:
                entities.update(range(start + 1, n + 1))
            start = None
        # A family name and a given name are two words: 江/nr 泽民/nr.
        after_name = n and is_name(items[n - 1]) and n - 1 not in entities
        if after_name and is_name(item) and not item.opens:
            entities.add(n)
    return phrases, entities


def is_name(item: Item) -> bool:
    """Part of a Chinese name; a foreign one, 克林顿/nr, is one word and longer."""
    return item.tag == "nr" and len(item.word) <= 2


def by_jieba(text: str) -> tuple[str, Borders]:
    try:
        import jieba
    except ModuleNotFoundError:
        raise InputError(
            "words=jieba needs jieba: pip install 'bert_jax[zh]'"
        ) from None
    jieba.setLogLevel("ERROR")  # it announces its dictionary
    words, at = [], 0
    for word in jieba.cut(text):
        words.append(at)
        at += len(word)
    return text, {"words": words}


def needs_space(before: str, word: str) -> bool:
    """Where the tokenizer would join them: neither stands alone by itself."""
    return all(c.strip() and not stands_alone(c) for c in (before[-1:], word[:1]))


def stands_alone(char: str) -> bool:
    """An ideograph, or what BERT takes for punctuation."""
    signs = char.isascii() and not char.isalnum()
    return signs or bool(IDEOGRAPH.match(char)) or unicodedata.category(char)[0] == "P"


SEGMENTERS: dict[str, Callable[[str], tuple[str, Borders]] | None] = {
    "pieces": None,
    "spaces": by_spaces,
    "tags": by_tags,
    "jieba": by_jieba,
}
UNITS = {
    "pieces": (),
    "spaces": ("words",),
    "tags": ("words", "phrases", "entities"),
    "jieba": ("words",),
}
