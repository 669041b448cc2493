"""The window kernel: equal to its dense definition, and at linear cost.

The definition is what runs when attentions are captured: [S, S] scores of every pair,
with those that are not visible taken out.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.convert.engine import flatten, unflatten
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, param_shapes
from bert_jax.models.tokens import Tokens, counted, plain
from tests.models.made import (
    LONGFORMER,
    QUICK,
    TINY,
    assert_same_gradients,
    assert_same_outputs,
    drawn_params,
    probe,
    quick_jit,
    random_tokens,
)

B = 3
ARCH = TINY.but(**LONGFORMER)  # 4 on each side, 4 slots


@lru_cache
def computed(arch: Arch, capture: tuple[str, ...]):
    """(params, tokens) -> outputs, and gradients of parameters and of vectors."""
    model = Model(arch)

    @quick_jit
    def compute(params, tokens):
        vectors = jnp.asarray(params["embed"]["token"])[tokens.ids]

        def total(params, vectors):
            given = tokens.replace(vectors=vectors)
            out = model.apply({"params": params}, given, capture=("hidden", *capture))
            weights = probe(out["last"].shape) / out["last"].size
            return (out["last"] * weights).sum(), out["hidden"]

        by = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
        (_, hidden), (inside, outside) = by(params, vectors)
        return {"hidden": hidden}, inside | {"vectors": outside}

    return compute


def assert_kernel_is_definition(tokens: Tokens, arch: Arch = ARCH) -> dict:
    """Outputs and gradients, of padding too; the gradients are returned."""
    params = drawn_params(arch)
    (ours, our_gradients), (theirs, their_gradients) = (
        computed(arch, capture)(params, tokens) for capture in ((), ("attentions",))
    )
    assert_same_outputs(ours, theirs)
    assert_same_gradients(our_gradients, their_gradients)
    return our_gradients


def reaches(*rows: list[int], length: int = 22) -> np.ndarray:
    """1 at the places of each row."""
    reach = np.zeros((len(rows), length), np.int32)
    for row, places in zip(reach, rows, strict=True):
        row[places] = 1
    return reach


# 22 tokens are no multiple of 4. The tokens at 3 and 4 stand at the edge of a block.
REACH = {
    "none": reaches([], [], []),
    "first": reaches([0], [0], [0]),
    "several": reaches([0, 1, 2], [3, 4, 21], [7, 12, 13]),
    "different": reaches([], [0, 9], [20]),
    "full": reaches([0, 1, 2, 3], [0, 5, 11, 21], [18, 19, 20, 21]),
    "too-many": reaches([0, 1, 2, 3, 9, 20], [0, 5, 11, 12, 21], [18]),
}


@pytest.mark.parametrize("name", REACH)
def test_global_tokens(name: str):
    assert_kernel_is_definition(random_tokens(ARCH, B, 22, reach=REACH[name]))


def test_no_word_of_global_tokens():
    tokens = random_tokens(ARCH, B, 22)
    assert tokens.reach is None
    gradients = assert_kernel_is_definition(tokens)
    for name, leaf in flatten(gradients["stack"]).items():
        assert np.any(leaf) == ("_global" not in name), name


@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("name", ["none", "different", "several"])
def test_padding(side: str, name: str):
    real = np.ones((B, 22), bool)
    if side in ("right", "both"):
        real[0, 15:] = real[1, 22:] = real[2, 6:] = False
    if side in ("left", "both"):
        real[0, :5] = real[1, :1] = False
        real[2, :16] = side == "both" and real[2, :16]
    reach = REACH[name] * real
    tokens = random_tokens(ARCH, B, 22, group=real, reach=reach)
    assert_kernel_is_definition(tokens.replace(positions=counted(real)))


def test_a_row_of_padding():
    real = np.ones((B, 22), bool)
    real[1] = False
    tokens = random_tokens(ARCH, B, 22, group=real, reach=REACH["several"])
    assert_kernel_is_definition(tokens)


def test_padding_that_reaches():
    """A global token that is not there takes a slot, and is not seen in it."""
    real = np.arange(22) < 12
    tokens = random_tokens(ARCH, B, 22, group=real, reach=REACH["several"])
    assert_kernel_is_definition(tokens)


@pytest.mark.parametrize("name", ["none", "several", "full"])
def test_packed_rows(name: str):
    """Two examples, with positions of their own: tokens of both that have the same
    position are far apart, and those beside each other are strangers."""
    group = np.array([[1] * 9 + [2] * 13, [1] * 4 + [2] * 12 + [0] * 6, [1] * 22])
    positions = np.zeros((B, 22), int)
    for b, i in np.ndindex(B, 22):
        positions[b, i] = (group[b, :i] == group[b, i]).sum()
    reach = REACH[name] * (group > 0)
    tokens = random_tokens(ARCH, B, 22, group=group, positions=positions, reach=reach)
    assert_kernel_is_definition(tokens)


def test_an_order_within_the_window():
    tokens = random_tokens(ARCH, B, 22, rank=np.arange(22), reach=REACH["several"])
    assert_kernel_is_definition(tokens)


# 3: less than half a window; 5: less than one; 12: three blocks and no rest.
@pytest.mark.parametrize("length", [3, 5, 12])
def test_lengths(length: int):
    places = [place for place in (0, 2, 7) if place < length]
    reach = reaches(places, [], [length - 1], length=length)
    tokens = random_tokens(ARCH, B, length, reach=reach)
    assert_kernel_is_definition(tokens, ARCH.but(layers=1))


def test_the_kernel_is_not_the_definition_run_twice():
    """They are told apart: a window one token wider is seen by the comparison."""
    params = drawn_params(ARCH)
    tokens = random_tokens(ARCH, B, 22, reach=REACH["several"])
    ours, _ = computed(ARCH, ())(params, tokens)
    theirs, _ = computed(ARCH.but(window=10), ("attentions",))(params, tokens)
    with pytest.raises(AssertionError, match="hidden"):
        assert_same_outputs(ours, theirs)


def as_dense(params: dict) -> dict:
    """Parameters of full attention: without those of global tokens."""
    flat = flatten(params)
    return unflatten({n: leaf for n, leaf in flat.items() if "_global" not in n})


def with_equal_projections(params: dict) -> dict:
    flat = flatten(params)
    return unflatten({n: flat[n.replace("_global", "")] for n in flat})


@pytest.mark.parametrize("name", ["none", "several", "full"])
def test_a_wide_window_is_full_attention(name: str):
    """w >= 2 S, and global tokens that ask like any other."""
    arch = ARCH.but(window=44)
    params = with_equal_projections(drawn_params(arch))
    tokens = random_tokens(arch, B, 22, reach=REACH[name])
    ours, our_gradients = computed(arch, ())(params, tokens)
    dense = arch.but(attention="dense")
    theirs, their_gradients = computed(dense, ())(as_dense(params), tokens)
    assert_same_outputs(ours, theirs)
    # What a projection and its twin hear adds up to what the one of them would.
    flat = flatten(our_gradients)
    added = {
        n: leaf + flat.get(twin(n), 0) for n, leaf in flat.items() if "_global" not in n
    }
    assert_same_gradients(unflatten(added), their_gradients)


def twin(name: str) -> str:
    """attention/q/kernel -> attention/q_global/kernel"""
    part, _, kind = name.rpartition("/")
    return f"{part}_global/{kind}"


def test_global_tokens_ask_through_their_own_projections():
    """q, k, v_global change the rows of global tokens alone, in one layer."""
    arch = ARCH.but(layers=1)
    params = drawn_params(arch)
    tokens = random_tokens(arch, B, 22, reach=REACH["several"])
    compute = computed(arch, ())
    before, gradients = compute(params, tokens)
    for part in ("q_global", "k_global", "v_global"):
        assert np.abs(gradients["stack"]["layers"]["attention"][part]["kernel"]).max()
    other = flatten(params)
    other = unflatten({n: x + 0.3 * ("_global" in n) for n, x in other.items()})
    after, _ = compute(other, tokens)
    change = np.abs(before["hidden"] - after["hidden"])[-1].max(-1)
    np.testing.assert_array_equal(change > 1e-4, REACH["several"] > 0)


def test_probabilities_sum_to_one():
    model, params = Model(ARCH), drawn_params(ARCH)
    tokens = random_tokens(ARCH, B, 22, reach=REACH["several"])
    found = quick_jit(
        lambda: model.apply({"params": params}, tokens, capture=("attentions",))
    )()["attentions"]
    assert found.shape == (2, B, 2, 22, 22)
    np.testing.assert_allclose(found.sum(-1), 1.0, atol=1e-5)
    near = np.abs(np.arange(22)[:, None] - np.arange(22)) <= 4
    reach = REACH["several"] > 0
    may = near | reach[:, :, None] | reach[:, None, :]
    np.testing.assert_array_equal(np.asarray(found > 0).any((0, 2)), may)


# Cost, as the compiler tells it; nothing is run.

LENGTHS = (1024, 2048, 4096, 8192)
# Four rows: below some size of an array the compiler chooses otherwise, once.
COST = Arch(
    vocab_size=16,
    vocab_multiple=1,
    width=8,
    layers=1,
    heads=1,
    inner=8,
    max_positions=max(LENGTHS),
    window=64,
    global_slots=4,
)


def cost(arch: Arch, length: int, what: str) -> dict[str, float]:
    model, params = Model(arch), param_shapes(arch, heads=())

    def tokens():
        rows = plain(jnp.zeros((4, length), jnp.int32))
        return rows.replace(reach=jnp.zeros_like(rows.ids))

    def forward(params, tokens):
        return model.apply({"params": params}, tokens)["last"].sum()

    run = jax.jit(forward if what == "forward" else jax.grad(forward))
    lowered = run.lower(params, jax.eval_shape(tokens))
    compiled = lowered.compile(compiler_options=QUICK)
    return {
        "flops": compiled.cost_analysis()["flops"],
        "bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def growth(arch: Arch, what: str) -> dict[str, np.ndarray]:
    """How many times more each doubling of the length costs."""
    costs = [cost(arch, length, what) for length in LENGTHS]
    found = {name: np.array([each[name] for each in costs]) for name in costs[0]}
    return {name: values[1:] / values[:-1] for name, values in found.items()}


@pytest.mark.parametrize("what", ["forward", "gradient"])
def test_the_cost_is_linear(what: str):
    times = growth(COST.but(attention="window"), what)
    for name in ("flops", "bytes"):
        assert (times[name] <= 2.2).all(), (name, times[name])


@pytest.mark.parametrize("what", ["forward", "gradient"])
def test_the_cost_of_dense_attention_is_not(what: str):
    times = growth(COST.but(attention="dense"), what)
    for name in ("flops", "bytes"):
        assert (times[name] > 3.5).all(), (name, times[name])
