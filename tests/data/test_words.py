"""Words and phrases from segmented text: the text is whole, the borders are right."""

import lzma

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


def test_gold_text(shared_data):
    path = next((shared_data / "zh_peopledaily199801").glob("*.xz"))
    with lzma.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    words = phrases = 0
    for line in lines:
        text, borders = by_tags(line)
        assert "/" not in text.replace("／", "") or "//" in line
        assert set(borders["phrases"]) <= set(borders["words"])
        assert len(borders["words"]) == len(line.split())
        words += len(borders["words"])
        phrases += len(borders["phrases"])
    print(f"{words} words, {phrases} phrases in {len(lines)} lines")
    assert words > 1_000_000


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
