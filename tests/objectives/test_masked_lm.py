"""The loss by hand, at initialisation, and at the end of a training."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.objectives.base import Mean, loss_of
from bert_jax.objectives.losses import correct, cross_entropy
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.optim import Optim, make_optimizer
from bert_jax.step import Net, TrainState, make_eval_step, make_train_step
from tests.objectives.made import SPECIAL, FixedNet
from tests.reference import QUICK, fresh_params


def test_cross_entropy_by_hand():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]]))
    loss = cross_entropy(logits + 7.0, jnp.array([[1, 2]]))
    np.testing.assert_allclose(loss, [[math.log(4), -math.log(0.8)]], rtol=1e-6)


def test_cross_entropy_of_large_and_missing_logits():
    logits = jnp.array([[1000.0, 999.0, -jnp.inf], [0.0, 0.0, -jnp.inf]])
    loss = cross_entropy(logits, jnp.array([1, 0]))
    expected = [1 + math.log1p(math.exp(-1)), math.log(2)]
    np.testing.assert_allclose(loss, expected, atol=2**-14)  # f32's step at 1000
    grad = jax.grad(lambda x: cross_entropy(x, jnp.array([1, 0])).sum())(logits)
    np.testing.assert_allclose(grad[1], [-0.5, 0.5, 0.0], rtol=1e-6)
    assert grad[1, 2] == 0


def test_cross_entropy_is_computed_in_f32():
    logits = jnp.linspace(-3, 3, 11, dtype=jnp.bfloat16)[None]
    loss = cross_entropy(logits, jnp.array([4]))
    assert loss.dtype == jnp.float32
    exact = np.asarray(logits, np.float64)[0]
    np.testing.assert_allclose(
        loss, [np.log(np.exp(exact).sum()) - exact[4]], rtol=1e-6
    )


def test_correct_by_hand():
    logits = jnp.array([[1.0, 3.0, 2.0], [4.0, 0.0, -jnp.inf]])
    assert correct(logits, jnp.array([1, 2])).tolist() == [1.0, 0.0]


def test_mean_by_hand():
    one = Mean.of(jnp.array([1.0, 2.0, 100.0]), jnp.array([1, 1, 0]))
    two = Mean.of(jnp.array([6.0]), jnp.array([True]))
    assert (float(one.total), float(one.count)) == (3.0, 2.0)
    assert float(one.value) == 1.5
    assert float((one + two).value) == 3.0  # not 3.75, the mean of means
    nothing = Mean.of(jnp.array([5.0]), jnp.array([0.0]))
    assert float(nothing.value) == 0.0


def by_hand() -> tuple[FixedNet, dict]:
    lm = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.9, 0.05, 0.05]]]))
    nsp = jnp.log(jnp.array([[[0.75, 0.25], [0.5, 0.5]]]))
    ids = jnp.array([[2, 1, 1, 3]])
    batch = {
        "ids": ids,
        "types": ids * 0,
        "positions": jnp.arange(4)[None],
        "group": jnp.array([[1, 1, 2, 2]]),
        "first": jnp.array([[0, 2]]),
        "where": jnp.array([[1, 2, 0]]),
        "targets": jnp.array([[0, 2, 2]]),
        "weights": jnp.array([[1.0, 1.0, 0.0]]),
        "next_sentence": jnp.array([[1, -1]]),
    }
    return FixedNet(lm=lm, nsp=nsp), batch


def test_terms_by_hand():
    net, batch = by_hand()
    objective = MaskedLM(3, 4, SPECIAL, next_sentence=0.5)
    means = objective.terms(net, batch).means
    masked = (math.log(2) - math.log(0.6)) / 2
    pair = math.log(4)
    assert float(means["masked_lm_loss"].value) == pytest.approx(masked)
    assert float(means["masked_lm_loss"].count) == 2
    assert float(means["masked_lm_accuracy"].value) == 1.0
    assert float(means["next_sentence_loss"].value) == pytest.approx(pair)
    assert float(means["next_sentence_loss"].count) == 1
    assert float(means["next_sentence_accuracy"].value) == 0.0
    assert float(loss_of(objective, means)) == pytest.approx(masked + 0.5 * pair)
    assert net.asked["heads"] == ("lm", "pooler", "nsp")
    np.testing.assert_array_equal(net.asked["where"], batch["where"])
    np.testing.assert_array_equal(net.asked["first"], batch["first"])
    np.testing.assert_array_equal(net.tokens.rank, 0)  # every token sees every other


def test_without_next_sentence():
    net, batch = by_hand()
    del batch["first"], batch["next_sentence"]
    objective = MaskedLM(3, 4, SPECIAL, next_sentence=0.0)
    means = objective.terms(net, batch).means
    assert set(means) == {"masked_lm_loss", "masked_lm_accuracy"}
    assert objective.heads == net.asked["heads"] == ("lm",)
    assert objective.weights == {"masked_lm_loss": 1.0}
    assert net.asked["first"] is None


def test_weights_and_heads_with_next_sentence():
    objective = MaskedLM(3, 4, SPECIAL)
    assert objective.heads == ("lm", "pooler", "nsp")
    assert objective.weights == {"masked_lm_loss": 1.0, "next_sentence_loss": 1.0}


def test_all_wrong_hyper_parameters_are_named():
    with pytest.raises(InputError) as raised:
        MaskedLM(3, 4, SPECIAL, rate=1.5, hide=-0.1, randomise=2.0, next_sentence=-1)
    assert str(raised.value).splitlines() == [
        "objective.rate=1.5 must be between 0 and 1",
        "objective.hide=-0.1 must be between 0 and 1",
        "objective.randomise=2.0 must be between 0 and 1",
        "objective.hide=-0.1 and objective.randomise=2.0 add up to more than 1",
        "objective.next_sentence=-1 is negative",
    ]


def test_rates_that_do_not_fit():
    with pytest.raises(InputError, match=r"objective\.rate=0 predicts nothing"):
        MaskedLM(3, 4, SPECIAL, rate=0)
    with pytest.raises(InputError, match="add up to more than 1"):
        MaskedLM(3, 4, SPECIAL, hide=0.8, randomise=0.3)


def toy_batch(arch: Arch, count: int, length: int) -> dict[str, np.ndarray]:
    """Rows of two random sentences, labelled 0 and 1 in turn: nothing in them tells, so
    that they can be learnt by heart only."""
    rng = np.random.default_rng(0)
    ids = rng.integers(5, arch.vocab_size, (count, length)).astype(np.int32)
    half = length // 2
    ids[:, 0], ids[:, half], ids[:, -1] = 2, 3, 3
    types = np.broadcast_to(np.arange(length) > half, ids.shape).astype(np.int32)
    return {
        "ids": ids,
        "types": types,
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape),
        "group": np.ones_like(ids),
        "first": np.zeros((count, 1), np.int32),
        "next_sentence": np.arange(count, dtype=np.int32)[:, None] % 2,
        "row_id": np.arange(count, dtype=np.int32),
    }


@pytest.mark.parametrize(
    "change",
    [{}, dict(pair_head="sop", boundary=1.0, choose="span")],
    ids=["bert", "order-and-boundary"],
)
def test_loss_at_initialisation(change: dict):
    """A fresh model knows nothing: ln V, ln 2, and from the borders ln V again."""
    arch = Arch(vocab_size=30522, width=128, layers=2, heads=2, inner=512)
    objective = MaskedLM(arch.vocab_size, 103, (0, 100, 101, 102, 103), **change)
    params = fresh_params(arch, heads=objective.heads)
    model = Model(arch)

    @partial(jax.jit, compiler_options=QUICK)
    def score(params, batch):
        batch = objective.corrupt(jax.random.split(jax.random.key(0), 16), batch)
        return objective.terms(Net(model, params), batch).means

    batch = toy_batch(arch, 16, 64)
    batch["words"] = batch["positions"] + 1
    means = score(params, batch)
    classes = {"masked_lm_loss": 30522, "next_sentence_loss": 2, "boundary_loss": 30522}
    assert float(means["masked_lm_loss"].count) == 16 * 10
    for name in objective.weights:
        assert float(means[name].count) > 10
        assert abs(float(means[name].value) - math.log(classes[name])) < 0.1
    theory = sum(math.log(classes[name]) for name in objective.weights)
    assert abs(float(loss_of(objective, means)) - theory) < 0.2


def test_a_small_model_learns_sixteen_rows_by_heart():
    arch = Arch(
        vocab_size=80,
        width=64,
        layers=2,
        heads=2,
        inner=128,
        max_positions=16,
        dropout=0.0,
        attention_dropout=0.0,
    )
    objective = MaskedLM(arch.vocab_size, 4, SPECIAL)
    model, params = Model(arch), fresh_params(arch)
    optim = Optim(name="adamw", lr=6e-3, warmup=20, decay=0.0)
    optimizer = make_optimizer(optim, 600, params)
    step = make_train_step(model, objective, optimizer)
    step = jax.jit(step, compiler_options=QUICK)
    score = jax.jit(make_eval_step(model, objective), compiler_options=QUICK)
    state = TrainState(jnp.int32(0), params, optimizer.init(params), jnp.uint32(0))
    batch = toy_batch(arch, 16, 16)

    def accuracy(state) -> tuple[float, float]:
        """Over eight corruptions of every row, none of them the training's."""
        total = None
        for copy in range(8):
            means = score(state.params, jnp.uint32(100 + copy), batch, jnp.int32(7))
            total = means if total is None else {n: total[n] + means[n] for n in means}
        names = ("masked_lm_accuracy", "next_sentence_accuracy")
        return tuple(float(total[name].value) for name in names)

    before = accuracy(state)
    for _ in range(600):
        state, _ = step(state, batch)
    after = accuracy(state)
    assert before[0] < 0.1
    assert after[0] > 0.98
    assert after[1] == 1.0


TOY = Arch(vocab_size=80, width=32, layers=1, heads=2, inner=64, max_positions=16)
TOY_OBJECTIVE = MaskedLM(TOY.vocab_size, 4, SPECIAL)


@pytest.fixture(scope="module")
def scorer():
    """The evaluation step of a toy model, and its parameters."""
    step = make_eval_step(Model(TOY), TOY_OBJECTIVE)
    return jax.jit(step, compiler_options=QUICK), fresh_params(TOY)


def test_eval_step_is_fixed_by_seed_and_row_id(scorer):
    score, params = scorer
    batch = toy_batch(TOY, 5, 16)
    commonest = jnp.int32(batch["ids"][0, 1])

    def scores(seed: int, batch) -> dict[str, Mean]:
        return jax.device_get(score(params, jnp.uint32(seed), batch, commonest))

    first, again, other = (scores(seed, batch) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert first["masked_lm_loss"].total != other["masked_lm_loss"].total
    # Rows in another order, with their ids: the same sum. Without: another draw.
    turned = {name: value[::-1] for name, value in batch.items()}
    np.testing.assert_allclose(
        scores(0, turned)["masked_lm_loss"].total,
        first["masked_lm_loss"].total,
        rtol=1e-6,
    )
    moved = batch | {"row_id": batch["row_id"] + 50}
    total = scores(0, moved)["masked_lm_loss"].total
    assert abs(total - first["masked_lm_loss"].total) > 1e-3
    # A row of padding, id -1, counts for nothing, whatever is in it.
    padded = {name: value.copy() for name, value in batch.items()}
    padded["row_id"][-1] = padded["next_sentence"][-1] = -1
    padded["group"][-1] = 0
    other = padded | {"ids": padded["ids"].copy()}
    other["ids"][-1] = 7
    one, two = scores(0, padded), scores(0, other)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert one["masked_lm_loss"].count == 4 * 2
    assert one["next_sentence_loss"].count == 4


def test_the_unigram_guess_is_scored_on_the_same_positions(scorer):
    score, params = scorer
    batch = toy_batch(TOY, 5, 16)
    batch["ids"][:, 1:15:2] = 9
    batch["ids"][:, 8] = 3
    means = score(params, jnp.uint32(0), batch, jnp.int32(9))
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(0), row))
    out = TOY_OBJECTIVE.corrupt(keys(batch["row_id"]), batch)
    guess = means["unigram_accuracy"]
    expected = ((out["targets"] == 9) * out["weights"]).sum()
    assert 0 < float(guess.total) == float(expected) < float(guess.count)
    assert float(guess.count) == float(means["masked_lm_loss"].count)
