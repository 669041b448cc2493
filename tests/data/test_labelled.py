"""Labelled files as batches: layouts of real files, cuts, order, clear errors."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data.labelled import read_labelled
from bert_jax.data.tokenizers import WordPiece
from bert_jax.errors import InputError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcde", "##x", "##y"]
PAD, UNK, CLS, SEP = range(4)
A, B, C, D, E, X, Y = range(5, 12)


@pytest.fixture(scope="module")
def tokenizer() -> WordPiece:
    return WordPiece(PIECES)


def written(folder: Path, text: str, *, name: str = "train.tsv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def read(path, tokenizer, *, length: int = 8, **options):
    return read_labelled(path, tokenizer=tokenizer, length=length, **options)


def test_a_pair_by_hand(tmp_path, tokenizer):
    path = written(tmp_path, "yes\tax b\tc dxy\nno\ta\tb\n")
    found = read(path, tokenizer, length=10)
    assert found.labels == ("no", "yes")
    row = {name: values[0].tolist() for name, values in found.arrays.items()}
    assert row == {
        "ids": [CLS, A, X, B, SEP, C, D, X, Y, SEP],
        "types": [0, 0, 0, 0, 0, 1, 1, 1, 1, 1],
        "positions": list(range(10)),
        "group": [1] * 10,
        "words": [0, 1, 1, 2, 0, 3, 4, 4, 4, 0],
        "row_id": 0,
        "first": [0],
        "label": [1],
    }
    assert found.arrays["ids"][1].tolist() == [CLS, A, SEP, B, SEP, *[PAD] * 5]
    assert found.arrays["group"][1].tolist() == [1] * 5 + [0] * 5


def test_the_longer_text_gives_first(tmp_path, tokenizer):
    path = written(tmp_path, "0\ta b c d e\tb c\n0\ta\tb c d e a b\n")
    ids = read(path, tokenizer, length=8).arrays["ids"].tolist()
    assert ids[0] == [CLS, A, B, C, SEP, B, C, SEP]
    assert ids[1] == [CLS, A, SEP, B, C, D, E, SEP]


def test_tags_stand_at_first_pieces_and_survive_a_cut(tmp_path, tokenizer):
    text = "ax\tB-p\nb\tO\n\n\nc\tO\ndxy\tI-p\na\tB-p\nb\tO\n?\tO"
    path = written(tmp_path, text, name="train.conll")
    found = read(path, tokenizer, length=6, columns={"word": 0, "tag": 1})
    assert found.labels == ("B-p", "I-p", "O")
    assert found.arrays["ids"].tolist() == [
        [CLS, A, X, B, SEP, PAD],
        [CLS, C, D, X, Y, SEP],
    ]
    tags = found.arrays["tags"].tolist()
    assert tags == [[-1, 0, -1, 2, -1, -1], [-1, 2, 1, -1, -1, -1]]
    assert found.tags == ((0, 2), (2, 1, 0, 2, 2))


def test_a_word_of_nothing_is_unknown(tmp_path, tokenizer):
    path = written(tmp_path, "\u200b\tO\nb\tB-p\n", name="x.conll")
    found = read(path, tokenizer, columns={"word": 0, "tag": 1})
    assert found.arrays["ids"][0, :4].tolist() == [CLS, UNK, B, SEP]
    assert found.arrays["tags"][0, :4].tolist() == [-1, 1, 0, -1]


def test_every_epoch_has_every_example_once_and_a_step_is_pure(tmp_path, tokenizer):
    path = written(tmp_path, "".join(f"{n % 3}\ta\tb\n" for n in range(10)))
    found = read(path, tokenizer)
    steps = [found.batch(k, size=4, seed=7) for k in range(10)]
    seen = np.concatenate([batch["row_id"] for batch in steps])
    for epoch in range(4):
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert seen[:10].tolist() != seen[10:20].tolist()
    again = found.batch(6, size=4, seed=7)
    for name, values in steps[6].items():
        np.testing.assert_array_equal(again[name], values)
    other = found.batch(0, size=4, seed=8)["row_id"].tolist()
    assert other != seen[:4].tolist()
    assert (steps[3]["label"][:, 0] == steps[3]["row_id"] % 3).all()


def test_evaluation_is_in_order_and_filled_up(tmp_path, tokenizer):
    path = written(tmp_path, "".join(f"{n % 2}\ta\tb\n" for n in range(5)))
    found = read(path, tokenizer)
    batches = list(found.in_order(4))
    assert [b["row_id"].tolist() for b in batches] == [[0, 1, 2, 3], [4, -1, -1, -1]]
    assert batches[1]["label"][:, 0].tolist() == [0, -1, -1, -1]
    assert not batches[1]["group"][1:].any()
    assert found.some(2).arrays["row_id"].tolist() == [0, 2]


def test_labels_of_the_training_part_hold_elsewhere(tmp_path, tokenizer):
    train = read(written(tmp_path, "no\ta\tb\nyes\ta\tb\n"), tokenizer)
    path = written(tmp_path, "yes\ta\tb\n", name="dev.tsv")
    dev = read(path, tokenizer, labels=train.labels)
    assert dev.arrays["label"].tolist() == [[1]]
    path = written(tmp_path, "yes\ta\tb\nyess\ta\tb\n", name="dev.tsv")
    with pytest.raises(InputError, match=r"dev.tsv:2: unknown label 'yess'.*no, yes"):
        read(path, tokenizer, labels=train.labels)


SINGLE = {"label": "gold", "a": "sentence"}


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("", SINGLE, "holds no example"),
        ("sentence\tgold\n\n", SINGLE, "holds no example"),
        ("text\tgold\na\t1\n", SINGLE, "unknown column 'sentence'.*gold, text"),
        ("gold\tsentence\n1\n", SINGLE, r"train.tsv:2: 1 column.*none for a \(2\)"),
        ("1\ta\n", {"label": 0}, "give label and a; label, a and b; or word and tag"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, tokenizer, text, columns, message):
    with pytest.raises(InputError, match=message):
        read(written(tmp_path, text), tokenizer, columns=columns)


def test_no_file_and_no_room(tmp_path, tokenizer):
    with pytest.raises(InputError, match=r"none.tsv: no such file"):
        read(tmp_path / "none.tsv", tokenizer)
    with pytest.raises(InputError, match=r"is a folder"):
        read(tmp_path, tokenizer)
    with pytest.raises(InputError, match=r"length=4 leaves no room"):
        read(written(tmp_path, "0\ta\tb\n"), tokenizer, length=4)


def test_several_packed_files_with_headers(tmp_path, tokenizer):
    paths = [tmp_path / f"{n}.tsv.gz" for n in range(2)]
    for path in paths:
        path.write_bytes(gzip.compress(b"sentence\tgold\na b\t1\n"))
    found = read(paths, tokenizer, columns=SINGLE)
    assert found.arrays["ids"][:, :4].tolist() == [[CLS, A, B, SEP]] * 2


def test_the_layouts_of_other_members(tmp_path):
    """RoBERTa puts two </s> between texts; XLNet ends with <cls>, of type 2."""
    from bert_jax.data.tokenizers import train_bpe, train_unigram

    text = ["a b c d e f g h " * 20]
    path = written(tmp_path, "0\ta b\tc d\n")
    roberta = train_bpe(text, vocab_size=265, progress=False)
    ids = read(path, roberta, length=12).arrays["ids"][0].tolist()
    end = roberta.sep_id
    assert [i for i in ids if i == end] == [end] * 3
    first = ids.index(end)
    assert ids[0] == roberta.cls_id
    assert ids[first + 1] == end
    xlnet = train_unigram(text, vocab_size=30, style="xlnet", progress=False)
    found = read(path, xlnet, length=12).arrays
    last = int(found["group"][0].sum()) - 1
    assert found["ids"][0, last] == xlnet.cls_id
    assert found["first"][0, 0] == last
    types = found["types"][0, : last + 1].tolist()
    assert types == sorted(types)
    assert set(types) == {0, 1, 2}


def test_real_files(shared_data, tokenizer):
    """As many examples as PROVENANCE.txt says; both labels, thirteen tags."""
    cola = [shared_data / f"glue_cola/{n}_domain_dev.tsv" for n in ("in", "out_of")]
    found = read(cola, tokenizer, columns={"label": 1, "a": 3})
    assert (len(found), found.labels) == (527 + 516, ("0", "1"))
    columns = {"label": "label", "a": "sentence1", "b": "sentence2"}
    found = read(shared_data / "glue_rte/dev.tsv", tokenizer, columns=columns)
    assert (len(found), len(found.labels)) == (277, 2)
    columns = {"label": "label", "a": "sentence"}
    found = read(shared_data / "glue_sst2/dev.tsv", tokenizer, columns=columns)
    assert len(found) == 872
    columns = {"word": 0, "tag": 1}
    path = shared_data / "wnut17/emerging.dev.conll"
    found = read(path, tokenizer, columns=columns)
    assert (len(found), len(found.labels)) == (1009, 13)
