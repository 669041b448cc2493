"""The model computes what transformers computes: outputs, loss and every gradient.

The tolerances are those of `reference`: 1e-5 for outputs, 1e-4 for gradients, in f32.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.convert.engine import flatten, unflatten
from bert_jax.models.arch import Arch
from bert_jax.models.dropout import Noise
from bert_jax.models.model import Model, init_params
from bert_jax.optim import OPTIMIZERS, Optim, make_optimizer, path_name
from bert_jax.step import TrainState, make_train_step
from tests.reference import (
    GRADIENT,
    HEADS,
    OUTPUT,
    QUICK,
    SHARP,
    Rows,
    compare,
    compare_gradients,
    excess,
    failures,
    fresh_params,
    objective_of,
    our_results,
    ours_from,
    random_rows,
    reference_model,
    their_results,
    theirs_from,
)

ODD = Arch(
    vocab_size=1013, width=96, heads=3, inner=200, max_positions=77, types=3, layers=2
)
SMALL = ODD.but(vocab_size=211, layers=1, width=48, inner=80, max_positions=40)

# name: arch, lengths of the rows, S, side of the padding
CASES = {
    "3-heads": (ODD, [24, 17, 9, 24], 24, "right"),
    "tanh": (
        ODD.but(activation="gelu_tanh", norm_eps=1e-5, layers=3),
        [31, 31, 5],
        31,
        "right",
    ),
    "relu": (
        ODD.but(activation="relu", norm_eps=1e-7, layers=1, inner=96),
        [12, 19],
        19,
        "right",
    ),
    "4-layers": (
        ODD.but(layers=4, width=60, heads=5, inner=301, types=1),
        [24, 11, 20],
        24,
        "right",
    ),
    "1-head": (
        ODD.but(vocab_size=131, width=33, heads=1, inner=17, types=4, layers=1),
        [2, 77],
        77,
        "right",
    ),
    "left": (
        ODD.but(layers=2, norm_eps=1e-5, activation="gelu_tanh", inner=777),
        [9, 24, 16],
        24,
        "left",
    ),
    "scan": (ODD.but(layers=4, stack="scan", norm_eps=1e-7), [20, 13], 20, "right"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, record_property):
    arch, lengths, S, side = CASES[name]
    model = reference_model(arch)
    rows = random_rows(arch, lengths, S, side=side)
    theirs = their_results(model, rows)
    # The reference is what it says: padded on that side, and attention is sharp
    # even in a full row.
    assert (rows.real[:, 0].all(), rows.real[:, -1].all()) == (
        (True, False) if side == "right" else (False, True)
    )
    full = lengths.index(S)
    assert (theirs["outputs"]["attentions"][:, full].max((1, 2, 3)) > SHARP).all()
    for tensor in model.parameters():
        assert tensor.std() > 0.01  # no bias is 0, no norm is 1

    ours = our_results(arch, ours_from(model, arch), rows.batch())
    found = compare(arch, ours, theirs, rows)
    # loss, pooler, nsp, lm; hidden; attentions; 16 tensors a layer, 14 elsewhere
    assert len(found) == 4 + (arch.layers + 1) + arch.layers + 16 * arch.layers + 14
    for kind in ("hidden", "attentions", "lm", "nsp", "pooler", "loss", "gradient"):
        worst = max(value for name, value in found.items() if name.startswith(kind))
        record_property(kind, worst)
        print(f"{name}: {kind} at {worst:.3f} of the tolerance")  # shown by -s
    assert not failures(found)


# Planted errors. Each must be seen, and the same comparison without it must pass.


@pytest.fixture(scope="module")
def planted():
    """A reference, our parameters, a batch, and a function that compares."""
    model = reference_model(SMALL)
    rows = random_rows(SMALL, [20, 14, 20], 20)
    theirs = their_results(model, rows)
    params = ours_from(model, SMALL)

    def found(arch=SMALL, params=params, **changes) -> dict[str, float]:
        ours = our_results(arch, params, rows.batch() | changes)
        return failures(compare(arch, ours, theirs, rows))

    assert not found()
    return found, params, rows


def changed(params: dict, name: str, change) -> dict:
    flat = flatten(params)
    assert name in flat
    return unflatten(flat | {name: change(flat[name])})


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param((SMALL.head_size / SMALL.width) ** 0.5, id="width-not-head-size"),
        pytest.param(SMALL.head_size**0.5, id="none"),
        pytest.param(1.001, id="a-thousandth"),
    ],
)
def test_sees_another_attention_scale(planted, scale: float):
    found, params, _ = planted
    for part in ("kernel", "bias"):
        name = f"stack/layers/attention/q/{part}"
        params = changed(params, name, lambda leaf: leaf * np.float32(scale))
    assert found(params=params)


@pytest.mark.parametrize("eps", [1e-6, 1e-5])  # the defaults of flax and of torch
def test_sees_another_epsilon(planted, eps: float):
    found, _, _ = planted
    assert found(SMALL.but(norm_eps=eps))


@pytest.mark.parametrize("activation", ["gelu_tanh", "relu"])
def test_sees_another_activation(planted, activation: str):
    found, _, _ = planted
    assert found(SMALL.but(activation=activation))


# All but the keys' bias: it adds the same to every score of a query, so that no
# output and no gradient depends on it.
BIASES = [
    "embed/norm/bias",
    "lm/bias",
    "lm/dense/bias",
    "lm/norm/bias",
    "nsp/dense/bias",
    "pooler/dense/bias",
    "stack/layers/attention/o/bias",
    "stack/layers/attention/q/bias",
    "stack/layers/attention/v/bias",
    "stack/layers/attention_norm/bias",
    "stack/layers/ffn/inner/bias",
    "stack/layers/ffn/outer/bias",
    "stack/layers/ffn_norm/bias",
]


def test_the_list_of_biases_is_whole(planted):
    _, params, _ = planted
    there = {name for name in flatten(params) if name.endswith("bias")}
    assert there - set(BIASES) == {"stack/layers/attention/k/bias"}


@pytest.mark.parametrize("name", BIASES)
def test_sees_a_bias_left_out(planted, name: str):
    found, params, _ = planted
    assert found(params=changed(params, name, np.zeros_like))


@pytest.mark.parametrize(
    "name", ["embed/norm/scale", "stack/layers/ffn_norm/scale", "lm/norm/scale"]
)
def test_sees_a_norm_scale_left_out(planted, name: str):
    found, params, _ = planted
    assert found(params=changed(params, name, np.ones_like))


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_sees_a_transpose_left_out(planted, name: str):
    found, params, _ = planted
    name = f"stack/layers/attention/{name}/kernel"
    assert found(params=changed(params, name, lambda leaf: leaf.swapaxes(1, 2)))


def test_sees_positions_that_start_at_one(planted):
    found, _, rows = planted
    assert found(positions=rows.positions + 1)


def test_sees_shifted_types(planted):
    found, _, rows = planted
    assert found(types=(rows.types + 1) % SMALL.types)


def test_sees_padding_that_is_seen(planted):
    found, _, rows = planted
    assert found(group=np.ones_like(rows.ids))


def test_sees_one_target_changed(planted):
    found, _, rows = planted
    targets = rows.targets.copy()
    targets[1, 0] = (targets[1, 0] + 1) % SMALL.vocab_size
    failed = found(targets=targets)
    assert "loss" in failed
    assert "lm" not in failed


# Packing.


def packed(rows: Rows, layout: list[list[int]], length: int) -> tuple[dict, list]:
    """Examples of `rows` several to a row, and (row, start, length) of each."""
    B, S, G = len(layout), length, max(map(len, layout))
    P = rows.where.shape[1] * G
    whole = {name: np.zeros((B, S), np.int32) for name in ("ids", "types")}
    whole |= {name: np.zeros((B, S), np.int32) for name in ("positions", "group")}
    first, pairs = np.zeros((B, G), np.int32), np.full((B, G), -1, np.int32)
    where, targets = np.zeros((B, P), np.int32), np.zeros((B, P), np.int32)
    weights = np.zeros((B, P), np.float32)
    places = [()] * len(rows.ids)
    for row, examples in enumerate(layout):
        start = slot = 0
        for number, example in enumerate(examples):
            size = int(rows.real[example].sum())
            there = slice(start, start + size)
            whole["ids"][row, there] = rows.ids[example, :size]
            whole["types"][row, there] = rows.types[example, :size]
            whole["positions"][row, there] = np.arange(size)
            whole["group"][row, there] = number + 1
            first[row, number] = start
            pairs[row, number] = rows.next_sentence[example, 0]
            for i in np.flatnonzero(rows.weights[example]):
                where[row, slot] = start + rows.where[example, i]
                targets[row, slot] = rows.targets[example, i]
                weights[row, slot] = 1
                slot += 1
            places[example] = (row, start, size, number)
            start += size
    loss = dict(where=where, targets=targets, weights=weights, next_sentence=pairs)
    return {**whole, "first": first, **loss}, places


@pytest.fixture(scope="module")
def pack():
    model = reference_model(ODD, seed=3)
    rows = random_rows(ODD, [9, 13, 7, 16, 12], 16, seed=3)
    theirs = their_results(model, rows)
    params = ours_from(model, ODD)

    def found(change=lambda batch: batch) -> dict[str, float]:
        """Differences between packed rows of ours and single ones of theirs."""
        batch, places = packed(rows, [[2, 0, 1], [4, 3]], 32)
        ours = our_results(ODD, params, change(batch))
        a, b = ours["outputs"], theirs["outputs"]
        result = {"loss": excess(a["loss"], b["loss"], **OUTPUT)}
        for example, (row, start, length, number) in enumerate(places):
            there = (row, slice(start, start + length))
            V = ODD.vocab_size
            pairs = {
                "hidden": (a["hidden"][:, *there], b["hidden"][:, example, :length]),
                "lm": (a["lm"][there][:, :V], b["lm"][example, :length]),
                "pooler": (a["pooler"][row, number], b["pooler"][example]),
                "nsp": (a["nsp"][row, number], b["nsp"][example]),
            }
            for name, pair in pairs.items():
                result[f"{name} of example {example}"] = excess(*pair, **OUTPUT)
        gradients = compare_gradients(ODD, ours["gradients"], theirs["gradients"])
        return failures(result | gradients)

    return found


def test_packed_rows_equal_single_ones(pack):
    assert not pack()


def test_sees_packed_examples_that_see_each_other(pack):
    def one_group(batch):
        return batch | {"group": np.minimum(batch["group"], 1)}

    assert pack(one_group)


def test_sees_packed_positions_that_run_on(pack):
    def run_on(batch):
        S = batch["ids"].shape[1]
        return batch | {"positions": np.broadcast_to(np.arange(S), (2, S))}

    assert pack(run_on)


# Padding.


def test_padding_is_zero_and_changes_nothing():
    model = reference_model(SMALL, seed=5)
    params = ours_from(model, SMALL)
    short = random_rows(SMALL, [20, 14, 1], 20)
    B, extra = 4, 13
    batch = short.batch()
    tight = our_results(SMALL, params, batch)
    # Thirteen more columns of padding, and a row that is nothing else.
    wide = {name: np.pad(value, ((0, 1), (0, 0))) for name, value in batch.items()}
    wide["next_sentence"][-1] = -1
    for name in ("ids", "types", "positions", "group"):
        wide[name] = np.pad(wide[name], ((0, 0), (0, extra)))
    loose = our_results(SMALL, params, wide)

    a, b = loose["outputs"], tight["outputs"]
    assert a["hidden"].shape == (2, B, 20 + extra, SMALL.width)
    for name in ("hidden", "attentions", "last", "pooler", "nsp", "loss"):
        assert np.isfinite(a[name]).all(), name
    assert np.isfinite(a["lm"][..., : SMALL.vocab_size]).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(loose["gradients"]))
    # Padding sees nothing and is seen by nothing.
    seen = a["attentions"][0].swapaxes(1, 2)  # [B, S_q, H, S_k]
    real = wide["group"] > 0
    np.testing.assert_array_equal(seen[~real], 0.0)
    np.testing.assert_array_equal(seen.swapaxes(1, 3)[~real], 0.0)
    np.testing.assert_allclose(seen[real].sum(-1), 1.0, atol=1e-6)

    close = dict(rtol=0, atol=1e-6)
    there = short.real
    for name in ("last", "lm"):
        V = SMALL.vocab_size if name == "lm" else None
        np.testing.assert_allclose(
            a[name][:3, :20][there][:, :V], b[name][there][:, :V], **close
        )
    np.testing.assert_allclose(a["nsp"][:3], b["nsp"], **close)
    np.testing.assert_allclose(a["loss"], b["loss"], **close)
    for name, leaf in flatten(loose["gradients"]).items():
        other = flatten(tight["gradients"])[name]
        allowed = dict(relative=1e-6, floor=0.0, absolute=1e-7)
        assert excess(leaf, other, **allowed) <= 1, name


# Ways of running that must not change the result.

RUNS = [
    ("scan", "none", "on"),
    ("scan:2", "none", "on"),
    ("loop", "dots", "on"),
    ("loop", "full", "on"),
    ("scan", "dots", "on"),
    ("loop", "kept", "on"),
    ("scan", "kept", "on"),
    ("scan:2", "full", "on"),
    ("scan", "none", "off"),
]


@pytest.fixture(scope="module")
def runs():
    arch = ODD.but(layers=4, width=48, inner=80, vocab_size=211)
    params = ours_from(reference_model(arch, seed=7), arch)
    rows = random_rows(arch, [16, 11], 16)
    noise = Noise.of(jax.random.key(3), jnp.arange(2))

    def run(stack: str, remat: str, noise):
        return our_results(
            arch.but(stack=stack, remat=remat), params, rows.batch(), noise=noise
        )

    return run, noise, {bool(n): run("loop", "none", n) for n in (None, noise)}


@pytest.mark.parametrize(("stack", "remat", "dropout"), RUNS)
def test_stack_and_remat_change_nothing(runs, stack: str, remat: str, dropout: str):
    run, noise, plain_runs = runs
    plain = plain_runs[dropout == "on"]
    other = run(stack, remat, noise if dropout == "on" else None)
    for name in ("hidden", "attentions", "pooler", "nsp", "loss"):
        a, b = other["outputs"][name], plain["outputs"][name]
        assert excess(a, b, relative=1e-6, floor=1.0, absolute=0.0) <= 1, name
    for name, leaf in flatten(other["gradients"]).items():
        there = flatten(plain["gradients"])[name]
        assert excess(leaf, there, relative=1e-6, floor=0.0, absolute=1e-7) <= 1, name


def test_dropout_changes_every_layer(runs):
    _, _, plain = runs
    for n in range(5):
        a, b = (plain[on]["outputs"]["hidden"][n] for on in (True, False))
        assert np.abs(a - b).max() > 0.1


def test_half_precision_is_close():
    """bf16 keeps 8 bits: 1 in 256 for each operation, 5 % after two layers."""
    model = reference_model(ODD)
    rows = random_rows(ODD, [24, 17], 24)
    params = ours_from(model, ODD)
    exact, half = (
        our_results(ODD, params, rows.batch(), dtype=dtype)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    a, b = half["outputs"], exact["outputs"]
    assert a["last"].dtype == jnp.bfloat16
    assert a["lm"].dtype == a["attentions"].dtype == a["nsp"].dtype == np.float32
    V = ODD.vocab_size
    for x, y in (
        (a["last"][rows.real], b["last"][rows.real]),
        (a["lm"][rows.real][:, :V], b["lm"][rows.real][:, :V]),
        (a["nsp"], b["nsp"]),
    ):
        x, y = np.asarray(x, np.float32), np.asarray(y)
        assert 0 < np.abs(x - y).max() < 0.05 * np.abs(y).max()
    assert abs(a["loss"] / b["loss"] - 1) < 0.01
    for leaf in jax.tree.leaves(half["gradients"]):
        assert leaf.dtype == np.float32
    x, y = (
        np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(side["gradients"])])
        for side in (half, exact)
    )
    assert x @ y / np.linalg.norm(x) / np.linalg.norm(y) > 0.99


def test_parameters_are_f32_in_half_precision():
    model = Model(SMALL, dtype=jnp.bfloat16)
    params = jax.eval_shape(partial(init_params, model, heads=HEADS), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


# Surplus rows of the vocabulary.

MULTIPLES = {1: 1100, 128: 1152, 1024: 2048}
WORDS = SMALL.but(vocab_size=1100)


@pytest.mark.parametrize("multiple", [128, 1024])
def test_vocabulary_padding_changes_nothing(multiple: int):
    model = reference_model(WORDS)
    rows = random_rows(WORDS, [20, 14], 20)
    results = {}
    for m in (1, multiple):
        arch = WORDS.but(vocab_multiple=m)
        assert arch.padded_vocab == MULTIPLES[m]
        params = ours_from(model, arch)
        assert len(params["embed"]["token"]) == len(params["lm"]["bias"])
        assert len(params["lm"]["bias"]) == MULTIPLES[m]
        ours = our_results(arch, params, rows.batch())
        surplus = slice(1100, None)
        assert (ours["outputs"]["lm"][..., surplus] == -np.inf).all()
        for leaf in (
            ours["gradients"]["embed"]["token"],
            ours["gradients"]["lm"]["bias"],
        ):
            np.testing.assert_array_equal(leaf[surplus], 0.0)
        results[m] = ours["outputs"]["loss"], theirs_from(ours["gradients"], arch)
    (loss, gradients), (plain_loss, plain_gradients) = results[multiple], results[1]
    assert excess(loss, plain_loss, relative=1e-6, floor=1.0, absolute=0.0) <= 1
    for name, leaf in gradients.items():
        allowed = dict(relative=1e-6, floor=0.0, absolute=1e-7)
        assert excess(leaf, plain_gradients[name], **allowed) <= 1, name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_surplus_rows_stay_zero_in_training(name: str):
    arch = WORDS.but(dropout=0.0)
    model, objective = Model(arch), objective_of(arch)
    start = params = fresh_params(arch)
    for leaf in (start["embed"]["token"], start["lm"]["bias"]):
        assert leaf.shape[0] == 1152
        np.testing.assert_array_equal(leaf[1100:], 0.0)
    assert np.abs(start["embed"]["token"][:1100]).max(1).min() > 0
    optimizer = make_optimizer(Optim(name=name, lr=0.1, warmup=0), 10, params)
    step = make_train_step(model, objective, optimizer)
    step = jax.jit(step, compiler_options=QUICK)
    rows = random_rows(arch, [20, 14], 20)
    state = TrainState(jnp.int32(0), params, optimizer.init(params), jnp.uint32(0))
    for _ in range(2):
        state, _ = step(state, rows.batch())
    end = jax.device_get(state.params)
    for leaf in (end["embed"]["token"], end["lm"]["bias"]):
        np.testing.assert_array_equal(leaf[1100:], 0.0)
    moments = jax.tree_util.tree_leaves_with_path(state.opt_state)
    tables = [leaf for path, leaf in moments if path_name(path).endswith("embed/token")]
    tables = [table for table in tables if table.ndim and len(table) == 1152]
    assert len(tables) == (1 if name == "adafactor" else 2)
    for table in tables:  # adafactor adds 1e-30 to every square
        assert np.abs(table[1100:]).max() <= (1e-29 if name == "adafactor" else 0.0)
    # and the other rows did move, by the decay at least
    moved = np.abs(end["embed"]["token"] - start["embed"]["token"]).max(1)
    assert moved[:1100].min() > 0


def test_a_gradient_that_is_lost_is_seen():
    """The gradient of a tied table is the sum of both uses; half of it must fail."""
    model = reference_model(SMALL)
    rows = random_rows(SMALL, [20, 14], 20)
    theirs = their_results(model, rows)
    ours = our_results(SMALL, ours_from(model, SMALL), rows.batch())
    name = "bert.embeddings.word_embeddings.weight"
    gradient = theirs_from(ours["gradients"], SMALL)[name].copy()
    assert excess(gradient, theirs["gradients"][name], **GRADIENT) <= 1
    used = np.unique(rows.ids[rows.real])
    unused = np.setdiff1d(np.arange(SMALL.vocab_size), used)
    assert np.abs(gradient[unused]).max() > 0  # through the head
    gradient[unused] = 0
    assert excess(gradient, theirs["gradients"][name], **GRADIENT) > 1
