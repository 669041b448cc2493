"""The only loop: data, mesh, state, step, checkpoints, evaluation, top to bottom.

    bert_jax train --config pretrain:bert-tiny --workdir DIR --config.data=CORPUS

The same command again resumes where the last whole checkpoint is; a finished run says
so and does nothing. What a step computes depends on (seed, step) alone, so a run that
was killed ends with the same parameters, bit for bit, as one that was not.
"""

import collections
import dataclasses
import json
import math
import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from bert_jax import metrics
from bert_jax.checkpoint import Checkpoints, write_text
from bert_jax.config import Run, differences
from bert_jax.data.pipeline import checksum, train_batches
from bert_jax.data.prepare import Corpus, open_corpus
from bert_jax.data.rows import Rows
from bert_jax.errors import InputError, unknown
from bert_jax.evaluators.held_out import HeldOut
from bert_jax.host_memory import keep_freed_memory
from bert_jax.model_dir import load
from bert_jax.models.model import Model, count_params, init_params
from bert_jax.objectives import OBJECTIVES
from bert_jax.objectives.corrupt import budget
from bert_jax.optim import bert_schedule, make_optimizer
from bert_jax.presets import preset
from bert_jax.sharding import make_mesh, own_rows, place, replicated
from bert_jax.step import TrainState, make_train_step
from bert_jax.warm_start import warm_start

IN_FLIGHT = 2  # steps dispatched ahead, so that the device never waits for the host


class NotFiniteError(InputError):
    """The loss is no number any more."""


def train(run: Run, workdir: str | Path, *, progress: bool = True) -> dict:
    """Trains, or goes on training. Returns the last scores and `finished`."""
    workdir = Path(workdir)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    say = print if jax.process_index() == 0 else lambda *_: None

    # Data, and what follows from its tokenizer.
    corpus = open_corpus(run.data)
    tokenizer = corpus.tokenizer
    run = fit_vocabulary(run, corpus, say)
    rows = Rows(corpus, run.rows, run.length, run.across, run.seed)
    objective = make_objective(run, tokenizer, say)
    held_out = open_held_out(run, corpus)

    # The workdir belongs to one configuration.
    about = {"config": run.as_dict(), "heads": list(objective.heads)}
    about["corpus"] = {key: corpus.about[key] for key in ("content", "tokenizer")}
    claim_workdir(workdir, about, tokenizer)

    # Mesh, model, state.
    mesh = make_mesh()
    part = own_rows(mesh, run.batch, field="batch")
    model = Model(run.arch, dtype=compute_dtype(run.dtype))
    params = init_params(model, jax.random.key(run.seed), heads=objective.heads)
    optimizer = make_optimizer(run.optim, run.steps, params)
    checkpoints = Checkpoints(workdir, keep=run.keep, say=say)
    last = checkpoints.last_good()
    if last is None and run.init:
        params, report = warm_start(
            params, arch=run.arch, tokenizer=tokenizer, source=load(run.init)
        )
        say("\n".join(report))
    state = TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        seed=jnp.uint32(run.seed),
    )
    state = jax.device_put(state, replicated(mesh))
    if last is not None:
        state = checkpoints.restore(last, state)
    start = int(state.step)
    if start >= run.steps:
        say(f"{workdir} is finished: {run.steps} steps are done")
        return {"finished": True, **last_scores(workdir)}

    say(describe(run, corpus, rows, objective, mesh, start))
    evaluator = held_out and HeldOut(
        held_out,
        model=model,
        objective=objective,
        mesh=mesh,
        frequent_id=corpus.frequent_id,
        batch=run.batch,
        count=run.eval.rows or None,
    )
    train_step = jax.jit(make_train_step(model, objective, optimizer), donate_argnums=0)
    batches = train_batches(
        rows, size=run.batch, start=start, stop=run.steps, part=part
    )
    writers = metrics.Writers(workdir, start=start, steps=run.steps, progress=progress)
    with writers, Interrupt() as interrupt:
        window = Window(run, writers)

        def finish_steps() -> None:
            """Waits for all that was dispatched; raises if a loss is not finite."""
            window.drain()

        def save_and_score(step: int, *, score: bool) -> None:
            finish_steps()
            checkpoints.save(state)
            if evaluator and score:
                window.pause()
                scores = dict(evaluator.run(state.params))
                writers.write(step, scores, kind="eval")
                writers.say(f"step {step}: " + summary(scores))
                window.resume()

        try:
            for step, batch in enumerate(batches, start + 1):
                state, means = train_step(state, place(mesh, batch))
                window.add(step, means, checksum(batch))
                due = bool(run.eval.every) and step % run.eval.every == 0
                if step == run.steps or interrupt.signal:
                    break
                if due or step % run.save_every == 0:
                    save_and_score(step, score=due)
            save_and_score(step, score=step == run.steps)
        except NotFiniteError as error:
            good = checkpoints.last_good()
            kept = f"step {good} is the last good checkpoint" if good else "none saved"
            raise NotFiniteError(f"{error} Stopped; {kept} in {workdir}.") from None
    if jax.process_index() == 0:
        metrics.draw_loss(workdir)
    finished = step == run.steps
    if not finished:
        say(f"stopped at step {step} and saved; the same command goes on from there")
    return {"finished": finished, **last_scores(workdir)}


class Window:
    """Steps under way and since the last line of metrics."""

    def __init__(self, run: Run, writers: metrics.Writers):
        self.run, self.writers = run, writers
        self.pending = collections.deque()
        self.sums, self.count, self.seconds = None, 0, 0.0
        self.schedule = bert_schedule(run.optim, run.steps)
        self.peak = metrics.peak_flops()
        rate = run.objective["rate"]
        predictions = int(budget(run.length, rate)[-1])
        row = metrics.train_flops(run.arch, length=run.length, predictions=predictions)
        self.flops = row * run.batch
        self.clock = (
            None  # set by the first step that is done: compiling is not counted
        )

    def add(self, step: int, means: dict, batch: str) -> None:
        self.pending.append((step, means, batch))
        if len(self.pending) > IN_FLIGHT:
            self.take()

    def drain(self) -> None:
        while self.pending:
            self.take()

    def pause(self) -> None:
        """Stops the clock: what follows is not training."""
        if self.clock is not None:
            self.seconds += time.perf_counter() - self.clock

    def resume(self) -> None:
        self.clock = time.perf_counter()

    def take(self) -> None:
        """Waits for the oldest step; checks it; writes a line where one is due."""
        step, means, batch = self.pending.popleft()
        means = jax.device_get(means)
        self.writers.advance()
        if not math.isfinite(means["loss"].total + means["grad_norm"].total):
            raise NotFiniteError(f"the loss or gradient is not finite at step {step}.")
        self.sums = means if self.count == 0 else jax.tree.map(sum_, self.sums, means)
        self.count += 1
        first = self.clock is None
        if step % self.run.log_every == 0 or step == self.run.steps:
            self.pause()
            self.write(step, batch)
            self.sums, self.count, self.seconds = None, 0, 0.0
            self.resume()
        elif first:
            self.resume()

    def write(self, step: int, batch: str) -> None:
        values = {name: float(mean.value) for name, mean in self.sums.items()}
        rate = self.count / self.seconds if self.seconds else 0.0
        tokens = float(self.sums["real_tokens"].total) / self.count
        values |= {
            "lr": float(self.schedule(step - 1)),
            "steps_per_second": rate,
            "tokens_per_second": rate * tokens,
        }
        if self.peak:
            values["share_of_peak"] = rate * self.flops / self.peak
        self.writers.write(step, {**values, "batch": batch}, kind="train")


def sum_(a, b):
    return a + b


class Interrupt:
    """Ctrl-C and SIGTERM set a flag; the loop ends after the step it is in."""

    def __enter__(self) -> "Interrupt":
        self.signal = None
        self.before = {
            number: signal.signal(number, self.note)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def note(self, number, _) -> None:
        self.signal = number

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def compute_dtype(name: str) -> jnp.dtype:
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def fit_vocabulary(run: Run, corpus: Corpus, say) -> Run:
    """The model gets as many pieces as the corpus has, unless told otherwise."""
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
    if run.rows != "pair" and hyper["next_sentence"]:
        say(f"rows={run.rows} are no sentence pairs: next-sentence prediction is off")
        hyper["next_sentence"] = 0.0
    return kind(
        vocab_size=tokenizer.size,
        mask_id=tokenizer.mask_id,
        special_ids=tokenizer.special_ids,
        **hyper,
    )


def open_held_out(run: Run, corpus: Corpus) -> Rows | None:
    """The rows of the evaluation corpus, which must have the same tokenizer."""
    if not run.eval.data:
        return None
    other = open_corpus(run.eval.data)
    check_same_tokenizer(other, corpus.tokenizer.hash, f"the training data {run.data}")
    return Rows(other, run.rows, run.length, run.across, seed=0)


def check_same_tokenizer(corpus: Corpus, digest: str, what: str) -> None:
    if corpus.about["tokenizer"]["hash"] != digest:
        raise InputError(
            f"{corpus.path} was prepared with another tokenizer than {what} (hash "
            f"{corpus.about['tokenizer']['hash']}, there {digest}): prepare it with "
            "the same one"
        )


def claim_workdir(workdir: Path, about: dict, tokenizer) -> None:
    """Writes what the run is, or checks that it is what the workdir already has."""
    path = workdir / "run.json"
    if path.is_file():
        before = json.loads(path.read_text())
        problems = differences(before["config"], about["config"])
        if before["corpus"] != about["corpus"]:
            problems.append(
                f"data: {before['config']['data']} then and {about['config']['data']} "
                "now hold other text or another tokenizer"
            )
        if problems:
            raise InputError(
                f"{workdir} belongs to another configuration; use another --workdir or "
                "the same values:\n" + "\n".join(problems)
            )
        return
    if workdir.exists() and not workdir.is_dir():
        raise InputError(f"--workdir {workdir} is a file")
    workdir.mkdir(parents=True, exist_ok=True)
    if not os.access(workdir, os.W_OK):
        raise InputError(f"--workdir {workdir} cannot be written to")
    if jax.process_index() == 0:
        tokenizer.save(workdir / "tokenizer")
        write_text(path, json.dumps(about, indent=2) + "\n")


def describe(run: Run, corpus: Corpus, rows: Rows, objective, mesh, start: int) -> str:
    count = count_params(run.arch, heads=objective.heads)
    verb = f"resumed at step {start}" if start else "training"
    return (
        f"{verb}: {run.preset}, {count:,} parameters, {mesh.size} device(s), "
        f"{corpus.about['pieces']:,} pieces in {rows.per_epoch:,} {run.rows} rows of "
        f"{run.length}, {rows.real:.1%} real tokens, {rows.units.cut} sentences longer "
        "than a row were cut"
    )


def summary(scores: dict) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items())


def last_scores(workdir: Path) -> dict:
    """The last line of each kind in metrics.jsonl."""
    rows = metrics.read_metrics(workdir / "metrics.jsonl")
    return {row["kind"]: row for row in rows}
