"""Optimizers against a port in numpy, torch and optax; rules and rates by hand."""

import ast
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from bert_jax.convert.engine import flatten, unflatten
from bert_jax.errors import InputError
from bert_jax.models.model import param_shapes
from bert_jax.objectives.replaced_token import ReplacedToken
from bert_jax.optim import DECAY, OPTIMIZERS, Optim, make_optimizer, rates
from bert_jax.parity import tiny
from bert_jax.presets import preset
from bert_jax.rules import by_rule
from tests.conftest import ROOT

SHAPES = {
    "embed/token": (7, 4),
    "embed/norm/scale": (4,),
    "embed/norm/bias": (4,),
    "stack/layers/ffn/inner/kernel": (2, 4, 6),
    "stack/layers/ffn/inner/bias": (2, 6),
    "lm/bias": (7,),
}
DECAYED = {"embed/token", "stack/layers/ffn/inner/kernel"}


def draw(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (scale * rng.normal(size=shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def run(optim: Optim, steps: int, params: dict, gradients: list[dict]) -> list[dict]:
    """The parameters after each step, flat."""
    tree = unflatten(params)
    optimizer = make_optimizer(optim, steps, tree)
    state, after = optimizer.init(tree), []
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(unflatten(gradient), state, tree)
        tree = optax.apply_updates(tree, updates)
        after.append(flatten(jax.device_get(tree)))
    return after


def port(optim: Optim, steps: int, params: dict, gradients: list[dict]) -> list[dict]:
    """optimization.py of google-research/bert, in f64, word for word."""
    w = {name: value.astype(np.float64) for name, value in params.items()}
    m = {name: np.zeros_like(value) for name, value in w.items()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    after = []
    warmup = round(optim.warmup * steps) if optim.warmup < 1 else optim.warmup
    for t, gradient in enumerate(gradients):
        rate = optim.lr * (1 - t / steps)
        if t < warmup:
            rate = optim.lr * t / warmup
        norm = np.sqrt(
            sum((g.astype(np.float64) ** 2).sum() for g in gradient.values())
        )
        for name, g in gradient.items():
            g = g.astype(np.float64) * optim.clip / max(norm, optim.clip)
            m[name] = optim.beta1 * m[name] + (1 - optim.beta1) * g
            v[name] = optim.beta2 * v[name] + (1 - optim.beta2) * g**2
            update = m[name] / (np.sqrt(v[name]) + optim.eps)
            if name in DECAYED:
                update += optim.decay * w[name]
            w[name] = w[name] - rate * update
        after.append({name: value.copy() for name, value in w.items()})
    return after


@pytest.mark.parametrize("warmup", [0, 2, 0.3])
def test_bert_adamw_is_the_release(warmup: float):
    optim = Optim(lr=0.05, warmup=warmup, decay=0.1)
    # Below and above the clipping norm of 1.
    gradients = [draw(seed, scale) for seed, scale in enumerate((0.01, 1, 0.05, 3, 0))]
    params = draw(9)
    ours = run(optim, 10, params, gradients)
    expected = port(optim, 10, params, gradients)
    for step in range(5):
        for name in SHAPES:
            np.testing.assert_allclose(
                ours[step][name], expected[step][name], rtol=1e-5, atol=1e-6
            )
    moved = np.abs(ours[-1]["lm/bias"] - params["lm/bias"]).min()
    assert moved > 0.01


def one(value: float, name: str = "kernel") -> dict[str, np.ndarray]:
    return {name: np.array([value], np.float32)}


def test_the_first_update_is_3_16():
    """0.1 g / √(0.001 g²), whatever g is; with bias correction it is 1."""
    for gradient in (0.5, -0.002):
        for name, size in (("bert_adamw", 0.1 / 0.001**0.5), ("adamw", 1.0)):
            optim = Optim(name=name, lr=1.0, warmup=0, decay=0.0, eps=1e-12)
            (after,) = run(optim, 100, one(0.0), [one(gradient)])
            assert after["kernel"][0] == pytest.approx(-np.sign(gradient) * size, 1e-4)
    assert pytest.approx(3.162, abs=1e-3) == 0.1 / 0.001**0.5


def test_three_steps_by_hand():
    """w = 2, g = 1, 1, -1; β 0.5 and 0.75, ε 0, λ 0.1, rate 1, 3/4, 1/2."""
    optim = Optim(lr=1.0, warmup=0, decay=0.1, beta1=0.5, beta2=0.75, eps=0.0, clip=0.0)
    after = run(optim, 4, one(2.0), [one(1.0), one(1.0), one(-1.0)])
    # m 1/2, v 1/4: 1 + 0.2
    assert after[0]["kernel"][0] == pytest.approx(0.8)
    # m 3/4, v 7/16: 0.8 - 3/4 (3/√7 + 0.08)
    assert after[1]["kernel"][0] == pytest.approx(0.74 - 2.25 / 7**0.5)
    # m -1/8, v 37/64
    w = 0.74 - 2.25 / 7**0.5
    w -= 0.5 * (-1 / 37**0.5 + 0.1 * w)
    assert after[2]["kernel"][0] == pytest.approx(w, abs=1e-6)


def test_adamw_is_torchs():
    optim = Optim(name="adamw", lr=0.02, warmup=0, decay=0.1, clip=0.0, eps=1e-6)
    params, gradients = draw(3), [draw(seed) for seed in range(5)]
    ours = run(optim, 20, params, gradients)
    tensors = {name: torch.nn.Parameter(torch.tensor(params[name])) for name in params}
    split = [
        {"params": [tensors[name] for name in SHAPES if name in DECAYED]},
        {
            "params": [tensors[name] for name in SHAPES if name not in DECAYED],
            "weight_decay": 0.0,
        },
    ]
    theirs = torch.optim.AdamW(split, lr=0.02, eps=1e-6, weight_decay=0.1)
    for t, gradient in enumerate(gradients):
        for part in theirs.param_groups:
            part["lr"] = 0.02 * (1 - t / 20)
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(gradient[name])
        theirs.step()
        for name, tensor in tensors.items():
            np.testing.assert_allclose(
                ours[t][name], tensor.detach().numpy(), rtol=1e-5, atol=1e-6
            )


def test_adamw_is_optaxs():
    optim = Optim(name="adamw", lr=0.02, warmup=2, decay=0.1, clip=0.5)
    params, gradients = draw(3), [draw(seed) for seed in range(5)]
    ours = run(optim, 20, params, gradients)[-1]
    rates = [0.0, 0.01, 0.02 * 0.9, 0.02 * 0.85, 0.02 * 0.8]
    decayed = {name: name in DECAYED for name in SHAPES}
    theirs = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(
            lambda t: jnp.array(rates)[t], eps=1e-6, weight_decay=0.1, mask=decayed
        ),
    )
    tree, state = params, theirs.init(params)
    for gradient in gradients:
        updates, state = theirs.update(gradient, state, tree)
        tree = optax.apply_updates(tree, updates)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], tree[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bert_adamw", "adamw"])
def test_without_gradient_only_the_decayed_shrink(name: str):
    params, nothing = draw(0), draw(0, scale=0.0)
    optim = Optim(name=name, lr=0.5, warmup=0, decay=0.1)
    (after,) = run(optim, 10, params, [nothing])
    for name in SHAPES:
        factor = 0.95 if name in DECAYED else 1.0
        np.testing.assert_allclose(after[name], params[name] * factor, rtol=1e-6)


def test_clipping_is_by_the_global_norm():
    """Ten times the gradient is the same update once both are clipped."""
    params, small = draw(0), draw(1)
    large = {name: 10 * value for name, value in small.items()}
    tiny = {name: value / 1000 for name, value in small.items()}
    eps = dict(beta1=0.0, beta2=0.0, eps=1.0, decay=0.0)  # update g / (|g| + 1)
    optim = Optim(lr=0.1, warmup=0, clip=1.0, **eps)
    results = [run(optim, 10, params, [g])[0] for g in (small, large, tiny)]
    for name in SHAPES:
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-5)
        g = tiny[name]  # below the norm: not touched
        expected = params[name] - 0.1 * g / (np.abs(g) + 1)
        np.testing.assert_allclose(results[2][name], expected, rtol=1e-6)


# Adafactor.


def test_adafactor_is_optaxs():
    """On matrices that were never stacked; large enough to be factored, and not."""
    rng = np.random.default_rng(0)
    shapes = {"a": (2, 130, 140), "b": (2, 140), "c": (2, 5, 6)}

    def tree(scale: float, *, stacked: bool) -> dict:
        drawn = {
            n: scale * rng.normal(size=s).astype(np.float32) for n, s in shapes.items()
        }
        drawn["a"][1] *= 9
        if stacked:
            layers = {"stack": {"layers": drawn}}
            return layers | {"generator": layers, "table": drawn["a"][0]}
        return {f"{n}{k}": x[k] for n, x in drawn.items() for k in (0, 1)}

    def both(scale: float) -> tuple[dict, dict]:
        nonlocal rng
        state = rng.bit_generator.state
        one = tree(scale, stacked=True)
        rng.bit_generator.state = state
        return one, tree(scale, stacked=False)

    params, apart = both(1.0)
    optim = Optim(
        name="adafactor", lr=0.01, warmup=0, schedule="constant", decay=0.0, clip=0
    )
    ours, theirs = make_optimizer(optim, 10, params), optax.adafactor(0.01)
    state, their_state = ours.init(params), theirs.init(apart)
    factored = [x.shape for x in jax.tree.leaves(state) if x.ndim > 1 and x.size > 1000]
    assert (2, 130, 140) not in factored
    for _ in range(3):
        gradient, their_gradient = both(0.3)
        updates, state = ours.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        updates, their_state = theirs.update(their_gradient, their_state, apart)
        apart = optax.apply_updates(apart, updates)
        for tower in (params, params["generator"]):
            for name in shapes:
                for k in (0, 1):
                    leaf = tower["stack"]["layers"][name][k]
                    np.testing.assert_allclose(
                        leaf, apart[f"{name}{k}"], rtol=1e-5, atol=1e-6
                    )
        np.testing.assert_allclose(params["table"], apart["a0"], rtol=1e-5, atol=1e-6)


# Rates of their own.


LAYERED = {
    "embed/token": (4, 2),
    "project/kernel": (2, 3),
    "stack/layers/ffn/kernel": (3, 2, 2),
    "stack/layers/ffn/bias": (3, 2),
    "stack/final_norm/scale": (2,),
    "pooler/dense/kernel": (2, 2),
    "generator/project/kernel": (2, 2),
    "generator/stack/layers/ffn/kernel": (2, 2, 2),
    "generator/stack/layers/attention/q/bias": (1, 2),
    "generator/lm/bias": (4,),
}


def layered(form: str, **changes) -> dict:
    tree = unflatten(
        {name: np.ones(shape, np.float32) for name, shape in LAYERED.items()}
    )
    return flatten(rates(Optim(layer_decay=0.5, layer_form=form, **changes), tree))


@pytest.mark.parametrize(("form", "more"), [("paper", 0), ("electra", 1)])
def test_layer_wise_rates(form: str, more: int):
    """Paper: the top layer d, embeddings d^(N+1). ELECTRA's code: d^(N+2 - depth), the
    depth of embeddings 0, of layer n n+1, of heads N+2. A generator counts its own."""
    found = layered(form)
    for name, shape in LAYERED.items():
        tower = "generator/" if name.startswith("generator/") else ""
        N = LAYERED[f"{tower}stack/layers/ffn/kernel"][0]
        if "layers/" in name:
            expected = [0.5 ** (N - n + more) for n in range(N)][-shape[0] :]
            assert found[name].shape == (shape[0], *[1] * (len(shape) - 1))
        elif name.startswith(("embed/", f"{tower}project/")):
            expected = [0.5 ** (N + 1 + more)]
        else:
            expected = [1.0]
        assert np.ravel(found[name]).tolist() == expected, name
    top = found["stack/layers/ffn/bias"][-1].item()
    assert top == {"paper": 0.5, "electra": 0.25}[form]


def test_layer_wise_rates_cover_every_parameter_or_raise():
    tree = unflatten({name: np.ones(shape) for name, shape in LAYERED.items()})
    tree |= {"temperature": np.ones(1), "adapter": {"down": {"kernel": np.ones(2)}}}
    assert rates(Optim(), tree)["temperature"] == 1.0
    with pytest.raises(InputError) as raised:
        rates(Optim(layer_decay=0.8), tree)
    text = str(raised.value)
    assert "parameters adapter/down/kernel, temperature" in text
    assert "depth_rules" in text


TREES = sorted((ROOT / "tests/models/trees").glob("*.txt"))


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.stem)
def test_layer_wise_rates_of_every_member(path: Path):
    """No parameter of any is without a depth, and the layers differ."""
    named = (line.partition(" ") for line in path.read_text().splitlines())
    shapes = {
        name: jax.ShapeDtypeStruct(ast.literal_eval(shape), jnp.float32)
        for name, _, shape in named
    }
    found = flatten(rates(Optim(layer_decay=0.5), unflatten(shapes)))
    N = max(x.shape[0] for name, x in shapes.items() if "stack/layers/" in name)
    for name in ("embed/token", "embed/norm/scale"):
        assert found.get(name, 0.5 ** (N + 1)) == 0.5 ** (N + 1)
    assert found["stack/layers/ffn/inner/kernel"][-1].item() == 0.5


def test_layer_wise_rates_of_a_generator():
    arch = tiny(preset("electra-small-discriminator").arch)
    objective = ReplacedToken(arch.vocab_size, 4, (0, 1, 2, 3, 4), generator=0.5)
    towers = objective.towers(arch)
    shapes = param_shapes(arch, heads=objective.heads, towers=towers)
    found = flatten(rates(Optim(layer_decay=0.5), shapes))
    own = found["generator/stack/layers/ffn/inner/kernel"]
    assert np.ravel(own).tolist() == [0.5**n for n in range(arch.layers, 0, -1)]
    assert found["generator/project/kernel"] == found["embed/token"] < own.min()
    assert found["generator/lm/bias"] == found["rtd/score/kernel"] == 1.0


def test_rates_by_rule_and_by_layer():
    found = layered("paper", rate_rules=((r"^stack/.*bias$", 0.0), (r".*", 2.0)))
    assert np.ravel(found["stack/layers/ffn/kernel"]).tolist() == [1 / 4, 1 / 2, 1]
    assert not np.any(found["stack/layers/ffn/bias"])
    assert found["pooler/dense/kernel"] == 2.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_frozen_stays(name: str):
    """Bit for bit, decay or not; and its gradient is not in the norm of the others."""
    rules = ((r"^embed/", 0.0), (r".*", 1.0))
    optim = Optim(name=name, lr=0.1, warmup=0, decay=0.5, rate_rules=rules)
    params, gradients = draw(0), [draw(seed) for seed in (1, 2)]
    after = run(optim, 10, params, gradients)[-1]
    loud = [
        {n: g * (1e4 if "embed" in n else 1) for n, g in x.items()} for x in gradients
    ]
    again = run(optim, 10, params, loud)[-1]
    for parameter in SHAPES:
        same = np.array_equal(after[parameter], params[parameter])
        assert same == parameter.startswith("embed/")
        np.testing.assert_array_equal(after[parameter], again[parameter])


def test_rates_multiply_the_step():
    rules = ((r"token", 0.25), (r".*", 1.0))
    params, gradients = draw(0), [draw(1)]
    plain = run(Optim(lr=0.1, warmup=0), 10, params, gradients)[0]
    slow = run(Optim(lr=0.1, warmup=0, rate_rules=rules), 10, params, gradients)[0]
    for name in SHAPES:
        step, other = (x[name] - params[name] for x in (plain, slow))
        factor = 0.25 if name == "embed/token" else 1.0
        np.testing.assert_allclose(other, factor * step, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", [("(", 1.0), ("a",), ("a", -1.0), ("a", "b"), "ab", 3])
def test_rules_that_are_none(rule):
    with pytest.raises(
        InputError, match=r"optim.rate_rules: .* is not \(regex, number"
    ):
        Optim(rate_rules=(rule,))


@pytest.mark.parametrize("field", ["rate_rules", "decay_rules"])
def test_rules_must_match_every_parameter(field: str):
    with pytest.raises(InputError, match="no rule matches the parameters") as raised:
        make_optimizer(Optim(**{field: (("embed", 1.0),)}), 10, unflatten(draw(0)))
    for name in SHAPES:
        assert (name in str(raised.value)) == ("embed" not in name)
    make_optimizer(
        Optim(**{field: (("embed", 1.0), (".*", 0.0))}), 10, unflatten(draw(0))
    )


def test_rules_read_from_json_are_the_same():
    optim = Optim(rate_rules=(("a", 0.0), (".*", 1.0)))
    assert Optim(**json.loads(json.dumps(dataclasses.asdict(optim)))) == optim


def test_decay_of_every_parameter_of_a_model():
    shapes = param_shapes(preset("bert-tiny").arch, heads=("lm", "pooler", "nsp"))
    decayed = flatten(by_rule(shapes, DECAY))
    assert {name for name, value in decayed.items() if not value} == {
        name for name in decayed if name.rsplit("/", 1)[-1] in ("bias", "scale")
    }
    kept = {name for name, value in decayed.items() if value}
    assert {"embed/token", "embed/position", "embed/type"} < kept
    assert len(kept) == 3 + 6 + 3  # tables; kernels of a layer; of the heads


def test_the_first_rule_decides():
    tree = {"a": {"bias": 0, "kernel": 0}, "rebias": 0, "bias": 0}
    rules = [(r"^a/", "first"), (r"(^|/)bias$", "second"), (r".*", "third")]
    assert by_rule(tree, rules) == {
        "a": {"bias": "first", "kernel": "first"},
        "rebias": "third",
        "bias": "second",
    }


def test_all_unmatched_parameters_are_named():
    tree = {"a": {"bias": 0, "kernel": 0}, "b": {"other": 0}}
    with pytest.raises(InputError) as raised:
        by_rule(tree, [("bias", 0.0)])
    text = str(raised.value)
    assert text.startswith("no rule matches the parameters a/kernel, b/other; a last ")


def test_all_wrong_settings_are_named():
    with pytest.raises(InputError) as raised:
        Optim(name="adamv", lr=-1, beta1=1.0, beta2=-0.1, eps=-1e-6, clip=-1)
    text = str(raised.value)
    assert "unknown optim.name 'adamv'. Did you mean adamw" in text
    for part in (
        "optim.beta1=1.0 not in [0, 1)",
        "optim.beta2=-0.1 not in [0, 1)",
        "optim.lr=-1 must be 0 or more",
        "optim.eps=-1e-06 must be 0 or more",
        "optim.clip=-1 must be 0 or more",
    ):
        assert part in text
    assert len(text.splitlines()) == 6
