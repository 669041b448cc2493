"""The only loop: data, mesh, state, step, checkpoints, evaluation, top to bottom.

    bert_jax train --config pretrain:bert-tiny --workdir DIR --config.data=CORPUS

The same command again resumes where the last whole checkpoint is; a finished run says
so and does nothing. What a step computes depends on (seed, step) alone, so a run that
was killed ends with the same parameters, bit for bit, as one that was not.
"""

import contextlib
import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import metrics
from bert_jax.checkpoint import Checkpoints
from bert_jax.config import Run
from bert_jax.course import course_of
from bert_jax.data.corpus import Corpus, open_corpus
from bert_jax.data.pipeline import checksum
from bert_jax.errors import InputError
from bert_jax.host_memory import keep_freed_memory
from bert_jax.input_watch import InputWatch
from bert_jax.interrupt import Interrupt, exit_code
from bert_jax.lane import first_losses, make_lane
from bert_jax.meeting import Hosts, excused
from bert_jax.model_dir import LoadedModel, load
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, count_params, init_params, param_shapes
from bert_jax.objectives.base import Objective
from bert_jax.peers import Peers, assemble
from bert_jax.presets import preset
from bert_jax.processes import told_by_all
from bert_jax.sharding import make_mesh, spread
from bert_jax.startup import StartUp
from bert_jax.step import TrainState
from bert_jax.warm_start import warm_start
from bert_jax.whole import locked
from bert_jax.workdir import claim_workdir, last_scores, scored_steps

digest = jax.jit(partial(checksum, xp=jnp))


def train(
    run: Run,
    workdir: str | Path,
    *,
    progress: bool = True,
    hosts: Hosts | None = None,
) -> dict:
    """Trains, or goes on training. Returns the last scores, `finished`, and the exit
    `code` of a process that does nothing else. With `hosts` it is one of several, all
    of which were told the same and have the same workdir."""
    workdir, source = Path(workdir), None
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(StartUp())
        with excused(hosts):  # what is not there is said before a workdir is made
            corpus = open_corpus(run.data)
            held_out = open_corpus(run.eval.data) if run.eval.data else None
            if not hosts and run.init and not Checkpoints(workdir, say=print).steps():
                source = load(run.init)
            if not hosts or hosts.index == 0:
                stack.enter_context(locked(workdir))  # for all
        started.done("corpus")
        peers = stack.enter_context(assemble(hosts, run, workdir, corpus, held_out))
        peers.connect()  # before JAX is asked for its devices
        started.done("other hosts")
        if jax.default_backend() == "cpu":
            keep_freed_memory()
        its = dict(started=started, progress=progress)
        return train_alone(run, corpus, held_out, source, workdir, peers, **its)


def train_alone(
    run: Run,
    corpus: Corpus,
    held_out: Corpus | None,
    source: LoadedModel | None,
    workdir: Path,
    peers: Peers,
    *,
    started: StartUp,
    progress: bool,
) -> dict:
    """The same, in a workdir that no other run trains in."""
    say = print if jax.process_index() == 0 else lambda *_: None

    # Data, and what follows from its tokenizer.
    tokenizer = corpus.tokenizer
    run = fit_vocabulary(run, corpus, say)
    course = course_of(run)
    mesh = make_mesh(run.mesh)
    lanes = [make_lane(leg, corpus, held_out, mesh, say) for leg in course.legs]
    started.done("rows")

    # The model that all of them train.
    model, heads = model_of([lane.objective for lane in lanes], run)
    towers = model.towers

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
    which = dict(keep=run.keep, every=run.save_every)
    checkpoints = Checkpoints(workdir, **which, about=about, say=say)
    claim_workdir(workdir, about, tokenizer, trained=bool(checkpoints.steps()))

    # The state: fresh, from another model, or where the run was stopped.
    last = checkpoints.last_good()
    peers.tick()
    if last is None and run.init:
        source = source or load(run.init)  # all checkpoints were damaged
    shapes = param_shapes(run.arch, heads=heads, towers=towers)
    for number, lane in enumerate(lanes):
        lane.build(model, course.rate, shapes, lanes[:number], say)
    places = lanes[0].places
    draw = partial(init_params, model, heads=heads)
    if source:
        params, report = warm_start(
            draw(jax.random.key(run.seed)),
            arch=run.arch,
            tokenizer=tokenizer,
            source=source,
        )
        say("\n".join(report))
        params = spread(params, places.params)
    else:
        key = jax.random.key(run.seed)
        params = jax.jit(draw, out_shardings=places.params)(key)
    # A checkpoint holds what the step before it handed on.
    written_by = lanes[course.leg_of[(last or 1) - 1]]
    state = TrainState(
        step=spread(np.int32(0), places.step),
        params=params,
        opt_state=lanes[0].first_moments(params),
        seed=spread(np.uint32(run.seed), places.seed),
        carry=written_by.first_carry(),
        losses=jax.tree.map(
            lambda x: spread(x, places.losses), first_losses(run, len(lanes))
        ),
    )
    if last is not None:
        state = checkpoints.restore(last, state)
    peers.tick()
    start = step = int(state.step)
    started.done("parameters")
    # Killed between a checkpoint and its scores.
    unscored = start > 0 and due(start) and start not in scored_steps(workdir)
    unscored = told_by_all(str(unscored))[0] == "True"  # a shared folder may lag
    names = tuple(dict.fromkeys(lane.title for lane in lanes))
    if start >= run.steps and not unscored:
        say(f"{workdir} is finished: {run.steps} steps are done")
        drawn = (workdir / "loss.png").exists()
        if not drawn and jax.process_index() == 0:  # killed just before
            metrics.draw_loss(workdir, names)
        return {"finished": True, "code": 0, **last_scores(workdir)}

    count = count_params(run.arch, heads=heads, towers=towers)
    verb = f"resumed at step {start}" if start else "training"
    say(f"{verb}: {run.preset}, {count:,} parameters, {mesh.size} device(s)")
    if mesh.size > mesh.shape["data"]:
        sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        say(f"mesh: {sizes}")
    for lane in lanes:
        say(lane.describe(course))
    writers = metrics.Writers(workdir, start=start, steps=run.steps, progress=progress)
    watch = InputWatch(run.data, run.stall_after)
    peers.reads = watch.waiting
    with writers, Interrupt() as interrupt, checkpoints, watch:

        def begun(step: int) -> None:
            started.done("first step")
            writers.say(f"step {step} is done after {started.over()}")

        under_way = metrics.UnderWay(run, course.rate, writers, begun)

        def save() -> None:
            metrics.check_finite(state.params, step)
            checkpoints.save(state)
            peers.tick()

        def score() -> int | None:
            """Or the signal for which that was broken off: it can be done later."""
            stopped, scores = None, {}

            def stops() -> bool:
                nonlocal stopped
                stopped = peers.stops(step, interrupt.signal)
                return stopped is not None

            stage = course.legs[course.leg_of[step - 1]].stage
            for lane in lanes:
                if lane.leg.stage == stage and lane.evaluator and stopped is None:
                    its = dict(lane.evaluator.run(state.params, stops=stops))
                    scores |= lane.named(its)
            if stopped is None:
                writers.write(step, scores, kind="eval")
                writers.say(f"step {step}: " + summary(scores))
            return stopped

        # The signal for which the run ends.
        started.done("TensorFlow")
        stopped = score() if unscored else None
        started.done("scores")
        feeds = {}  # streams of batches, as they are needed
        numbers = [spread(np.int32(n), places.step) for n in range(len(lanes))]
        try:
            for step in range(start + 1, run.steps + 1) if stopped is None else ():
                number = course.leg_of[step - 1]
                lane = lanes[number]
                if step > 1 and step - 1 in course.starts:
                    state = lane.enter(state, course.moments[lane.leg.stage])
                with watch.batch_of(step):
                    batch = lane.next_batch(course, step - 1, feeds)
                batch = lane.feed.place(batch)
                started.done("first batch")
                state, means = lane.step(state, batch, numbers[number])
                started.done("compiling the step")
                which = digest(batch) if under_way.tells(step) else None
                means = lane.named(means)
                under_way.add(step, means, which, lane.flops, watch.took, number)
                checkpoints.check()
                stopped = peers.stops(step, interrupt.signal)
                ends = stopped is not None or step == run.steps
                to_save = ends or step % run.save_every == 0
                if to_save or due(step):
                    under_way.finish()  # raises if a loss was not finite
                    with under_way.pause():
                        if to_save:
                            save()
                        if due(step) and stopped is None:
                            stopped = score()
                            if stopped is not None and not to_save:
                                save()
                if ends or stopped is not None:
                    break
        except metrics.LossError as error:
            good = checkpoints.last_good()
            kept = f"step {good} is the last good checkpoint" if good else "none saved"
            raise type(error)(
                f"{error} Stopped; {kept} in {workdir}. {error.advice}"
            ) from None
    if jax.process_index() == 0:
        metrics.draw_loss(workdir, names)
    # Stopped at the very end, it has its scores to come.
    finished = step == run.steps and (stopped is None or not due(step))
    if not finished:
        say(
            f"stopped at step {step} and saved{peers.reason}; the same command goes on "
            "from there"
        )
    code = 0 if finished else exit_code(stopped)
    return {"finished": finished, "code": code, **last_scores(workdir)}


def compute_dtype(name: str) -> jnp.dtype:
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def model_of(objectives: list[Objective], run: Run) -> tuple[Model, tuple[str, ...]]:
    """The model that all of them train, and its heads."""
    heads = tuple(dict.fromkeys(head for one in objectives for head in one.heads))
    towers = towers_of(objectives, run.arch)
    return Model(run.arch, dtype=compute_dtype(run.dtype), towers=towers), heads


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
