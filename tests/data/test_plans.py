"""Plans against brute force: nothing lost, nothing cut that need not be."""

import itertools
import random

import numpy as np
import pytest

from bert_jax.data import plans
from bert_jax.data.pairs import RANDOM, RULES
from bert_jax.data.plan_files import open_plan
from bert_jax.data.plans import KINDS, Partners
from bert_jax.data.rows import Rows
from bert_jax.errors import InputError
from tests.data.made import (
    SIGMAS,
    cut,
    doc_stretches,
    full_rows,
    in_records,
    into_words,
    joined,
    make_corpus,
    numbered,
)

LENGTHS = [8, 17, 32, 200]
PACKED = ("doc", *RULES)


@pytest.fixture(scope="module")
def words(encoded, tokenizer):
    """Documents as words as numbered pieces."""
    begins = [
        not tokenizer.vocab[piece].startswith("##") for piece in joined(joined(encoded))
    ]
    return [into_words(document, begins) for document in numbered(encoded)]


def stretches(plan, row: int) -> list[list[int]]:
    return [list(range(*plan.a[e])) for e in range(*plan.rows[row : row + 2])]


def places(encoded) -> tuple[np.ndarray, np.ndarray]:
    """Of each piece: number of its document; where documents begin, and the end."""
    sizes = [len(joined(document)) for document in encoded]
    return np.repeat(np.arange(len(sizes)), sizes), np.cumsum([0, *sizes])


def test_the_corpus_has_everything(corpus, encoded):
    """What the tests below rely on."""
    assert corpus.records > 6
    assert corpus.about["shards"] > 2
    assert (corpus.index["pieces"] == 0).sum() == 1
    sizes = [len(sentence) for sentence in joined(encoded)]
    assert corpus.read(0, corpus.about["pieces"]).tolist() == joined(joined(encoded))
    assert max(sizes) > 100
    assert len(open_plan(corpus, "full", 32, 0).blocks) > 20


# --- full, doc, stream, sentences ----------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_full(length, corpus, words):
    """Greedy by trial; the corpus once, in order, cut between words."""
    plan = open_plan(corpus, "full", length, 0)
    expected = joined(
        full_rows(documents, length) for documents in in_records(words, corpus)
    )
    assert len(plan) == len(expected)
    for number, row in enumerate(expected):
        assert len(row) <= length
        by_document = [
            [piece for piece, *_ in part if piece not in ("CLS", "SEP")]
            for _, part in itertools.groupby(row, key=lambda token: token[1])
        ]
        assert stretches(plan, number) == by_document
    found = joined(range(*stretch) for stretch in plan.a)
    assert found == list(range(corpus.about["pieces"]))
    assert not plan.b.any()
    assert (plan.labels == -1).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_full_cuts_only_words_longer_than_a_row(length, corpus, words):
    """Said once more without the oracle: ends of rows are ends of words."""
    plan = open_plan(corpus, "full", length, 0)
    of_word = {word[-1] + 1: len(word) for word in joined(words)}
    ends = plan.a[plan.rows[1:] - 1, 1]
    inside = [end for end in ends.tolist() if end not in of_word]
    size = {piece: len(word) for word in joined(words) for piece in word}
    assert all(size[end] > length - 2 for end in inside)
    assert (len(inside) > 0) == (length < 30)


@pytest.mark.parametrize("length", LENGTHS)
def test_doc(length, corpus, words):
    plan = open_plan(corpus, "doc", length, 0)
    found = [list(range(*stretch)) for stretch in plan.a]
    expected = doc_stretches(words, length - 2)
    assert sorted(found) == expected  # one document an example, nothing lost
    assert joined(expected) == list(range(corpus.about["pieces"]))
    assert not plan.b.any()
    assert (plan.labels == -1).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_stream(length, corpus, encoded):
    line = joined([*joined(document), "SEP"] for document in numbered(encoded))
    plan = open_plan(corpus, "stream", length, 0)
    rows = []
    for number in range(len(plan)):
        row = []
        examples = range(*plan.rows[number : number + 2])
        for part, ends in zip(
            stretches(plan, number), plan.labels[examples], strict=True
        ):
            row += part + ["SEP"] * int(ends)
        rows.append(row)
    assert rows == cut([line], length)
    assert not plan.b.any()


@pytest.mark.parametrize("length", LENGTHS)
def test_sentences(length, corpus, encoded):
    plan = open_plan(corpus, "sentences", length, 0)
    parts = cut(joined(numbered(encoded)), length - 2)
    assert [stretches(plan, number) for number in range(len(plan))] == [
        [part] for part in parts
    ]
    assert not plan.b.any()


# --- pairs ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("length", [16, 64])
@pytest.mark.parametrize("kind", RULES)
def test_pairs_come_from_where_they_say(kind, length, seed, corpus, encoded):
    plan = open_plan(corpus, kind, length, seed)
    home, _ = places(encoded)
    seen = {-1: 0, 0: 0, 1: 0, 2: 0}
    for a, b, label in zip(
        plan.a.tolist(), plan.b.tolist(), plan.labels.tolist(), strict=True
    ):
        seen[label] += 1
        (document,) = set(home[slice(*a)])
        others = set(home[slice(*b)])
        assert len(others) <= 1
        if label == RANDOM.get(kind):
            assert others
            assert document not in others
        elif others:
            assert others == {document}
        if others == {document} and kind != "distance":
            low, high = (b, a) if label == 1 else (a, b)
            assert low[1] <= high[0] < low[0] + 2 * length
    used = {"order": {-1, 0, 1}, "electra": {-1}, "distance": {0, 1, 2}}
    used = used.get(kind, {0, 1})
    assert {label for label, count in seen.items() if count > 5} == used


@pytest.mark.parametrize("kind", ["pair", "order", "sentence-pair", "distance"])
def test_pairs_are_made_record_by_record(kind, corpus, encoded):
    """As pairs.py has it, of sentences cut to a row, with a draw for each record."""
    plan = open_plan(corpus, kind, 24, 5)
    found = np.concatenate([plan.a, plan.b, plan.labels[:, None]], 1).tolist()
    partner = Partners(corpus, 24, random.Random())
    expected = []
    for record, documents in enumerate(in_records(numbered(encoded), corpus)):
        rng = random.Random(f"5/{record}")
        partner.rng, partner.left = rng, 0
        for document in documents:
            parts = cut(document, 21)
            starts = [part[0] for part in parts] + [parts[-1][-1] + 1]
            expected += RULES[kind](starts, 24, rng, partner)
    assert sorted(found) == sorted(map(list, expected))


def test_partners(corpus, encoded, monkeypatch):
    """Whole sentences of another document, as many as it takes."""
    parts = [cut(document, 29) for document in numbered(encoded)]
    home, borders = places(encoded)
    begins = {part[0] for part in joined(parts)}
    sizes = {part[0]: len(part) for part in joined(parts)}
    rng = random.Random(0)
    partner = Partners(corpus, 32, rng)
    went_on, before = 0, None
    for _ in range(3000):
        a, wanted = rng.choice(sorted(begins)), rng.randint(1, 40)
        start, stop = partner(a, wanted)
        assert home[start] == home[stop - 1] != home[a]
        assert start in begins
        assert stop in begins | {len(home)}
        last = max(begin for begin in begins if begin < stop)
        assert stop == last + sizes[last]
        assert stop - start >= wanted or stop == borders[home[start] + 1]
        assert last - start < wanted or last == start
        went_on += start == before
        before = stop
    assert 1000 < went_on < 2950
    # A jump for every draw: each document is as likely as any other.
    monkeypatch.setattr(plans, "BLOCK", 0)
    counts = np.zeros(len(encoded))
    sentence = np.zeros(2)
    total = 6000
    for _ in range(total):
        start, _ = partner(0, 1)
        counts[home[start]] += 1
        document = parts[home[start]]
        if len(document) == 2:
            sentence[start == document[1][0]] += 1
    assert counts[0] == 0
    share = 1 / (len(encoded) - 1)
    slack = SIGMAS * (total * share * (1 - share)) ** 0.5
    assert np.abs(counts[1:] - total * share).max() < slack
    assert abs(sentence[0] - sentence.sum() / 2) < SIGMAS * (sentence.sum() / 4) ** 0.5


def test_partners_of_two_documents(tmp_path, texts, tokenizer):
    """Never from A's own document, also where every second draw hits it."""
    two = make_corpus(tmp_path / "two", texts[1:3], tokenizer)
    border = len(joined(tokenizer.encode(line) for line in texts[1]))
    partner = Partners(two, 16, random.Random(0))
    for _ in range(8000):
        partner.left = 0
        start, _ = partner(0, 1)
        assert start >= border


def test_partners_are_spread_over_the_corpus(corpus):
    """Of 16 equal parts of the corpus, every one gives some of the random B.

    In one plan of so small a corpus there are some 30 jumps, so four are counted.
    """
    found = [open_plan(corpus, "pair", 16, seed) for seed in range(4)]
    begins = np.concatenate([plan.b[plan.labels == 1, 0] for plan in found])
    counts = np.bincount(begins * 16 // corpus.about["pieces"], minlength=16)
    assert len(begins) > 1000
    assert (counts > 0).all()
    assert counts.max() < len(begins) / 5


# --- rows and blocks -----------------------------------------------------------------


def sizes_of(plan) -> np.ndarray:
    """Tokens of each example: its specials by kind, its pieces."""
    pieces = np.diff(plan.a)[:, 0] + np.diff(plan.b)[:, 0]
    if plan.kind == "stream":
        return pieces + plan.labels
    if plan.kind == "full":
        return pieces + 1 + np.isin(np.arange(len(pieces)), plan.rows)
    return pieces + 2 + (np.diff(plan.b)[:, 0] > 0)


@pytest.mark.parametrize("length", [17, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_blocks(kind, length, corpus):
    """No row too long; rows of a block lie together and do not share its text."""
    plan = open_plan(corpus, kind, length, 0)
    sizes = sizes_of(plan)
    counts = np.diff(plan.rows)
    assert plan.rows[0] == plan.blocks[0] == 0
    assert plan.rows[-1] == len(plan.a)
    assert plan.blocks[-1] == len(plan)
    assert counts.min() >= 1
    assert np.diff(plan.blocks).min() >= 1
    used = np.add.reduceat(sizes, plan.rows[:-1])
    assert used.max() <= length
    assert plan.about["tokens"] == used.sum()
    assert plan.real == used.sum() / (len(plan) * length)
    if kind in PACKED:
        assert counts.max() <= plan.most
        assert counts.max() > 1
    before = 0
    for block in itertools.pairwise(plan.blocks.tolist()):
        examples = slice(*plan.rows[list(block)])
        text = np.concatenate([plan.a[examples], plan.b[examples]])
        text = text[text[:, 1] > text[:, 0]]
        if kind in RANDOM:  # the random B is elsewhere
            text = plan.a[examples]
        low, high = text[:, 0].min(), text[:, 1].max()
        if kind not in RANDOM:
            assert low >= before
        assert low >= before - 2 * length
        assert sizes[examples].sum() < plans.BLOCK + 2 * length
        before = high
    first = plan.a[plan.rows[:-1], 0]
    if kind not in RULES:
        assert (np.diff(first) > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_cut(kind, corpus, encoded):
    """Sentences longer than a row are counted."""
    longest = 32 - (3 if kind in RULES else 2)
    expected = sum(len(sentence) > longest for sentence in joined(encoded))
    assert open_plan(corpus, kind, 32, 0).about["cut"] == expected > 10


@pytest.mark.parametrize("length", [16, 32, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_covered(kind, length, corpus):
    """Pieces that are in a row, each once; a B from elsewhere does not count."""
    plan = open_plan(corpus, kind, length, 0)
    found = set()
    for a, b, label in zip(plan.a, plan.b, plan.labels, strict=True):
        found |= set(range(*a))
        if label != RANDOM.get(kind):
            found |= set(range(*b))
    assert plan.covered == len(found) / corpus.about["pieces"]
    assert (plan.covered == 1) or kind in RULES
    assert plan.covered > 0.3


@pytest.mark.parametrize("length", [128, 512])
def test_real_text(length, books):
    """Books: nothing lost, rows nearly full, and `real` is what built rows hold."""
    for kind in KINDS:
        rows = Rows(books, kind, length)
        plan = rows.plan
        print(
            f"{kind:13} {length}: {plan.real:.2%} of {len(plan)} rows are real tokens"
        )
        if kind in ("full", "doc"):
            assert plan.real >= 0.97
        if kind in ("full", "doc", "stream", "sentences"):
            order = np.argsort(plan.a[:, 0], kind="stable")
            a = plan.a[order]
            assert a[0, 0] == 0
            assert (a[1:, 0] == a[:-1, 1]).all()
            assert a[-1, 1] == books.about["pieces"]
        if kind in ("full", "doc", "order"):
            text = rows.read(0, len(plan))
            batch = rows.build(range(len(plan)), [text] * len(plan), len(plan))
            assert plan.real == pytest.approx((batch["group"] > 0).mean(), rel=1e-12)


@pytest.mark.parametrize("kind", ["doc", "order", "electra"])
def test_short_documents_fill_rows(kind, tmp_path, tokenizer):
    """Of some 20 pieces each: 25 of them share a row of 512."""
    texts = [["a b c d e f g h i j", "k l m n o p q r s t"]] * 400
    corpus = make_corpus(tmp_path / "short", texts, tokenizer, record=100_000)
    assert open_plan(corpus, kind, 512, 0).real > 0.9


def test_errors(corpus, tmp_path, texts, tokenizer):
    with pytest.raises(InputError) as error:
        open_plan(corpus, "pairs", 7, 0)
    assert str(error.value).split("\n") == [
        "unknown rows 'pairs'. Did you mean pair? Valid: distance, doc, electra, "
        "full, order, pair, sentence-pair, sentences, stream",
        "length=7 is too short: at least 8",
    ]
    alone = make_corpus(tmp_path / "alone", [joined(texts[:3])], tokenizer)
    for kind in RANDOM:
        message = rf"rows={kind} needs at least two documents .* has one: use rows=full"
        with pytest.raises(InputError, match=message):
            open_plan(alone, kind, 32, 0)
    for kind in ("full", "doc", "stream", "sentences", "order", "electra"):
        assert len(open_plan(alone, kind, 32, 0)) > 1
