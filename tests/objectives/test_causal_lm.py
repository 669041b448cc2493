"""Left to right: what is asked, what it costs, what must not be seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, init_params
from bert_jax.models.tokens import Tokens, rank_of
from bert_jax.objectives import OBJECTIVES
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.causal_lm import CausalLM
from bert_jax.step import Net
from tests.models.made import quick_jit
from tests.reference import collectives_in, shardings

# Two examples and padding in the first row, one example in the second.
IDS = np.array([[5, 6, 7, 8, 9, 0], [4, 5, 6, 7, 8, 9]], np.int32)
GROUP = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], np.int32)


def batch() -> dict:
    return {
        "ids": jnp.asarray(IDS),
        "group": jnp.asarray(GROUP),
        "positions": jnp.asarray(POSITIONS),
        "types": jnp.zeros_like(IDS),
    }


def keys(count: int):
    return jax.random.split(jax.random.key(0), count)


def test_every_token_predicts_the_next_of_its_example():
    asked = CausalLM().corrupt(keys(2), batch())
    found = {
        (row, int(where), int(target))
        for row in range(2)
        for where, target, weight in zip(
            asked["where"][row],
            asked["targets"][row],
            asked["weights"][row],
            strict=True,
        )
        if weight
    }
    want = {
        (row, i, int(IDS[row, i + 1]))
        for row in range(2)
        for i in range(5)
        if GROUP[row, i] == GROUP[row, i + 1] and GROUP[row, i + 1] > 0
    }
    assert found == want
    assert len(want) == 2 + 1 + 5
    np.testing.assert_array_equal(asked["ids"], IDS)
    assert asked["where"].shape[1] == CausalLM().slots(6) == 5


def test_right_to_left_every_token_predicts_the_one_before():
    of = CausalLM(direction="backward")
    asked = jax.device_get(of.corrupt(keys(2), batch()))
    found = {
        (row, int(where), int(target))
        for row in range(2)
        for where, target, weight in zip(
            asked["where"][row],
            asked["targets"][row],
            asked["weights"][row],
            strict=True,
        )
        if weight
    }
    assert found == {
        (row, i, int(IDS[row, i - 1]))
        for row in range(2)
        for i in range(1, 6)
        if GROUP[row, i] == GROUP[row, i - 1] and GROUP[row, i] > 0
    }

    def net(tokens, **_):
        np.testing.assert_array_equal(tokens.rank, -tokens.positions)
        return {"lm": jnp.zeros((2, 5, 11))}

    loss = of.terms(net, asked).means["causal_lm_loss"]
    assert float(loss.count) == 8


def test_right_to_left_is_left_to_right_of_the_text_turned_round():
    """The same loss and gradient, where positions are not told."""
    arch = Arch(vocab_size=16, width=16, layers=1, heads=2, inner=24, max_positions=8)
    params = init_params(Model(arch), jax.random.key(0), heads=("lm",))
    params["embed"]["position"] = jnp.zeros_like(params["embed"]["position"])
    ids = jnp.asarray(IDS[1:])
    place = jnp.arange(6)[None]
    zeros = jnp.zeros_like(ids)
    row = {"ids": ids, "positions": place, "types": zeros, "group": zeros + 1}
    turned = row | {"ids": ids[:, ::-1]}

    def loss(params, of, row):
        asked = of.corrupt(keys(1), row)
        return loss_of(of, of.terms(Net(Model(arch), params), asked).means)

    @quick_jit
    def each(params):
        forward, backward = CausalLM(), CausalLM(direction="backward")
        same = ((forward, turned), (backward, row))
        found = [jax.value_and_grad(loss)(params, *given) for given in same]
        return found, loss(params, forward, row)

    both, other = each(params)
    for _, gradient in both:
        gradient["embed"].pop("position")  # each at places of its own
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *both)
    assert abs(other - both[0][0]) > 1e-4


def test_wrong_directions():
    with pytest.raises(InputError, match="objective.direction.*forward"):
        CausalLM(direction="back")
    with pytest.raises(InputError, match="objective.memory=-1 must be at least 0"):
        CausalLM(memory=-1)
    with pytest.raises(InputError, match="objective.direction=backward reads the text"):
        CausalLM(direction="backward", memory=4)


class Uniform:
    """A net that knows nothing of V pieces."""

    def __call__(self, tokens, *, where, heads, **_):
        assert heads == ("lm",)
        np.testing.assert_array_equal(tokens.rank, tokens.positions)
        return {"lm": jnp.zeros((*where.shape, 11))}


def test_the_loss_of_knowing_nothing():
    objective = CausalLM()
    means = objective.terms(Uniform(), objective.corrupt(keys(2), batch())).means
    assert float(means["causal_lm_loss"].count) == 8
    assert float(loss_of(objective, means)) == pytest.approx(np.log(11), rel=1e-6)


def test_no_prediction_sees_what_comes_after():
    arch = Arch(
        **dict(vocab_size=16, width=16, layers=2, heads=2, inner=24, max_positions=8),
        **dict(types=0, norm_place="pre", embed_norm="none", lm_head="bare"),
    )
    params = init_params(Model(arch), jax.random.key(0), heads=("lm",))
    given = batch()
    tokens = Tokens(
        ids=given["ids"],
        types=given["types"],
        positions=given["positions"],
        group=given["group"],
        rank=rank_of("causal", given["positions"]),
    )
    vectors = jax.random.normal(jax.random.key(1), (2, 6, 16))

    def scores(vectors):
        shown = tokens.replace(vectors=vectors)
        return Model(arch).apply({"params": params}, shown, heads=("lm",))["lm"][
            ..., :16
        ]

    jacobian = quick_jit(jax.jacobian(lambda v: scores(v).sum(-1)))(vectors)
    assert jacobian.shape == (2, 6, 2, 6, 16)
    influence = np.abs(jacobian).sum(-1)
    for row in range(2):
        for i in range(6):
            for j in range(6):
                sees = i == j or (GROUP[row, i] == GROUP[row, j] > 0 and j < i)
                assert (influence[row, i, row, j] > 0) == sees, (row, i, j)
    assert not influence[0, :, 1].any()


def test_it_is_known_by_name_and_devices_do_not_talk():
    assert OBJECTIVES["causal_lm"] is CausalLM
    _, rows = shardings()
    many = {name: jnp.tile(value, (8, 1)) for name, value in batch().items()}
    corrupt = jax.jit(CausalLM().corrupt, in_shardings=(rows, rows), out_shardings=rows)
    text = corrupt.lower(keys(16), many).compile().as_text()
    assert not collectives_in(text)


def test_the_step_trains_it():
    arch = Arch(vocab_size=16, width=16, layers=1, heads=2, inner=24, max_positions=8)
    params = init_params(Model(arch), jax.random.key(0), heads=("lm",))
    objective = CausalLM()
    asked = objective.corrupt(keys(2), batch())

    @jax.jit
    def loss(params):
        return loss_of(
            objective, objective.terms(Net(Model(arch), params), asked).means
        )

    before = loss(params)
    for _ in range(20):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
    assert loss(params) < before
