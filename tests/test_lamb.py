"""LAMB's variants against a port in numpy, optax, timm, and themselves when sharded."""

import importlib
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import lamb
from bert_jax.convert.engine import flatten, unflatten
from bert_jax.optim import Optim, make_optimizer
from bert_jax.sharding import Axes, make_mesh

KERNEL, BIAS = "stack/layers/ffn/inner/kernel", "stack/layers/ffn/inner/bias"
SECOND = f"generator/{KERNEL}"  # of a second tower
SHAPES = {
    "embed/token": (8, 4),
    "embed/norm/scale": (4,),
    KERNEL: (2, 4, 8),
    BIAS: (2, 8),
    "lm/bias": (8,),
    SECOND: (3, 4, 6),
    f"generator/{BIAS}": (3, 6),
}
DECAYED = ("embed/token", KERNEL, SECOND)
LAYERED = tuple(name for name in SHAPES if "stack/" in name)
STEPS = 20


def draw(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    drawn = {
        name: (scale * rng.normal(size=shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    for name in (KERNEL, SECOND):
        drawn[name][1] *= 7  # layers are not alike
    return drawn


def settings(variant: str = "paper", **changes) -> Optim:
    fixed = dict(name="lamb", schedule="constant", warmup=0, lr=0.03, decay=0.1)
    return Optim(variant=variant, **fixed | {"clip": 0.0} | changes)


def run(optim: Optim, params: dict, gradients: list[dict]) -> tuple[list[dict], dict]:
    """The parameters after each step, flat, and the last ratios."""
    tree = unflatten(params)
    optimizer = make_optimizer(optim, STEPS, tree)
    state, after = optimizer.init(tree), []
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(unflatten(gradient), state, tree)
        tree = optax.apply_updates(tree, updates)
        after.append(flatten(jax.device_get(tree)))
    return after, flatten(jax.device_get(optax.tree.get(state, "trust_ratios")))


# The table of the module, once more.
CORRECTED = {"paper": 1, "nvidia": 1, "optax": 1, "google": 0, "albert": 0}
ONLY_DECAYED = ("google", "albert")


def port(optim: Optim, params: dict, gradients: list[dict]) -> list[dict]:
    """In f64, every matrix of every layer by itself."""
    after = []
    w = {name: value.astype(np.float64) for name, value in params.items()}
    m = {name: np.zeros_like(value) for name, value in w.items()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    for t, gradient in enumerate(gradients, 1):
        for name in w:
            layers = range(len(w[name])) if name in LAYERED else [...]
            for n in layers:
                g = gradient[name][n].astype(np.float64)
                m[name][n] = optim.beta1 * m[name][n] + (1 - optim.beta1) * g
                v[name][n] = optim.beta2 * v[name][n] + (1 - optim.beta2) * g * g
                a, b = m[name][n], v[name][n]
                if CORRECTED[optim.variant]:
                    a, b = a / (1 - optim.beta1**t), b / (1 - optim.beta2**t)
                u = a / (np.sqrt(b) + optim.eps)
                if name in DECAYED:
                    u = u + optim.decay * w[name][n]
                ratio = 1.0
                size, length = np.linalg.norm(w[name][n]), np.linalg.norm(u)
                adapted = optim.variant not in ONLY_DECAYED or name in DECAYED
                if adapted and size > 0 and length > 0:
                    if optim.variant == "paper":
                        size = min(size, 10.0)
                    ratio = size / length
                w[name][n] -= optim.lr * ratio * u
        after.append({name: value.copy() for name, value in w.items()})
    return after


@pytest.mark.parametrize("variant", lamb.VARIANTS)
def test_is_the_port(variant: str):
    params, gradients = draw(9), [draw(seed, 0.3) for seed in range(5)]
    params["lm/bias"][:] = 0  # as it starts: a ratio of 1
    assert (
        np.linalg.norm(params[KERNEL][1]) > 10 > np.linalg.norm(params["embed/token"])
    )
    ours, _ = run(settings(variant), params, gradients)
    expected = port(settings(variant), params, gradients)
    for step in range(5):
        for name in SHAPES:
            np.testing.assert_allclose(
                ours[step][name], expected[step][name], rtol=2e-5, atol=1e-6
            )


def test_variants_differ():
    params, gradients = draw(9, 2.0), [draw(seed, 0.3) for seed in range(3)]
    ends = {v: run(settings(v), params, gradients)[0][-1] for v in lamb.VARIANTS}
    for one, other, same in (
        ("google", "albert", True),
        ("nvidia", "optax", True),
        ("paper", "optax", False),
        ("google", "optax", False),
    ):
        equal = all(np.array_equal(ends[one][n], ends[other][n]) for n in SHAPES)
        assert equal == same, (one, other)


def apart(tree: dict) -> dict:
    """As matrices that were never stacked."""
    flat = {f"{name}/{n}": w for name in LAYERED for n, w in enumerate(tree[name])}
    return flat | {name: tree[name] for name in SHAPES if name not in LAYERED}


def has_decay(name: str) -> bool:
    return name in DECAYED or name[:-2] in DECAYED


def test_is_optaxs():
    params, gradients = draw(9), [draw(seed, 0.3) for seed in range(4)]
    decayed = {name: has_decay(name) for name in apart(params)}
    theirs = optax.lamb(0.03, eps=1e-6, weight_decay=0.1, mask=decayed)
    tree = apart(params)
    state = theirs.init(tree)
    ours, _ = run(settings("optax"), params, gradients)
    for step, gradient in enumerate(gradients):
        updates, state = theirs.update(apart(gradient), state, tree)
        tree = optax.apply_updates(tree, updates)
        for name, leaf in apart(ours[step]).items():
            np.testing.assert_allclose(leaf, tree[name], rtol=1e-5, atol=1e-6)


@pytest.fixture
def timm_lamb(monkeypatch):
    """timm's class alone: all of timm would want torchvision."""
    # `make test` puts it in a folder of its own: where it can be imported, transformers
    # takes all of it to be there.
    folder = Path(sys.prefix) / "timm"
    if not folder.is_dir():
        pytest.skip("timm's LAMB: `make test` installs timm")
    for name in ("timm", "timm.optim"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, name, module)
    return importlib.import_module("timm.optim.lamb").Lamb


@pytest.mark.parametrize(
    ("variant", "told"),
    [
        ("google", dict(bias_correction=False, always_adapt=False)),
        ("nvidia", dict(bias_correction=True, always_adapt=True)),
    ],
)
def test_is_timms(timm_lamb, variant: str, told: dict):
    """That for torch, on the same matrices."""
    params, gradients = draw(9), [draw(seed, 0.3) for seed in range(4)]
    tree = {name: torch.nn.Parameter(tensor(w)) for name, w in apart(params).items()}
    groups = [
        {"params": [tree[name] for name in tree if has_decay(name) == decayed]}
        | {"weight_decay": 0.1 * decayed}
        for decayed in (True, False)
    ]
    theirs = timm_lamb(groups, lr=0.03, eps=1e-6, max_grad_norm=None, **told)
    ours, _ = run(settings(variant), params, gradients)
    for step, gradient in enumerate(gradients):
        for name, g in apart(gradient).items():
            tree[name].grad = tensor(g)
        theirs.step()
        for name, leaf in apart(ours[step]).items():
            found = tree[name].detach().numpy()
            np.testing.assert_allclose(leaf, found, rtol=1e-5, atol=1e-6)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.array(x))


def test_the_length_of_a_step_is_that_of_the_parameter():
    """Without decay: η ‖w‖ in every layer, however large the gradient is."""
    params = draw(9)
    ends = [
        run(settings("optax", decay=0.0, eps=0.0), params, [draw(0, scale)])[0][0]
        for scale in (1e-3, 1.0, 1e3)
    ]
    for name in LAYERED:
        for n in range(SHAPES[name][0]):
            moved = np.linalg.norm(ends[0][name][n] - params[name][n])
            size = np.linalg.norm(params[name][n])
            assert moved == pytest.approx(0.03 * size, rel=1e-4)
    for end in ends[1:]:
        for name in SHAPES:
            np.testing.assert_allclose(end[name], ends[0][name], rtol=1e-4, atol=1e-6)


# What each parameter is split over; the rest is on every device.
OVER_ALL = {
    "embed/token": P("data"),
    KERNEL: P(None, None, "data"),
    BIAS: P(None, "data"),
}
BY_RULE = {  # as sharding.RULES has it
    "embed/token": P(("tensor", "fsdp")),
    KERNEL: P(None, "fsdp", "tensor"),
    BIAS: P(None, "tensor"),
    SECOND: P(None, "fsdp", "tensor"),
    "lm/bias": P(("tensor", "fsdp")),
}


@pytest.mark.parametrize(
    ("axes", "over"),
    [(Axes(), OVER_ALL), (Axes(data=2, fsdp=2, tensor=2), BY_RULE)],
    ids=["8", "2x2x2"],
)
def test_norms_of_sharded_parameters_are_of_the_whole(axes: Axes, over: dict):
    mesh = make_mesh(axes)
    assert mesh.size == 8
    params, gradients = draw(9), draw(0, 0.3)
    optim = settings("paper")
    alone, ratios = run(optim, params, [gradients])
    places = {name: NamedSharding(mesh, over.get(name, P())) for name in SHAPES}
    tree, grads = (
        unflatten({name: jax.device_put(x[name], places[name]) for name in SHAPES})
        for x in (params, gradients)
    )
    optimizer = make_optimizer(optim, STEPS, tree)
    updates, state = jax.jit(optimizer.update)(grads, optimizer.init(tree), tree)
    found = flatten(jax.device_get(optax.apply_updates(tree, updates)))
    for name in SHAPES:
        np.testing.assert_allclose(found[name], alone[0][name], rtol=1e-6, atol=1e-7)
    sharded = flatten(jax.device_get(optax.tree.get(state, "trust_ratios")))
    assert (sharded[KERNEL].shape, sharded[SECOND].shape) == ((2,), (3,))
    for name in SHAPES:
        np.testing.assert_allclose(sharded[name], ratios[name], rtol=1e-6)


def test_the_ratios_of_layers_are_shown():
    tree = unflatten(draw(9))
    optimizer = make_optimizer(settings("optax"), STEPS, tree)
    _, state = optimizer.update(unflatten(draw(0)), optimizer.init(tree), tree)
    found = lamb.layer_ratios(state)
    names = ["layer_0", "layer_1", *(f"generator_layer_{n}" for n in range(3))]
    assert set(found) == {"trust_embed", *(f"trust_{name}" for name in names)}
    ratios = flatten(optax.tree.get(state, "trust_ratios"))
    np.testing.assert_array_equal(found["trust_layer_1"], ratios[KERNEL][1])
    np.testing.assert_array_equal(found["trust_generator_layer_2"], ratios[SECOND][2])
    assert found["trust_layer_1"] > 3 * found["trust_layer_0"]
    adam = make_optimizer(Optim(), STEPS, tree)
    assert lamb.layer_ratios(adam.init(tree)) == {}


def test_layers_that_share_some_parameters():
    """ALBERT with attention of its own in each layer: no ratio of a whole layer."""
    flat = {"embed/token": jnp.ones((4, 2))}
    flat |= {"stack/layers/attention/q/kernel": jnp.ones((3, 2, 2))}
    flat |= {"stack/layers/ffn/inner/kernel": jnp.ones((1, 2, 2))}
    tree = unflatten(flat)
    state = make_optimizer(settings(), STEPS, tree).init(tree)
    assert set(lamb.layer_ratios(state)) == {"trust_embed"}
