"""MacBERT from text to scores by its three commands, and what does not go together."""

import json
import shutil

import pytest

from bert_jax import cli
from bert_jax.config import load_config, override, resolve
from bert_jax.data.corpus import open_corpus
from bert_jax.data.similar import load_similar
from bert_jax.errors import InputError
from bert_jax.evaluate import evaluate
from bert_jax.objective import make_objective
from bert_jax.presets import preset
from bert_jax.train import train
from tests import tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_tokenizer):
    """A folder with a tokenizer, a text, a table and a corpus that has its words."""
    folder = tmp_path_factory.mktemp("macbert")
    tiny_tokenizer.save(folder / "tok")
    text = str(tiny.write_text(folder / "text.txt"))
    told = ["--tokenizer", str(folder / "tok")]
    table = str(folder / "similar")
    cli.main(["similar", *told, "--out", table, "--neighbours", "5", text])
    out = ["--out", str(folder / "corpus")]
    cli.main(["prepare", *told, "--words", table, *out, "--workers", "0", text])
    return folder


def make_run(data, **changes):
    config = load_config("pretrain:chinese-macbert-base")
    named = {name.replace("__", "."): str(value) for name, value in changes.items()}
    small = {**tiny.SETTINGS, "arch.layers": "1", "length": "24"}
    override(config, {**small, "data": str(data), **named})
    return resolve(config)


def test_from_text_to_scores(made, tmp_path, capsys):
    about = json.loads((made / "corpus" / "corpus.json").read_text())
    assert about["similar"]["dtype"] == "<u2"
    run = make_run(made / "corpus", steps=2)
    assert run.rows == "order"
    told = run.objective
    assert (told["choose"], told["replace"], told["similar"]) == (
        "macbert",
        "similar",
        "",
    )
    result = train(run, tmp_path / "run", progress=False)
    assert result["finished"]
    assert 3 < result["train"]["masked_lm_loss"] < 6  # ln 100 at the beginning
    assert "next_sentence_loss" in result["train"]
    scores = evaluate(tmp_path / "run", data=made / "corpus", batch=8, count=8)
    assert scores["predictions"] > 10


def test_the_table_by_its_path_is_the_corpus_s_own(made):
    corpus = open_corpus(made / "corpus")
    told = dict(preset=preset("chinese-macbert-base"), tokenizer=corpus.tokenizer)
    own, named = (
        make_objective(
            make_run(corpus.path, objective__similar=path).objective,
            **told,
            arch=preset("chinese-macbert-base").arch,
            rows="full",
            corpus=corpus,
            say=lambda _: None,
        )
        for path in ("", made / "similar")
    )
    assert own.table == named.table == corpus.similar
    assert own.table is not named.table


def test_what_does_not_go_together(made, tiny_corpus, tmp_path):
    """Each is said before anything is compiled, and leaves no workdir behind."""

    def message(data, **changes) -> str:
        with pytest.raises(InputError) as caught:
            train(make_run(data, **changes), tmp_path / "run", progress=False)
        assert not (tmp_path / "run" / "run.json").exists()
        return str(caught.value)

    assert "has no column word_id; make a table with" in message(tiny_corpus.path)
    corpus = made / "corpus"
    wrong = message(corpus, eval__data=tiny_corpus.path)
    assert "was prepared with other words than those of the training data" in wrong
    missing = message(corpus, objective__similar=tmp_path)
    assert "no table of similar words" in missing
    copy = shutil.copytree(made / "similar", tmp_path / "other")
    table = load_similar(copy)
    fields = {name: getattr(table, name) for name in table.__dataclass_fields__}
    type(table)(**fields | {"tokenizer": "another"}).save(copy)
    other = message(corpus, objective__similar=copy)
    assert f"config.objective.similar={copy} is a table of words of another" in other


def test_the_command_wants_text_or_vectors(made, capsys):
    told = ["similar", "--tokenizer", str(made / "tok"), "--out", str(made / "x")]
    for also in ([], ["--vectors", "v.txt", "text.txt"]):
        with pytest.raises(SystemExit):
            cli.main([*told, *also])
        assert "give either INPUT" in capsys.readouterr().err
    assert not (made / "x").exists()
    vectors = made / "vectors.txt"
    vectors.write_text("cat 1 0 0\ndog 1 0.1 0\nmoon 0 1 0\n", encoding="utf-8")
    cli.main([*told, "--vectors", str(vectors), "--neighbours", "2"])
    assert "similar ones" in capsys.readouterr().out
