"""Left to right: what is asked, what it costs, what must not be seen."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from bert_jax import parity
from bert_jax.convert import engine
from bert_jax.convert.tables import LAYOUTS
from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, init_params
from bert_jax.objectives import OBJECTIVES
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.causal_lm import CausalLM
from bert_jax.parity import GRADIENT, OUTPUT, excess
from bert_jax.presets import preset
from bert_jax.step import Net, TrainState, make_train_step
from tests.models.made import GPT2, TINY, drawn_params, probe, quick_jit
from tests.objectives.made import FixedNet, counting
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
    assert asked["where"].shape[1] == 5


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


# By the piece that is asked for at each place of `where`, written out from IDS.
ASKED = {
    "forward": [(0, 0, 6), (0, 1, 7), (0, 3, 9), *((1, n, n + 5) for n in range(5))],
    "backward": [(0, 0, 5), (0, 1, 6), (0, 3, 8), *((1, n, n + 4) for n in range(5))],
}
by_direction = pytest.mark.parametrize("direction", ASKED)


@by_direction
def test_the_loss_by_hand(direction):
    """The piece that is right has 1/2, 1/4 ... 1/256; of eleven pieces, it is the
    likeliest three times. Places that are not asked do not count."""
    of = CausalLM(direction=direction)
    logits = np.full((2, 5, 11), 7.0, np.float32) * np.arange(11)
    for n, (row, place, target) in enumerate(ASKED[direction], 1):
        logits[row, place] = np.log((1 - 2.0**-n) / 10)
        logits[row, place, target] = np.log(2.0**-n)
    net = FixedNet(lm=jnp.asarray(logits))
    means = of.terms(net, of.corrupt(keys(2), batch())).means
    assert float(loss_of(of, means)) == pytest.approx(4.5 * math.log(2), rel=1e-5)
    assert float(means["causal_lm_accuracy"].value) == 3 / 8


@by_direction
def test_no_prediction_sees_what_it_is_asked_for(direction):
    """Through `terms`: nothing of the rest of the text in its direction, of another
    example or of another row; and all that it may see."""
    arch = TINY.but(**GPT2, lm_head="bare")
    params = drawn_params(arch, heads=("lm",))
    of = CausalLM(direction=direction)
    asked = of.corrupt(keys(2), batch())
    vectors = jax.random.normal(jax.random.key(1), (2, 6, arch.width))
    weights = probe((arch.padded_vocab,))

    @quick_jit
    def heard(vectors):
        def scores(vectors):
            found = []

            def net(tokens, **told):
                out = Net(Model(arch), params)(tokens.replace(vectors=vectors), **told)
                found.append(out["lm"])
                return out

            of.terms(net, asked)
            real = jnp.where(jnp.arange(arch.padded_vocab) < V, found[0], 0.0)
            return real @ weights

        return jnp.abs(jax.jacrev(scores)(vectors)).max(-1)  # [B, S-1, B, S]

    V = arch.vocab_size
    influence = np.asarray(heard(vectors)) > 0
    for row, place in np.ndindex(2, 5):
        here = int(asked["where"][row, place])
        for other, token in np.ndindex(2, 6):
            gone = here - token if direction == "forward" else token - here
            together = row == other and GROUP[row, here] == GROUP[row, token] > 0
            sees = (row, here) == (other, token) or (together and gone >= 0)
            assert influence[row, place, other, token] == sees, (row, here, other)


@pytest.mark.parametrize(
    ("name", "its_class"),
    [("gpt2", "GPT2LMHeadModel"), ("openai-gpt", "OpenAIGPTLMHeadModel")],
)
def test_loss_and_gradients_are_those_of_gpts_classes(name, its_class):
    member, heads = preset(name), ("lm",)
    arch, layout, of = parity.tiny(member.arch), LAYOUTS[member.layout], CausalLM()
    params = drawn_params(arch, heads=heads)
    rows = parity.random_rows(arch, [12, 7, 12], 12)
    place = np.broadcast_to(np.arange(12, dtype=np.int32), rows.ids.shape)
    given = {"ids": rows.ids, "positions": place, "types": np.zeros_like(rows.ids)}
    given["group"] = rows.real.astype(np.int32)

    @quick_jit
    def compute(params):
        def total(params):
            asked = of.corrupt(keys(3), given)
            return loss_of(of, of.terms(Net(Model(arch), params), asked).means)

        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(total)(params)

    loss, gradients = jax.device_get(compute(params))
    tensors, _ = engine.to_theirs(params, arch, layout, heads=heads)
    theirs = parity.their_model(arch, layout, heads, tensors)
    assert type(theirs).__name__ == its_class
    out = theirs(
        torch.tensor(rows.ids).long(),
        attention_mask=torch.tensor(rows.real).long(),
        labels=torch.tensor(np.where(rows.real, rows.ids, -100)).long(),
    )
    out.loss.backward()
    assert excess(loss, out.loss.detach(), **OUTPUT) <= 1
    its = {name: tensor.grad for name, tensor in theirs.named_parameters()}
    flat, mine = engine.flatten(params), engine.flatten(gradients)
    expected = parity.gradients_of(its, arch, layout, heads, flat)
    assert expected.keys() == mine.keys()
    for name in mine:
        assert excess(mine[name], expected[name], **GRADIENT) <= 1, name


@pytest.mark.parametrize(
    ("member", "fields"),
    [
        ("gpt2", {}),
        ("gpt2", {"direction": "backward"}),
        ("transfo-xl-wt103-base", {"memory": 16}),
    ],
    ids=["forward", "backward", "memory"],
)
def test_loss_at_initialisation(member, fields):
    """ln V: of text, and of text that goes on with what is remembered."""
    sizes = dict(width=64, layers=1, heads=2, inner=256, vocab_size=3000)
    model = Model(preset(member).arch.but(**sizes, embed_width=0))
    of = CausalLM(**fields)
    rows = counting(16, 16, turns=3000) | {"continues": np.ones(16, np.int32)}

    @quick_jit
    def losses():
        params = init_params(model, jax.random.key(0), heads=("lm",))
        asked, carry = of.corrupt(keys(16), rows), of.first_carry(model, 16)
        found = []
        for _ in range(2):
            terms = of.terms(Net(model, params), asked, carry)
            found.append(loss_of(of, terms.means))
            carry = terms.carry
        return found

    for loss in losses():
        assert float(loss) == pytest.approx(math.log(3000), abs=0.05)


def test_it_is_known_by_name_and_devices_do_not_talk():
    assert OBJECTIVES["causal_lm"] is CausalLM
    _, rows = shardings()
    many = {name: jnp.tile(value, (8, 1)) for name, value in batch().items()}
    corrupt = jax.jit(CausalLM().corrupt, in_shardings=(rows, rows), out_shardings=rows)
    text = corrupt.lower(keys(16), many).compile().as_text()
    assert not collectives_in(text)


@by_direction
def test_the_step_trains_it(direction):
    """It learns to count, and not what was shuffled: chance is 1 in 20."""
    arch = TINY.but(**GPT2, vocab_size=24, layers=1, dropout=0.0, attention_dropout=0.0)
    of, optimizer = CausalLM(direction=direction), optax.adam(1e-2)
    step = quick_jit(make_train_step(Model(arch), of, optimizer))
    fresh = init_params(Model(arch), jax.random.key(0), heads=("lm",))
    last = {}
    for shuffled in (False, True):
        one = jnp.int32(0), fresh, optimizer.init(fresh), jnp.uint32(0)
        state, found = TrainState(*one), []
        for number in range(60):
            rows = counting(16, 16, seed=number, shuffled=shuffled)
            state, means = step(state, rows)
            scores = means["causal_lm_accuracy"], means["causal_lm_loss"]
            found.append([float(score.value) for score in scores])
        last[shuffled] = np.array(found[-20:])
    assert last[False][-1, 0] > 0.9
    accuracy, loss = last[True].mean(0)
    assert accuracy < 0.1
    assert loss > math.log(20) - 0.02
