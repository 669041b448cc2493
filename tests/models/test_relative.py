"""Flash attention with relative positions and types: equal to dense attention."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.models.arch import Arch
from bert_jax.models.attention import attend
from bert_jax.models.dropout import Noise
from bert_jax.models.flash import attend_flash
from bert_jax.models.model import Model
from bert_jax.models.positions import type_scores, xl_scores
from bert_jax.models.relative import Relative, slide, unslide
from bert_jax.models.slots import Slots
from bert_jax.models.tokens import BELOW_ALL, Tokens, memory_of, visible
from bert_jax.objectives.permuted_lm import PermutedLM
from bert_jax.sharding import Axes, make_mesh, replicated
from bert_jax.tpu import CHIPS
from tests.models.made import (
    TINY,
    TRANSFORMER_XL,
    XLNET,
    assert_same_gradients,
    assert_same_outputs,
    drawn_params,
    probe,
    quick_jit,
    random_tokens,
)
from tests.models.test_flash import (
    BLOCK,
    FLASH,
    RAGGED,
    B,
    assert_close,
    packed,
    permuted,
    tokens_of,
)
from tests.test_sharding import SCANNED, Trained, assert_same
from tests.tpu import run_for_tpu

H, K = 2, 16
NOISE = Noise.of(jax.random.key(7), jnp.asarray([3, 1000]))


class Case:
    """Queries that are the last tokens of those that answer, or some of them."""

    def __init__(self, here: Tokens, there: Tokens | None = None, where=None):
        self.here, self.where, self.strict = here, where, where is not None
        join = partial(jax.tree.map, partial(jnp.append, axis=1))
        self.keys = here if there is None else join(there, here)

    @property
    def asking(self) -> Tokens:
        return self.here if self.where is None else self.here.at(self.where)

    @property
    def weights(self) -> np.ndarray:
        """Of what the queries get: nothing of slots that are not the first of theirs,
        which may share what the first gets."""
        if self.where is None:
            return np.ones(self.here.ids.shape)
        return np.stack(
            [
                [list(row).index(at) == n for n, at in enumerate(row)]
                for row in self.where
            ]
        ).astype(float)


def before(length: int = 60) -> Tokens:
    """Of which the first are not there."""
    return tokens_of(length, rank=BELOW_ALL, group=np.arange(length) >= 20)


def asked(length: int, filled: int, empty: int) -> tuple[Tokens, jax.Array]:
    """XLNet's: predictions ask, and slots that none is in stand at place 0."""
    tokens = tokens_of(length, rank=permuted(length))
    where = np.stack([np.flatnonzero(row >= 0)[:filled] for row in tokens.rank])
    where[0, 0] = 0  # where one asks, too
    return tokens, jnp.asarray(np.pad(where, ((0, 0), (0, empty))))


def stream_case(length: int = 200, there: Tokens | None = None) -> Case:
    here, where = asked(length, length // 8, 6)
    return Case(here, there, where)


CASES = {
    "bidirectional": lambda: Case(tokens_of(200, group=RAGGED)),
    "causal": lambda: Case(tokens_of(200, rank=np.arange(200))),
    "memory": lambda: Case(tokens_of(150, rank=np.arange(150)), before()),
    "long-memory": lambda: Case(tokens_of(7, rank=np.arange(7)), before(250)),
    "permuted": lambda: Case(tokens_of(200, rank=permuted(200))),
    "packed": lambda: Case(tokens_of(200, **packed(70, 1, 60, 50))),
    "query-stream": stream_case,
    "query-stream-memory": lambda: stream_case(150, before()),
    "query-stream-short": lambda: stream_case(40),
    "unseeing": lambda: Case(
        tokens_of(150, group=[[0] * 150, [1] * 150], rank=np.arange(150)),
        None,
        jnp.asarray([[3, 60, 149], [0, 60, 149]]),
    ),
    "one-token": lambda: Case(tokens_of(1)),
    "seven": lambda: Case(tokens_of(7, group=np.arange(7) < 6)),
    "a-block-and-one": lambda: Case(tokens_of(129, rank=np.arange(129))),
}


def states(case: Case, heads: int = H, size: int = K, dtype=jnp.float32) -> dict:
    """Of everything that has a gradient; attention is sharp."""
    draw, rows = np.random.default_rng(0).normal, len(case.here.ids)
    keys, row = case.keys.ids.shape[1], case.here.ids.shape[1]
    each = {"q": (rows, case.asking.ids.shape[1]), "k": (rows, keys), "v": (rows, keys)}
    each |= {"r": (keys + row,), "u": (), "bias": (), "s": (), "t": (2,)}
    return {
        name: jnp.asarray(draw(size=(*shape, heads, size)), dtype)
        for name, shape in each.items()
    }


def dense(case: Case, *, types: bool, **options):
    seen = visible(case.asking, case.keys, strict=case.strict)
    differs = case.asking.types[:, :, None] != case.keys.types[:, None, :]

    def run(q, k, v, r, u, bias, s, t):
        added = xl_scores(q, k, r, (u, bias), where=case.where)
        if types:
            added += type_scores(q, (s, t), differs=differs)
        return attend(q, k, v, visible=seen, bias=added, **options)[0]

    return run


def flash(case: Case, *, types: bool, **options):
    slots, asking = None, case.here
    if case.where is not None:
        slots = Slots.of(case.where, length=case.here.ids.shape[1])
        asking = slots.asking(asking)
    asking = asking.replace(rank=asking.rank - case.strict)
    who = dict(asking=asking, answering=case.keys, slots=slots)

    def run(q, k, v, r, u, bias, s, t):
        relative = Relative.of(r, (u, bias), (s, t) if types else None)
        given = dict(relative=relative, block=BLOCK) | options
        return attend_flash(q, k, v, **who, **given)

    return run


def with_gradients(kernel, case: Case, given: dict) -> dict:
    out_shape = given["q"].shape
    weights = probe(out_shape) * case.weights[:, :, None, None]

    @quick_jit
    def run(given):
        def total(given):
            out = kernel(**given).astype(jnp.float32)
            return (out * weights).sum(), out * (weights != 0)

        (_, out), gradients = jax.value_and_grad(total, has_aux=True)(given)
        return {"out": out} | gradients

    return run(given)


@pytest.mark.parametrize("types", [True, False])
@pytest.mark.parametrize(
    ("name", "rate"),
    [("bidirectional", 0.0), ("query-stream", 0.0), *((name, 0.3) for name in CASES)],
)
def test_it_is_dense_attention(name: str, rate: float, types: bool):
    case = CASES[name]()
    options = {"rate": rate, "noise": NOISE, "types": types}
    given = states(case)
    ours = with_gradients(flash(case, **options), case, given)
    theirs = with_gradients(dense(case, **options), case, given)
    assert_close(ours, theirs)
    assert all(np.any(theirs[name]) for name in ("r", "u", "bias")) or name in (
        "one-token",
        "seven",
    )
    assert np.any(theirs["t"]) == (types and name != "one-token")


def test_an_error_would_be_seen(monkeypatch):
    """One distance more, types the other way round, slots counted by place."""
    case = stream_case()
    options = {"rate": 0.3, "noise": NOISE, "types": True}
    given = states(case)
    right = with_gradients(dense(case, **options), case, given)
    for wrong in (
        given | {"r": jnp.roll(given["r"], 1, axis=0)},
        given | {"t": given["t"][::-1]},
    ):
        with pytest.raises(AssertionError):
            assert_close(with_gradients(flash(case, **options), case, wrong), right)
    length = case.here.ids.shape[1]
    slots = Slots.of(case.where, length=length)
    places = jnp.broadcast_to(jnp.arange(length), slots.number.shape)
    monkeypatch.setattr(Slots, "put", lambda _, x, put=slots.put: put(x))
    monkeypatch.setattr(Slots, "of", lambda *_, **__: slots.replace(number=places))
    with pytest.raises(AssertionError):
        assert_close(with_gradients(flash(case, **options), case, given), right)


@pytest.mark.parametrize(("heads", "size"), [(4, 64), (3, 64), (2, 13)])
def test_heads_of_any_size(heads: int, size: int):
    case = Case(tokens_of(150), before())
    given = states(case, heads, size)
    options = {"rate": 0.1, "noise": NOISE, "types": True}
    ours = with_gradients(flash(case, **options), case, given)
    assert_close(ours, with_gradients(dense(case, **options), case, given))


@pytest.mark.parametrize("name", ["memory", "query-stream"])
def test_long_rows_are_asked_in_parts(name: str, monkeypatch):
    monkeypatch.setattr("bert_jax.models.flash.QUERIES", 128)
    case = CASES[name]()
    given = states(case)
    options = {"rate": 0.3, "noise": NOISE, "types": True}
    ours = with_gradients(flash(case, **options), case, given)
    assert_close(ours, with_gradients(dense(case, **options), case, given))


def test_blocks_of_several_tiles():
    """Of 512 queries, and as many keys, by 128."""
    case = Case(tokens_of(520, rank=permuted(520)), before())
    given = states(case)
    options = {"rate": 0.1, "noise": NOISE, "types": True}
    ours = with_gradients(flash(case, **options, block=512), case, given)
    assert_close(ours, with_gradients(dense(case, **options), case, given))


def test_bfloat16():
    """As near to the exact result as dense attention of the same inputs."""
    case = CASES["memory"]()
    options = {"rate": 0.1, "noise": NOISE, "types": True}
    given = states(case, dtype=jnp.bfloat16)
    ours = with_gradients(flash(case, **options), case, given)
    theirs = with_gradients(dense(case, **options), case, given)
    wide = {name: x.astype(jnp.float32) for name, x in given.items()}
    exact = with_gradients(dense(case, **options), case, wide)
    for name, x in exact.items():
        assert ours[name].dtype == theirs[name].dtype
        a, b = (np.abs(y[name].astype(np.float32) - x).max() for y in (ours, theirs))
        assert a <= 1.5 * b, (name, a, b)


@pytest.mark.parametrize("name", ["packed", "memory", "query-stream"])
def test_nothing_leaks(name: str):
    """Gradients by keys and values that a query must not see are zero to the bit."""
    case = CASES[name]()
    given = states(case)
    kernel = flash(case, types=True)
    seen = np.asarray(visible(case.asking, case.keys, strict=case.strict))
    weights = probe(given["q"].shape)

    @quick_jit
    def by_keys(which):
        picked = weights * (jnp.arange(weights.shape[1]) == which)[:, None, None]
        rest = {name: x for name, x in given.items() if name not in "kv"}
        total = lambda k, v: (kernel(k=k, v=v, **rest) * picked).sum()  # noqa: E731
        return jax.grad(total, argnums=(0, 1))(given["k"], given["v"])

    for which in (1, weights.shape[1] // 3):
        for gradient in by_keys(which):
            reached = np.any(gradient, axis=(2, 3))
            np.testing.assert_array_equal(reached & ~seen[:, which], False)
        np.testing.assert_array_equal(reached, seen[:, which])  # by values


def test_nothing_seen_is_zero():
    case = CASES["unseeing"]()
    found = with_gradients(flash(case, types=True), case, states(case))
    assert not np.any(found["out"][0])
    assert not np.any(found["q"][1, 0])
    assert all(np.isfinite(x).all() for x in found.values())


@pytest.mark.parametrize("width", [128, 384])
def test_slide(width: int):
    x = probe((128, width + 128))
    expected = np.stack([row[128 - i :][:width] for i, row in enumerate(x)])
    np.testing.assert_array_equal(slide(jnp.asarray(x)), expected)
    back = jax.vjp(slide, jnp.asarray(x))[1](expected)[0]
    np.testing.assert_array_equal(unslide(jnp.asarray(expected)), back)


def test_slots():
    where = jnp.asarray([[4, 1, 4, 0], [0, 0, 2, 3]])
    slots = Slots.of(where, length=6)
    x = jnp.asarray(probe((2, 4, 3)))
    row = slots.put(x)
    expected = np.zeros((2, 6, 3))
    expected[0, [4, 1, 0]] = x[0, [0, 1, 3]]
    expected[1, [0, 2, 3]] = x[1, [0, 2, 3]]
    np.testing.assert_array_equal(row, expected)
    np.testing.assert_array_equal(
        slots.take(row), np.stack([row[n][at] for n, at in enumerate(where)])
    )
    np.testing.assert_array_equal(slots.number[0, [4, 1, 0]], [0, 1, 3])
    group = slots.asking(random_tokens(TINY, 2, 6)).group
    np.testing.assert_array_equal(group, [[1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("rows", "heads", "axes"),
    [(4, 2, Axes(data=2, fsdp=2, tensor=2)), (2, 3, Axes(data=4, tensor=2))],
)
def test_on_a_mesh(rows: int, heads: int, axes: Axes):
    """What all rows add up to is that of all devices."""
    mesh = make_mesh(axes)
    case = Case(random_tokens(TINY, rows, 40, rank=np.arange(40)))
    given = states(case, heads)
    noise = Noise.of(jax.random.key(7), jnp.arange(rows))
    options = {"rate": 0.3, "noise": noise, "types": True}
    theirs = with_gradients(dense(case, **options), case, given)
    placed = jax.device_put(given, replicated(mesh))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        ours = with_gradients(flash(case, **options), case, placed)
    assert ours["out"].sharding.num_devices == 8
    assert_close(ours, theirs)


# The whole model.

MEMBERS = {
    "xlnet-loop": TINY.but(**XLNET),
    "xlnet-scan": TINY.but(**XLNET, stack="scan", remat="kept"),
    "transformer-xl": TINY.but(**TRANSFORMER_XL, position_biases="shared"),
    "clipped": TINY.but(**XLNET, max_distance=9, stack="scan"),
}


def memory(arch: Arch, length: int = 21):
    shape = (arch.layers, B, length, arch.width)
    group = np.broadcast_to(np.arange(length) >= 4, shape[1:3])
    return memory_of(jnp.asarray(probe(shape)), jnp.asarray(group, jnp.int32))


@lru_cache
def trained(arch: Arch, dropout: bool, remembers: bool):
    model = Model(arch)
    past = memory(arch) if remembers else None
    where = jnp.asarray([[3, 8, 9, 20, 36, 0], [0, 5, 11, 12, 30, 31]])
    asks = arch.streams == 2
    asked = dict(where=where, streams=2) if asks else {}

    @quick_jit
    def compute(params, tokens):
        noise = Noise.of(jax.random.key(5), jnp.arange(B)) if dropout else None

        def total(params):
            captured = ("hidden",) + (("query",) if asks else ())
            out = model.apply(
                {"params": params},
                tokens,
                heads=("lm",),
                capture=captured,
                noise=noise,
                memory=past,
                **asked,
            )
            lm = out["lm"][..., : arch.vocab_size]
            loss = (lm * probe(lm.shape)).sum() / lm.size
            return loss, {name: out[name] for name in captured}

        (loss, states), gradients = jax.value_and_grad(total, has_aux=True)(params)
        return {"loss": loss} | states, gradients

    return compute


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", MEMBERS)
def test_a_model(name: str, dropout: bool, remembers: bool):
    """Loss, states of both streams and gradients. No slot is empty: see below."""
    arch = MEMBERS[name]
    params = drawn_params(arch, heads=("lm",))
    fields = {"rank": permuted(37)} if arch.streams == 2 else {}
    tokens = tokens_of(37, group=[1] * 20 + [2] * 12 + [0] * 5, **fields)
    theirs = trained(arch, dropout, remembers)(params, tokens)
    ours = trained(arch.but(**FLASH), dropout, remembers)(params, tokens)
    assert_same_outputs(ours[0], theirs[0])
    assert_same_gradients(ours[1], theirs[1])


def test_empty_slots_get_what_their_place_gets():
    """Without dropout that is what dense attention gives them."""
    arch = MEMBERS["xlnet-scan"]
    params = drawn_params(arch, heads=("lm",))
    tokens = tokens_of(37, rank=permuted(37))
    where = jnp.asarray([[3, 8, 0, 0, 0], [0, 5, 11, 0, 0]])
    asked = dict(capture=("query",), where=where, streams=2)
    ours, theirs = (
        quick_jit(partial(Model(one).apply, **asked))({"params": params}, tokens)
        for one in (arch.but(**FLASH), arch)
    )
    assert_same_outputs(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [Axes(), Axes(data=2, fsdp=2, tensor=2)])
def test_a_mesh_trains_as_one_device(axes: Axes):
    """Loss and parameters, with dropout and memory, as dense attention on one."""
    objective = PermutedLM((0, 1, 2, 3, 4), memory=8)
    arch = SCANNED.but(**XLNET)
    assert arch.attention_dropout == 0.1
    one = Trained(objective, arch, devices=jax.devices()[:1], steps=3)
    assert_same(one, Trained(objective, arch.but(**FLASH), axes, steps=3))


# For TPUs.

PROGRAM = """
import json
import jax
import jax.numpy as jnp
from bert_jax.hlo import Program
from bert_jax.models.dropout import Noise
from bert_jax.models.flash import attend_flash
from bert_jax.models.relative import Relative
from bert_jax.models.slots import Slots
from bert_jax.models.tokens import plain
from bert_jax.sharding import Axes, make_mesh, replicated
from bert_jax.tpu import Topology

jax.config.update("jax_enable_compilation_cache", False)  # it cannot be read for TPUs

def cost(topology, row, memory, asked, rows=4, heads=12, size=64):
    mesh, keys = make_mesh(Axes(), topology.devices()), row + memory

    def loss(q, k, v, r, learned, ids, where, seed):
        answering = plain(ids, real=ids > 0)
        asking, slots = jax.tree.map(lambda x: x[:, memory:], answering), None
        if asked:
            slots = Slots.of(where, length=row)
            asking = slots.asking(asking)
        out = attend_flash(
            *(q, k, v),
            asking=asking,
            answering=answering,
            relative=Relative(r, learned),
            slots=slots,
            rate=0.1,
            noise=Noise(seed, jnp.arange(rows, dtype=jnp.uint32)),
        )
        return (out.astype(jnp.float32) ** 2).sum()

    def array(kind, *shape):
        return jax.ShapeDtypeStruct(shape, kind, sharding=replicated(mesh))

    lengths = (asked or row, keys, keys)
    states = [array(jnp.bfloat16, rows, length, heads, size) for length in lengths]
    states += [array(jnp.bfloat16, keys + row, heads, size)]
    states += [array(jnp.float32, 5, heads, size)]
    rest = array(jnp.int32, rows, keys), array(jnp.int32, rows, asked or row)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))
        done = run.lower(*states, *rest, array(jnp.uint32, 2)).compile()
    program = Program(done.as_text())
    kernels = [one.instruction.kernel for one in program.executed()]
    square = f"{row},{keys}]"
    return {
        "bytes": done.memory_analysis().temp_size_in_bytes,
        "kernels": [kernel.name for kernel in kernels if kernel],
        "square": square in program.text,
    }
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHIPS)
def test_memory_on_tpus(kind: str):
    """Forward and backward compile, rows in parts, too, and no array is quadratic."""
    shape = "x".join("1" * CHIPS[kind].dimensions)
    program = f"""
topology = Topology.parse("{kind}:{shape}")
shapes = (128, 384, 21), (128, 384, 0), (512, 384, 85), (2048, 0, 0), (4096, 0, 0)
print(json.dumps([cost(topology, *shape) for shape in shapes]))
"""
    found = run_for_tpu(PROGRAM + program)
    for one, parts in zip(found, (1, 1, 1, 1, 4), strict=True):
        kernels = sorted(one["kernels"])
        assert kernels == ["flash_backward"] * parts + ["flash_forward"] * parts
        assert not one["square"]
    # Four rows of 12 heads of 64: 6 KB a token in bf16, for each of what is put
    # together from four parts.
    assert found[-1]["bytes"] <= 12 * 6144 * 4096, found
