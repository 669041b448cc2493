"""Two towers on the same tables: ELECTRA's generator and discriminator."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.convert.engine import flatten
from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.dropout import Noise
from bert_jax.models.heads import HEADS
from bert_jax.models.model import Model, count_params, init_params, param_shapes
from bert_jax.presets import preset
from tests.models.made import (
    TINY,
    assert_same_gradients,
    assert_same_outputs,
    drawn_params,
    probe,
    quick_jit,
    random_tokens,
)

BOTH = ("rtd", "generator/lm")


# How many parameters there are together.


def together(size: str, **generator) -> int:
    main = preset(f"electra-{size}-discriminator").arch
    other = preset(f"electra-{size}-generator").arch.but(**generator)
    return count_params(main, heads=BOTH, towers=(("generator", other),))


@pytest.mark.parametrize(
    ("size", "generator", "count"),
    [
        ("small", dict(width=64, heads=1, inner=256), 14_196_219),
        ("base", {}, 119_386_427),
        ("large", {}, 354_655_291),
    ],
)
def test_counts(size: str, generator: dict, count: int):
    assert together(size, **generator) == count


def test_tables_are_counted_once():
    """Apart, the two have one pair of tables more, and a norm."""
    main = preset("electra-base-discriminator").arch
    other = preset("electra-base-generator").arch
    apart = count_params(main, heads=("rtd",)) + count_params(other, heads=("lm",))
    tables = (30522 + 512 + 2 + 2) * 768
    assert apart - together("base") == tables
    assert (apart - tables, tables) == (119_386_427, 23_837_184)


# What they compute, and what the tables hear.

MAIN = TINY.but(embed_width=12)
SMALL = MAIN.but(width=16, heads=1, inner=20, layers=1)
TOWERS = (("generator", SMALL),)


def names(tree: dict, *, tables: bool) -> set[str]:
    return {name for name in flatten(tree) if name.startswith("embed/") == tables}


def test_names():
    shapes = param_shapes(MAIN, heads=BOTH, towers=TOWERS)
    main = param_shapes(MAIN, heads=("rtd",))
    other = param_shapes(SMALL, heads=("lm",))
    assert names(shapes, tables=True) == names(main, tables=True)
    assert names(other, tables=True) == names(main, tables=True)
    own = {f"generator/{name}" for name in names(other, tables=False)}
    assert names(shapes, tables=False) == names(main, tables=False) | own


@pytest.fixture(scope="module")
def results() -> dict:
    """Outputs and gradients: of both towers at once, and of two models apart."""
    params = drawn_params(MAIN, heads=BOTH, towers=TOWERS)
    main = {name: leaf for name, leaf in params.items() if name != "generator"}
    other = {"embed": params["embed"]} | params["generator"]
    tokens = random_tokens(MAIN, 2, 9, group=[[1] * 9, [1] * 6 + [0] * 3])
    where = jnp.array([[1, 4], [5, 0]])

    def score(out) -> jax.Array:
        out = jnp.where(jnp.isinf(out), 0.0, out)  # pieces that do not exist
        return (out * probe(out.shape)).mean()

    def joint(params):
        call = partial(Model(MAIN, towers=TOWERS).apply, {"params": params}, tokens)
        out = call(heads=("rtd",))
        made = call(tower="generator", where=where, heads=("lm",))
        return score(out["rtd"]) + score(made["lm"]), (out, made)

    def alone(params, arch, **options):
        out = Model(arch).apply({"params": params}, tokens, **options)
        return score(out[options["heads"][0]]), out

    @quick_jit
    def compute(params, main, other):
        by = partial(jax.grad, has_aux=True)
        return {
            "joint": by(joint)(params),
            "main": by(partial(alone, arch=MAIN, heads=("rtd",)))(main),
            "other": by(partial(alone, arch=SMALL, where=where, heads=("lm",)))(other),
        }

    return jax.device_get(compute(params, main, other))


def finite(out: dict) -> dict:
    return {name: np.where(np.isinf(leaf), 0.0, leaf) for name, leaf in out.items()}


def test_outputs_are_those_of_two_models(results):
    out, made = results["joint"][1]
    assert out["last"].shape == (2, 9, 24)
    assert made["last"].shape == (2, 9, 16)
    assert_same_outputs(out, results["main"][1])
    assert_same_outputs(finite(made), finite(results["other"][1]))


def test_tables_hear_both(results):
    """Every table's gradient, and the norm's, is the sum; neither part is zero."""
    joint, main, other = (results[side][0] for side in ("joint", "main", "other"))
    added = jax.tree.map(np.add, main["embed"], other["embed"])
    assert_same_gradients(joint["embed"], added)
    for side in (main, other):
        for name, leaf in flatten(side["embed"]).items():
            largest = np.abs(flatten(added)[name]).max()
            assert np.abs(leaf).max() > 0.01 * largest, name


def test_the_rest_hears_its_own(results):
    joint, main, other = (results[side][0] for side in ("joint", "main", "other"))
    own = {name: tree for name, tree in main.items() if name != "embed"}
    assert_same_gradients({name: joint[name] for name in own}, own)
    own = {name: tree for name, tree in other.items() if name != "embed"}
    assert_same_gradients(joint["generator"], own)


def test_fresh_parameters_of_both():
    draw = partial(init_params, Model(MAIN, towers=TOWERS), heads=BOTH)
    params = flatten(quick_jit(draw)(jax.random.key(0)))
    expected = flatten(param_shapes(MAIN, heads=BOTH, towers=TOWERS))
    assert {n: leaf.shape for n, leaf in params.items()} == {
        n: leaf.shape for n, leaf in expected.items()
    }
    # Drawn apart: the first rows of two kernels of one shape are not the same.
    a = params["rtd/dense/kernel"].ravel()[:100]
    b = params["generator/lm/dense/kernel"].ravel()[:100]
    assert np.abs(a - b).max() > 0.01


def test_towers_drop_apart():
    """Equal towers with equal weights: only the noise is another."""
    model = Model(MAIN, towers=(("twin", MAIN),))
    params = drawn_params(MAIN)
    params["twin"] = {n: tree for n, tree in params.items() if n != "embed"}
    tokens = random_tokens(MAIN, 2, 9)
    noise = Noise.of(jax.random.key(0), jnp.arange(2))

    @quick_jit
    def run(noise):
        return [
            model.apply({"params": params}, tokens, tower=tower, noise=noise)["last"]
            for tower in ("main", "twin")
        ]

    np.testing.assert_array_equal(*run(None))
    a, b = run(noise)
    assert np.abs(a - b).max() > 0.1


# What does not fit.


@pytest.mark.parametrize(
    ("tower", "text"),
    [
        (MAIN.but(embed_width=0), "tower generator.*width 24.*have 12.*embed_width"),
        (MAIN.but(embed_width=10), "tower generator.*width 10.*have 12.*embed_width"),
        (MAIN.but(vocab_size=49), "tower generator.*vocab_size=49.*they have 50"),
        (MAIN.but(vocab_multiple=64), "tower generator.*64 rows.*stored with 56"),
    ],
)
def test_tables_that_do_not_fit(tower: Arch, text: str):
    with pytest.raises(InputError, match=text):
        param_shapes(MAIN, heads=BOTH, towers=(("generator", tower),))


def test_unknown_names():
    model, params = Model(MAIN, towers=TOWERS), drawn_params(MAIN, towers=TOWERS)
    ask = partial(model.apply, {"params": params}, random_tokens(MAIN, 1, 4))
    with pytest.raises(InputError, match="'generater'.*Valid: generator, main"):
        ask(tower="generater")
    with pytest.raises(InputError, match=f"'mlm'.*Valid: {', '.join(sorted(HEADS))}"):
        ask(heads=("mlm",))
    with pytest.raises(
        InputError, match="'states'.*Valid: attentions, hidden, k, query, v"
    ):
        ask(capture=("states",))


def test_heads_of_unknown_towers():
    text = "unknown tower of head 'generater/lm'.*Valid: generator, main"
    with pytest.raises(InputError, match=text):
        param_shapes(MAIN, heads=("rtd", "generater/lm"), towers=TOWERS)
