"""The only loop: data, mesh, state, step, checkpoints, evaluation, top to bottom.

    bert_jax train --config pretrain:bert-tiny --workdir DIR --config.data=CORPUS

The same command again resumes where the last whole checkpoint is; a finished run says
so and does nothing. What a step computes depends on (seed, step) alone, so a run that
was killed ends with the same parameters, bit for bit, as one that was not.
"""

import contextlib
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from bert_jax import metrics
from bert_jax.checkpoint import Checkpoints
from bert_jax.config import Run
from bert_jax.course import course_of
from bert_jax.data.corpus import Corpus, open_corpus
from bert_jax.data.pipeline import checksum
from bert_jax.errors import InputError
from bert_jax.host_memory import keep_freed_memory
from bert_jax.interrupt import Interrupt
from bert_jax.lane import make_lane
from bert_jax.model_dir import LoadedModel, load
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, count_params, init_params
from bert_jax.objectives.base import Objective
from bert_jax.presets import preset
from bert_jax.sharding import make_mesh, place, replicated
from bert_jax.step import TrainState
from bert_jax.warm_start import warm_start
from bert_jax.whole import locked
from bert_jax.workdir import claim_workdir, last_scores, scored_steps


def train(run: Run, workdir: str | Path, *, progress: bool = True) -> dict:
    """Trains, or goes on training. Returns the last scores and `finished`."""
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    # What is not there is said before a workdir is made.
    corpus = open_corpus(run.data)
    held_out = open_corpus(run.eval.data) if run.eval.data else None
    begun = Checkpoints(workdir, say=print).steps()
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
    course = course_of(run)
    mesh = make_mesh()
    lanes = [make_lane(leg, corpus, held_out, mesh, say) for leg in course.legs]

    # The model that all of them train.
    objectives = [lane.objective for lane in lanes]
    heads = tuple(dict.fromkeys(head for one in objectives for head in one.heads))
    towers = towers_of(objectives, run.arch)
    model = Model(run.arch, dtype=compute_dtype(run.dtype), towers=towers)

    def due(step: int) -> bool:  # for its scores
        every = run.eval.every
        regular = every > 0 and step % every == 0
        return held_out is not None and (regular or step == run.steps)

    # The workdir belongs to one configuration.
    about = {"config": run.as_dict(), "heads": list(heads)}
    about["towers"] = {name: dataclasses.asdict(arch) for name, arch in towers}
    about["corpus"] = {key: corpus.about[key] for key in ("content", "tokenizer")}
    about["others"] = sorted(
        {lane.content for lane in lanes} - {corpus.about["content"]}
    )
    checkpoints = Checkpoints(workdir, keep=run.keep, every=run.save_every, say=say)
    claim_workdir(workdir, about, tokenizer, trained=bool(checkpoints.steps()))

    # The state: fresh, from another model, or where the run was stopped.
    last = checkpoints.last_good()
    if last is None and run.init:
        source = source or load(run.init)  # all checkpoints were damaged
    params = init_params(model, jax.random.key(run.seed), heads=heads)
    if source:
        params, report = warm_start(
            params, arch=run.arch, tokenizer=tokenizer, source=source
        )
        say("\n".join(report))
    for number, lane in enumerate(lanes):
        lane.build(model, course.rate, params, lanes[:number])
    state = TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=lanes[0].optimizer.init(params),
        seed=jnp.uint32(run.seed),
    )
    state = jax.device_put(state, replicated(mesh))
    # A checkpoint holds what the step before it handed on.
    written_by = lanes[course.leg_of[(last or 1) - 1]]
    state = state.replace(carry=written_by.first_carry())
    if last is not None:
        state = checkpoints.restore(last, state)
    start = step = int(state.step)
    # Killed between a checkpoint and its scores.
    unscored = start > 0 and due(start) and start not in scored_steps(workdir)
    names = tuple(dict.fromkeys(lane.title for lane in lanes))
    if start >= run.steps and not unscored:
        say(f"{workdir} is finished: {run.steps} steps are done")
        if not (workdir / "loss.png").exists():  # killed just before it was drawn
            metrics.draw_loss(workdir, names)
        return {"finished": True, **last_scores(workdir)}

    count = count_params(run.arch, heads=heads, towers=towers)
    verb = f"resumed at step {start}" if start else "training"
    say(f"{verb}: {run.preset}, {count:,} parameters, {mesh.size} device(s)")
    for lane in lanes:
        say(lane.describe(course))
    writers = metrics.Writers(workdir, start=start, steps=run.steps, progress=progress)
    with writers, Interrupt() as interrupt:
        under_way = metrics.UnderWay(run, course.rate, writers)

        def score() -> None:
            stage = course.legs[course.leg_of[step - 1]].stage
            scores = {}
            for lane in lanes:
                if lane.leg.stage == stage and lane.evaluator:
                    scores |= lane.named(dict(lane.evaluator.run(state.params)))
            writers.write(step, scores, kind="eval")
            writers.say(f"step {step}: " + summary(scores))

        if unscored:
            score()
        feeds = {}  # streams of batches, as they are needed
        try:
            for step in range(start + 1, run.steps + 1):
                lane = lanes[course.leg_of[step - 1]]
                if step > 1 and step - 1 in course.starts:
                    state = lane.enter(state, course.moments[lane.leg.stage])
                batch = lane.next_batch(course, step - 1, feeds)
                state, means = lane.step(state, place(mesh, batch))
                under_way.add(step, lane.named(means), checksum(batch), lane.flops)
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
        metrics.draw_loss(workdir, names)
    finished = step == run.steps
    if not finished:
        say(f"stopped at step {step} and saved; the same command goes on from there")
    return {"finished": finished, **last_scores(workdir)}


def compute_dtype(name: str) -> jnp.dtype:
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def towers_of(objectives: list[Objective], arch: Arch) -> tuple[tuple[str, Arch], ...]:
    """What they need beside the main tower; those that share one agree about it."""
    towers = {}
    for objective in objectives:
        for name, its in objective.towers(arch):
            if towers.setdefault(name, its) != its:
                raise InputError(
                    f"config.stages: the tower {name!r} has width {towers[name].width} "
                    f"and {towers[name].layers} layers in one stage, {its.width} and "
                    f"{its.layers} in another: set objective.generator and "
                    "objective.generator_layers alike in all of them"
                )
    return tuple(towers.items())


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


def summary(scores: dict) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
