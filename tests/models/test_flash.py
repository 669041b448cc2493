"""Flash attention: equal to dense attention, and in linear memory.

Here its kernel is run by JAX's interpreter of Pallas; for TPUs it is compiled
(test_memory_on_tpus), but none has run it.
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.convert.tables import LAYOUTS
from bert_jax.errors import InputError
from bert_jax.flops import step_flops
from bert_jax.generate import go_on
from bert_jax.models.arch import Arch
from bert_jax.models.attention import attend
from bert_jax.models.dropout import Noise
from bert_jax.models.flash import FLASH_FROM, XL_FROM, attend_flash, takes_flash
from bert_jax.models.model import Model
from bert_jax.models.tokens import Tokens, visible
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.sharding import Axes, make_mesh, replicated
from bert_jax.tpu import CHIPS
from tests.models.made import (
    GPT2,
    NEZHA,
    TINY,
    XL,
    assert_same_gradients,
    assert_same_outputs,
    drawn_params,
    probe,
    quick_jit,
    random_tokens,
)
from tests.test_sharding import ARCH, Trained, assert_same
from tests.tpu import run_for_tpu

B, H, K = 2, 2, 16
BLOCK = 128  # so that a row of 200 has two


def tokens_of(length: int, **fields) -> Tokens:
    return random_tokens(TINY, B, length, **fields)


def packed(*lengths: int) -> dict:
    """Examples of these lengths in a row, and padding up to 200."""
    group = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    rest = (0, 200 - len(group))
    return {"group": np.pad(group, rest), "positions": np.pad(positions, rest)}


def permuted(length: int) -> np.ndarray:
    """XLNet's ranks: words that are not predicted have -1."""
    rng = np.random.default_rng(1)
    order = np.stack([rng.permutation(length) for _ in range(B)])
    return np.where(rng.random((B, length)) < 0.6, -1, order)


def case(queries: Tokens, keys: Tokens | None = None, **options):
    return queries, queries if keys is None else keys, options


def memory_case():
    """More keys than queries: 60 of another text, 40 of which are there, come first."""
    here = tokens_of(150, rank=np.arange(150))
    there = tokens_of(60, rank=-(2**30), group=np.arange(60) >= 20)
    return case(here, jax.tree.map(partial(jnp.append, axis=1), there, here))


def stream_case():
    """XLNet's query stream: predictions ask, and see what comes before them only."""
    tokens = tokens_of(200, rank=permuted(200))
    where = np.stack([np.flatnonzero(row >= 0)[:50] for row in tokens.rank])
    return case(tokens.at(jnp.asarray(where)), tokens, strict=True)


def unseeing_case():
    """One row is padding; in the other nobody has a smaller rank than the first."""
    group = np.array([[0] * 150, [1] * 150])
    return case(tokens_of(150, group=group, rank=np.arange(150)), strict=True)


RAGGED = np.arange(200) < np.array([[200], [130]])
HALF = np.arange(200) < np.array([[200], [100]])  # a block of it is padding
CASES = {
    "bidirectional": lambda: case(tokens_of(200, group=RAGGED)),
    "causal": lambda: case(tokens_of(200, group=HALF, rank=np.arange(200))),
    "backward": lambda: case(tokens_of(200, group=RAGGED, rank=-np.arange(200))),
    "prefix": lambda: case(
        tokens_of(200, rank=np.maximum(0, np.arange(200) - [[50], [140]]))
    ),
    "permuted": lambda: case(tokens_of(200, rank=permuted(200))),
    "query-stream": stream_case,
    "packed": lambda: case(tokens_of(200, **packed(70, 1, 60, 50))),
    "packed-causal": lambda: case(
        tokens_of(200, **packed(130, 66), rank=np.arange(200))
    ),
    "memory": memory_case,
    "window": lambda: case(tokens_of(200, group=RAGGED), window=20),
    "packed-window": lambda: case(tokens_of(200, **packed(90, 80)), window=60),
    "unseeing": unseeing_case,
    "one-token": lambda: case(tokens_of(1)),
    "seven": lambda: case(tokens_of(7, group=np.arange(7) < 6)),
    "a-block-and-one": lambda: case(tokens_of(129, rank=np.arange(129))),
}


def states(queries: Tokens, keys: Tokens, dtype=jnp.float32, heads=H, size=K):
    """q, k, v and weights of a sum over what comes out; attention is sharp."""
    lengths = [queries.ids.shape[1], *[keys.ids.shape[1]] * 2, queries.ids.shape[1]]
    draw = np.random.default_rng(0).normal
    shapes = ((queries.ids.shape[0], length, heads, size) for length in lengths)
    return tuple(jnp.asarray(draw(size=shape), dtype) for shape in shapes)


def with_gradients(kernel, q, k, v, weights):
    """What comes out, and the gradients of q, k and v."""

    @quick_jit
    def run(q, k, v):
        def total(*states):
            out = kernel(*states)
            return (out.astype(jnp.float32) * weights).sum(), out

        by = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
        (_, out), gradients = by(q, k, v)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))

    return run(q, k, v)


def dense(queries: Tokens, keys: Tokens, *, strict=False, window=None, **options):
    seen = visible(queries, keys, strict=strict, window=window)
    return lambda q, k, v: attend(q, k, v, visible=seen, **options)[0]


def flash(queries: Tokens, keys: Tokens, *, strict=False, **options):
    asking = queries.replace(rank=queries.rank - strict)
    given = dict(asking=asking, answering=keys, block=BLOCK) | options
    return partial(attend_flash, **given)


def assert_close(ours: dict, theirs: dict, limit: float = 1e-5) -> None:
    for name in theirs:
        a, b = (np.asarray(x[name], np.float32) for x in (ours, theirs))
        assert np.isfinite(a).all(), name
        far = np.abs(a - b).max() / max(1, np.abs(b).max())
        assert far <= limit, (name, far)


@pytest.mark.parametrize(
    ("name", "rate"), [("bidirectional", 0.0), *((name, 0.3) for name in CASES)]
)
def test_it_is_dense_attention(name: str, rate: float):
    queries, keys, options = CASES[name]()
    noise = Noise.of(jax.random.key(7), jnp.asarray([3, 1000]))
    options |= {"rate": rate, "noise": noise}
    given = states(queries, keys)
    ours = with_gradients(flash(queries, keys, **options), *given)
    theirs = with_gradients(dense(queries, keys, **options), *given)
    assert_close(ours, theirs)


def test_an_error_would_be_seen():
    """One place at the edge of a window, the bits of another row."""
    queries, keys, options = CASES["packed-causal"]()
    given = states(queries, keys)
    right = with_gradients(dense(queries, keys, **options), *given)
    wrong = with_gradients(flash(queries, keys, **options, window=256), *given)
    with pytest.raises(AssertionError):
        assert_close(wrong, right)
    noise = Noise.of(jax.random.key(7), jnp.asarray([3, 1000]))
    right = with_gradients(dense(queries, keys, rate=0.3, noise=noise), *given)
    other = noise.replace(rows=noise.rows + 1)
    wrong = with_gradients(flash(queries, keys, rate=0.3, noise=other), *given)
    with pytest.raises(AssertionError):
        assert_close(wrong, right)


@pytest.mark.parametrize(("heads", "size"), [(4, 64), (3, 64), (2, 13)])
def test_heads_of_any_size(heads: int, size: int):
    """Four of 64 go through by twos, three of 64 together."""
    queries, keys, _ = CASES["causal"]()
    given = states(queries, keys, heads=heads, size=size)
    noise = Noise.of(jax.random.key(7), jnp.arange(2))
    options = {"rate": 0.1, "noise": noise}
    ours = with_gradients(flash(queries, keys, **options), *given)
    assert_close(ours, with_gradients(dense(queries, keys, **options), *given))


def test_long_rows_are_asked_in_parts(monkeypatch):
    """As those of more than 4096 tokens are."""
    monkeypatch.setattr("bert_jax.models.flash.QUERIES", 128)
    queries, keys, _ = CASES["causal"]()
    given = states(queries, keys)
    options = {"rate": 0.3, "noise": Noise.of(jax.random.key(7), jnp.arange(2))}
    ours = with_gradients(flash(queries, keys, **options), *given)
    assert_close(ours, with_gradients(dense(queries, keys, **options), *given))


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_bfloat16(rate: float):
    """As near to the exact result as dense attention of the same inputs."""
    queries, keys, _ = CASES["causal"]()
    options = {"rate": rate, "noise": Noise.of(jax.random.key(7), jnp.arange(2))}
    given = states(queries, keys, jnp.bfloat16)
    ours = with_gradients(flash(queries, keys, **options), *given)
    assert {x.dtype for x in ours.values()} == {jnp.dtype(jnp.bfloat16)}
    theirs = with_gradients(dense(queries, keys, **options), *given)
    wide = [x.astype(jnp.float32) for x in given]
    exact = with_gradients(dense(queries, keys, **options), *wide)
    for name, x in exact.items():
        a, b = (np.abs(y[name].astype(np.float32) - x).max() for y in (ours, theirs))
        assert a <= 1.5 * b, (name, a, b)


def test_nothing_seen_is_zero():
    queries, keys, options = CASES["unseeing"]()
    found = with_gradients(flash(queries, keys, **options), *states(queries, keys))
    for name, x in found.items():
        assert not np.any(x[0]), name  # a row of padding
    assert not np.any(found["out"][1, 0])
    assert not np.any(found["dq"][1, 0])
    assert np.all(np.any(found["out"][1, 1:], axis=(1, 2)))


@pytest.mark.parametrize("name", ["packed-causal", "query-stream", "window", "memory"])
def test_nothing_leaks(name: str):
    """The gradient of what a query gets, by keys and values it must not see, is zero to
    the bit; by those it sees, it is not."""
    queries, keys, options = CASES[name]()
    q, k, v, weights = states(queries, keys)
    kernel = flash(queries, keys, **options)
    seen = np.asarray(visible(queries, keys, **options))

    @quick_jit
    def by_keys(asked):
        picked = weights * (jnp.arange(q.shape[1]) == asked)[:, None, None]
        total = lambda k, v: (kernel(q, k, v) * picked).sum()  # noqa: E731
        return jax.grad(total, argnums=(0, 1))(k, v)

    for asked in (0, 31, q.shape[1] - 5):
        for gradient in by_keys(asked):
            reached = np.any(gradient, axis=(2, 3))
            np.testing.assert_array_equal(reached & ~seen[:, asked], False)
        np.testing.assert_array_equal(reached, seen[:, asked])  # by values


# The whole model.

FLASH = {"attention": "flash"}
ORDERS = {
    "packed-loop": (TINY, {"group": [1] * 12 + [2] * 20 + [0] * 5}),
    "causal-remat": (TINY.but(**GPT2, stack="scan", remat="dots"), {}),
}


@lru_cache
def trained(arch: Arch, dropout: bool, capture=()):
    """(params, tokens) -> outputs and gradients of parameters."""
    model = Model(arch)

    @quick_jit
    def compute(params, tokens):
        noise = Noise.of(jax.random.key(5), jnp.arange(B)) if dropout else None

        def total(params):
            asked = dict(heads=("lm",), capture=("hidden", *capture), noise=noise)
            out = model.apply({"params": params}, tokens, **asked)
            lm = out["lm"][..., : arch.vocab_size]
            return (lm * probe(lm.shape)).sum() / lm.size, out["hidden"]

        by = jax.value_and_grad(total, has_aux=True)
        (loss, hidden), gradients = by(params)
        return {"loss": loss, "hidden": hidden}, gradients

    return compute


@pytest.mark.parametrize("name", ORDERS)
def test_a_model(name: str):
    """Loss, states and gradients, with dropout."""
    arch, fields = ORDERS[name]
    params, tokens = drawn_params(arch, heads=("lm",)), tokens_of(37, **fields)
    theirs, their_gradients = trained(arch, True)(params, tokens)
    ours, our_gradients = trained(arch.but(**FLASH), True)(params, tokens)
    assert_same_outputs(ours, theirs)
    assert_same_gradients(our_gradients, their_gradients)


def test_captured_attentions_are_dense():
    params, tokens = drawn_params(TINY), tokens_of(37)

    def run(arch, *capture) -> str:
        """What is computed, traced and no more."""
        asked = dict(capture=capture, mutable=False)
        return str(
            jax.make_jaxpr(partial(Model(arch).apply, **asked))(
                {"params": params}, tokens
            )
        )

    assert "pallas_call" in run(TINY.but(**FLASH))
    assert run(TINY.but(**FLASH), "attentions") == run(TINY, "attentions")


def test_it_writes_what_dense_attention_writes():
    """Texts of several lengths; keys and values of before are memory."""
    arch = TINY.but(**GPT2, lm_head="bare", stack="scan")
    params = drawn_params(arch, heads=("lm",))
    prompts = [[7, 9, 30], [5, 6, 8, 11, 13]]
    ours, theirs = (
        go_on(one, params, prompts, length=6) for one in (arch.but(**FLASH), arch)
    )
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "heads", "axes"),
    [(4, 2, Axes(data=2, fsdp=2, tensor=2)), (2, 3, Axes(data=4, tensor=2))],
)
def test_on_a_mesh(rows: int, heads: int, axes: Axes):
    """Each device has its rows and heads, or all where they do not divide."""
    mesh = make_mesh(axes)
    queries = random_tokens(TINY, rows, 40, rank=np.arange(40))
    given = states(queries, queries, heads=heads)
    noise = Noise.of(jax.random.key(7), jnp.arange(rows))
    options = {"rate": 0.3, "noise": noise}
    theirs = with_gradients(dense(queries, queries, **options), *given)
    placed = jax.device_put(given, replicated(mesh))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        ours = with_gradients(flash(queries, queries, **options), *placed)
    assert ours["out"].sharding.num_devices == 8
    assert_close(ours, theirs)


@pytest.mark.slow
def test_a_mesh_trains_as_one_device():
    """Loss and parameters, with dropout, as dense attention on one device."""
    objective, arch = MaskedLM(300, 4, (0, 1, 2, 3, 4)), ARCH.but(stack="scan")
    assert arch.attention_dropout == 0.1
    one = Trained(objective, arch, devices=jax.devices()[:1], steps=3)
    axes = Axes(data=2, fsdp=2, tensor=2)
    many = Trained(objective, arch.but(**FLASH), axes, steps=3)
    assert_same(one, many)


# The choice.


def test_what_auto_chooses(monkeypatch):
    def chosen(length: int, **fields) -> bool:
        return takes_flash(TINY.but(**fields), length=length, keys=length)

    auto = {"attention": "auto"}
    assert chosen(1, **FLASH)
    assert not chosen(2**20)
    assert not chosen(2**20, **auto)  # here is no TPU
    monkeypatch.setattr("bert_jax.models.flash.on_tpu", lambda: True)
    assert chosen(FLASH_FROM, **auto)
    assert not chosen(FLASH_FROM - 1, **auto)
    assert not chosen(2**20, **auto, **NEZHA)
    assert not chosen(XL_FROM, **auto, **XL)  # its heads do not fill the lanes
    wide = TINY.but(**auto, **XL, width=128, heads=2)
    assert takes_flash(wide, length=XL_FROM, keys=XL_FROM)
    assert not takes_flash(wide, length=XL_FROM - 1, keys=XL_FROM)
    assert takes_flash(wide, length=512, keys=4608)
    assert not takes_flash(wide, length=512, keys=4609)
    assert not chosen(2**20)


def test_positions_that_it_has_not():
    with pytest.raises(InputError, match="='flash' needs 'learned' or 'xl', not arch"):
        TINY.but(**FLASH, **NEZHA)
    assert TINY.but(attention="auto", **NEZHA)


@pytest.mark.parametrize("attention", ["flash", "auto"])
def test_it_is_no_other_member(attention: str):
    """To a config.json, and in the FLOPs that are counted."""
    arch = TINY.but(attention=attention)
    assert LAYOUTS["bert"].to_config(arch) == LAYOUTS["bert"].to_config(TINY)
    objective = MaskedLM(50, 4, (0, 1, 2, 3, 4))
    counted = (
        step_flops(Model(one), objective, batch=2, length=32) for one in (arch, TINY)
    )
    assert len({*counted}) == 1


# For TPUs.

PROGRAM = """
import json
import jax
import jax.numpy as jnp
from bert_jax.estimate import estimate
from bert_jax.hlo import Program
from bert_jax.models.attention import attend
from bert_jax.models.dropout import Noise
from bert_jax.models.flash import attend_flash
from bert_jax.models.tokens import plain, visible
from bert_jax.sharding import Axes, make_mesh, replicated
from bert_jax.tpu import Topology

jax.config.update("jax_enable_compilation_cache", False)  # it cannot be read for TPUs

def cost(topology, length, kernel, rows=4, heads=12, size=64):
    mesh = make_mesh(Axes(), topology.devices())

    def loss(q, k, v, ids, seed):
        tokens = plain(ids, real=ids > 0)
        noise = Noise(seed, jnp.arange(rows, dtype=jnp.uint32))
        given = dict(rate=0.1, noise=noise)
        if kernel == "flash":
            out = attend_flash(q, k, v, asking=tokens, answering=tokens, **given)
        else:
            out, _ = attend(q, k, v, visible=visible(tokens, tokens), **given)
        return (out.astype(jnp.float32) ** 2).sum()

    def arrays(shape, kind):
        return jax.ShapeDtypeStruct(shape, kind, sharding=replicated(mesh))

    states = [arrays((rows, length, heads, size), jnp.bfloat16)] * 3
    ids, seed = arrays((rows, length), jnp.int32), arrays((2,), jnp.uint32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        compiled = run.lower(*states, ids, seed).compile()
    program = Program(compiled.as_text())
    kernels = [one.instruction.kernel for one in program.executed()]
    found = estimate(program, topology.chip, dict(mesh.shape))
    square = f"{length},{length}]"
    return {
        "bytes": compiled.memory_analysis().temp_size_in_bytes,
        "kernels": [kernel.name for kernel in kernels if kernel],
        "modelled": found.modelled,
        "square": square in program.text,
    }
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHIPS)
def test_memory_on_tpus(kind: str):
    """Forward and backward compile, and what they need grows with the length."""
    shape = "x".join("1" * CHIPS[kind].dimensions)
    program = f"""
topology = Topology.parse("{kind}:{shape}")
lengths = (512, 1024, 2048, 4096)
flash = [cost(topology, length, "flash") for length in lengths]
print(json.dumps([flash, cost(topology, 2048, "dense")]))
"""
    flash, dense = run_for_tpu(PROGRAM + program)
    for one in flash:
        assert one["kernels"] == ["flash_forward", "flash_backward"]
        assert not one["square"]
        assert one["modelled"]["flash_forward"] > 0
        assert one["modelled"]["flash_backward"] > one["modelled"]["flash_forward"]
    sizes = np.array([one["bytes"] for one in flash])
    # Four rows of 12 heads of 64: 6 KB a token in bf16; less if it stays on the chip.
    assert (sizes <= 8 * 6144 * np.array([512, 1024, 2048, 4096])).all(), sizes
    assert dense["square"]
    assert dense["bytes"] > 10 * sizes[2]
