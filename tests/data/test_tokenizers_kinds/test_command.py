"""`bert_jax tokenizer` for every kind, and what it refuses."""

from pathlib import Path

import pytest

from bert_jax.cli import main
from bert_jax.data.tokenizers import load_tokenizer
from bert_jax.errors import InputError

TEXT = (Path(__file__).parents[3] / "LICENSE").read_text()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books.txt").write_text(TEXT)


@pytest.fixture
def failure(capsys):
    def told(*words) -> str:
        with pytest.raises(SystemExit):
            main(["tokenizer", "--out", "tok", *words, "books.txt"])
        return capsys.readouterr().err

    return told


@pytest.mark.parametrize(
    ("words", "kind", "style", "size"),
    [
        ("--vocab_size 200", "wordpiece", None, 200),
        ("--kind chars", "chars", None, None),
        ("--kind chars --vocab_size 20", "chars", None, 20),
        ("--kind bpe --vocab_size 280", "bpe", "roberta", 280),
        ("--kind bpe --style gpt2 --vocab_size 280", "bpe", "gpt2", 280),
        ("--kind unigram --vocab_size 200", "unigram", "albert", 200),
        ("--kind unigram --style t5 --vocab_size 300", "unigram", "t5", 300),
        (
            "--kind unigram --style xlnet --vocab_size 200 --lowercase yes",
            "unigram",
            "xlnet",
            200,
        ),
    ],
)
def test_trains(words, kind, style, size, capsys):
    main(["tokenizer", *words.split(), "--out", "tok", "books.txt"])
    tokenizer = load_tokenizer("tok")
    assert (tokenizer.kind, getattr(tokenizer, "style", None)) == (kind, style)
    assert size in (None, tokenizer.size)
    printed = capsys.readouterr().out
    assert f"{tokenizer.size} pieces written to tok" in printed
    assert tokenizer.hash in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kind bpe --lowercase yes", "--kind bpe has no --lowercase"),
        ("--kind chars --style t5", "--kind chars has no --style"),
        ("--style roberta", "--kind wordpiece has no --style"),
        ("--kind bpe --style t5", "unknown style of a bpe tokenizer 't5'"),
        ("--kind unigram --style gpt2", "unknown style of a unigram tokenizer 'gpt2'"),
        ("--kind unigram --style t5 --lowercase yes", "style t5 leaves the text"),
        ("--vocab_size 0", "vocab_size=0 is too small"),
        ("--kind bpe --vocab_size 9999", "vocab_size=9999 is too large"),
    ],
)
def test_refuses(failure, words, message, tmp_path):
    assert message in failure(*words.split())
    assert not (tmp_path / "tok").exists()


def test_in_a_bucket(bucket):
    main(["tokenizer", "--vocab_size", "200", "--out", "gs://toks/one", "books.txt"])
    main(["tokenizer", "--vocab_size", "200", "--out", "tok", "books.txt"])
    here = load_tokenizer("tok").hash
    assert (bucket / "toks/one/vocab.txt").is_file()
    assert not Path("gs:").exists()
    assert load_tokenizer("gs://toks/one").hash == here
    assert load_tokenizer("gs://toks/one/vocab.txt").hash == here
    with pytest.raises(InputError, match="^gs://toks/two does not exist"):
        load_tokenizer("gs://toks/two")
    (bucket / "toks/one/tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"^gs://toks/one/tokenizer\.json is not"):
        load_tokenizer("gs://toks/one")


def test_help_has_an_example_of_each(capsys):
    with pytest.raises(SystemExit):
        main(["tokenizer", "--help"])
    printed = capsys.readouterr().out
    for kind in ("wordpiece", "bpe", "unigram", "chars"):
        assert f"bert_jax tokenizer --kind {kind}" in printed
