"""What the steps of one leg of the course need: objective, rows, step, evaluator."""

import dataclasses
from collections.abc import Callable
from functools import cached_property

import jax
import numpy as np
import optax

from bert_jax.config import Run
from bert_jax.continual import train_own_heads
from bert_jax.course import Course, Leg
from bert_jax.data.corpus import (
    Corpus,
    check_same_tokenizer,
    check_same_words,
    open_corpus,
)
from bert_jax.data.labelled import Labelled, read_labelled
from bert_jax.data.pipeline import train_batches
from bert_jax.data.rows import Batch, Rows
from bert_jax.errors import InputError
from bert_jax.evaluators.held_out import HeldOut
from bert_jax.flops import step_flops
from bert_jax.models.model import Model
from bert_jax.objective import check_columns, check_rows, make_objective
from bert_jax.objectives.base import Objective
from bert_jax.optim import make_optimizer, with_rate_of
from bert_jax.presets import preset
from bert_jax.sharding import (
    Feed,
    by_rows,
    compiler_options,
    like_params,
    param_shardings,
    replicated,
    spread,
)
from bert_jax.spikes import nothing_known
from bert_jax.step import OF_ANY_STEP, TrainState, make_train_step


@dataclasses.dataclass(eq=False)
class Lane:
    leg: Leg
    objective: Objective
    rows: Rows | Labelled
    held_out: Rows | None
    mesh: jax.sharding.Mesh
    feed: Feed  # the rows of a batch that are this process's
    # Of `build`.
    model: Model = dataclasses.field(init=False)
    optimizer: optax.GradientTransformation = dataclasses.field(init=False)
    places: TrainState = dataclasses.field(init=False)  # where each part of it lies
    step: Callable = dataclasses.field(init=False)

    def build(
        self, model: Model, rate: optax.Schedule, shapes, lanes: list, say: Callable
    ) -> None:
        """The optimizer, the places and the step of parameters of such shapes; it is
        compiled when it is first used. One of the `lanes` before it that does the same
        has them already."""
        run, self.model = self.leg.run, model
        for lane in lanes:
            if lane.recipe == self.recipe:
                self.optimizer, self.step = lane.optimizer, lane.step
                self.places = lane.places
                return
        self.optimizer = make_optimizer(run.optim, rate, shapes)
        self.places = state_places(self.mesh, shapes, self.optimizer, model, say)
        step = make_train_step(
            model,
            self.objective,
            self.optimizer,
            accumulate=run.accumulate,
            copies=run.copies,
            nonfinite=run.nonfinite,
            mesh=self.mesh,
        )
        if self.leg.task:
            step = train_own_heads(step, self.objective.heads)
        out = (self.places, replicated(self.mesh))
        self.step = jax.jit(
            step,
            donate_argnums=0,
            out_shardings=out,
            compiler_options=compiler_options(self.mesh),
        )

    @property
    def recipe(self) -> tuple:
        """All that a step depends on beside its arguments."""
        run = self.leg.run
        return self.objective, run.optim, run.accumulate, run.copies, run.nonfinite

    @cached_property
    def flops(self) -> float:
        """Of one step."""
        sizes = dict(batch=self.leg.run.batch, length=self.leg.run.length)
        return step_flops(self.model, self.objective, **sizes)

    @cached_property
    def evaluator(self) -> HeldOut | None:
        if self.held_out is None:
            return None
        run = self.leg.run
        return HeldOut(
            self.held_out,
            model=self.model,
            objective=self.objective,
            mesh=self.mesh,
            batch=run.batch,
            count=run.eval.rows or None,
        )

    def first_carry(self):
        carry = self.objective.first_carry(self.model, self.leg.run.batch)
        return spread(carry, jax.tree.map(lambda _: self.places.carry, carry))

    def first_moments(self, params) -> optax.OptState:
        return jax.jit(self.optimizer.init, out_shardings=self.places.opt_state)(params)

    def enter(self, state: TrainState, moments: str) -> TrainState:
        """The state in which a later stage begins."""
        begin = jax.jit(self.objective.begin, out_shardings=self.places.params)
        params, opt_state = begin(state.params), state.opt_state
        if moments == "reset":
            opt_state = with_rate_of(self.first_moments(params), opt_state)
        carry = self.first_carry()
        return state.replace(params=params, opt_state=opt_state, carry=carry)

    def next_batch(self, course: Course, step: int, feeds: dict) -> Batch:
        """The batch of a step. `feeds` are the streams that are open, by number: lanes
        with the same rows take turns at one."""
        run, number = self.leg.run, int(course.batch_of[step])
        if isinstance(self.rows, Labelled):
            batch = self.rows.batch(number, size=run.batch, seed=run.seed)
            return {name: column[self.feed.rows] for name, column in batch.items()}
        stream = course.stream_of[step]
        if stream not in feeds:
            feeds[stream] = train_batches(
                self.rows,
                size=run.batch,
                start=number,
                stop=int((course.stream_of == stream).sum()),
                part=self.feed.rows,
                alpha=run.alpha,
                direction=run.direction,
            )
        return next(feeds[stream])

    @property
    def title(self) -> str:
        """What its first scores are called after."""
        return "/".join(filter(None, (self.leg.task, self.objective.name)))

    def named(self, values: dict) -> dict:
        """The objective's own numbers under the name of the task."""
        if not self.leg.task:
            return values
        return {
            name if name.startswith(OF_ANY_STEP) else f"{self.leg.task}/{name}": value
            for name, value in values.items()
        }

    @property
    def content(self) -> str:
        """A hash of the data that it reads."""
        if isinstance(self.rows, Labelled):
            return self.rows.content
        return self.rows.corpus.about["content"]

    def describe(self, course: Course) -> str:
        run = self.leg.run
        task = f"{self.leg.task}: " if self.leg.task else ""
        steps = (course.leg_of == course.legs.index(self.leg)).sum()
        what = f"{task}{steps} steps of {self.objective.name}, "
        if isinstance(self.rows, Labelled):
            return what + f"{len(self.rows):,} labelled examples of {self.rows.path}"
        plan = self.rows.plan
        return what + (
            f"{self.rows.corpus.about['pieces']:,} pieces in {len(self.rows):,} "
            f"{run.rows} rows of {run.length} ({plan.covered:.1%} of the pieces, "
            f"{plan.real:.1%} real tokens), {plan.about['cut']} sentences longer than "
            "a row were cut"
        )


def make_lane(
    leg: Leg, corpus: Corpus, held_out: Corpus | None, mesh, say: Callable
) -> Lane:
    """Checks a leg against its data; nothing is compiled yet."""
    run, tokenizer = leg.run, corpus.tokenizer
    what = f"the training data {corpus.path}"
    labelled = run.rows == "labelled"
    if not labelled and run.data != str(corpus.path):
        corpus = open_corpus(run.data)
        check_same_tokenizer(corpus, tokenizer.hash, what)
    objective = make_objective(
        run.objective,
        preset=preset(run.preset),
        arch=run.arch,
        rows=run.rows,
        tokenizer=tokenizer,
        corpus=corpus,
        say=say,
    )
    if labelled:
        rows = read_labelled(run.data, tokenizer=tokenizer, length=run.length)
        check_columns(objective, rows.arrays, run.data)
        objective.check_labels(rows.labels, run.arch)
    else:
        if run.alpha != 1 and not corpus.index["input"].any():
            say(f"config.alpha={run.alpha} changes nothing: the corpus has one input")
        if run.across != "attend" and run.rows not in ("full", "stream"):
            crosses = f"{run.rows} rows never cross"
            say(f"config.across={run.across} changes nothing: {crosses}")
        rows = Rows(corpus, run.rows, run.length, run.across, run.seed)
        check_rows(objective, rows)
    scored = None
    if held_out is not None and not labelled:
        check_same_tokenizer(held_out, tokenizer.hash, what)
        if "word_id" in objective.columns:
            check_same_words(held_out, objective.table, what)
        scored = Rows(held_out, run.rows, run.length, run.across, seed=0)
        check_rows(objective, scored)
    return Lane(leg, objective, rows, scored, mesh, feed_of(run, mesh))


def feed_of(run: Run, mesh: jax.sharding.Mesh) -> Feed:
    """Checks that the batch divides over the mesh, also in parts."""
    feed = Feed(mesh, run.batch, field="batch")
    if run.batch // run.accumulate % feed.apart:
        raise InputError(
            f"config.batch={run.batch} in config.accumulate={run.accumulate} parts "
            f"does not divide over {feed.apart} devices"
        )
    return feed


def first_losses(run: Run, lanes: int) -> np.ndarray | None:
    """What a fresh state remembers of the losses of each lane, if anything."""
    return nothing_known(lanes) if run.spike == "skip" else None


def state_places(
    mesh, shapes, optimizer: optax.GradientTransformation, model: Model, say: Callable
) -> TrainState:
    """Where a training state lies on the mesh: a sharding for each part of it."""
    params = param_shardings(mesh, shapes, model, say=say)
    moments = jax.eval_shape(optimizer.init, shapes)
    everywhere = replicated(mesh)
    return TrainState(
        step=everywhere,
        params=params,
        opt_state=like_params(mesh, moments, shapes, params),
        seed=everywhere,
        carry=by_rows(mesh),
        losses=everywhere,
    )
