"""The only loop: data, mesh, state, step, checkpoints, evaluation, top to bottom.

    bert_jax train --config pretrain:bert-tiny --workdir DIR --config.data=CORPUS

The same command again resumes where the last whole checkpoint is; a finished run says
so and does nothing. What a step computes depends on (seed, step) alone, so a run that
was killed ends with the same parameters, bit for bit, as one that was not.
"""

import contextlib
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from bert_jax import metrics
from bert_jax.checkpoint import Checkpoints
from bert_jax.config import Run, differences
from bert_jax.data.corpus import Corpus, check_same_tokenizer, open_corpus
from bert_jax.data.pipeline import checksum, train_batches
from bert_jax.data.rows import LABELLED, Rows
from bert_jax.data.tokenizers import load_tokenizer
from bert_jax.errors import InputError, unknown
from bert_jax.evaluators.held_out import HeldOut
from bert_jax.host_memory import keep_freed_memory
from bert_jax.interrupt import Interrupt
from bert_jax.model_dir import LoadedModel, load, read_run
from bert_jax.models.model import Model, count_params, init_params
from bert_jax.objectives import OBJECTIVES
from bert_jax.optim import make_optimizer
from bert_jax.presets import preset
from bert_jax.sharding import make_mesh, own_rows, place, replicated
from bert_jax.step import TrainState, make_train_step
from bert_jax.warm_start import warm_start
from bert_jax.whole import locked, write_text


def train(run: Run, workdir: str | Path, *, progress: bool = True) -> dict:
    """Trains, or goes on training. Returns the last scores and `finished`."""
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    # What is not there is said before a workdir is made.
    corpus = open_corpus(run.data)
    held_out = open_corpus(run.eval.data) if run.eval.data else None
    begun = Checkpoints(workdir, keep=run.keep, say=print).steps()
    source = load(run.init) if run.init and not begun else None
    chief = jax.process_index() == 0  # holds the lock for all
    with locked(Path(workdir)) if chief else contextlib.nullcontext():
        return train_alone(
            run, corpus, held_out, source, Path(workdir), progress=progress
        )


def train_alone(
    run: Run,
    corpus: Corpus,
    held_out: Corpus | None,
    source: LoadedModel | None,
    workdir: Path,
    *,
    progress: bool,
) -> dict:
    """The same, in a workdir that no other process trains in."""
    say = print if jax.process_index() == 0 else lambda *_: None

    # Data, and what follows from its tokenizer.
    tokenizer = corpus.tokenizer
    run = fit_vocabulary(run, corpus, say)
    objective = make_objective(run, tokenizer, say)
    rows = Rows(corpus, run.rows, run.length, run.across, run.seed)
    lacking = sorted(set(objective.columns) - set(rows.empty(1)))
    if lacking:
        raise InputError(
            f"config.objective.unit={lacking[0]}: {run.data} has no such column; see "
            "`bert_jax prepare --words`"
        )
    if run.alpha != 1 and not corpus.index["input"].any():
        say(f"config.alpha={run.alpha} changes nothing: the corpus has one input")
    if run.across != "attend" and run.rows not in ("full", "stream"):
        say(f"config.across={run.across} changes nothing: {run.rows} rows never cross")

    # Mesh, model, evaluator.
    mesh = make_mesh()
    part = own_rows(mesh, run.batch, field="batch")
    towers = objective.towers(run.arch)
    model = Model(run.arch, dtype=compute_dtype(run.dtype), towers=towers)
    evaluator = make_evaluator(run, corpus, held_out, model, objective, mesh)

    def due(step: int) -> bool:  # for its scores
        every = run.eval.every
        regular = every > 0 and step % every == 0
        return evaluator is not None and (regular or step == run.steps)

    # The workdir belongs to one configuration.
    about = {"config": run.as_dict(), "heads": list(objective.heads)}
    about["towers"] = {name: dataclasses.asdict(arch) for name, arch in towers}
    about["corpus"] = {key: corpus.about[key] for key in ("content", "tokenizer")}
    checkpoints = Checkpoints(workdir, keep=run.keep, say=say)
    claim_workdir(workdir, about, tokenizer, trained=bool(checkpoints.steps()))

    # The state: fresh, from another model, or where the run was stopped.
    last = checkpoints.last_good()
    if last is None and run.init:
        source = source or load(run.init)  # all checkpoints were damaged
    state, optimizer = first_state(run, model, objective, tokenizer, source, say)
    state = jax.device_put(state, replicated(mesh))
    if last is not None:
        state = checkpoints.restore(last, state)
    start = step = int(state.step)
    # Killed between a checkpoint and its scores.
    unscored = start > 0 and due(start) and start not in scored_steps(workdir)
    if start >= run.steps and not unscored:
        say(f"{workdir} is finished: {run.steps} steps are done")
        if not (workdir / "loss.png").exists():  # killed just before it was drawn
            metrics.draw_loss(workdir, objective.name)
        return {"finished": True, **last_scores(workdir)}

    count = count_params(run.arch, heads=objective.heads, towers=towers)
    say(describe(run, corpus, rows, count, mesh, start))
    train_step = jax.jit(make_train_step(model, objective, optimizer), donate_argnums=0)
    batches = train_batches(
        rows,
        size=run.batch,
        start=start,
        stop=run.steps,
        part=part,
        alpha=run.alpha,
        direction=run.direction,
    )
    writers = metrics.Writers(workdir, start=start, steps=run.steps, progress=progress)
    with writers, Interrupt() as interrupt:
        under_way = metrics.UnderWay(run, model, objective, writers)

        def score() -> None:
            scores = dict(evaluator.run(state.params))
            writers.write(step, scores, kind="eval")
            writers.say(f"step {step}: " + summary(scores))

        if unscored:
            score()
        try:
            for step, batch in enumerate(batches, start + 1):
                state, means = train_step(state, place(mesh, batch))
                under_way.add(step, means, checksum(batch))
                stopped = interrupt.signal is not None
                ends = stopped or step == run.steps
                to_save = ends or step % run.save_every == 0
                if to_save or due(step):
                    under_way.finish()  # raises if a loss was not finite
                    with under_way.pause():
                        if to_save:
                            metrics.check_finite(state.params, step)
                            checkpoints.save(state)
                        if due(step) and not stopped:
                            score()
                if ends:
                    break
        except metrics.NotFiniteError as error:
            good = checkpoints.last_good()
            kept = f"step {good} is the last good checkpoint" if good else "none saved"
            raise metrics.NotFiniteError(
                f"{error} Stopped; {kept} in {workdir}. A lower optim.lr or a longer "
                "optim.warmup may help, in another --workdir."
            ) from None
    if jax.process_index() == 0:
        metrics.draw_loss(workdir, objective.name)
    finished = step == run.steps
    if not finished:
        say(f"stopped at step {step} and saved; the same command goes on from there")
    return {"finished": finished, **last_scores(workdir)}


def first_state(run: Run, model: Model, objective, tokenizer, source, say):
    """The state before step 1, and the optimizer. A resumed run only needs its form."""
    params = init_params(model, jax.random.key(run.seed), heads=objective.heads)
    if source:
        params, report = warm_start(
            params, arch=run.arch, tokenizer=tokenizer, source=source
        )
        say("\n".join(report))
    optimizer = make_optimizer(run.optim, run.steps, params)
    state = TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        seed=jnp.uint32(run.seed),
    )
    return state, optimizer


def compute_dtype(name: str) -> jnp.dtype:
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def fit_vocabulary(run: Run, corpus: Corpus, say) -> Run:
    """The model gets as many pieces as the corpus has, unless told otherwise, and
    counts positions from the id of padding where its kind does (RoBERTa)."""
    offset, pad = run.arch.position_offset, corpus.tokenizer.pad_id
    if offset and pad is not None and offset != pad + 1:
        say(f"positions: from {pad + 1}, after the id of padding (not from {offset})")
        run = dataclasses.replace(run, arch=run.arch.but(position_offset=pad + 1))
    pieces, wanted = corpus.about["tokenizer"]["size"], run.arch.vocab_size
    if pieces == wanted:
        return run
    if wanted == preset(run.preset).arch.vocab_size:
        say(f"vocabulary: {pieces} pieces of the data (the preset has {wanted})")
        return dataclasses.replace(run, arch=run.arch.but(vocab_size=pieces))
    raise InputError(
        f"config.arch.vocab_size={wanted}, but the tokenizer of {corpus.path} has "
        f"{pieces} pieces: leave it out or prepare the data with the other tokenizer"
    )


def make_objective(run: Run, tokenizer, say):
    """The preset's objective with the run's hyper-parameters."""
    kind = OBJECTIVES[preset(run.preset).objective]
    hyper = dict(run.objective)
    valid = {field.name for field in dataclasses.fields(kind)}
    problems = [
        unknown("config field", f"objective.{name}", {f"objective.{v}" for v in valid})
        for name in hyper
        if name not in valid
    ]
    if problems:
        raise InputError("\n".join(problems))
    if "mask_id" in valid and tokenizer.mask_id is None:
        raise InputError(
            f"the {tokenizer.kind} tokenizer of {run.data} has no token to hide others "
            "behind ([MASK]), which the objective needs: prepare with another one"
        )
    if run.rows not in LABELLED and hyper.get("next_sentence"):
        hyper["next_sentence"] = 0.0
        if preset(run.preset).rows in LABELLED:
            say(f"rows={run.rows} are no pairs: next-sentence prediction is off")
    decided = {
        "vocab_size": tokenizer.size,
        "mask_id": tokenizer.mask_id,
        "special_ids": tokenizer.special_ids,
        "pair_head": preset(run.preset).pair_head,
    }
    return kind(**{name: decided[name] for name in decided if name in valid}, **hyper)


def make_evaluator(
    run: Run, corpus: Corpus, held_out: Corpus | None, model, objective, mesh
) -> HeldOut | None:
    """Scores on the evaluation corpus, which must have the same tokenizer."""
    if held_out is None:
        return None
    digest = corpus.tokenizer.hash
    check_same_tokenizer(held_out, digest, f"the training data {run.data}")
    return HeldOut(
        Rows(held_out, run.rows, run.length, run.across, seed=0),
        model=model,
        objective=objective,
        mesh=mesh,
        batch=run.batch,
        count=run.eval.rows or None,
    )


def claim_workdir(workdir: Path, about: dict, tokenizer, *, trained: bool) -> None:
    """Writes what the run is; once there is a checkpoint it must be what is there."""
    if jax.process_index():
        return
    path = workdir / "run.json"
    if trained:
        before = read_run(workdir)
        problems = differences(before["config"], about["config"])
        if before["corpus"] != about["corpus"]:
            problems.append(
                f"data: {before['config']['data']} then and {about['config']['data']} "
                "now hold other text or another tokenizer"
            )
        if problems:
            raise InputError(
                f"{workdir} belongs to another configuration; use the same values, or "
                f"go on from it in another --workdir with --config.init={workdir}:\n"
                + "\n".join(problems)
            )
    else:
        folder = workdir / "tokenizer"
        others = ("corpus.json", "tokenizer_config.json", "config.json")
        in_the_way = [name for name in others if (workdir / name).exists()]
        if in_the_way:
            raise InputError(
                f"{workdir} holds {in_the_way[0]}: it is a corpus, a tokenizer or a "
                "model; use another --workdir"
            )
        foreign = folder.exists() and not path.is_file()  # not of a run of ours
        if foreign and load_tokenizer(folder).hash != tokenizer.hash:
            raise InputError(
                f"{folder} is another tokenizer than that of the data: it would be "
                "overwritten; use another --workdir"
            )
        tokenizer.save(folder)
        write_text(path, json.dumps(about, indent=2) + "\n")


def describe(run: Run, corpus: Corpus, rows: Rows, count: int, mesh, start: int) -> str:
    verb = f"resumed at step {start}" if start else "training"
    return (
        f"{verb}: {run.preset} by {preset(run.preset).objective}, {count:,} "
        f"parameters, {mesh.size} device(s), {corpus.about['pieces']:,} pieces in "
        f"{len(rows):,} {run.rows} rows of "
        f"{run.length} ({rows.plan.covered:.1%} of the pieces, {rows.plan.real:.1%} "
        f"real tokens), {rows.plan.about['cut']} sentences longer than a row were cut"
    )


def summary(scores: dict) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items())


def scored_steps(workdir: Path) -> set[int]:
    rows = metrics.read_metrics(workdir / "metrics.jsonl")
    return {row["step"] for row in rows if row["kind"] == "eval"}


def last_scores(workdir: Path) -> dict:
    """The last line of each kind in metrics.jsonl."""
    rows = metrics.read_metrics(workdir / "metrics.jsonl")
    return {row["kind"]: row for row in rows}
