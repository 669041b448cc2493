"""The command line: every command's help, its output, and its errors."""

import contextlib
import io
import json

import pytest

from bert_jax import parity
from bert_jax.cli import COMMANDS, main, read_overrides
from bert_jax.errors import InputError
from bert_jax.presets import PRESETS
from tests import tiny
from tests.conftest import ROOT


def failure(*argv) -> str:
    """What a command that fails prints; it must end with `error: ...`, status 1."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as caught:
        main([str(word) for word in argv])
    assert caught.value.code == 1
    (_, message) = printed.getvalue().split("error: ", 1)
    assert message.endswith("\n")
    return message.strip()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "example:" in out
    assert COMMANDS[name][1].split("\\")[0].strip() in out


def test_presets(capsys):
    main(["presets"])
    assert len(capsys.readouterr().out.splitlines()) == len(PRESETS)
    main(["presets", "bert-base", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["parameters"] == 110_106_428
    assert shown["arch"]["width"] == 768
    assert "Did you mean bert-tiny" in failure("presets", "bert-tinyy")


def test_presets_checked_live(capsys, monkeypatch):
    main(["presets", "gpt2", "--check", "--json"])
    (measured,) = json.loads(capsys.readouterr().out)
    assert (measured["member"], measured["also"]) == ("gpt2", 0)
    assert 0 < measured["share"] <= 1
    row = parity.Parity(**measured)
    with monkeypatch.context() as patch:
        patch.setattr(parity, "check_members", lambda _: iter([row]))
        main(["presets", "gpt2", "--check"])
    head, _, row = capsys.readouterr().out.strip().splitlines()
    assert head == "| member | parameters | hidden | logits | gradients | round trip |"
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert (cells[0], cells[1], cells[5]) == ("gpt2", "124,439,808", "exact")
    assert all(0 < float(cell) < 1e-4 for cell in cells[2:5])
    main(["presets", "nezha-cn-base", "--check", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["hidden"] is None
    assert "transformers 4.57" in found["reference"]

    # A member that is not what its class computes is an error.
    wrong = parity.Parity("m", 0, 1, "", 1.0, 1.0, 1.0, 1.5, "exact")
    monkeypatch.setattr(parity, "check_members", lambda _: iter([wrong]))
    assert "not what transformers computes: m" in failure("presets", "gpt2", "--check")


def test_the_table_of_the_readme():
    """Its figures are of --check; members and counts are these."""
    text = (ROOT / "README.md").read_text()
    _, _, table = text.partition("| member | parameters | hidden |")
    rows = [
        line.strip("|").split("|") for line in table.split("\n\n")[0].split("\n")[2:]
    ]
    for cells, (row, _) in zip(rows, parity.kinds_of([*PRESETS.values()]), strict=True):
        name = f"{row.member} (and {row.also} more)" if row.also else row.member
        assert (cells[0].strip(), cells[1].strip()) == (name, f"{row.parameters:,}")
        measured = "4.57" not in row.reference
        assert ("exact" in cells[5]) == measured


def test_the_road_from_text_to_export(tmp_path, capsys, monkeypatch):
    """tokenizer, prepare, train, eval, fill, export as a person types them."""
    monkeypatch.chdir(tmp_path)
    tiny.write_text(tmp_path / "books.txt")
    main(["tokenizer", "--vocab_size", "100", "--out", "tok", "books.txt"])
    assert "100 pieces written to tok" in capsys.readouterr().out
    main(["prepare", "--tokenizer", "tok", "--out", "corpus", "*.txt"])
    assert "corpus: 40 documents" in capsys.readouterr().out
    fields = {**tiny.SETTINGS, "data": "corpus", "steps": "2"}
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    # The overrides come before --config: any order will do.
    main(["train", *overrides, "--workdir", "run", "--config", "pretrain:bert-tiny"])
    assert "next: bert_jax export run OUT" in capsys.readouterr().out
    main(["eval", "run", "--data", "corpus", "--json", "--batch", "8"])
    scores = json.loads(capsys.readouterr().out)
    assert scores.keys() >= {"masked_lm_loss", "masked_lm_accuracy", "perplexity"}
    main(["fill", "run", "the [MASK] likes [MASK]", "--top", "3", "--json"])
    blanks = json.loads(capsys.readouterr().out)
    assert [len(guesses) for guesses in blanks] == [3, 3]
    main(["fill", "run", "the [MASK] likes"])
    assert capsys.readouterr().out.startswith("blank 1: ")
    main(["export", "run", "exported", "--step", "2"])
    assert "PyTorch's logits differ by at most" in capsys.readouterr().out
    main(["eval", "exported", "--data", "corpus", "--batch", "8"])
    assert "masked_lm_loss" in capsys.readouterr().out
    assert "exists already" in failure("export", "run", "exported")
    assert "has no step 1; it has [2]" in failure("export", "run", "x", "--step", "1")
    assert "exists already" in failure(
        *("prepare", "--tokenizer", "tok", "--out", "corpus", "books.txt")
    )
    assert "exists already" in failure("tokenizer", "--out", "tok", "books.txt")


def test_bad_input_is_named(tmp_path, monkeypatch, tiny_tokenizer):
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer.save("tok")
    prepare = ("prepare", "--tokenizer", "tok", "--out", "corpus")
    assert "nothing.txt: no such file" in failure(*prepare, "nothing.txt")
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt holds no document" in failure(*prepare, "empty.txt")
    (tmp_path / "broken.txt").write_bytes(b"good\nbad \xff\n")
    assert "broken.txt:2: not UTF-8 at byte 4" in failure(*prepare, "broken.txt")
    assert not (tmp_path / "corpus").exists()
    train = ("train", "--workdir", "run", "--config", "pretrain:bert-tiny")
    assert "config.data is not set" in failure(*train)
    assert "data x does not exist; make one with" in failure(*train, "--config.data=x")
    assert "Did you mean batch" in failure(
        *train, "--config.data=x", "--config.batsh=1"
    )
    assert "unknown preset" in failure(
        *("train", "--workdir", "run", "--config", "pretrain:bert-tinyy")
    )
    assert not (tmp_path / "run").exists()
    assert "MODEL x does not exist" in failure("eval", "x", "--data", "corpus")
    assert "MODEL tok is neither" in failure("fill", "tok", "a [MASK]")
    assert "unknown arguments --jsn" in failure("presets", "--jsn")


def test_overrides_are_read_in_both_forms():
    words = ["--config.steps=3", "--config.optim.lr", "1e-3"]
    assert read_overrides(words) == {"steps": "3", "optim.lr": "1e-3"}
    with pytest.raises(InputError, match="--config.steps lacks its value"):
        read_overrides(["--config.steps"])
    with pytest.raises(InputError, match="unknown argument --steps=3"):
        read_overrides(["--steps=3"])
