"""What repeats an earlier text is found; what only looks alike is not."""

import random

import pytest

from bert_jax.data.duplicates import make_filter, shingles, words_of
from bert_jax.data.text import documents

WORDS = [f"w{n}" for n in range(5000)]


def draw(rng, count: int) -> list[str]:
    return rng.choices(WORDS, k=count)


def jaccard(a: str, b: str) -> float:
    a, b = (set(shingles(words_of(text)).tolist()) for text in (a, b))
    return len(a & b) / len(a | b)


def test_keep_drops_nothing():
    is_duplicate = make_filter("keep")
    assert not any(is_duplicate("the same") for _ in range(3))


@pytest.mark.parametrize("kind", ["exact", "near"])
def test_exact_up_to_case_and_punctuation(kind):
    is_duplicate = make_filter(kind)
    assert not is_duplicate("The cat, it sat.")
    assert is_duplicate("the  CAT it\nsat")
    assert not is_duplicate("the cat it sits")
    assert not is_duplicate("")


@pytest.mark.parametrize(
    ("changes", "least", "most"), [(0, 1.0, 1.0), (1, 0.9, 1.0), (40, 0.0, 0.05)]
)
def test_near(changes, least, most):
    """Documents of 2000 words with a few words changed."""
    rng = random.Random(0)
    is_duplicate = make_filter("near")
    found, common = 0, []
    for _ in range(60):
        words = draw(rng, 2000)
        other = list(words)
        for place in rng.sample(range(2000), changes):
            other[place] = "changed"
        first, second = " ".join(words), " ".join(other)
        common.append(jaccard(first, second))
        assert not is_duplicate(first)
        found += is_duplicate(second)
    mean = sum(common) / len(common)
    print(f"{changes} changes: Jaccard {mean:.2f}, found {found / 60:.2f}")
    assert least <= found / 60 <= most


def test_near_in_chinese():
    """One character of a thousand changed; texts of other characters are kept."""
    rng = random.Random(0)
    found = kept = 0
    for _ in range(100):
        text = "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(1000))
        at = rng.randrange(1000)
        other = text[:at] + "一" + text[at + 1 :]
        is_duplicate = make_filter("near")
        kept += not is_duplicate(text)
        kept += not is_duplicate(text[500:] * 2)
        found += is_duplicate(other)
    assert kept == 200
    assert found >= 95  # 1 - (1 - J ** 12) ** 10 at J = 0.974 is 0.9999998


def test_signs_alone_are_compared_as_they_are():
    is_duplicate = make_filter("exact")
    assert [is_duplicate(t) for t in (":-)", "***", ":-)")] == [False, False, True]


def test_different_texts_are_kept():
    rng = random.Random(1)
    is_duplicate = make_filter("near")
    assert not any(is_duplicate(" ".join(draw(rng, 300))) for _ in range(500))


def test_real_text(shared_data):
    """Books: no document is dropped but those that are there twice."""
    texts = [d.text for d in documents([str(shared_data / "en_books/valid.txt.xz")])]
    is_duplicate = make_filter("near")
    assert sum(map(is_duplicate, texts)) == len(texts) - len(set(texts))
    assert all(map(is_duplicate, texts))
