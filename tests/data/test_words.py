"""Words and phrases from segmented text: the text is whole, the borders are right."""

import lzma
import re

import pytest

from bert_jax.data.words import by_jieba, by_spaces, by_tags
from bert_jax.errors import InputError


def cut(text: str, borders: list[int]) -> list[str]:
    return [text[a:b] for a, b in zip(borders, [*borders[1:], len(text)], strict=True)]


def test_spaces():
    text, borders = by_spaces("人民 日报 社\n我 用 Windows 95 和 Linux 。")
    assert text == "人民日报社\n我用Windows 95和Linux。"
    words = ["人民", "日报", "社\n", "我", "用", "Windows ", "95", "和", "Linux", "。"]
    assert cut(text, borders["words"]) == words


@pytest.mark.parametrize(
    "text", ["café au lait", "москва и пермь", "the 3 cats", "abc ▲ def"]
)
def test_words_of_letters_stay_apart(text):
    plain, borders = by_spaces(text)
    assert plain == text
    assert [text[place:].split()[0] for place in borders["words"]] == text.split()
    tagged = " ".join(f"{word}/n" for word in text.split())
    assert by_tags(tagged)[0] == text


def test_tags():
    text, borders = by_tags(
        "在/p  [中央/n  电视台/n]nt  １９９８年/t\n他/r  说/v  。/w"
    )
    assert text == "在中央电视台１９９８年\n他说。"
    words = ["在", "中央", "电视台", "１９９８年\n", "他", "说", "。"]
    assert cut(text, borders["words"]) == words
    phrases = ["在", "中央电视台", "１９９８年\n", "他", "说", "。"]
    assert cut(text, borders["phrases"]) == phrases


def test_slashes_and_brackets_that_are_text():
    text, borders = by_tags("//w  a/b/n  [/w  ]/w  km/h/q")
    assert cut(text, borders["words"]) == ["/", "a/b", "[", "]", "km/h"]
    assert borders["phrases"] == borders["words"]


def test_entities():
    """Names in brackets or in two parts are one; everything else stands alone."""
    text, borders = by_tags(
        "江/nr  泽民/nr  李/nr  鹏/nr  在/p  北京/ns  上海/ns  会见/v  克林顿/nr  王/nr"
        "\n[中央/n  电视台/n]nt  [三/m  个/q  代表/n]l  [长江/ns  公司/n]nz  司马/nr"
        "  迁/nr  [王/nr  府/n]ns"
    )
    assert cut(text, borders["entities"]) == [
        *("江泽民", "李鹏", "在", "北京", "上海", "会见", "克林顿", "王\n"),
        *("中央电视台", "三", "个", "代表", "长江公司", "司马迁", "王府"),
    ]
    assert cut(text, borders["phrases"])[10:] == [
        *("中央电视台", "三个代表", "长江公司", "司马", "迁", "王府")
    ]


def test_gold_text(shared_data):
    path = next((shared_data / "zh_peopledaily199801").glob("*.xz"))
    with lzma.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    words = phrases = names = 0
    for line in lines:
        text, borders = by_tags(line)
        assert "/" not in text.replace("／", "") or "//" in line
        assert set(borders["phrases"]) <= set(borders["words"])
        assert len(borders["words"]) == len(line.split())
        words += len(borders["words"])
        phrases += len(borders["phrases"])
        # Nothing is joined but parts of names, which are two in this text.
        inside = set(borders["words"]) - set(borders["entities"])
        assert set(borders["entities"]) <= set(borders["words"])
        assert len(inside) <= len(re.findall(r"/nr +\S{1,2}/nr", line)) + line.count(
            "]"
        )
        names += len(inside)
    print(f"{words} words, {phrases} phrases, {names} names in {len(lines)} lines")
    assert words > 1_000_000
    assert 10_000 < names < 20_000


def test_jieba():
    jieba = pytest.importorskip("jieba")
    text = "我来到北京清华大学"
    plain, borders = by_jieba(text)
    assert plain == text
    assert cut(text, borders["words"]) == list(jieba.cut(text))


def test_jieba_is_not_there(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *rest):
        if name == "jieba":
            raise ModuleNotFoundError(name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'bert_jax\[zh\]'"):
        by_jieba("我")
