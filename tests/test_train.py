"""The loop: a run, its resume, its workdir, and what happens when things go wrong."""

import fcntl
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import checkpoint, course, lane, metrics
from bert_jax.cli import main
from bert_jax.config import load_config, override, resolve
from bert_jax.data.prepare import prepare
from bert_jax.data.rows import Rows
from bert_jax.data.tokenizers import (
    SPECIALS,
    WordBPE,
    WordPiece,
    train_bpe,
    train_chars,
    train_wordpiece,
)
from bert_jax.errors import InputError
from bert_jax.evaluate import evaluate
from bert_jax.evaluators.held_out import HeldOut
from bert_jax.metrics import NotFiniteError, read_metrics
from bert_jax.objective import check_rows
from bert_jax.objectives.base import Mean
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.parity import tiny as tiny_arch
from bert_jax.presets import PRESETS, preset
from bert_jax.sharding import make_mesh
from bert_jax.step import TrainState
from bert_jax.train import train
from bert_jax.warm_start import shared_pieces
from tests import tiny


def leaves(workdir, step=None):
    return jax.tree.leaves(bert_jax.load(workdir, step=step).params)


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def finished(tiny_corpus, tmp_path_factory):
    """A workdir of six steps with checkpoints at 2, 4 and 6."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    run = tiny.make_run(tiny_corpus, eval__data=tiny_corpus.path, eval__every=3)
    result = train(run, workdir, progress=False)
    assert result["finished"]
    return workdir


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


def test_a_run_leaves_what_a_workdir_holds(finished):
    names = {path.name for path in finished.iterdir()}
    assert names >= {"run.json", "tokenizer", "checkpoints", "metrics.jsonl"}
    assert names >= {"tensorboard", "loss.png"}
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == list("246")
    rows = read_metrics(finished / "metrics.jsonl")
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 5, 6]
    assert {row["step"] for row in rows if row["kind"] == "eval"} == {3, 6}
    wanted = {"loss", "masked_lm_accuracy", "lr", "tokens_per_second", "share_of_peak"}
    assert all(wanted <= row.keys() for row in trained)
    assert len({row["batch"] for row in trained}) == 6
    assert any((finished / "tensorboard").glob("events*"))


def test_a_finished_run_says_so_and_does_nothing(tiny_corpus, copy, capsys):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    result = train(tiny.make_run(tiny_corpus), copy, progress=False)
    assert result["finished"]
    assert "is finished: 6 steps are done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_going_on_from_any_checkpoint_gives_the_same_bits(tiny_corpus, copy, finished):
    for step in (6, 4):
        shutil.rmtree(copy / f"checkpoints/{step}")
    run = tiny.make_run(tiny_corpus, eval__data=tiny_corpus.path, eval__every=3)
    train(run, copy, progress=False)
    assert same(leaves(copy), leaves(finished))
    assert not same(leaves(copy), leaves(finished, step=4))
    old, new = (read_metrics(w / "metrics.jsonl") for w in (finished, copy))
    assert [row.get("batch") for row in old] == [row.get("batch") for row in new]


def test_another_seed_gives_other_parameters(tiny_corpus, finished, tmp_path):
    train(tiny.make_run(tiny_corpus, seed=1), tmp_path / "other", progress=False)
    assert not same(leaves(tmp_path / "other"), leaves(finished))


def test_a_workdir_of_another_configuration_is_refused(tiny_corpus, copy):
    run = tiny.make_run(tiny_corpus, steps=8, optim__lr=2e-3, keep=1)
    with pytest.raises(InputError) as caught:
        train(run, copy)
    text = str(caught.value)
    assert "belongs to another configuration" in text
    assert f"in another --workdir with --config.init={copy}" in text
    assert "optim.lr: 0.001 in the workdir, 0.002 now" in text
    assert "steps: 6 in the workdir, 8 now" in text
    assert "keep" not in text  # what a run keeps does not change what it computes


def test_a_run_that_saved_nothing_leaves_the_workdir_free(tiny_corpus, tmp_path):
    workdir = tmp_path / "run"
    run = tiny.make_run(tiny_corpus, optim__lr=1e30, optim__warmup=0, save_every=99)
    with pytest.raises(NotFiniteError, match="none saved"):
        train(run, workdir, progress=False)
    run = tiny.make_run(tiny_corpus, steps=1)
    assert train(run, workdir, progress=False)["finished"]


def test_a_workdir_in_use_is_refused(tiny_corpus, copy):
    with open(copy / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="is in use by another process"):
            train(tiny.make_run(tiny_corpus), copy)


def test_another_tokenizer_in_the_workdir_is_noticed(copy, tmp_path):
    tiny.make_tokenizer(seed=5, folder=tmp_path).save(copy / "tokenizer")
    with pytest.raises(InputError, match="not the tokenizer that .* was trained with"):
        _ = bert_jax.load(copy).tokenizer


def test_scores_are_there_whenever_the_last_checkpoint_is(
    tiny_corpus, tmp_path, monkeypatch
):
    """Killed between the two, the scores are computed by the next run."""

    class Killed(BaseException):
        pass

    score, calls = HeldOut.run, []

    def killed_at_the_first_and_third(self, params, **options):
        calls.append(len(calls))
        if calls[-1] in (0, 2):
            raise Killed
        return score(self, params, **options)

    run = tiny.make_run(
        tiny_corpus, steps=4, eval__data=tiny_corpus.path, eval__every=2
    )
    monkeypatch.setattr(HeldOut, "run", killed_at_the_first_and_third)
    for step in (2, 4):
        with pytest.raises(Killed):
            train(run, tmp_path / "run", progress=False)
        assert bert_jax.load(tmp_path / "run").step == step
    result = train(run, tmp_path / "run", progress=False)
    assert result["finished"]
    assert result["eval"]["step"] == 4
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [2, 4]


def test_an_evaluation_that_fails_loses_no_training(tiny_corpus, tmp_path, monkeypatch):
    def fails(self, params, **_):
        raise InputError("the held-out text is gone")

    monkeypatch.setattr(HeldOut, "run", fails)
    run = tiny.make_run(tiny_corpus, eval__data=tiny_corpus.path, eval__every=4)
    with pytest.raises(InputError, match="is gone"):
        train(run, tmp_path / "run", progress=False)
    assert bert_jax.load(tmp_path / "run").step == 4


def test_checkpoints_come_when_they_are_asked_for(tiny_corpus, tmp_path):
    """Evaluations, or none for want of data, do not make more of them."""
    run = tiny.make_run(tiny_corpus, save_every=4, eval__every=1, keep=9)
    train(run, tmp_path / "run", progress=False)
    folder = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6"]
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert not [row for row in rows if row["kind"] == "eval"]


def test_the_clock_goes_on_while_lines_are_written(tiny_corpus, monkeypatch):
    """Steps of a second, a line after two that takes five: by then more are done."""
    now = [0.0]
    rates = []

    class Writers:
        def advance(self):
            now[0] += 1.0

        def write(self, step, values, kind):
            rates.append(values["steps_per_second"])
            now[0] += 5.0

    run = tiny.make_run(tiny_corpus, log_every=2)
    under_way = metrics.UnderWay(run, lambda step: 0.1, Writers())
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    one = Mean(np.float32(1), np.float32(1))
    means = dict.fromkeys(("loss", "grad_norm", "real_tokens"), one)
    for step in range(1, 7):
        under_way.add(step, means, 0, flops=1e9)
    under_way.finish()
    assert rates == pytest.approx([1.0, 2 / 7, 2 / 7])


def test_other_text_in_the_same_workdir_is_refused(copy, tiny_tokenizer, tmp_path):
    other = tiny.make_corpus(tmp_path, tokenizer=tiny_tokenizer, seed=1)
    with pytest.raises(InputError, match="hold other text or another tokenizer"):
        train(tiny.make_run(other), copy)


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "altered", "missing", "unfinished"])
def test_a_damaged_checkpoint_is_set_aside(tiny_corpus, copy, finished, how, capsys):
    folder = copy / "checkpoints/6"
    largest = max(folder.rglob("*"), key=lambda path: path.stat().st_size)
    if how == "missing":
        largest.unlink()
    elif how == "unfinished":
        (folder / checkpoint.MANIFEST).unlink()
    else:
        damage(largest, how)
    reason = {
        "truncated": "bytes instead of",
        "altered": "was altered",
        "missing": "is missing",
        "unfinished": "was not finished",
    }[how]
    assert bert_jax.load(copy).step == 4  # reading moves nothing
    assert reason in capsys.readouterr().err
    assert folder.is_dir()
    run = tiny.make_run(tiny_corpus, eval__data=tiny_corpus.path, eval__every=3)
    train(run, copy, progress=False)
    out = capsys.readouterr().out
    assert "checkpoint 6 is not usable" in out
    assert reason in out
    assert "resumed at step 4" in out
    left = {path.name for path in (copy / "checkpoints").glob("*.damaged")}
    assert left == (set() if how == "unfinished" else {"6.damaged"})
    assert same(leaves(copy), leaves(finished))


def test_every_file_of_a_checkpoint_is_in_the_manifest(finished):
    folder = finished / "checkpoints/6"
    listed = set(json.loads((folder / checkpoint.MANIFEST).read_text()))
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found - listed == {checkpoint.MANIFEST}
    assert any(name.startswith("optimizer") for name in listed)


def test_what_a_stopped_run_saved_takes_no_place(tmp_path):
    """Kept are 4, every 10 steps; the run was stopped after 13, 17 and 35."""
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=4, every=10, say=print)
    one = {"one": jax.numpy.ones(1)}
    seen = {}
    for step in (10, 13, 17, 20, 30, 35, 40, 50):
        number = jax.numpy.int32(step)
        checkpoints.save(
            TrainState(step=number, params=one, opt_state=one, seed=number)
        )
        checkpoints.wait()
        seen[step] = checkpoints.steps()
    assert seen[13] == [10, 13]
    assert seen[17] == [10, 17]
    assert seen[35] == [10, 20, 30, 35]
    assert seen[40] == [10, 20, 30, 40]
    assert seen[50] == [20, 30, 40, 50]


def test_a_loss_that_is_not_finite_stops_the_run(tiny_corpus, finished, tmp_path):
    """The rate explodes with step 6: what was saved before is kept and good."""
    workdir = tmp_path / "run"
    good = tiny.make_run(tiny_corpus, steps=9, save_every=2)
    schedule = course.schedule_of

    def explodes(settings, steps):
        before = schedule(settings, steps)
        return lambda t: jax.numpy.where(t == 5, 1e38, before(t))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "schedule_of", explodes)
        with pytest.raises(NotFiniteError) as caught:
            train(good, workdir, progress=False)
    text = str(caught.value)
    assert "the parameters are not finite after step 6. Stopped" in text
    assert f"step 4 is the last good checkpoint in {workdir}" in text
    assert checkpoint.Checkpoints(workdir, say=print).steps() == [2, 4]
    assert all(np.isfinite(leaf).all() for leaf in leaves(workdir, 4))
    assert train(good, workdir, progress=False)["finished"]


def test_a_loss_that_is_not_finite_between_checkpoints(tiny_corpus, tmp_path):
    run = tiny.make_run(
        tiny_corpus, steps=40, optim__lr=1e30, optim__warmup=0, save_every=40
    )
    with pytest.raises(NotFiniteError, match="gradient is not finite at step 2"):
        train(run, tmp_path / "run", progress=False)
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    tiny_corpus, tmp_path, monkeypatch, when
):
    import orbax.checkpoint as ocp

    save, listed = ocp.AsyncCheckpointer.save, checkpoint.size_and_hash

    def fails_at_once(self, path, *args, **kwargs):
        if path.name == "4":
            (path.parent / "4.orbax-checkpoint-tmp").mkdir()
            raise OSError(28, "No space left on device")
        return save(self, path, *args, **kwargs)

    def fails_later(path):
        if "checkpoints/4/" in str(path):
            raise OSError(28, "No space left on device")
        return listed(path)

    if when == "at once":
        monkeypatch.setattr(ocp.AsyncCheckpointer, "save", fails_at_once)
    else:  # in the thread that writes, while the next steps are done
        monkeypatch.setattr(checkpoint, "size_and_hash", fails_later)
    with pytest.raises(InputError) as caught:
        train(tiny.make_run(tiny_corpus), tmp_path / "run", progress=False)
    text = str(caught.value)
    assert "checkpoint of step 4 could not be written" in text
    assert "No space left" in text
    assert "last good one is step 2" in text
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["2"]
    monkeypatch.undo()
    assert train(tiny.make_run(tiny_corpus), tmp_path / "run", progress=False)[
        "finished"
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full: not Linux")
def test_metrics_on_a_full_disk(tiny_corpus, tmp_path, capsys):
    """Are lost with a word, and the training is not."""
    writers = metrics.Writers(tmp_path, start=0, steps=1, progress=False)
    with writers:
        writers.file.close()
        writers.file = open("/dev/full", "a")  # noqa: SIM115
        writers.write(1, {"loss": 1.0}, kind="eval")
    out = capsys.readouterr().out
    assert "the metrics of step 1 could not be written: " in out
    assert "metrics.jsonl could not be written to its end: " in out
    assert out.count("No space left on device") == 2


def test_rows_that_are_no_pairs_turn_next_sentence_off(tiny_corpus, tmp_path, capsys):
    for rows in ("full", "doc"):
        workdir = tmp_path / rows
        train(tiny.make_run(tiny_corpus, rows=rows, steps=2), workdir, progress=False)
        assert "next-sentence prediction is off" in capsys.readouterr().out
        assert bert_jax.load(workdir).heads == ("lm",)


def test_evaluation_data_of_another_tokenizer_is_refused(tiny_corpus, tmp_path):
    other = tiny.make_tokenizer(pieces=90, folder=tmp_path)
    held_out = tiny.make_corpus(tmp_path, tokenizer=other)
    run = tiny.make_run(tiny_corpus, eval__data=held_out.path)
    with pytest.raises(InputError, match="prepared with another tokenizer"):
        train(run, tmp_path / "run")


def test_the_vocabulary_is_that_of_the_data(tiny_corpus, finished, tmp_path):
    assert bert_jax.load(finished).arch.vocab_size == 100
    run = tiny.make_run(tiny_corpus, arch__vocab_size=50)
    with pytest.raises(InputError, match="vocab_size=50, but the tokenizer of"):
        train(run, tmp_path / "run")


def test_a_batch_that_does_not_divide_is_refused(tiny_corpus, tmp_path):
    with pytest.raises(InputError, match="batch=6 does not divide over 8 devices"):
        train(tiny.make_run(tiny_corpus, batch=6), tmp_path / "run")


def test_warm_start_from_a_workdir(tiny_corpus, finished, tmp_path, capsys):
    run = tiny.make_run(tiny_corpus, init=finished, steps=1, optim__lr=0.0)
    train(run, tmp_path / "run", progress=False)
    assert "started from" in capsys.readouterr().out
    assert same(leaves(tmp_path / "run"), leaves(finished))  # a rate of 0 moves nothing


def test_warm_start_lists_missing_heads(tiny_corpus, tmp_path, capsys):
    source = tmp_path / "source"
    train(tiny.make_run(tiny_corpus, rows="full", steps=1), source, progress=False)
    run = tiny.make_run(tiny_corpus, init=source, steps=1)
    train(run, tmp_path / "run", progress=False)
    out = capsys.readouterr().out
    assert "initialised, not in the source: nsp/dense/bias, nsp/dense/kernel" in out
    assert "pooler/dense/kernel" in out


def test_warm_start_with_another_vocabulary(finished, tmp_path, capsys):
    tokenizer = tiny.make_tokenizer(pieces=90, folder=tmp_path)
    corpus = tiny.make_corpus(tmp_path, tokenizer=tokenizer)
    run = tiny.make_run(corpus, init=finished, steps=1, optim__lr=0.0)
    train(run, tmp_path / "run", progress=False)
    old, new = bert_jax.load(finished), bert_jax.load(tmp_path / "run")
    shared = set(old.tokenizer.vocab) & set(new.tokenizer.vocab)
    out = capsys.readouterr().out
    assert f"{len(shared)} of 90 pieces copied, {90 - len(shared)} initialised" in out
    for piece in shared:
        here, there = (m.tokenizer.vocab.index(piece) for m in (new, old))
        for name in ("embed/token", "lm/bias"):
            part, leaf = name.split("/")
            assert np.array_equal(
                new.params[part][leaf][here], old.params[part][leaf][there]
            )


def test_warm_start_from_another_kind_of_vocabulary():
    """Special pieces go by their role, others by their text and place in a word."""
    words = WordPiece([*SPECIALS, "the", "##the", "a", "##s", "Ġthe"])
    text = ["the the athe s as " * 30]
    joined = train_bpe(text, vocab_size=266, style="roberta", progress=False)
    pairs = dict(shared_pieces(words, joined).tolist())
    at = joined.vocab.index
    for role in ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id"):
        assert pairs[getattr(words, role)] == getattr(joined, role)
    assert pairs[words.vocab.index("the")] == at("Ġthe")
    assert pairs[words.vocab.index("##s")] == at("s")
    assert words.vocab.index("Ġthe") not in pairs


def test_warm_start_from_another_shape_is_refused(tiny_corpus, finished, tmp_path):
    run = tiny.make_run(tiny_corpus, init=finished, arch__width=64)
    with pytest.raises(InputError, match=r"does not fit config\.arch"):
        train(run, tmp_path / "run")


def test_warm_start_to_another_function_is_refused(tiny_corpus, finished, tmp_path):
    """Shapes tell nothing of the number of heads, of gelu or of epsilon."""
    changes = {"arch__heads": 4, "arch__activation": "relu", "arch__norm_eps": 0.1}
    run = tiny.make_run(tiny_corpus, init=finished, **changes)
    with pytest.raises(InputError, match=r"does not fit config\.arch") as caught:
        train(run, tmp_path / "run")
    text = str(caught.value)
    assert "arch.heads is 2 there, 4 here: give --config.arch.heads=2" in text
    assert "arch.activation is 'gelu' there, 'relu' here" in text
    assert "arch.norm_eps is 1e-12 there, 0.1 here" in text


@pytest.mark.parametrize("field", ["init", "eval__data", "data"])
def test_what_is_not_there_leaves_no_workdir(field, tiny_corpus, tmp_path):
    run = tiny.make_run(tiny_corpus, **{field: tmp_path / "nope"})
    with pytest.raises(InputError, match="nope .*does not exist"):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_checkpoints_without_their_run_are_refused(tiny_corpus, copy):
    (copy / "run.json").unlink()
    with pytest.raises(InputError, match=r"has checkpoints, but no run\.json"):
        train(tiny.make_run(tiny_corpus, optim__lr=0.5), copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.clear(),
        lambda about: about["config"]["arch"].update(new=1),
        lambda about: about["config"]["arch"].update(width="32"),
        lambda about: about.update(heads=3),
    ],
)
def test_a_run_json_of_another_form(change, tiny_corpus, copy):
    about = json.loads((copy / "run.json").read_text())
    change(about)
    (copy / "run.json").write_text(json.dumps(about))
    for use in (bert_jax.load, lambda path: train(tiny.make_run(tiny_corpus), path)):
        with pytest.raises(
            InputError, match=r"run\.json is damaged, or of another ver"
        ):
            use(copy)


def test_a_tokenizer_that_is_in_the_way(tiny_corpus, tmp_path):
    mine = tmp_path / "run/tokenizer"
    tiny.make_tokenizer(pieces=90, folder=tmp_path).save(mine)
    before = (mine / "vocab.txt").read_text()
    with pytest.raises(InputError, match="is another tokenizer than that of the data"):
        train(tiny.make_run(tiny_corpus), tmp_path / "run")
    assert (mine / "vocab.txt").read_text() == before


def test_a_run_with_the_wrong_data_leaves_the_workdir_free(tiny_corpus, tmp_path):
    """It saved nothing; its tokenizer is in nobody's way."""
    tokenizer = tiny.make_tokenizer(pieces=90, folder=tmp_path)
    wrong = tiny.make_corpus(tmp_path, tokenizer=tokenizer)
    run = tiny.make_run(wrong, optim__lr=1e30, optim__warmup=0, save_every=99)
    with pytest.raises(NotFiniteError, match="none saved"):
        train(run, tmp_path / "run", progress=False)
    run = tiny.make_run(tiny_corpus, steps=1)
    assert train(run, tmp_path / "run", progress=False)["finished"]
    assert bert_jax.load(tmp_path / "run").tokenizer.size == 100


def test_a_workdir_that_is_something_else(tiny_corpus):
    with pytest.raises(InputError, match=r"holds corpus\.json: it is a corpus"):
        train(tiny.make_run(tiny_corpus), tiny_corpus.path)


def test_settings_that_change_nothing_are_told(tiny_corpus, tmp_path, capsys):
    run = tiny.make_run(tiny_corpus, steps=1, across="block", alpha=0.5)
    train(run, tmp_path / "run", progress=False)
    out = capsys.readouterr().out
    assert "across=block changes nothing: pair rows never cross" in out
    assert "alpha=0.5 changes nothing: the corpus has one input" in out


def test_a_workdir_in_a_bucket(tiny_corpus):
    with pytest.raises(InputError, match="is in a bucket: give a folder of this"):
        train(tiny.make_run(tiny_corpus), "gs://bucket/run")


def test_one_device_and_eight_agree(tiny_corpus, finished, tmp_path):
    """The fixture ran on eight devices; a mesh of one gives the same losses."""
    import bert_jax.train as module

    original = module.make_mesh
    module.make_mesh = lambda axes: original(axes, jax.devices()[:1])
    try:
        train(tiny.make_run(tiny_corpus), tmp_path / "one", progress=False)
    finally:
        module.make_mesh = original
    rows = [
        [row for row in read_metrics(w / "metrics.jsonl") if row["kind"] == "train"]
        for w in (finished, tmp_path / "one")
    ]
    for eight, one in zip(*rows, strict=True):
        assert eight["batch"] == one["batch"]
        assert eight["loss"] == pytest.approx(one["loss"], rel=1e-5)


def family_run(corpus, name: str, **changes):
    """A run of one step of another member, at tiny size and without learning."""
    arch = tiny_arch(preset(name).arch)
    config = load_config(f"pretrain:{name}")
    sizes = ("width", "layers", "heads", "inner", "max_positions", "window", "types")
    fields = {f"arch.{size}": str(getattr(arch, size)) for size in sizes}
    fields |= {"data": str(corpus.path), "rows": "full", "length": "24", "batch": "8"}
    fields |= {"steps": "1", "optim.lr": "0", "optim.warmup": "0"}
    fields |= {key.replace("__", "."): str(value) for key, value in changes.items()}
    override(config, fields)
    return resolve(config)


def test_a_longformer_starts_from_a_roberta(tiny_corpus, tmp_path, capsys):
    short = tmp_path / "roberta"
    train(family_run(tiny_corpus, "roberta-base"), short, progress=False)
    # RoBERTa counts positions from the id of padding, which is 0 in this vocabulary.
    assert "positions: from 1, after the id of padding" in capsys.readouterr().out
    theirs = bert_jax.load(short)
    assert theirs.arch.position_offset == theirs.tokenizer.pad_id + 1 == 1

    long = tmp_path / "longformer"
    run = family_run(
        tiny_corpus, "longformer-base-4096", init=short, arch__max_positions=90
    )
    train(run, long, progress=False)
    said = capsys.readouterr().out
    assert "positions: 42 rows stretched to 90" in said
    assert "begun as the ordinary projections: stack/layers/attention/k_global" in said
    ours = bert_jax.load(long).params
    attention = ours["stack"]["layers"]["attention"]
    for name in "qkv":
        for leaf in ("kernel", "bias"):
            near, far = attention[name][leaf], attention[f"{name}_global"][leaf]
            np.testing.assert_array_equal(near, far)
    before, after = (p["embed"]["position"] for p in (theirs.params, ours))
    np.testing.assert_array_equal(after[:42], before)
    np.testing.assert_array_equal(after[42:83], before[1:])
    np.testing.assert_array_equal(after[83:], before[1:8])


def test_another_function_is_refused(tiny_corpus, finished, tmp_path):
    run = family_run(tiny_corpus, "gpt2", init=finished, rows="full")
    with pytest.raises(InputError) as caught:
        train(run, tmp_path / "run", progress=False)
    assert "arch.norm_place is 'post' there, 'pre' here" in str(caught.value)


CAUSAL = {"objective__name": "causal_lm"}
ORDERS = {
    "bert": (CAUSAL, "'causal'", "all", "causal"),
    "gpt": ({"arch__order": "causal"}, "'all'", "causal", "all"),
    "backward": (
        {**CAUSAL, "objective__direction": "backward"},
        *("'backward'", "all", None),
    ),
    "agreed": ({**CAUSAL, "arch__order": "causal"}, None, None, None),
    "as it is": ({}, None, None, None),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_model_that_is_read_otherwise_than_trained(tiny_corpus, name: str):
    told, trained, read, advice = ORDERS[name]
    run = tiny.make_run(tiny_corpus, rows="full", **told)
    (leg,), said = course.course_of(run).legs, []
    lane.make_lane(leg, tiny_corpus, None, make_mesh(run.mesh), said.append)
    lines = [line for line in said if "arch.order" in line]
    if trained is None:
        assert not lines
        return
    (line,) = lines
    assert f"to read in the order {trained}, but probes" in line
    assert f"load go by config.arch.order={read}" in line
    assert line.endswith(f"give --config.arch.order={advice}") == (advice is not None)


def test_presets_are_read_as_they_are_trained():
    for name in PRESETS:
        causal = preset(name).objective == "causal_lm"
        assert preset(name).arch.order == ("causal" if causal else "all"), name


def test_lamb_shows_how_far_it_trusts_each_layer(tiny_corpus, tmp_path):
    run = tiny.make_run(tiny_corpus, steps=2, log_every=1, optim__name="lamb")
    train(run, tmp_path / "run", progress=False)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    names = {"trust_embed", *(f"trust_layer_{n}" for n in range(run.arch.layers))}
    for row in rows:
        assert names == {name for name in row if name.startswith("trust")}
        assert all(row[name] > 0 for name in names)


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_static_masks_come_again(tiny_corpus, tmp_path, copies: int):
    """A step is an epoch, and the rate next to nothing: what is hidden is all that can
    change the loss."""
    sizes = ((n, len(Rows(tiny_corpus, "full", n))) for n in range(24, 64))
    length, rows = next((n, rows) for n, rows in sizes if rows % 8 == 0)
    still = dict(optim__lr=1e-12, arch__dropout=0.0, arch__attention_dropout=0.0)
    how = dict(rows="full", length=length, batch=rows, steps=4, copies=copies)
    run = tiny.make_run(tiny_corpus, **how, **still)
    train(run, tmp_path / "run", progress=False)
    losses = [row["loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl")]
    found = len({round(loss, 4) for loss in losses})
    assert found == (copies or 4)


def test_units_that_the_data_does_not_have(tiny_corpus, tmp_path):
    unit = {"objective__choose": "word", "objective__unit": "phrases"}
    run = tiny.make_run(tiny_corpus, steps=2, **unit)
    with pytest.raises(
        InputError, match="masked_lm needs phrases: .* has no such column"
    ):
        train(run, tmp_path / "run", progress=False)
    assert not (tmp_path / "run/run.json").exists()


def test_words_that_chinese_does_not_show(tmp_path):
    """By pieces alone every character would be a word, and nothing would say so."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(["猫看山。\n狗画水。"] * 60), encoding="utf-8")
    characters = train_wordpiece([text.read_text()], vocab_size=12, progress=False)
    corpus, with_words = (
        prepare(
            [str(text)],
            tokenizer=characters,
            out=tmp_path / words,
            words=words,
            progress=False,
        )
        for words in ("pieces", "spaces")
    )
    assert not with_words.hides_words
    run = tiny.make_run(corpus, objective__choose="word")
    with pytest.raises(InputError, match="does not show: .* Prepare it with --words"):
        train(run, tmp_path / "run", progress=False)
    assert not (tmp_path / "run/run.json").exists()


CHINESE = "猫 看 远山 ， 狗 画 流水 ， 鸟 听 明月 ， 江流 石 不 转 ， 大雪 满 弓刀 。"
SCRIPTS = {
    "chinese": CHINESE.replace(" ", ""),
    "spaced": CHINESE,
    "thai": "แมวมองเห็นทะเลสีครามและนกก็ร้องเพลงอยู่บนต้นไม้ใหญ่",
    "kana": "ねこがうみをみていてとりはきのうえでうたをうたっていた。",
    "english": "The cat sees the blue sea, and a bird sings in the tall tree.",
}


def tokenizer_of(kind: str, text: str):
    """Byte BPE is made from English, as RoBERTa's: others are bytes to it."""
    if kind == "gpt":
        letters = sorted({*text.lower()} - {" "})
        return WordBPE(["<unk>", *letters, *(f"{c}</w>" for c in letters)], [])
    if kind == "byte bpe":
        return train_bpe([SCRIPTS["english"]], vocab_size=280, progress=False)
    return train_chars([text], progress=False)


@pytest.mark.parametrize(
    ("script", "kind", "words", "why"),
    [
        ("chinese", "byte bpe", "pieces", "words of more than 16 pieces"),
        ("spaced", "byte bpe", "spaces", ""),
        ("thai", "byte bpe", "pieces", "words of more than 16 pieces"),
        ("kana", "byte bpe", "pieces", "words of more than 16 pieces"),
        ("kana", "chars", "pieces", "words of more than 16 pieces"),
        ("english", "byte bpe", "pieces", ""),
        ("english", "chars", "pieces", ""),
        ("english", "gpt", "pieces", "does not tell whether it begins one"),
        ("english", "gpt", "spaces", ""),
    ],
)
def test_words_that_pieces_do_not_show(tmp_path, script, kind, words, why):
    """In text without spaces, by pieces alone, a sentence would be a word: longer than
    what is hidden of a row."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join([f"{SCRIPTS[script]}\n" * 3] * 20), encoding="utf-8")
    corpus = prepare(
        [str(text)],
        tokenizer=tokenizer_of(kind, text.read_text()),
        out=tmp_path / "corpus",
        words=words,
        progress=False,
    )
    rows = Rows(corpus, "stream", 32)
    check_rows(MaskedLM(corpus.tokenizer.size, 4, ()), rows)
    whole_words = MaskedLM(corpus.tokenizer.size, 4, (), choose="word")
    if why:
        with pytest.raises(InputError, match=f"not show: .*{why}. Prepare it with"):
            check_rows(whole_words, rows)
    else:
        check_rows(whole_words, rows)


def refused(corpus, told: dict, workdir, monkeypatch) -> str:
    """What is said before anything is built or written."""

    def never(*_, **__):
        raise AssertionError("a step was made")

    monkeypatch.setattr(lane, "make_train_step", never)
    with pytest.raises(InputError) as caught:
        train(tiny.make_run(corpus, **told), workdir, progress=False)
    assert not (workdir / "run.json").exists()
    return str(caught.value)


MEMORY = {"objective__name": "causal_lm", "objective__memory": 8}
WRONG = {
    "no head": (
        {"objective__name": "permuted_lm"},
        "needs config.arch.streams=2",
    ),
    "no generator's head": (
        {"objective__name": "replaced_token", "arch__lm_head": "bias"},
        "needs config.arch.lm_head=transform instead of bias",
    ),
    "memory of shuffled rows": (
        {**MEMORY, "arch__position": "xl", "rows": "full"},
        "config.objective.memory=8 needs config.rows=stream",
    ),
    "memory beside another task": (
        {
            **MEMORY,
            "arch__position": "xl",
            "rows": "stream",
            "tasks": (("one", {}), ("two", {})),
            "stages": ({"steps": 6, "tasks": {"one": 3, "two": 3}},),
        },
        "objective.memory is that of the step before, which trained another task",
    ),
    "stages": (
        {"stages": ({"steps": 2}, {"steps": 3})},
        "config.steps=6, but the stages add up to 5 steps",
    ),
    "towers of two sizes": (
        {
            "objective__name": "replaced_token",
            "stages": (
                {"steps": 3, "objective.generator": 0.5},
                {"steps": 3, "objective.generator": 1.0},
            ),
        },
        "the tower 'generator' has width",
    ),
    "no generator before": (
        {
            "objective__name": "replaced_token",
            "objective__phase": "discriminator",
            "objective__generator": 1.0,
        },
        "phase=discriminator begins with the weights of a generator",
    ),
    "batch": ({"batch": 12}, "config.batch=12"),
    "parts": (
        {"accumulate": 2},
        "config.batch=8 in config.accumulate=2 parts does not divide over 8 devices",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_said_before_a_step_is_made(
    tiny_corpus, tmp_path, monkeypatch, name
):
    told, said = WRONG[name]
    assert said in refused(tiny_corpus, told, tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("unit", ["phrases", "words"])
def test_held_out_text_needs_what_is_hidden(tmp_path, monkeypatch, unit):
    """As the text that is learned from does."""
    texts = {"tags": "猫/n 看/v 山/n 。/w\n狗/n 画/v 水/n 。/w", "pieces": "猫看山。"}
    for words, text in texts.items():
        (tmp_path / f"{words}.txt").write_text("\n\n".join([text] * 60))
    characters = train_wordpiece(["猫看山。狗画水。"], vocab_size=12, progress=False)
    with_words, without = (
        prepare(
            [str(tmp_path / f"{words}.txt")],
            tokenizer=characters,
            out=tmp_path / words,
            words=words,
            progress=False,
        )
        for words in texts
    )
    hidden = dict(objective__choose="word", objective__unit=unit, eval__every=0)
    told = hidden | dict(eval__data=without.path)
    said = refused(with_words, told, tmp_path / "run", monkeypatch)
    assert str(without.path) in said
    assert f"masked_lm needs {unit}" in said
    monkeypatch.undo()
    run = tiny.make_run(with_words, **hidden, eval__data=with_words.path, steps=1)
    assert train(run, tmp_path / "run", progress=False)["eval"]
    with pytest.raises(InputError) as caught:
        evaluate(tmp_path / "run", data=without.path)
    assert str(caught.value) == said


def test_labelled_pairs_are_a_task_beside_the_text(tiny_corpus, tmp_path, monkeypatch):
    """ERNIE 2.0's relations, from a file of label<TAB>text<TAB>text."""
    lines = [f"{n % 3}\tthe cat sees the sea\ta dog likes bread" for n in range(40)]
    path = tmp_path / "relations.tsv"
    path.write_text("\n".join(lines) + "\n")
    relation = {"objective.name": "discourse_relation", "rows": "labelled"}
    told = dict(
        arch__labels=3,
        stages=({"steps": 4, "tasks": {"text": 2, "relation": 2}},),
        steps=4,
    )
    tasks = (("text", {}), ("relation", {**relation, "data": str(path)}))
    run = tiny.make_run(tiny_corpus, tasks=tasks, **told)
    train(run, tmp_path / "run", progress=False)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    found = ["relation/discourse_relation_loss" in row for row in rows]
    assert found.count(True) == 2
    assert "discourse" in bert_jax.load(tmp_path / "run").heads
    few = dict(tasks=tasks) | told | {"arch__labels": 2}
    said = refused(tiny_corpus, few, tmp_path / "few", monkeypatch)
    assert "the data have 3 labels, 0, 1, 2; its head has 2" in said
    text = (tasks[0], ("relation", {"objective.name": "discourse_relation"}))
    said = refused(tiny_corpus, told | dict(tasks=text), tmp_path / "few", monkeypatch)
    assert "discourse_relation needs label: " in said


def test_electra_trains_two_towers(tiny_corpus, tmp_path, capsys):
    """One loop, one step; the generator comes along when the model goes to PyTorch."""
    config = load_config("pretrain:electra-small-discriminator")
    toy = tiny_arch(preset("electra-small-discriminator").arch)
    sizes = ("width", "layers", "heads", "inner", "max_positions", "embed_width")
    override(
        config,
        {f"arch.{size}": str(getattr(toy, size)) for size in sizes}
        | {"data": str(tiny_corpus.path), "eval.data": str(tiny_corpus.path)}
        | {"length": "32", "batch": "8", "steps": "3", "eval.rows": "8"},
    )
    workdir = tmp_path / "run"
    result = train(resolve(config), workdir, progress=False)
    for kind in ("train", "eval"):
        assert {"replaced_token_recall", "masked_lm_loss"} <= set(result[kind])
    assert "perplexity" not in result["eval"]
    assert (workdir / "loss.png").exists()
    model = bert_jax.load(workdir)
    assert [name for name, _ in model.towers] == ["generator"]
    scores = evaluate(workdir, data=tiny_corpus.path, count=8)
    assert scores["replaced_token_loss"] == pytest.approx(
        result["eval"]["replaced_token_loss"], rel=1e-4
    )
    capsys.readouterr()
    main(["export", str(workdir), str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "as ElectraForPreTraining; PyTorch's logits differ by at most" in printed
    assert "generator/stack/layers/attention/q/kernel" in printed


STAGES = (
    {"steps": 3, "length": 16, "batch": 16},
    {"steps": 3, "moments": "reset", "optim.lr": 5e-4, "accumulate": 1},
)


def stage_run(corpus, **changes):
    settings = dict(stages=STAGES, eval__data=corpus.path, eval__every=3)
    return tiny.make_run(corpus, **settings | changes)


@pytest.fixture(scope="module")
def in_stages(tiny_corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("stages") / "run"
    train(stage_run(tiny_corpus), workdir, progress=False)
    return workdir


def test_stages_have_rows_rates_and_moments_of_their_own(in_stages, tiny_corpus):
    rows = [r for r in read_metrics(in_stages / "metrics.jsonl") if "lr" in r]
    assert rows[3]["lr"] == pytest.approx(5e-4)
    fresh = course.course_of(stage_run(tiny_corpus))
    assert [float(fresh.rate(n)) for n in range(6)] == [row["lr"] for row in rows]
    # Another length: other batches, the same ones as a run of that length begins with.
    alone = tiny.make_run(tiny_corpus, steps=3)
    train(alone, in_stages.parent / "alone", progress=False)
    there = read_metrics(in_stages.parent / "alone/metrics.jsonl")
    assert [r["batch"] for r in rows][3:] == [r["batch"] for r in there]


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_goes_on_in_any_stage(in_stages, tiny_corpus, tmp_path, step):
    copy = shutil.copytree(in_stages, tmp_path / "copy")
    for later in range(step + 1, 7):
        shutil.rmtree(copy / f"checkpoints/{later}", ignore_errors=True)
    train(stage_run(tiny_corpus), copy, progress=False)
    assert same(leaves(copy), leaves(in_stages))


def test_moments_are_reset_only_where_a_stage_says_so(in_stages, tiny_corpus, tmp_path):
    kept = tuple({k: v for k, v in s.items() if k != "moments"} for s in STAGES)
    train(stage_run(tiny_corpus, stages=kept), tmp_path / "run", progress=False)
    assert same(leaves(tmp_path / "run", 2), leaves(in_stages, 2))
    assert not same(leaves(tmp_path / "run"), leaves(in_stages))


def test_tasks_share_a_model(tiny_corpus, tmp_path):
    """Two objectives on rows of their own, mixed; all heads are saved."""
    run = tiny.make_run(
        tiny_corpus,
        tasks=(
            ("masked", {"objective.name": "masked_lm"}),
            ("causal", {"objective.name": "causal_lm", "rows": "stream"}),
        ),
        stages=(
            {"steps": 2, "tasks": {"masked": 2}},
            {"steps": 4, "tasks": {"masked": 2, "causal": 2}},
        ),
        eval__data=tiny_corpus.path,
        eval__every=0,
    )
    result = train(run, tmp_path / "run", progress=False)
    assert result["finished"]
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    trained = [row for row in rows if row["kind"] == "train"]
    kinds = ["causal/causal_lm_loss" in row for row in trained]
    assert kinds == [False, False, False, True, False, True]
    scored = {"masked/masked_lm_loss", "causal/causal_lm_loss", "causal/perplexity"}
    assert scored <= result["eval"].keys()
    assert bert_jax.load(tmp_path / "run").heads == ("lm", "pooler", "nsp")


def test_tasks_with_the_same_rows_take_turns_at_them(tiny_corpus, tmp_path):
    """No batch twice, none left out, and the same after a stop between two tasks."""
    run = tiny.make_run(
        tiny_corpus,
        tasks=(("one", {}), ("two", {"objective.rate": 0.3})),
        stages=(
            {"steps": 2, "tasks": {"one": 2}},
            {"steps": 4, "tasks": {"one": 2, "two": 2}},
        ),
        save_every=3,
    )
    train(run, tmp_path / "run", progress=False)
    plain = tiny.make_run(tiny_corpus)
    train(plain, tmp_path / "plain", progress=False)
    batches = [
        [row["batch"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "plain")
    ]
    assert batches[0] == batches[1]
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints/6")
    train(run, copy, progress=False)
    assert same(leaves(copy), leaves(tmp_path / "run"))


def test_a_gradient_that_is_not_finite_is_skipped(tiny_corpus, tmp_path, monkeypatch):
    """Step 3 sees a rate that makes the parameters infinite: from there on all losses
    are no numbers, each is reported, and ten in a row end the run."""
    schedule = course.schedule_of

    def explodes(settings, steps):
        before = schedule(settings, steps)
        return lambda t: jax.numpy.where(t == 2, jax.numpy.inf, before(t))

    monkeypatch.setattr(course, "schedule_of", explodes)
    settings = dict(steps=20, nonfinite="skip", save_every=100)
    said = []
    monkeypatch.setattr(metrics.tqdm, "write", said.append)
    with pytest.raises(NotFiniteError, match="gradients of 10 steps, the last of them"):
        train(tiny.make_run(tiny_corpus, **settings), tmp_path / "run", progress=False)
    skips = [text for text in said if "is skipped: its gradient is not fin" in text]
    assert skips[0].startswith("step 4 ")
    assert len(skips) == 10
