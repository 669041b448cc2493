"""Tables of similar words, and the column that says which word a piece belongs to."""

import json
import random
import shutil

import numpy as np
import pytest

from bert_jax.data import find_similar as finding
from bert_jax.data import plans
from bert_jax.data import prepare as module
from bert_jax.data import similar as table_module
from bert_jax.data.corpus import open_corpus, similar_words
from bert_jax.data.find_similar import similar_from_text, similar_from_vectors
from bert_jax.data.plans import KINDS
from bert_jax.data.prepare import prepare
from bert_jax.data.records import Writer
from bert_jax.data.rows import Rows
from bert_jax.data.similar import load_similar, make_similar, nearest
from bert_jax.data.tokenizers import SPECIALS, WordPiece
from bert_jax.errors import InputError
from tests.data.made import make_corpus
from tests.data.test_prepare import contents

CHARACTERS = [chr(0x4E00 + n) for n in range(30)]


def make_words(count: int) -> list[str]:
    rng = random.Random(1)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(CHARACTERS, k=rng.choice((1, 2, 2, 3))))] = None
    return list(found)


WORDS = make_words(60)


@pytest.fixture(scope="module")
def tokenizer():
    return WordPiece([*SPECIALS, *CHARACTERS])


@pytest.fixture(scope="module")
def lines() -> list[list[str]]:
    """Documents of lines of words set apart by spaces; a third of them are strange."""
    rng = random.Random(0)
    strange = ["龙", "一" * 9, "丁龙"]  # unknown, too long, partly unknown
    return [
        [" ".join(rng.choices([*WORDS, *strange], k=rng.randint(1, 20)))] * (n % 3 + 1)
        for n in range(80)
    ]


@pytest.fixture(scope="module")
def source(lines, tmp_path_factory):
    path = tmp_path_factory.mktemp("similar") / "text.txt"
    path.write_text("\n\n".join("\n".join(document) for document in lines))
    return str(path)


@pytest.fixture(scope="module")
def table(source, tokenizer):
    return similar_from_text(
        [source], tokenizer=tokenizer, words="spaces", neighbours=4, progress=False
    )


@pytest.fixture(scope="module")
def folder(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "similar"
    table.save(path)
    return path


@pytest.fixture(scope="module")
def corpus(folder, lines, tokenizer, tmp_path_factory):
    out = tmp_path_factory.mktemp("with-words") / "corpus"
    return make_corpus(out, lines, tokenizer, record=300, shard=1500, words=str(folder))


# --- tables --------------------------------------------------------------------------


def test_words_of_a_text(table, tokenizer, lines):
    text = " ".join(line for document in lines for line in document)
    counts = {word: text.split().count(word) for word in WORDS}
    often = {word for word in WORDS if counts[word] >= finding.RAREST}
    assert set(table.names) == often  # nothing strange, nothing rare
    assert list(table.names) == sorted(table.names, key=lambda w: -counts[w])
    for number, name in enumerate(table.names, 1):
        size = table.sizes[number]
        assert table.pieces[number, :size].tolist() == tokenizer.encode(name)
        assert not table.pieces[number, size:].any()


def test_the_nearest_of_as_many_pieces():
    rng = np.random.default_rng(0)
    vectors, sizes = rng.normal(size=(40, 5)), rng.integers(1, 4, 40)
    sizes[7] = 9  # the only one: nothing is similar to it
    sizes[[8, 9]] = 8
    vectors[11] = 0  # a word about which nothing is known
    found = nearest(vectors, sizes, 6)
    for word in range(40):
        others = [n for n in range(40) if n != word and sizes[n] == sizes[word]]
        length = lambda v: max(np.linalg.norm(v), 1e-12)  # noqa: E731
        cosine = {
            n: vectors[n] @ vectors[word] / length(vectors[n]) / length(vectors[word])
            for n in others
        }
        got = [int(n) - 1 for n in found[word] if n]
        assert len(got) == min(6, len(others))
        best = sorted(cosine.values(), reverse=True)[: len(got)]
        np.testing.assert_allclose([cosine[n] for n in got], best, atol=1e-12)
    assert not found[7].any()
    assert found[8].tolist() == [10, 0, 0, 0, 0, 0]


def test_blocks_make_no_difference(monkeypatch):
    rng = np.random.default_rng(0)
    vectors, sizes = rng.normal(size=(50, 5)), rng.integers(1, 3, 50)
    whole = nearest(vectors, sizes, 3)
    monkeypatch.setattr(table_module, "CELLS", 175)  # of some 25 words, seven rows
    np.testing.assert_array_equal(nearest(vectors, sizes, 3), whole)


def test_saved_and_loaded(table, folder, tmp_path):
    again = load_similar(folder)
    assert again == table
    assert hash(again) == hash(table)
    assert again.names == table.names
    again.save(tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(folder)


def test_equality_is_of_what_it_says(table):
    fields = dict(vars(table))
    fields = {name: fields[name] for name in table.__dataclass_fields__}
    near = table.near[:, :2].copy()
    other = type(table)(**fields | {"near": near})
    assert other != table
    assert other.numbering == table.numbering  # of the same words
    assert type(table)(**fields | {"words": "jieba"}).numbering != table.numbering


def test_damaged(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    arrays = dict(np.load(copy / "similar.npz"))
    for name in arrays:
        wrong = arrays[name].copy()
        wrong[3] += 1
        np.savez_compressed(copy / "similar.npz", **arrays | {name: wrong})
        with pytest.raises(InputError, match="damaged .its checksum is wrong"):
            load_similar(copy)
    (copy / "similar.npz").write_bytes((folder / "similar.npz").read_bytes()[:-70])
    with pytest.raises(InputError, match="is damaged"):
        load_similar(copy)
    about = json.loads((folder / "similar.json").read_text())
    (copy / "similar.json").write_text(json.dumps(about | {"format": 0}))
    with pytest.raises(InputError, match="format 0, not 1"):
        load_similar(copy)


def test_given_vectors(tokenizer, tmp_path):
    """Two words with the same pieces are one; unknown and long ones are left out."""
    path = tmp_path / "vectors.txt"
    rows = [
        "丁 1 0",
        "七 0.9 0.1",
        "万 0 1",
        "丁 5 5",
        "龙 1 0",
        "丁七 1 1",
        "万丁 1 0",
    ]
    path.write_text("\n".join([*rows, f"{'丁' * 9} 1 1"]))
    told = dict(tokenizer=tokenizer, neighbours=2)
    made = similar_from_vectors(path, words="spaces", **told)
    assert made.names == ("丁", "七", "万", "丁七", "万丁")
    assert made.near[1:].tolist() == [[2, 3], [1, 3], [2, 1], [5, 0], [4, 0]]
    # Where every character is a word, words of several are none.
    assert similar_from_vectors(path, words="pieces", **told).names == (
        "丁",
        "七",
        "万",
    )


def test_what_cannot_be_made(source, tokenizer, tmp_path):
    told = dict(tokenizer=tokenizer, progress=False)
    with pytest.raises(InputError, match="neighbours=0: at least 1"):
        similar_from_text([source], neighbours=0, **told)
    with pytest.raises(InputError, match="unknown words 'space'"):
        similar_from_text([source], words="space", **told)
    (tmp_path / "a.txt").write_text("丁 七 丁 七")
    with pytest.raises(InputError, match="too little to tell which are similar"):
        similar_from_text([str(tmp_path / "a.txt")], words="spaces", **told)
    (tmp_path / "v.txt").write_text("cat 1 2\ndog 3 4")
    with pytest.raises(InputError, match="the tokenizer knows 0 as single words"):
        similar_from_vectors(tmp_path / "v.txt", tokenizer=tokenizer)
    with pytest.raises(InputError, match="no table of similar words; make one with"):
        load_similar(tmp_path)


def test_texts_without_any_piece(table, folder, source, tokenizer, tmp_path):
    """A file of U+200B alone: cleaning leaves nothing of it. Among others it changes
    nothing; by itself it is too little."""
    (tmp_path / "empty.txt").write_text("\u200b\n\n\u200b\n")
    empty = str(tmp_path / "empty.txt")
    nothing = np.zeros(0, np.int32)
    found = table.numbers(nothing, nothing > 0)
    assert (found.shape, found.dtype) == ((0,), table.dtype)
    told = dict(tokenizer=tokenizer, words="spaces", neighbours=4, progress=False)
    assert similar_from_text([empty, source], **told) == table
    with pytest.raises(InputError, match="the text has 0 words"):
        similar_from_text([empty], **told)
    options = dict(tokenizer=tokenizer, words=str(folder), progress=False)
    both = prepare([empty, source], out=tmp_path / "both", **options)
    alone = prepare([source], out=tmp_path / "alone", **options)
    assert both.about["pieces"] == alone.about["pieces"]
    for corpus in (both, alone):
        assert corpus.read_columns(0, 50)["word_id"].any()


# --- the column ----------------------------------------------------------------------


def expected_numbers(lines, table) -> list[int]:
    """Word after word, from the text."""
    found = []
    for line in (line for document in lines for line in document):
        for word in line.split():
            number = table.names.index(word) + 1 if word in table.names else 0
            found += [number] * len(word)
    return found


def test_every_piece_has_its_word(corpus, lines, table):
    expected = expected_numbers(lines, table)
    assert 0.3 < np.mean(np.array(expected) > 0) < 0.95
    assert corpus.records > 5
    assert corpus.similar == table
    assert corpus.units == ("words",)
    assert corpus.about["settings"]["words"] == "spaces"
    total = corpus.about["pieces"]
    rng = random.Random(0)
    for _ in range(50):
        start, stop = sorted(rng.sample(range(total + 1), 2))
        columns = corpus.read_columns(start, stop)
        assert columns["word_id"].tolist() == expected[start:stop]
        assert columns["word_id"].dtype == np.uint16


def test_more_words_than_two_bytes_hold(tokenizer):
    ids = [np.array([5 + n % 30, 5 + n // 30 % 30], np.int32) for n in range(900)]
    made = make_similar(
        ids,
        np.random.default_rng(0).normal(size=(900, 3)),
        names=[str(n) for n in range(900)],
        tokenizer=tokenizer.hash,
        found_by="spaces",
        neighbours=2,
    )
    wide = type(made)(
        *(made.tokenizer, made.words, ("",) * (1 << 16)),
        *(made.pieces, made.sizes, made.near),
    )
    assert (made.dtype, wide.dtype) == (np.dtype("<u2"), np.dtype("<u4"))
    text, begins = np.concatenate(ids[::-1]), np.arange(1800) % 2 == 0
    assert (
        wide.numbers(text, begins).tolist() == np.repeat(range(900, 0, -1), 2).tolist()
    )


def test_words_by_pieces(tmp_path, tokenizer):
    """Where the tokenizer tells what a word is, only the word's number is kept."""
    (tmp_path / "a.txt").write_text("\n".join(["丁七万"] * 6))
    made = similar_from_text(
        [str(tmp_path / "a.txt")], tokenizer=tokenizer, progress=False
    )
    made.save(tmp_path / "table")
    options = dict(tokenizer=tokenizer, out=tmp_path / "corpus", progress=False)
    found = prepare([str(tmp_path / "a.txt")], words=str(tmp_path / "table"), **options)
    assert found.units == ()
    names = [made.names[n - 1] for n in found.read_columns(0, 6)["word_id"]]
    assert names == list("丁七万丁七万")


def test_workers_and_interruptions_make_no_difference(
    corpus, folder, lines, tokenizer, tmp_path, monkeypatch
):
    source = tmp_path / "corpus.txt"
    text = "\n\n".join("\n".join(document) for document in lines)
    source.write_text(text)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr("bert_jax.data.records.SHARD_BYTES", 1500)
    out = tmp_path / "again"
    options = dict(tokenizer=tokenizer, out=out, sentences="line", progress=False)
    options |= dict(words=str(folder))
    real, written = Writer.append, []

    def stop(self, data):
        real(self, data)
        written.append(data)
        if len(written) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare([str(source)], workers=0, **options)
    made = []
    real_columns = module.columns_of
    with monkeypatch.context() as patch:
        patch.setattr(
            module, "columns_of", lambda *told: made.append(0) or real_columns(*told)
        )
        prepare([str(source)], workers=0, **options)
    assert len(made) == corpus.records - 4  # the rest alone
    found, before = contents(out), contents(corpus.path)
    for name in ("similar/similar.json", "similar/similar.npz"):
        assert found[name] == before[name]
    again = open_corpus(out)
    assert again.about["content"] == corpus.about["content"]
    shutil.rmtree(out)
    prepare([str(source)], workers=2, **options)
    assert contents(out) == found


def test_another_table_starts_over(folder, table, lines, tokenizer, tmp_path):
    """What an interrupted run left is not gone on with by a run with another table."""
    source = tmp_path / "text.txt"
    source.write_text("\n".join(lines[0]))
    sources = module.find_sources([str(source)])
    settings = module.Settings(words="spaces")
    fields = {name: getattr(table, name) for name in table.__dataclass_fields__}
    other = type(table)(**fields | {"near": table.near[:, ::-1].copy()})
    known = [
        module.identity(sources, tokenizer, settings, one)
        for one in (None, table, other)
    ]
    assert len(set(known)) == 3


def test_every_flipped_bit_of_the_column_is_found(corpus, tmp_path):
    copy = shutil.copytree(corpus.path, tmp_path / "copy")
    at, size = (int(corpus.index[name][2]) for name in ("word_id_at", "pieces"))
    shard = copy / f"shard-{corpus.index['shard'][2]:05d}.tfrecord"
    data = bytearray(shard.read_bytes())
    for place in (at, at + size, at + 2 * size - 1):
        wrong = data.copy()
        wrong[place] ^= 4
        shard.write_bytes(wrong)
        with pytest.raises(InputError, match="the checksum of page"):
            open_corpus(copy).verify()
    shard.write_bytes(data)
    open_corpus(copy).verify()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_it(kind, corpus, table, monkeypatch):
    """Whole words have their number on each piece; special tokens and padding none."""
    monkeypatch.setattr(plans, "BLOCK", 300)
    rows = Rows(open_corpus(corpus.path), kind, 24)
    count = min(len(rows), 40)
    batch = rows.build(range(count), [rows.read(n, n + 1) for n in range(count)], 50)
    assert batch["word_id"].dtype == np.int32
    tokenizer = rows.corpus.tokenizer
    special = np.isin(batch["ids"], tokenizer.special_ids)
    assert not batch["word_id"][special].any()
    whole = 0
    for ids, words, numbers in zip(
        batch["ids"], batch["words"], batch["word_id"], strict=True
    ):
        for word in set(words[numbers > 0]):
            (number,) = set(numbers[words == word])
            pieces = ids[words == word].tolist()
            of_table = table.pieces[number, : table.sizes[number]].tolist()
            whole += pieces == of_table
            # Cut where the row ends, or where B or A was shortened.
            assert str(pieces)[1:-1] in str(of_table)
    assert whole > 100
    turned = {name: column.copy() for name, column in batch.items()}
    rows.turn(turned, [1])
    size = int((batch["group"][1] > 0).sum())
    reverse = -batch["word_id"][1, :size][::-1]
    np.testing.assert_array_equal(turned["word_id"][1, :size], reverse)
    np.testing.assert_array_equal(turned["word_id"][2:], batch["word_id"][2:])


# --- what does not fit ---------------------------------------------------------------


def test_a_table_of_another_vocabulary(folder, source, tmp_path):
    other = WordPiece([*SPECIALS, *CHARACTERS[::-1]])
    options = dict(tokenizer=other, out=tmp_path / "corpus", progress=False)
    with pytest.raises(InputError, match="words of another vocabulary"):
        prepare([source], words=str(folder), **options)
    assert not (tmp_path / "corpus").exists()


def test_words_that_are_neither(source, tokenizer, tmp_path):
    options = dict(tokenizer=tokenizer, out=tmp_path / "corpus", progress=False)
    with pytest.raises(InputError, match="or a folder made by `bert_jax similar`"):
        prepare([source], words=str(tmp_path), **options)


def test_tables_for_a_corpus(corpus, folder, table, tokenizer, source, tmp_path):
    assert similar_words(corpus) == table
    assert similar_words(corpus, str(folder)) == table
    told = dict(tokenizer=tokenizer, words="spaces", progress=False)
    wider = similar_from_text([source], neighbours=9, **told)
    wider.save(tmp_path / "wider")
    assert similar_words(corpus, str(tmp_path / "wider")).near.shape[1] == 9
    path = tmp_path / "vectors.txt"
    path.write_text("\n".join(f"{word} {n} 1" for n, word in enumerate(WORDS)))
    other = similar_from_vectors(path, tokenizer=tokenizer, words="spaces")
    other.save(tmp_path / "other")
    with pytest.raises(InputError, match="was prepared with other words than those"):
        similar_words(corpus, str(tmp_path / "other"))
    plain = prepare([source], tokenizer=tokenizer, out=tmp_path / "c", progress=False)
    with pytest.raises(InputError, match="has no column word_id; make a table"):
        similar_words(plain)


def test_another_table_in_the_corpus(corpus, tmp_path, table):
    copy = shutil.copytree(corpus.path, tmp_path / "copy")
    fields = {name: getattr(table, name) for name in table.__dataclass_fields__}
    fields["near"] = np.zeros_like(table.near)
    type(table)(**fields).save(copy / "similar")
    with pytest.raises(InputError, match="is not the table the corpus was made with"):
        _ = open_corpus(copy).similar
