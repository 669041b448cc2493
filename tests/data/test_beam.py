"""The corpus that Beam makes is the local one, byte for byte."""

import json

import pytest

from bert_jax.data import prepare as module
from bert_jax.data import records
from bert_jax.data.beam import prepare_with_beam, shards_of
from bert_jax.data.find_similar import similar_from_text
from bert_jax.data.prepare import Settings, prepare
from bert_jax.errors import InputError
from tests import tiny
from tests.data.test_prepare import contents

pytestmark = pytest.mark.slow


@pytest.fixture
def texts(tmp_path) -> list[str]:
    """Six files, of which two hold the same documents."""
    seeds = (0, 1, 2, 3, 1, 4)
    names = [
        str(tiny.write_text(tmp_path / f"text-{n}.txt", documents=30, seed=seed))
        for n, seed in enumerate(seeds)
    ]
    lines = [json.dumps({"text": f"a book of {n} words"}) for n in range(50)]
    (tmp_path / "more.jsonl").write_text("\n".join(lines))
    # The first three are one input.
    return [f"{tmp_path}/text-[012].txt", *names[3:], f"{tmp_path}/more.jsonl"]


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(duplicates="exact", shortest=60, sentences="line"),
        Settings(words="spaces"),
        Settings(words="a table of similar words"),
    ],
    ids=["plain", "filtered", "words", "table"],
)
def test_same_bytes_as_the_local_run(
    settings, texts, tiny_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(records, "SHARD_BYTES", 6000)
    if settings.words.startswith("a table"):
        told = dict(tokenizer=tiny_tokenizer, words="spaces", progress=False)
        similar_from_text(texts, **told).save(tmp_path / "similar")
        settings = settings._replace(words=str(tmp_path / "similar"))
    alone = prepare(
        texts,
        tokenizer=tiny_tokenizer,
        out=tmp_path / "local",
        progress=False,
        **settings._asdict(),
    )
    assert alone.about["shards"] > 2
    assert alone.records > 6
    read = alone.about["read"]
    assert (
        bool(read["duplicates"]) == bool(read["too_short"]) == bool(settings.shortest)
    )
    beam = prepare_with_beam(
        texts, tokenizer=tiny_tokenizer, out=tmp_path / "beam", settings=settings
    )
    assert contents(beam.path) == contents(alone.path)


def test_errors(texts, tiny_tokenizer, tmp_path):
    common = {"tokenizer": tiny_tokenizer, "out": tmp_path / "out"}
    with pytest.raises(InputError, match="use duplicates=exact"):
        prepare_with_beam(texts, settings=Settings(duplicates="near"), **common)
    with pytest.raises(InputError, match="no such file"):
        prepare_with_beam([str(tmp_path / "no.txt")], settings=Settings(), **common)
    with pytest.raises(InputError, match="--runner Nobody: Unexpected pipeline runner"):
        prepare_with_beam(texts, settings=Settings(), runner="Nobody", **common)
    with pytest.raises(InputError, match=r"knows no option --beam\.nosuch"):
        prepare_with_beam(texts, settings=Settings(), options=["--nosuch=3"], **common)
    assert not (tmp_path / "out").exists()


def test_records_go_to_shards_in_order(monkeypatch):
    monkeypatch.setattr(records, "SHARD_BYTES", 100)
    sizes = tuple(((0, n), 60) for n in range(5))
    assert list(shards_of(sizes).values()) == [0, 0, 1, 1, 2]
