"""Preflight: the very step that `train` would run, compiled for TPUs that are not here.

    bert_jax compile --config pretrain:bert-base-uncased --topology v5e:4x4

The step is built by the code that training uses (Lane.build) and lowered for arrays
that are never made. The compiler says whether it fits into a chip's memory; how long it
takes is its ESTIMATE:

    seconds = cycles of all fusions, loops as often as they go round / clock
    share of peak = FLOPs of the model / (seconds · peak of a chip)

What it gives no cycles for is modelled, and shown apart: what chips tell each other by
the bytes that each sends in a ring / bandwidth of its links, sorts and custom calls by
the bytes they read and write / bandwidth of HBM, Pallas kernels by their FLOPs / peak
where that is more. Nothing is assumed to overlap.
"""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import jax
import numpy as np

from bert_jax.config import Run
from bert_jax.course import course_of
from bert_jax.data.corpus import open_corpus
from bert_jax.data.labelled import Labelled
from bert_jax.errors import InputError
from bert_jax.estimate import Estimate, estimate
from bert_jax.flops import clean_batch
from bert_jax.hlo import Program
from bert_jax.lane import Lane, feed_of, first_losses, make_lane
from bert_jax.models.model import count_params, param_shapes
from bert_jax.objective import make_objective
from bert_jax.presets import preset
from bert_jax.sharding import by_rows, make_mesh
from bert_jax.step import TrainState
from bert_jax.tpu import Topology
from bert_jax.train import fit_vocabulary, model_of

NO_DATA = "(none)"  # config.data, where nobody gave it
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one chip."""

    arguments: int
    outputs: int
    aliased: int  # outputs that take the place of arguments
    temporaries: int
    program: int

    @property
    def needed(self) -> int:
        kept = self.arguments + self.outputs - self.aliased
        return kept + self.temporaries + self.program


@dataclasses.dataclass(frozen=True)
class Report:
    preset: str
    step: str  # which of the run's
    topology: str
    chips: int
    mesh: dict[str, int]
    batch: int
    length: int
    accumulate: int
    dtype: str
    parameters: int
    flops: float  # of one step, on all chips
    tracing_seconds: float
    compile_seconds: float
    hbm: int  # bytes that a chip has
    needed: int  # bytes that the step takes there
    memory: Memory | None = None  # None where it does not fit, and
    estimate: Estimate | None = None

    @property
    def fits(self) -> bool:
        return self.memory is not None

    @property
    def share_of_peak(self) -> float:
        """If a step took the compiler's cycles and nothing else."""
        found = self.estimate
        return self.flops / self.chips / (found.seconds * found.peak)

    @property
    def share_with_modelled(self) -> float:
        """If what is modelled came on top, none of it beside the rest."""
        found = self.estimate
        seconds = found.seconds + sum(found.modelled.values())
        return self.flops / self.chips / (seconds * found.peak)

    def as_dict(self) -> dict:
        found = dataclasses.asdict(self) | {"fits": self.fits}
        if self.fits:
            for name in ("share_of_peak", "share_with_modelled"):
                found[name] = getattr(self, name)
        return found


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a run, as `train` makes it, with the shapes that it takes."""

    lane: Lane
    params: dict
    batch: dict[str, jax.ShapeDtypeStruct]
    losses: np.ndarray | None  # that the state remembers
    parameters: int  # that are learned

    def lower(self) -> jax.stages.Lowered:
        """For a state and a batch that lie where training puts them."""
        lane, places = self.lane, self.lane.places

        def placed(leaf, place) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        def first_carry():
            return lane.objective.first_carry(lane.model, lane.leg.run.batch)

        carry = jax.eval_shape(first_carry)
        moments = jax.eval_shape(lane.optimizer.init, self.params)
        state = TrainState(
            step=placed(np.int32(0), places.step),
            params=jax.tree.map(placed, self.params, places.params),
            opt_state=jax.tree.map(placed, moments, places.opt_state),
            seed=placed(np.uint32(0), places.seed),
            carry=jax.tree.map(lambda x: placed(x, places.carry), carry),
            losses=jax.tree.map(lambda x: placed(x, places.losses), self.losses),
        )
        rows = by_rows(lane.mesh)
        batch = {name: placed(column, rows) for name, column in self.batch.items()}
        return lane.step.lower(state, batch, placed(np.int32(0), places.step))

    @property
    def recipe(self) -> tuple:
        """Steps with the same one are compiled once."""
        shapes = tuple((k, x.shape, x.dtype) for k, x in sorted(self.batch.items()))
        return self.lane.recipe, shapes


def stand_in(run: Run) -> SimpleNamespace:
    """A tokenizer that only its numbers are asked of: as many pieces as the preset,
    each with a capital and without one."""
    size, special = run.arch.vocab_size, tuple(range(5))
    return SimpleNamespace(
        kind=preset(run.preset).tokenizer,
        vocab=[f"{'pP'[number % 2]}iece {number // 2}" for number in range(size)],
        size=size,
        mask_id=special[-1],
        special_ids=special,
    )


def steps_of(run: Run, mesh: jax.sharding.Mesh, say: Callable) -> list[Step]:
    """The steps that are not alike, in the order in which a run comes to them. Without
    data they have the vocabulary of the preset."""
    if run.data != NO_DATA:
        corpus = open_corpus(run.data)
        run = fit_vocabulary(run, corpus, say)
        course = course_of(run)
        lanes = [make_lane(leg, corpus, None, mesh, say) for leg in course.legs]
        batches = [columns_of(lane) for lane in lanes]
    else:
        course = course_of(run)
        lanes = [lane_without_data(leg, mesh, say) for leg in course.legs]
        batches = [
            clean_batch(lane.objective, batch=leg.run.batch, length=leg.run.length)
            for lane, leg in zip(lanes, course.legs, strict=True)
        ]
    model, heads = model_of([lane.objective for lane in lanes], run)
    asked = dict(heads=heads, towers=model.towers)
    shapes, count = param_shapes(run.arch, **asked), count_params(run.arch, **asked)
    for number, lane in enumerate(lanes):
        lane.build(model, course.rate, shapes, lanes[:number], say)
    steps: dict[tuple, Step] = {}
    for lane, batch in zip(lanes, batches, strict=True):
        step = Step(lane, shapes, batch, first_losses(run, len(lanes)), count)
        steps.setdefault(step.recipe, step)
    return list(steps.values())


def lane_without_data(leg, mesh: jax.sharding.Mesh, say: Callable) -> Lane:
    run = leg.run
    objective = make_objective(
        run.objective,
        preset=preset(run.preset),
        arch=run.arch,
        rows=run.rows,
        tokenizer=stand_in(run),
        say=say,
    )
    return Lane(leg, objective, None, None, mesh, feed_of(run, mesh))


def columns_of(lane: Lane) -> dict[str, jax.ShapeDtypeStruct]:
    run = lane.leg.run
    if isinstance(lane.rows, Labelled):
        batch = lane.rows.batch(0, size=run.batch, seed=run.seed)
    else:
        batch = lane.rows.empty(run.batch)
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}


def preflight(
    run: Run, topology: Topology, *, first: bool = False, say: Callable = print
) -> Iterator[Report]:
    """Compiles every step of the run, or only its first, and tells of each."""
    if run.dtype == "auto":
        run = dataclasses.replace(run, dtype="bfloat16")  # as on a TPU
    mesh = make_mesh(run.mesh, topology.devices(run.mesh.slices))
    steps = steps_of(run, mesh, say)
    for step in steps[:1] if first else steps:
        yield report_of(step, topology)


def report_of(step: Step, topology: Topology) -> Report:
    lane, run, chip = step.lane, step.lane.leg.run, topology.chip
    begin = time.perf_counter()
    lowered = step.lower()
    traced = time.perf_counter()
    hbm, needed = int(chip.hbm * GIB), 0
    memory = found = None
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed, hbm = out_of_memory(str(error))
    done = time.perf_counter()
    if not needed:
        told = compiled.memory_analysis()
        memory = Memory(
            arguments=told.argument_size_in_bytes,
            outputs=told.output_size_in_bytes,
            aliased=told.alias_size_in_bytes,
            temporaries=told.temp_size_in_bytes,
            program=told.generated_code_size_in_bytes,
        )
        needed = memory.needed
        found = estimate(Program(compiled.as_text()), chip, dict(lane.mesh.shape))
    return Report(
        preset=run.preset,
        step=lane.title,
        topology=str(topology),
        chips=lane.mesh.size,
        mesh=dict(lane.mesh.shape),
        batch=run.batch,
        length=run.length,
        accumulate=run.accumulate,
        dtype=str(lane.model.dtype),
        parameters=step.parameters,
        flops=lane.flops,
        tracing_seconds=traced - begin,
        compile_seconds=done - traced,
        hbm=hbm,
        needed=needed,
        memory=memory,
        estimate=found,
    )


def out_of_memory(message: str) -> tuple[int, int]:
    """The bytes that a step needs and that a chip has, as the compiler's refusal says;
    raises where it refused for another reason."""
    number = r"([\d.]+)([KMGT]?)"
    for form in (
        rf"Used {number} of {number} hbm",
        rf"required for \w+ \w+ \({number}\) exceeds available HBM \({number}\)",
    ):
        if found := re.search(form, message):
            units = dict(zip("KMGT", (2**10, 2**20, 2**30, 2**40), strict=True))
            needed, unit, hbm, its = found.groups()
            return (
                int(float(needed) * units.get(unit, 1)),
                int(float(hbm) * units.get(its, 1)),
            )
    raise InputError(f"the TPU compiler gave up:\n{message}")


def find_batch(
    run: Run, topology: Topology, *, say: Callable = print
) -> tuple[Report, int]:
    """The report of the largest batch that fits, found by bisection over how many rows
    there are on each chip, and the smallest that was seen not to fit."""
    if run.stages:
        raise InputError(
            "--find-batch takes a run of one stage: give the fields of the stage as "
            "--config.FIELD, and --config.stages='()'"
        )
    mesh = make_mesh(run.mesh, topology.devices(run.mesh.slices))
    unit = mesh.shape["data"] * mesh.shape["fsdp"] * run.accumulate
    if run.direction == "both":  # a half of the batch each
        unit = math.lcm(unit, 2)
    best, low, high = None, 0, None  # in units: what fits, and what does not
    count = max(1, run.batch // unit)
    while high is None or high - low > 1:
        its = dataclasses.replace(run, batch=count * unit)
        report = next(preflight(its, topology, first=True, say=lambda _: None))
        verdict = "fits" if report.fits else "does not fit"
        say(
            f"batch {its.batch} ({count} of {unit}): {report.needed / GIB:.2f} of "
            f"{report.hbm / GIB:.2f} GiB, {verdict} ({report.compile_seconds:.0f} s)"
        )
        if report.fits:
            best, low = report, count
        else:
            high = count
        if high == 1:
            raise InputError(
                f"no batch fits {topology}: even {unit} rows take "
                f"{report.needed / GIB:.2f} GiB of {report.hbm / GIB:.2f} on a chip. "
                "More config.mesh.fsdp or tensor, config.arch.remat=full or a shorter "
                "config.length make it smaller"
            )
        count = 2 * low if high is None else (low + high) // 2
    return best, high * unit
