"""The one step: the same on one device and on eight, repeatable, and without talk."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from bert_jax.convert.engine import flatten
from bert_jax.data.similar import make_similar
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, init_params
from bert_jax.objectives.base import Mean, Terms, loss_of
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.permuted_lm import PermutedLM
from bert_jax.objectives.replaced_token import ReplacedToken
from bert_jax.objectives.sentence_reordering import SentenceReordering
from bert_jax.objectives.unilm import UniLM
from bert_jax.optim import Optim, make_optimizer
from bert_jax.spikes import FEWEST, WINDOW, nothing_known
from bert_jax.step import TrainState, make_train_step, row_keys
from tests.models.made import XLNET
from tests.reference import collectives_in, fresh_params, shardings
from tests.tpu import run_for_tpu

# Less is optimised, in half of the time. (parity.QUICK also fuses otherwise, and then
# a step whose buffers are donated rounds otherwise, too.)
QUICK = {"xla_backend_optimization_level": 0}

ARCH = Arch(vocab_size=300, width=48, layers=2, heads=3, inner=96, max_positions=32)
B, S = 16, 24
DEVICE = SingleDeviceSharding(jax.devices()[0])


def make_batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of 4 to 24 tokens, so that devices hold different numbers of them."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, ARCH.vocab_size, (B, S)).astype(np.int32)
    lengths = np.linspace(4, S, B).astype(int)
    real = np.arange(S) < lengths[:, None]
    ids = np.where(real, ids, 0).astype(np.int32)
    ids[:, 0] = 2
    return {
        "ids": ids,
        "types": (np.arange(S) > 8).astype(np.int32) * np.ones_like(ids),
        "positions": np.arange(S, dtype=np.int32) * np.ones_like(ids),
        "group": real.astype(np.int32),
        "first": np.zeros((B, 1), np.int32),
        "next_sentence": rng.integers(0, 2, (B, 1)).astype(np.int32),
        "row_id": np.arange(B, dtype=np.int32),
    }


class Run:
    """The step, jitted, and the state it starts from."""

    def __init__(self, arch: Arch = ARCH, *, donate: bool = False, dtype=jnp.float32):
        objective = MaskedLM(arch.vocab_size, 4, (0, 1, 2, 3, 4))
        params = fresh_params(arch)
        optimizer = make_optimizer(Optim(lr=1e-3, warmup=0), 100, params)
        one = jnp.int32(0), params, optimizer.init(params), jnp.uint32(7)
        self.state = jax.device_get(TrainState(*one))
        step = make_train_step(Model(arch, dtype=dtype), objective, optimizer)
        given = (0,) if donate else ()
        self.step = jax.jit(step, donate_argnums=given, compiler_options=QUICK)

    def compiled(self, state_place, batch_place):
        state = jax.device_put(self.state, state_place)
        batch = jax.device_put(make_batch(), batch_place)
        return self.step.lower(state, batch).compile()

    def steps(self, count: int, step, state_place, batch_place, *, batches: int = 3):
        """State and losses after that many steps, on so many batches in turn."""
        state = jax.device_put(self.state, state_place)
        losses = []
        for number in range(count):
            batch = jax.device_put(make_batch(number % batches), batch_place)
            state, means = step(state, batch)
            losses.append(float(means["loss"].value))
        return state, losses


@pytest.fixture(scope="module")
def run() -> Run:
    return Run()


@pytest.fixture(scope="module")
def single(run: Run):
    return run.steps(3, run.step, DEVICE, DEVICE)


@pytest.fixture(scope="module")
def on_eight(run: Run):
    """The step compiled for eight devices."""
    return run.compiled(*shardings())


def test_eight_devices_equal_one(run: Run, single, on_eight):
    assert ARCH.dropout == ARCH.attention_dropout == 0.1
    one, losses = single
    many, their_losses = run.steps(3, on_eight, *shardings())
    assert len(jax.tree.leaves(many.params)[0].sharding.device_set) == 8
    np.testing.assert_allclose(losses, their_losses, rtol=1e-5)
    for a, b in zip(
        jax.tree.leaves(one.params), jax.tree.leaves(many.params), strict=True
    ):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-5)
    # They did move, far more than that.
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), one.params, run.state.params)
    assert np.median(jax.tree.leaves(moved)) > 1e-3


def test_dropout_is_on_and_differs_by_step(run: Run, single):
    """The same parameters and batch at another step give another loss."""
    state, batch = jax.device_put((run.state, make_batch()), DEVICE)
    one = run.step(state, batch)[1]["loss"].value
    two = run.step(state.replace(step=state.step + 1), batch)[1]["loss"].value
    three = run.step(state.replace(seed=state.seed + 1), batch)[1]["loss"].value
    assert float(one) == single[1][0]
    assert len({float(one), float(two), float(three)}) == 3


def test_only_gradients_are_sent(on_eight):
    text = on_eight.as_text()
    assert "num_partitions=8" in text
    assert set(collectives_in(text)) == {"all-reduce"}


def test_same_twice_bit_for_bit(run: Run, single):
    again, losses = run.steps(3, run.step, DEVICE, DEVICE)
    assert losses == single[1]
    jax.tree.map(np.testing.assert_array_equal, again, single[0])


def test_stopping_in_between_changes_nothing(run: Run, single):
    """Two steps, the state to the host and back, then the third."""
    state, _ = run.steps(2, run.step, DEVICE, DEVICE)
    state, batch = jax.device_put((jax.device_get(state), make_batch(2)), DEVICE)
    state, _ = run.step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, state, single[0])


def test_the_state_may_be_donated(single):
    donating = Run(donate=True)
    given = jax.device_put(donating.state, DEVICE)
    state, _ = donating.step(given, jax.device_put(make_batch(0), DEVICE))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given.params))
    for number in (1, 2):
        state, _ = donating.step(state, jax.device_put(make_batch(number), DEVICE))
    jax.tree.map(np.testing.assert_array_equal, state.params, single[0].params)


def test_bfloat16_computes_and_float32_keeps(run: Run):
    """Twenty steps in which the loss falls by a tenth, within 1 % of each other."""
    runs = {jnp.float32: run, jnp.bfloat16: Run(dtype=jnp.bfloat16)}
    losses = {}
    for dtype, its in runs.items():
        state, losses[dtype] = its.steps(20, its.step, DEVICE, DEVICE, batches=2)
        for leaf in jax.tree.leaves((state.params, state.opt_state)):
            counts = leaf.ndim == 0 and leaf.dtype == jnp.int32
            assert counts or leaf.dtype == jnp.float32
    exact, half = losses.values()
    np.testing.assert_allclose(half, exact, rtol=0.01)
    assert all(a != b for a, b in zip(exact, half, strict=True))
    assert exact[-1] < 0.95 * exact[0]


def test_what_a_step_reports(run: Run):
    batch = make_batch()
    state, means = run.step(*jax.device_put((run.state, batch), DEVICE))
    assert int(state.step) == 1
    assert int(state.seed) == 7
    real = (batch["group"] > 0).mean()
    assert float(means["real_tokens"].value) == pytest.approx(real)
    lengths = (batch["group"] > 0).sum(1)
    predicted = sum(max(1, round(0.15 * int(n))) for n in lengths)
    assert float(means["masked_lm_loss"].count) == predicted
    assert float(means["next_sentence_loss"].count) == B
    parts = means["masked_lm_loss"].value + means["next_sentence_loss"].value
    assert float(means["loss"].value) == pytest.approx(float(parts))
    assert float(means["grad_norm"].value) > 0


# A TPU's compiler, without a TPU.

ROWS, LENGTH, CHIPS = 32, 128, 4
# Compiles the step of bert-tiny for four chips and prints what its text holds.
PROGRAM = f"""
import json, re
from functools import partial
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from bert_jax.models.model import Model, param_shapes
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.optim import Optim, make_optimizer
from bert_jax.presets import preset
from bert_jax.step import TrainState, make_train_step
from tests.reference import collectives_in, shardings

topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
whole, split = shardings(topology.devices)
arch = preset("bert-tiny").arch
objective = MaskedLM(arch.vocab_size, 103, (0, 100, 101, 102, 103))
params = param_shapes(arch, heads=objective.heads)
optimizer = make_optimizer(Optim(), 100, params)
number = jax.ShapeDtypeStruct((), jnp.int32)
seed = jax.ShapeDtypeStruct((), jnp.uint32)
state = TrainState(number, params, jax.eval_shape(optimizer.init, params), seed)
row = jax.ShapeDtypeStruct(({ROWS}, {LENGTH}), jnp.int32)
one = jax.ShapeDtypeStruct(({ROWS}, 1), jnp.int32)
batch = dict.fromkeys(("ids", "types", "positions", "group"), row)
batch |= dict.fromkeys(("first", "next_sentence"), one)

def place(tree, sharding):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )

step = make_train_step(Model(arch, dtype=jnp.bfloat16), objective, optimizer)
jitted = jax.jit(step, donate_argnums=0)
compiled = jitted.lower(place(state, whole), place(batch, split)).compile()
text = compiled.as_text()
print(json.dumps({{
    "partitions": re.search(r"num_partitions=(\\d+)", text).group(1),
    "collectives": collectives_in(text),
    "generators": re.findall(r"= (.*?) rng-bit-generator\\(", text),
    "unsigned": sorted(set(re.findall(r"\\bu32\\[([\\d,]+)\\]", text))),
    "flops": compiled.cost_analysis()["flops"],
}}))
"""


@pytest.fixture(scope="module")
def tpu() -> dict:
    return run_for_tpu(PROGRAM)


def test_tpu_chips_send_only_sums(tpu: dict):
    assert tpu["partitions"] == str(CHIPS)
    assert set(tpu["collectives"]) == {"all-reduce"}


def size(shape: str) -> int:
    return int(np.prod([int(part) for part in shape.split(",")]))


def test_tpu_chips_draw_only_for_their_own_rows(tpu: dict):
    """The largest random array is of attention: local rows x H x S x S."""
    assert not tpu["generators"]
    local = ROWS // CHIPS * 2 * LENGTH * LENGTH
    sizes = [size(shape) for shape in tpu["unsigned"]]
    assert max(sizes) <= local
    # The bits of dropout are in there: the check is not empty.
    assert max(sizes) >= LENGTH * 128


WHOLE = MaskedLM(300, 4, (0, 1, 2, 3, 4), choose="word", boundary=0.5)
FOUND = ReplacedToken(300, 4, (0, 1, 2, 3, 4), generator=0.5)
FORMS = UniLM(300, 4, (0, 1, 2, 3, 4))


def parts_and_whole(objective, make, batch):
    """(parameters, state, means) of a step with the batch whole, and in four parts."""
    arch = ARCH.but(types=6) if objective is FORMS else ARCH
    model = Model(arch, towers=objective.towers(arch))
    params = init_params(model, jax.random.key(1), heads=objective.heads)
    optimizer = make(params)

    def after(accumulate: int):
        step = make_train_step(model, objective, optimizer, accumulate=accumulate)
        state = TrainState(
            *(jnp.int32(3), params, optimizer.init(params)), seed=jnp.uint32(7)
        )
        return jax.jit(step, compiler_options=QUICK)(state, batch)

    return params, after(1), after(4)


def assert_same_gradients(whole: dict, parts: dict):
    """Of each tensor to 1e-6 of its own largest.

    Only a key's bias is measured by the key's kernel: it adds as much to all scores of
    a query, so its gradient is 0, and what is found is how terms as large as the
    kernel's were rounded before they cancelled (1e-12, of 1e-5).
    """
    whole, parts = flatten(whole), flatten(parts)
    assert whole.keys() == parts.keys()
    for name, gradient in whole.items():
        measure = whole[name.replace("attention/k/bias", "attention/k/kernel")]
        size = np.abs(measure).max()
        assert size > 0, name
        np.testing.assert_allclose(
            parts[name], gradient, rtol=0, atol=1e-6 * size, err_msg=name
        )


def uneven_batch() -> dict[str, np.ndarray]:
    """Its four parts hold different numbers of tokens, and so of predictions."""
    batch = make_batch() | {"words": np.cumsum(np.ones((B, S), np.int32), 1)}
    sums = batch["group"].reshape(-1, 4, S).sum((0, 2))
    assert len(set(sums.tolist())) == 4
    return batch


@pytest.mark.parametrize("objective", [WHOLE, FOUND, FORMS], ids=lambda of: of.name)
def test_parts_of_a_batch_add_up_to_the_whole(objective):
    """With dropout on, and parts that hold different numbers of predictions; of pairs,
    too, where these are asked of rows of one form."""
    batch = uneven_batch()
    if objective is FORMS:
        key = jax.random.fold_in(jax.random.key(7), 3)
        keys = row_keys(jax.random.split(key)[0], jnp.arange(B))
        asked = objective.corrupt(keys, batch)["next_sentence"] >= 0
        pairs = asked.reshape(-1, 4).sum(0)
        assert len(set(pairs.tolist())) == 4

    # The gradient as it is: the difference of two parameters is rounded to what their
    # last places are worth (a norm's scale is 1: to 6e-8), which hides small ones.
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, _, params: (jax.tree.map(jnp.negative, grads), grads),
    )
    found = parts_and_whole(objective, lambda _: keep, batch)
    params, (one, means), (four, their_means) = found
    assert means.keys() == their_means.keys()
    if objective is FORMS:
        assert float(means["next_sentence_loss"].count) == pairs.sum() < B
    # What was counted beforehand is what was found.
    found = float(loss_of(objective, means))
    assert float(means["loss"].value) == pytest.approx(found, rel=1e-6)
    for name, mean in means.items():
        theirs = float(their_means[name].value)
        assert theirs == pytest.approx(float(mean.value), rel=1e-6), name
    assert_same_gradients(one.opt_state, four.opt_state)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), one.params, params)
    assert np.median(jax.tree.leaves(moved)) > 1e-3


def test_parts_are_clipped_as_the_whole():
    """By the norm of their sum, once. What Adam makes of the clipped gradient goes
    element by element, so its first moment, a tenth of it, is what is compared."""
    optim = Optim(lr=1e-3, warmup=0, clip=0.1)
    make = lambda params: make_optimizer(optim, 100, params)  # noqa: E731
    objective = MaskedLM(300, 4, (0, 1, 2, 3, 4))
    _, (one, means), (four, _) = parts_and_whole(objective, make, uneven_batch())
    assert float(means["grad_norm"].value) > 10 * optim.clip
    first, theirs = (optax.tree.get(after.opt_state, "mu") for after in (one, four))
    size = float(optax.tree.norm(first))
    assert size == pytest.approx((1 - optim.beta1) * optim.clip, rel=1e-5)
    assert_same_gradients(first, theirs)


PIECES = (300, 4, (0, 1, 2, 3, 4))
TABLE = make_similar(  # words of two pieces
    list(np.arange(5, 85, dtype=np.int32).reshape(40, 2)),
    np.random.default_rng(0).normal(size=(40, 4)),
    names=[str(n) for n in range(40)],
    **dict(tokenizer="0", found_by="spaces", neighbours=10),
)
DRAWN = {
    "token": MaskedLM(*PIECES),
    "word": MaskedLM(*PIECES, choose="word"),
    "ngram": MaskedLM(*PIECES, choose="ngram"),
    "macbert": MaskedLM(*PIECES, choose="macbert"),
    "span": MaskedLM(*PIECES, choose="span"),
    "run": MaskedLM(*PIECES, choose="span", replace="run"),
    "similar": MaskedLM(*PIECES, choose="word", replace="similar", table=TABLE),
    "replaced_token": ReplacedToken(*PIECES, generator=0.5),
    "permuted_lm": PermutedLM(PIECES[-1], partial=3),
    "unilm": UniLM(*PIECES),
    "sentence_reordering": SentenceReordering(),
}


def still(name: str, copies: int = 0):
    """(step, seed, epoch) -> loss, where nothing is dropped and nothing learned: what
    is drawn for a row is all that can change it."""
    objective, two = DRAWN[name], XLNET if name == "permuted_lm" else {}
    arch = ARCH.but(layers=1, types=6, dropout=0.0, attention_dropout=0.0, **two)
    model, optimizer = Model(arch, towers=objective.towers(arch)), optax.sgd(0.0)
    params = init_params(model, jax.random.key(1), heads=objective.heads)
    step = make_train_step(model, objective, optimizer, copies=copies)
    step = jax.jit(step, compiler_options=QUICK)
    batch = make_batch()
    place = np.broadcast_to(np.arange(1, S + 1, dtype=np.int32), (B, S))
    batch["words"] = np.where(batch["ids"] > 4, (place + 1) // 2, 0)
    batch["word_id"] = batch["words"]  # some of the table

    def loss(number: int, seed: int, epoch: int = 0) -> float:
        state = TrainState(
            jnp.int32(number), params, optimizer.init(params), jnp.uint32(seed)
        )
        means = step(state, batch | {"epoch": np.full(B, epoch, np.int32)})[1]
        return float(means[next(iter(objective.weights))].value)

    return loss


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_goes_by_seed_and_step(name: str):
    loss = still(name)
    assert loss(3, 7) == loss(3, 7)
    assert len({loss(3, 7), loss(4, 7), loss(3, 8), loss(7, 3)}) == 4


@pytest.mark.parametrize("name", ["token", "span", "replaced_token", "permuted_lm"])
def test_copies_of_a_row_are_hidden_alike(name: str):
    """RoBERTa's static masking: by (seed, row, epoch % copies), whatever the step."""
    loss = still(name, copies=2)
    first = loss(0, 7, 0)
    assert loss(5, 7, 0) == loss(9, 7, 2) == first
    assert loss(0, 7, 1) == loss(3, 7, 3) != first
    assert loss(0, 8, 0) != first


class Explodes(MaskedLM):
    def terms(self, net, batch, carry=None):
        found = super().terms(net, batch, carry)
        loss = found.means["masked_lm_loss"]
        factor = jnp.where(batch["row_id"][0] == 99, jnp.inf, 1.0)
        changed = Mean(loss.total * factor, loss.count)
        return Terms(found.means | {"masked_lm_loss": changed})


def assert_left_out(before: TrainState, after: TrainState) -> None:
    """Nothing but the step number and the place in the schedule is another."""
    assert int(after.step) == int(before.step) + 1
    assert int(after.seed) == int(before.seed)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    for a, b in zip(before.opt_state, after.opt_state, strict=True):
        if isinstance(a, optax.ScaleByScheduleState):  # the rate goes by the step
            assert int(b.count) == int(a.count) + 1
        else:
            jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_step_without_a_finite_gradient_changes_nothing():
    params = fresh_params(ARCH)
    optimizer = make_optimizer(Optim(lr=1e-3, warmup=0), 100, params)
    objective = Explodes(300, 4, (0, 1, 2, 3, 4))
    step = make_train_step(Model(ARCH), objective, optimizer, nonfinite="skip")
    step = jax.jit(step, compiler_options=QUICK)
    state = TrainState(jnp.int32(0), params, optimizer.init(params), jnp.uint32(7))
    bad = make_batch() | {"row_id": np.full(B, 99, np.int32)}
    after, means = step(state, bad)
    assert_left_out(state, after)
    assert float(means["skipped"].total) == 1.0
    assert float(means["loss"].count) == 0.0
    after, means = step(after, make_batch())
    assert float(means["skipped"].total) == 0.0
    assert np.isfinite(float(means["loss"].value))


def known(*lanes: tuple[int, float]) -> np.ndarray:
    """What a state remembers: so many times the same loss, of each lane. Alike as they
    are, one that is more than 6 % above stands out."""
    losses = nothing_known(len(lanes))
    for row, (count, loss) in zip(losses, lanes, strict=True):
        row[WINDOW - count :] = loss
    return losses


def assert_moved(before: TrainState, after: TrainState) -> None:
    """Parameters and both moments do, where no step is left out."""
    for its in (
        lambda state: state.params,
        lambda state: optax.tree.get(state.opt_state, "mu"),
        lambda state: optax.tree.get(state.opt_state, "nu"),
    ):
        sizes = jax.tree.map(lambda a, b: np.abs(a - b).max(), its(before), its(after))
        assert np.median(jax.tree.leaves(sizes)) > 0


@pytest.fixture(scope="module")
def remembers(run: Run):
    """A step on one device with so many losses known, and the loss that it has."""

    def step(*lanes: tuple[int, float], lane: int = 0, batch=None):
        state = run.state.replace(losses=known(*lanes))
        given = jax.device_put((state, batch or make_batch(), np.int32(lane)), DEVICE)
        return state, *jax.device_get(run.step(*given))

    _, _, means = step((0, 0.0))
    return step, means["loss"].value


def test_a_loss_that_stands_out_changes_nothing(remembers):
    step, loss = remembers
    _, free, means = step((0, 0.0))
    assert means["skipped"].total == means["usual_loss"].count == 0
    usual = loss / 1.07
    before, after, means = step((FEWEST, usual))
    assert_left_out(before, after)
    assert_moved(before, free)
    assert means["skipped"].total == 1
    assert means["loss"].value == loss  # it is told as it was
    assert means["usual_loss"].value == pytest.approx(usual)
    # It is remembered, so that it may become usual.
    np.testing.assert_array_equal(after.losses[0, :-1], before.losses[0, 1:])
    assert after.losses[0, -1] == loss


@pytest.mark.parametrize(
    ("count", "times"), [(WINDOW, 1.05), (FEWEST - 1, 1.07), (WINDOW, 0.1)]
)
def test_what_does_not_stand_out_is_learned_from(remembers, count, times):
    """Where it is within bounds, where too few are known, and where it is low."""
    step, loss = remembers
    _, free, _ = step((0, 0.0))
    before, after, means = step((count, loss / times))
    assert means["skipped"].total == 0
    jax.tree.map(np.testing.assert_array_equal, after.params, free.params)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, free.opt_state)
    assert_moved(before, after)
    assert after.losses[0, -1] == loss


def test_lanes_are_compared_with_themselves(remembers):
    step, loss = remembers
    lanes = (WINDOW, loss / 1.07), (WINDOW, loss), (0, 0.0)
    for lane, skipped in enumerate((1, 0, 0)):
        before, after, means = step(*lanes, lane=lane)
        assert means["skipped"].total == skipped
        assert after.losses[lane, -1] == loss
        others = [n for n in range(3) if n != lane]
        np.testing.assert_array_equal(after.losses[others], before.losses[others])


def test_eight_devices_leave_out_what_one_does(run: Run, remembers):
    """Also where the batch is scored in parts; and nothing else is sent for it."""
    step, loss = remembers
    everywhere, split = shardings()
    objective = MaskedLM(ARCH.vocab_size, 4, (0, 1, 2, 3, 4))
    optimizer = make_optimizer(Optim(lr=1e-3, warmup=0), 100, run.state.params)
    parts = make_train_step(Model(ARCH), objective, optimizer, accumulate=2)
    for its in (run.step, jax.jit(parts, compiler_options=QUICK)):
        batch = jax.device_put(make_batch(), split)
        compiled = None
        for times, skipped in ((1.07, 1), (1.05, 0)):
            state = run.state.replace(losses=known((FEWEST, loss / times)))
            state = jax.device_put(state, everywhere)
            compiled = compiled or its.lower(state, batch).compile()
            after, means = jax.device_get(compiled(state, batch))
            _, alone, _ = step((FEWEST, loss / times))
            assert means["skipped"].total == skipped
            if skipped:
                assert_left_out(run.state, after)
            else:
                assert_moved(run.state, after)
            for a, b in zip(*map(jax.tree.leaves, (after, alone)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert set(collectives_in(compiled.as_text())) == {"all-reduce"}


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_loss_that_is_no_number_is_not_remembered(nonfinite: str):
    """Whether a step is left out for it is not for `spike` to say."""
    params = fresh_params(ARCH)
    optimizer = make_optimizer(Optim(lr=1e-3, warmup=0), 100, params)
    objective = Explodes(300, 4, (0, 1, 2, 3, 4))
    step = make_train_step(Model(ARCH), objective, optimizer, nonfinite=nonfinite)
    step = jax.jit(step, compiler_options=QUICK)
    one = jnp.int32(0), params, optimizer.init(params), jnp.uint32(7)
    state = TrainState(*one, losses=known((FEWEST, 0.1)))
    bad = make_batch() | {"row_id": np.full(B, 99, np.int32)}
    after, means = step(state, bad)
    np.testing.assert_array_equal(after.losses, state.losses)
    assert float(means["skipped"].total) == (nonfinite == "skip")
    assert bool(jnp.isfinite(after.params["embed"]["token"]).all()) == (
        nonfinite == "skip"
    )
    assert np.isfinite(float(means["loss"].total)) == (nonfinite == "skip")
    if nonfinite == "skip":
        assert_left_out(state, after)
    after, means = step(state, make_batch())  # a spike, in the same program
    assert_left_out(state, after)
    assert float(means["skipped"].total) == float(means["loss"].count) == 1.0
    assert float(after.losses[0, -1]) == float(means["loss"].value)
