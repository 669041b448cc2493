"""Texts on which tokenizers are compared: real ones, and every character there is."""

import lzma
import random
import sys
import unicodedata

ODD = [
    *("", " ", "\n", "\0", "\ufffd", "\u00a0", "\u3000", "\u2028x\u2029y", "\x85", "▁"),
    *(
        " a",
        "a ",
        "  a  b   c ",
        "\ta\n\nb \n c\r\n",
        "a \u200b b",
        "a\u00a0 b",
        "▁a b▁",
    ),
    *("a\u200bb", "a\u200db", "a\u00adb", "a\ufeffb", "\uffff", "a\ufdd0b", "a\x1cb"),
    *("👩‍👩‍👧‍👦 🇫🇷 👍🏽 ❤️ ☺", "1️⃣", "ﬁne ﬂow ½ ² Ⅷ ™", "e\u0301 é É E\u0301 ¨x x¨ y"),
    *("İstanbul I ı ẞ ß ǅ", "중국 ㄱ ｶﾞ ガ カ\u3099", "ᾈ ᾼ ΐ ΣΑΣ", "日本語kana混じり"),
    *("w" * 100, "w" * 101, "the" * 33 + "t", "the" * 34, "é" * 100, "é" * 101),
    *("don't.stop--now...", "##ing ## #", "$a+b=c^d`|~", "I'll we've they're 'S it's"),
    *("``quoted'' ''x`` `a' '''b```", '(a) "b" c-d e–f £5 €6.', "aaa aaaaaaa ----"),
    *("In 1999, 10,000 men; 3, 4, 12,345,678, x7, 2010,", "9, 9,9 ９，٣, ²,x5,000,"),
    *("北京是中国的首都。 上海，“在”《东方》…—·！A股2010,涨5%", "１２３，４"),
]


def english(folder):
    content = (folder / "en_books/valid.txt.xz").read_bytes()
    return lzma.decompress(content).decode().split("\n")


def chinese(folder):
    folder = folder / "zh_cluecorpussmall"
    names = (
        "CLUECorpusSmall_bert_sampled.txt",
        "news-commentary-v13-en-zh_sampled.txt",
    )
    texts = [(folder / name).read_text(encoding="utf-8") for name in names]
    return [line for text in texts for line in text.split("\n")]


def tweets(folder):
    names = ("emerging.dev.conll", "emerging.test.annotated", "wnut17train.conll")
    for name in names:
        text = (folder / "wnut17" / name).read_text(encoding="utf-8")
        for block in text.split("\n\n"):
            yield " ".join(line.split("\t")[0] for line in block.split("\n"))


def fuzz():
    """Every assigned character inside a word, all categories mixed, and odd cases."""
    rng = random.Random(0)
    pools = {}
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category not in ("Cs", "Cn", "Co"):
            pools.setdefault(category, []).append(chr(code))
    assert len(pools) == 27
    words = [f"a{char}b" for pool in pools.values() for char in pool]
    inside = [" ".join(words[i : i + 50]) for i in range(0, len(words), 50)]
    pools = [*pools.values(), ["\ue000", "\U000f0000", "\u0378"]]
    pools += [list("abcdefgh ABC.,1")] * 40
    mixed = [
        "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randrange(60)))
        for _ in range(1500)
    ]
    return [*inside, *mixed, *ODD]
