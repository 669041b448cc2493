"""What devices tell each other in a step, beside what theory says that they have to.

For one step of masked LM, on one device, with B rows on it (of a batch that is split
over the axes `data` and `fsdp`), n layers and P predictions a row:

    data     every gradient is summed once
    fsdp     what is split is put together once, and its gradient summed over the axis,
             then over `data` only as much as this device keeps
    tensor   states [B, S, D] of the embedding; in each layer those behind attention and
             behind the feed-forward part, and their gradients before both; the gradient
             of the predicted states [B, P, D]; of each prediction [B, P] the largest
             logit (for the loss and the accuracy), two sums and the best piece

and no logits. Two sums are more than theory: the gradient before attention is summed
for q, k and v apart, and that of the token table for the look-up and for the head.

Here all numbers have four bytes. Chips tell each other numbers of two bytes, except for
gradients of norms, tables and the bias of pieces, what is looked up in a split table,
and what is said of logits. They tell gradients of biases eight times (linear.add_bias).
What layers hold apart they put together in both passes.
"""

import math
import re

import jax
import numpy as np
import pytest

from bert_jax.config import load_config, override, resolve
from bert_jax.hlo import Program, arrays_in, size_of
from bert_jax.objectives.corrupt import budget
from bert_jax.objectives.replaced_token import BLOCKS
from bert_jax.preflight import NO_DATA, steps_of
from bert_jax.sharding import Axes, make_mesh
from tests.tpu import run_for_tpu

QUICK = {"xla_backend_optimization_level": 0}  # of machine code; it is never run
SIZES = {"layers": 2, "width": 64, "heads": 4, "inner": 96, "max_positions": 48}
SIZES |= {"vocab_size": 1000}
S, BATCH = 48, 40
P = 7  # predictions: 15 % of 48
MESHES = {
    "data": Axes(),
    "fsdp": Axes(data=1, fsdp=8),
    "tensor": Axes(data=2, tensor=4),
    "4x2": Axes(data=4, tensor=2),
    "2x2x2": Axes(data=2, fsdp=2, tensor=2),
}
FEW = 600  # bytes: losses, counts and norms, a number each
ROWS = ("data", "fsdp")


def make_step(mesh: jax.sharding.Mesh, preset: str = "bert-tiny", **changes):
    config = load_config(f"pretrain:{preset}")
    config.data = NO_DATA
    sizes = {f"arch.{name}": str(size) for name, size in SIZES.items()}
    settings = {"rows": "full", "length": str(S), "batch": str(BATCH)}
    named = {name.replace("__", "."): value for name, value in changes.items()}
    override(config, sizes | settings | named)
    [step] = steps_of(resolve(config), mesh, say=lambda _: None)
    return step


def theory(step, mesh: dict[str, int], *, chips: bool = False) -> dict[tuple, int]:
    """(kind, axes, bytes of a number): bytes."""
    found: dict[tuple, int] = {}
    low = 2 if chips else 4

    def add(kind: str, axes: tuple[str, ...], numbers: float, size: int) -> None:
        axes = tuple(axis for axis in axes if mesh[axis] > 1)
        if axes:
            which = kind, axes, size
            found[which] = found.get(which, 0) + int(size * numbers)

    places = jax.tree.leaves(step.lane.places.params)
    for (path, leaf), place in zip(
        jax.tree_util.tree_leaves_with_path(step.params), places, strict=True
    ):
        axes = [axis for part in place.spec for axis in np.atleast_1d(part or [])]
        whole = leaf.size / (mesh["tensor"] if "tensor" in axes else 1)
        name = "/".join(part.key for part in path)
        exact = "embed/" in name or "norm/" in name or name == "lm/bias"
        size = 4 if exact else low
        if "fsdp" in axes:
            add("all-gather", ("fsdp",), whole if size == 4 else 2 * whole, size)
        if chips and name.endswith("bias") and "norm/" not in name:
            add("all-reduce", ROWS, 8 * whole, size)
        elif "fsdp" in axes and name.startswith("stack/"):
            add("all-reduce", ("fsdp",), whole, size)
            add("all-reduce", ("data",), whole / mesh["fsdp"], size)
        else:
            add("all-reduce", ROWS, whole, size)
        if name == "embed/token":
            add("all-reduce", ROWS, whole, low)  # of the head
    B, D, n = BATCH / mesh["data"] / mesh["fsdp"], SIZES["width"], SIZES["layers"]
    forward, before_attention, before_ffn = 2, 3, 1
    passes = n * (forward + before_attention + before_ffn)
    add("all-reduce", ("tensor",), passes * B * S * D + B * P * D, low)
    # For chips the largest logits of the loss and of the accuracy are one.
    add("all-reduce", ("tensor",), B * S * D + (4 if chips else 5) * B * P, 4)
    return found


def told(program: Program, mesh: dict[str, int]) -> dict[tuple, int]:
    found: dict[tuple, int] = {}
    for one in program.collectives():
        for kind, shape in one.arrays:
            size = size_of(kind)
            which = one.kind, one.axes(mesh), size
            total = one.times * size * math.prod(shape)
            found[which] = found.get(which, 0) + int(total)
    return found


def assert_as_expected(found: dict[tuple, int], expected: dict[tuple, int]) -> None:
    few = {which for which, size in found.items() if size <= FEW}
    assert found.keys() - few == expected.keys()
    for which, size in expected.items():
        assert size > 20 * FEW  # else it would not be seen whether it is there
        assert size <= found[which] <= size + FEW, which
    assert all(kind == "all-reduce" for kind, *_ in few)


@pytest.mark.parametrize("name", MESHES)
def test_devices_tell_each_other_what_they_must(name):
    mesh = make_mesh(MESHES[name])
    step = make_step(mesh)
    program = Program(step.lower().compile(compiler_options=QUICK).as_text())
    sizes = dict(mesh.shape)
    assert_as_expected(told(program, sizes), theory(step, sizes))
    assert_nothing_is_whole(program, sizes)


def assert_nothing_is_whole(program: Program, mesh: dict[str, int]) -> None:
    """No device has the logits of all pieces for its predictions, nor random bits or
    states of rows that are others'."""
    V = -(-SIZES["vocab_size"] // 128) * 128
    all_rows = (BATCH, BATCH * S, BATCH * P)  # no other dimension is one of these
    for one in program.executed():
        for _, shape in arrays_in(one.instruction.shape):
            size = math.prod(shape)
            if mesh["tensor"] > 1 and V in shape:
                assert size <= V * SIZES["width"], one.instruction
            if shape[:1] and shape[0] in all_rows:  # keys and counts of rows, at most
                assert size <= BATCH * 8, one.instruction
    for bits in ("rng-bit-generator", "rng("):
        assert bits not in program.text


def more_of(
    name: str, shapes: dict, mesh: dict[str, int], batch: int, length: int, *, low=4
) -> dict[tuple, int]:
    """What an objective has to tell beside, at most: (kind, axes): bytes on a device,
    where `low` is those of a number that need not be exact.

    ELECTRA: the kernels that are split by one dimension and needed by another, the
    projections and, since its few heads do not divide, those of the generator's
    attention. In each of both passes they are put together once, after their parts went
    where that is done. And of what its generator says, B x P times, the sums of blocks
    of pieces, of which it samples.

    XLNet: what heads add to their queries, [n, H, K] and [n, 2, H, K]. Every device has
    it whole and the gradient of its heads' part; so the parameter and its two moments
    are updated in parts, and put together once each.
    """
    parts = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    if name == "replaced_token":
        kernels = re.compile(r"project/kernel|generator/stack/.*attention/\w/kernel")
        both = low * 2 * sum(n for its, n in parts.items() if kernels.search(its))
        B, P = batch // (mesh["data"] * mesh["fsdp"]), int(budget(length, 0.15)[-1])
        sums = 4 * B * P * BLOCKS
        return {
            ("all-gather", ("tensor",)): both + sums,
            ("collective-permute", None): both,
        }
    if name == "permuted_lm":
        added = re.compile(r"stack/layers/(position|types)/")
        numbers = sum(n for its, n in parts.items() if added.match(its))
        return {("all-gather", ("tensor",)): 4 * 3 * numbers}
    return {}


def assert_kinds(
    program: Program, mesh: dict[str, int], more: dict[tuple, int] | None = None
) -> None:
    """What theory has for such a mesh, and no `more` than is known."""
    more = more or {}
    rows = tuple(axis for axis in ROWS if mesh[axis] > 1)
    expected = {("all-reduce", rows)} if rows else set()
    if mesh["fsdp"] > 1:
        expected |= {("all-gather", ("fsdp",)), ("all-reduce", ("fsdp",))}
        expected |= {("all-reduce", ("data",))} if mesh["data"] > 1 else set()
    if mesh["tensor"] > 1:
        expected |= {("all-reduce", ("tensor",))}
    found: dict[tuple, int] = {}
    for one in program.collectives():
        which = one.kind, one.axes(mesh)
        found[which] = found.get(which, 0) + one.times * one.bytes
    large = {which for which, size in found.items() if size > FEW}
    assert expected <= large <= expected | more.keys()
    for which, most in more.items():
        assert found.get(which, 0) <= most, (which, found[which], most)
    assert {kind for kind, _ in found.keys() - large} <= {"all-reduce"}


OTHERS = {
    "replaced_token": (
        "electra-small-discriminator",
        {"arch.heads": "8", "arch.stack": "scan", "objective.generator": "0.5"},
    ),
    "permuted_lm": (
        "xlnet-base-cased",
        {"rows": "stream", "arch.stack": "scan", "objective.memory": "16"},
    ),
}


PROGRAM = """
import json
import jax
from bert_jax.hlo import Program
from bert_jax.sharding import make_mesh
from bert_jax.tpu import Topology
from tests.test_collectives import (
    BATCH, MESHES, OTHERS, S, assert_kinds, assert_nothing_is_whole, make_step, more_of,
    told
)

jax.config.update("jax_enable_compilation_cache", False)  # it cannot be read for TPUs
devices = Topology.parse("v5e:2x4").devices()

def compiled(mesh, *preset, **changes):
    step = make_step(mesh, *preset, dtype="bfloat16", **changes)
    program = Program(step.lower().compile().as_text())
    assert_nothing_is_whole(program, dict(mesh.shape))
    return program, step

"""


@pytest.mark.slow
def test_chips_tell_each_other_no_more():
    program = """
found = {}
for name, axes in MESHES.items():
    mesh = make_mesh(axes, devices)
    there = told(compiled(mesh)[0], dict(mesh.shape))
    found[name] = [[*which, size] for which, size in there.items()]
print(json.dumps(found))
"""
    found = run_for_tpu(PROGRAM + program)
    assert found.keys() == MESHES.keys()
    for name, there in found.items():
        mesh = make_mesh(MESHES[name])
        expected = theory(make_step(mesh), dict(mesh.shape), chips=True)
        assert_as_expected(
            {(kind, tuple(axes or ()), n): size for kind, axes, n, size in there},
            expected,
        )


@pytest.mark.slow
def test_chips_of_other_objectives_tell_no_more():
    program = """
mesh = make_mesh(MESHES["2x2x2"], devices)
for name, (preset, changes) in OTHERS.items():
    program, step = compiled(mesh, preset, **changes)
    sizes = dict(mesh.shape)
    more = more_of(name, step.params, sizes, BATCH, S, low=2)
    assert more
    assert_kinds(program, sizes, more)
print(json.dumps([*OTHERS]))
"""
    assert run_for_tpu(PROGRAM + program) == ["replaced_token", "permuted_lm"]
