"""How the cost of a step grows (benchmarks/growth.py): not faster than theory says."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks.growth import (
    BASE,
    HEAD,
    SIZES,
    TOY,
    Found,
    cycles_in_theory,
    flops_in_theory,
    memory_in_theory,
    parameters,
    sent_in_theory,
    series_of,
)
from bert_jax.config import load_config, override, resolve
from bert_jax.preflight import NO_DATA, steps_of
from bert_jax.sharding import make_mesh
from tests.conftest import ROOT

FEW = 1200  # bytes that are sent besides: losses, counts and norms, a number each
# Gradients of biases are sent eight times (linear.add_bias), and a small array may be
# gathered by a sum.
ALLOWED = 1.05


@pytest.mark.parametrize("point", [TOY, TOY.but(layers=3, length=64, width=192)])
def test_theory_counts_what_is_trained(point):
    """Parameters to the number; FLOPs but for sums over rows, which are products."""
    config = load_config("pretrain:bert-base-uncased")
    config.data = NO_DATA
    override(config, {name: str(value) for name, value in point.fields().items()})
    run = resolve(config)
    mesh = make_mesh(run.mesh, jax.devices()[: point.chips])
    [step] = steps_of(run, mesh, say=lambda _: None)
    assert step.parameters == sum(count for count, _ in parameters(point).values())
    theory = flops_in_theory(point)
    assert theory <= step.lane.flops <= 1.01 * theory


@pytest.mark.parametrize("size", SIZES)
def test_one_thing_is_varied_at_a_time(size):
    base, values = SIZES[size]
    for one in series_of(base, values).values():
        for points in one.curves.values():
            for point in points:
                fixed = {one.field, "attention", "axis", "rows"}
                there, those = map(dataclasses.asdict, (point, base))
                assert all(there[k] == those[k] for k in there.keys() - fixed)


def test_theory_by_hand():
    """Of what grows and what does not, where it is plain."""
    assert BASE.but(layers=8).tokens == BASE.tokens == 4096
    head = flops_in_theory(BASE.but(layers=0))
    one = flops_in_theory(BASE.but(layers=1)) - head
    assert flops_in_theory(BASE.but(layers=16)) == 16 * one + head
    ring = [sent_in_theory(BASE.but(chips=n))["all-reduce"] for n in (2, 4, 64)]
    assert ring == pytest.approx([ring[0], 1.5 * ring[0], 2 * 63 / 64 * ring[0]])
    assert sent_in_theory(BASE.but(chips=1)) == {}
    for axis in ("fsdp", "tensor"):
        less = memory_in_theory(BASE.but(axis=axis))
        assert less < memory_in_theory(BASE) == memory_in_theory(BASE.but(chips=64))
    assert cycles_in_theory(BASE) == pytest.approx(cycles_in_theory(BASE.but(chips=64)))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """What the benchmark says of toys, and what it found of each."""
    folder = Path(sys.prefix) / "libtpu"
    if not folder.is_dir():
        pytest.skip("the TPU compiler: `make test` installs libtpu")
    out = tmp_path_factory.mktemp("growth")
    command = [sys.executable, "-m", "benchmarks.growth", "--size", "toy"]
    command += ["--json", out / "found.json", "--out", out / "growth.png"]
    command += ["--workers", "2"]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    known = json.loads((out / "found.json").read_text())
    assert (out / "growth.png").stat().st_size > 10_000
    return done.stdout, lambda point: Found(**known[point.name])


@pytest.mark.slow
def test_nothing_grows_faster_than_theory(toy):
    """Memory: of small steps it is less, since much stays on the chip, and not counted.
    That of long rows and dense attention has a test of its own."""
    said, found = toy
    base, values = SIZES["toy"]
    lines = said.splitlines()
    for one in series_of(base, values).values():
        assert any(one.label in line for line in lines)
        for curve, points in one.curves.items():
            for point in points:
                there, theory = found(point), flops_in_theory(point)
                assert theory <= there.flops <= 1.01 * theory
                if point.length == TOY.length or curve == "flash":
                    assert there.memory <= 1.1 * memory_in_theory(point)
                assert there.total >= cycles_in_theory(point)
            for small, large in itertools.pairwise(points):
                told = found(large).total / found(small).total
                most = cycles_in_theory(large) / cycles_in_theory(small)
                if curve == "dense":  # softmax and dropout: the square of the length
                    most *= large.length / small.length
                assert told <= 1.1 * most, (small.name, large.name)


@pytest.mark.slow
def test_chips_send_what_theory_says(toy):
    _, found = toy
    sums = {}
    for axis, chips in (("data", 4), ("data", 16), ("fsdp", 16)):
        point = TOY.but(axis=axis, chips=chips)
        told, theory = found(point).sent, sent_in_theory(point)
        for kind, size in theory.items():
            assert 0.99 * size <= told[kind] <= ALLOWED * size + FEW
        assert all(told[kind] <= FEW for kind in told.keys() - theory.keys())
        sums[axis, chips] = told["all-reduce"] / (2 * (chips - 1) / chips)
    # What there is to sum does not depend on how many do it.
    assert sums["data", 16] == pytest.approx(sums["data", 4], rel=1e-3)


@pytest.mark.slow
def test_who_splits_parameters_has_less_memory(toy):
    _, found = toy
    few, many = found(TOY), found(TOY.but(chips=16))
    assert many.memory == pytest.approx(few.memory, rel=0.01)
    assert many.total == pytest.approx(few.total, rel=0.02)
    split = found(TOY.but(chips=16, axis="fsdp"))
    assert split.memory < 0.7 * many.memory


@pytest.mark.slow
def test_flash_attention_has_no_squares(toy):
    """Dense attention has between 4 and 16 bytes more a query, key and head."""
    _, found = toy
    long = TOY.but(length=1024)
    dense, flash = (found(long.but(attention=kind)) for kind in ("dense", "flash"))
    squares = long.rows * (long.width // HEAD) * long.length**2
    assert 4 * squares < dense.memory - flash.memory < 16 * squares
    assert flash.total < 0.6 * dense.total
