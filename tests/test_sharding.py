"""The same run on every mesh: losses, parameters, and what lies where."""

import functools
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from bert_jax.convert.engine import flatten
from bert_jax.errors import InputError
from bert_jax.hlo import Program
from bert_jax.lane import state_places
from bert_jax.models.arch import Arch
from bert_jax.models.heads import HEADS
from bert_jax.models.model import Model, init_params, param_shapes
from bert_jax.objectives.base import Objective
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.permuted_lm import PermutedLM
from bert_jax.objectives.replaced_token import ReplacedToken
from bert_jax.optim import Optim, make_optimizer
from bert_jax.presets import PRESETS
from bert_jax.sharding import (
    Axes,
    Feed,
    make_mesh,
    param_shardings,
    replicated,
    slices_of,
    spread,
)
from bert_jax.step import TrainState, make_train_step
from tests.models.made import XLNET
from tests.test_collectives import assert_kinds, more_of
from tests.test_step import B, S, make_batch

QUICK = {"xla_backend_optimization_level": 0}
ARCH = Arch(vocab_size=300, width=64, layers=2, heads=4, inner=96, max_positions=32)
MESHES = {
    "8 data": Axes(),
    "8 fsdp": Axes(data=1, fsdp=8),
    "2x4 data-tensor": Axes(data=2, tensor=4),
    "4x2 data-tensor": Axes(data=-1, tensor=2),
    "2x2x2": Axes(data=2, fsdp=2, tensor=2),
    "2 slices": Axes(data=4, fsdp=2, slices=2),
}
SPECIAL = (0, 1, 2, 3, 4)
SCANNED = ARCH.but(stack="scan")
OBJECTIVES = {
    "masked_lm": (MaskedLM(300, 4, SPECIAL, boundary=1.0), ARCH),
    "replaced_token": (ReplacedToken(300, 4, SPECIAL, generator=0.5), SCANNED),
    "permuted_lm": (PermutedLM(SPECIAL, memory=8), SCANNED.but(**XLNET)),
}


@functools.cache
def begin(objective: Objective, arch: Arch, optim: Optim):
    """Shapes, the optimizer, and parameters and moments to start from: the same on
    every mesh, so once."""
    towers = objective.towers(arch)
    shapes = param_shapes(arch, heads=objective.heads, towers=towers)
    model, optimizer = Model(arch, towers=towers), make_optimizer(optim, 100, shapes)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def draw(key):
        params = init_params(model, key, heads=objective.heads)
        return params, optimizer.init(params)

    return shapes, optimizer, *jax.device_get(draw(jax.random.key(1)))


class Trained:
    """Twenty steps of an objective on one mesh."""

    def __init__(
        self,
        objective: Objective,
        arch: Arch,
        axes: Axes = Axes(),  # noqa: B008
        devices=None,
        *,
        optim: Optim = Optim(lr=1e-3, warmup=0),  # noqa: B008
        accumulate: int = 1,
        steps: int = 20,
    ):
        self.mesh = mesh = make_mesh(axes, devices)
        model = Model(arch, towers=objective.towers(arch))
        shapes, optimizer, self.first, moments = begin(objective, arch, optim)
        self.said: list[str] = []
        places = state_places(mesh, shapes, optimizer, model, self.said.append)
        step = jax.jit(
            make_train_step(
                model, objective, optimizer, accumulate=accumulate, mesh=mesh
            ),
            donate_argnums=0,
            out_shardings=(places, replicated(mesh)),
            compiler_options=QUICK,
        )

        carry = objective.first_carry(model, B)
        state = TrainState(
            step=spread(np.int32(0), places.step),
            params=spread(self.first, places.params),
            opt_state=spread(moments, places.opt_state),
            seed=spread(np.uint32(7), places.seed),
            carry=spread(carry, jax.tree.map(lambda _: places.carry, carry)),
        )
        feed = Feed(mesh, B, field="batch")
        self.losses = []
        self.text = ""
        for number in range(steps):
            batch = make_batch(number % 3)
            batch["words"] = np.arange(B * S, dtype=np.int32).reshape(B, S) % S + 1
            batch["continues"] = np.full(B, int(number > 0), np.int32)
            placed = feed.place({name: x[feed.rows] for name, x in batch.items()})
            if not self.text:
                compiled = step.lower(state, placed).compile()
                self.text = compiled.as_text()
            state, means = compiled(state, placed)
            self.losses.append(float(means["loss"].value))
        self.state, self.places = state, places

    def params(self) -> list[np.ndarray]:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.state.params)]


def assert_same(one: Trained, many: Trained, *, least: float = 1e-3) -> None:
    """Losses to 1e-5 of what they are, parameters to 1e-5; and most were moved by more
    than `least`, so that they are not alike for want of training."""
    np.testing.assert_allclose(one.losses, many.losses, rtol=1e-5, atol=0)
    for a, b in zip(one.params(), many.params(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    moved = [
        np.abs(after - before).max()
        for after, before in zip(one.params(), jax.tree.leaves(one.first), strict=True)
    ]
    assert np.median(moved) > least


@pytest.fixture(scope="module")
def alone():
    """Each objective on one device, once."""
    made = {}

    def get(name: str) -> Trained:
        if name not in made:
            made[name] = Trained(*OBJECTIVES[name], devices=jax.devices()[:1])
        return made[name]

    return get


# One mesh of each objective with every change, the others with the slow tests.
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(n, m, marks=[] if m == "2x2x2" else pytest.mark.slow)
        for n in OBJECTIVES
        for m in MESHES
    ],
)
def test_every_mesh_trains_as_one_device(alone, name, mesh):
    objective, arch = OBJECTIVES[name]
    assert arch.dropout == arch.attention_dropout == 0.1
    many = Trained(objective, arch, MESHES[mesh])
    assert_same(alone(name), many)
    assert many.mesh.size == 8
    # The state stays where it was put.
    for leaf, place in zip(
        jax.tree.leaves((many.state.params, many.state.opt_state)),
        jax.tree.leaves((many.places.params, many.places.opt_state)),
        strict=True,
    ):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    sizes = dict(many.mesh.shape)
    more = more_of(name, many.first, sizes, B, S)
    assert_kinds(Program(many.text), sizes, more)
    # No device has logits of the whole vocabulary of any of its predictions: arrays as
    # wide as that are tables and what is said of them, [V] or [V, E].
    if many.mesh.shape["tensor"] > 1:
        V = arch.padded_vocab
        wide = re.findall(rf"\w+\[([\d,]*{V})\]", many.text)
        assert {shape for shape in wide if shape != str(V)} == set(), wide


def test_parameters_are_drawn_alike_where_they_lie():
    """Each device its part of them."""
    objective, arch = OBJECTIVES["masked_lm"]
    shapes, _, first, _ = begin(objective, arch, Optim(lr=1e-3, warmup=0))
    model, mesh = Model(arch), make_mesh(MESHES["2x2x2"])

    def draw(key):
        return init_params(model, key, heads=objective.heads)

    places = param_shardings(mesh, shapes, model)
    how = dict(out_shardings=places, compiler_options=QUICK)
    drawn = jax.jit(draw, **how)(jax.random.key(1))
    for a, b in zip(jax.tree.leaves(drawn), jax.tree.leaves(first), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n == "masked_lm" else pytest.mark.slow)
        for n in OBJECTIVES
    ],
)
def test_accumulation_on_a_mesh(alone, name):
    """Parts of the batch, one after the other, on eight devices: the whole on one."""
    objective, arch = OBJECTIVES[name]
    one, many = alone(name), Trained(objective, arch, MESHES["2x2x2"], accumulate=2)
    assert_same(one, many)
    # And what is carried to the next step: the memory of XLNet.
    carried = [jax.tree.leaves(run.state.carry) for run in (one, many)]
    assert bool(carried[0]) == (name == "permuted_lm")
    for a, b in zip(*carried, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_lamb_on_a_mesh():
    """Norms are those of whole parameters, layer by layer, wherever their parts lie."""
    objective, arch = MaskedLM(300, 4, SPECIAL), SCANNED
    how = dict(optim=Optim(name="lamb", lr=1e-3, warmup=0), steps=5)
    one = Trained(objective, arch, devices=jax.devices()[:1], **how)
    many = Trained(objective, arch, MESHES["2x2x2"], **how)
    assert_same(one, many, least=1e-4)
    ratios = [
        optax.tree.get(run.state.opt_state, "trust_ratios") for run in (one, many)
    ]
    found = [np.concatenate(jax.tree.leaves(jax.tree.map(np.ravel, r))) for r in ratios]
    np.testing.assert_allclose(*found, rtol=1e-4)
    assert found[0].std() > 0.1


def places_of(arch: Arch, axes: Axes, *, towers=(), heads=("lm",)) -> dict:
    """The split of each parameter, by name, and what was said of it."""
    model = Model(arch, towers=towers)
    shapes = param_shapes(arch, heads=heads, towers=towers)
    said = []
    places = param_shardings(make_mesh(axes), shapes, model, say=said.append)
    return {name: place.spec for name, place in flatten(places).items()}, said


def test_what_is_split():
    specs, said = places_of(ARCH, MESHES["2x2x2"], heads=("lm", "pooler", "nsp"))
    assert not said
    layers = "stack/layers/"
    expected = {
        "embed/token": P(("tensor", "fsdp"), None),
        "lm/bias": P(("tensor", "fsdp")),
        f"{layers}attention/q/kernel": P(None, "fsdp", "tensor"),
        f"{layers}attention/q/bias": P(None, "tensor"),
        f"{layers}attention/o/kernel": P(None, "tensor", "fsdp"),
        f"{layers}attention/o/bias": P(),
        f"{layers}ffn/inner/kernel": P(None, "fsdp", "tensor"),
        f"{layers}ffn/outer/kernel": P(None, "tensor", "fsdp"),
        f"{layers}ffn_norm/scale": P(),
        "pooler/dense/kernel": P(),
    }
    assert {name: specs[name] for name in expected} == expected


def test_moments_lie_where_their_parameters_do():
    shapes = param_shapes(ARCH, heads=("lm",))
    optimizer = make_optimizer(Optim(), 100, shapes)
    mesh = make_mesh(MESHES["2x2x2"])
    places = state_places(mesh, shapes, optimizer, Model(ARCH), print)
    wanted = jax.tree.leaves(places.params)
    for moment in ("mu", "nu"):
        found = optax.tree.get(places.opt_state, moment)
        assert jax.tree.leaves(found) == wanted
    assert len({place.spec for place in wanted}) > 4


def test_what_does_not_divide_is_said():
    odd = ARCH.but(heads=2, width=60, inner=96)
    specs, said = places_of(odd, Axes(data=1, fsdp=2, tensor=4))
    assert said == [
        "mesh: 2 heads do not divide over tensor (4): they are not split there"
    ]
    assert specs["stack/layers/attention/q/kernel"] == P(None, "fsdp", None)
    assert specs["stack/layers/ffn/inner/kernel"] == P(None, "fsdp", "tensor")


def test_every_parameter_of_every_member_has_a_rule():
    """Large ones are split: what lies whole on every device is a few percent."""
    for preset in {preset.layout: preset for preset in PRESETS.values()}.values():
        specs, _ = places_of(preset.arch, Axes(fsdp=2), heads=("lm",))
        shapes = flatten(param_shapes(preset.arch, heads=("lm",)))
        whole = sum(shapes[name].size for name, spec in specs.items() if not any(spec))
        assert whole < 0.06 * sum(x.size for x in shapes.values()), preset.name


def test_every_head_and_tower_has_a_rule():
    towers = ReplacedToken(300, 4, SPECIAL, generator=0.5).towers(ARCH)
    heads = (*HEADS, *(f"{name}/lm" for name, _ in towers))
    specs, _ = places_of(ARCH, MESHES["2x2x2"], towers=towers, heads=heads)
    assert all(any(name.startswith(f"{head}/") for name in specs) for head in heads)


def test_parameters_without_a_rule_are_all_named():
    shapes = {"stack": {"layers": {"new": {"table": np.zeros((2, 3))}}}}
    shapes["other"] = {"gate": np.zeros(3)}
    with pytest.raises(InputError) as error:
        param_shardings(make_mesh(), shapes, Model(ARCH))
    for name in ("stack/layers/new/table", "other/gate", "RULES"):
        assert name in str(error.value)


def test_a_mesh_that_does_not_fit():
    with pytest.raises(InputError, match="do not fit 8 devices"):
        make_mesh(Axes(data=3))
    with pytest.raises(InputError, match="do not fit 8 devices"):
        make_mesh(Axes(data=2, fsdp=2, tensor=1))
    with pytest.raises(InputError, match="only one size may be -1"):
        Axes(data=-1, fsdp=-1)
    with pytest.raises(InputError) as error:
        Axes(data=0, tensor=-2, slices=0)
    for field in ("data=0", "tensor=-2", "slices=0"):
        assert f"config.mesh.{field}" in str(error.value)
    with pytest.raises(InputError, match="slices split rows and nothing else"):
        make_mesh(Axes(data=2, fsdp=4, slices=4))


def test_slices_are_the_outermost_part_of_data():
    """Only rows go over the slower network between them."""

    class Chip:
        def __init__(self, number: int):
            self.id, self.slice_index = number, number % 2

    chips = [Chip(n) for n in range(8)]
    first, second = slices_of(chips, 2)
    assert [chip.id for chip in first] == [0, 2, 4, 6]
    assert [chip.id for chip in second] == [1, 3, 5, 7]
    with pytest.raises(InputError, match="the devices are in 2 slices"):
        slices_of(chips, 4)
    # Where they are not named they are counted off, whole slices after each other.
    mesh = make_mesh(Axes(data=4, fsdp=2, slices=2))
    assert {d.id for d in mesh.devices[:2].flat} == {0, 1, 2, 3}


def test_feed():
    """Each row of the batch lies on the devices that the mesh says, once a copy."""
    mesh = make_mesh(MESHES["2x2x2"])
    feed = Feed(mesh, 16, field="batch")
    assert feed.rows.tolist() == list(range(16))  # one process feeds all
    rows = {"ids": np.arange(16 * 3).reshape(16, 3)}
    placed = feed.place(rows)["ids"]
    np.testing.assert_array_equal(np.asarray(placed), rows["ids"])
    assert {shard.data.shape for shard in placed.addressable_shards} == {(4, 3)}
    with pytest.raises(InputError, match=r"config.batch=18 does not divide over 4"):
        Feed(mesh, 18, field="batch")
