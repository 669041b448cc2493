"""Memory through the objectives: a long text in steps is the long text at once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.models.model import Model, init_params
from bert_jax.objectives.causal_lm import CausalLM
from bert_jax.objectives.permuted_lm import PermutedLM
from bert_jax.parity import OUTPUT, excess
from bert_jax.presets import preset
from bert_jax.spikes import WINDOW
from bert_jax.step import Net, TrainState, make_train_step
from tests.models.made import TINY, TRANSFORMER_XL, XLNET, drawn_params, quick_jit
from tests.objectives.made import counting
from tests.reference import shardings

ARCH = TINY.but(**TRANSFORMER_XL, lm_head="bias")
B, S, STEPS = 8, 8, 3
SPECIAL = (0, 1, 2, 3, 4)


def text(group: np.ndarray | None = None, *, length: int = S * STEPS) -> dict:
    """Rows of a long text."""
    ids = np.random.default_rng(0).integers(5, ARCH.vocab_size, (B, length))
    place = np.broadcast_to(np.arange(length), ids.shape)
    columns = {
        "ids": ids,
        "types": np.zeros_like(ids),
        "positions": place,
        "group": np.ones_like(ids) if group is None else group,
        "words": place + 1,
    }
    return {name: column.astype(np.int32) for name, column in columns.items()}


def piece(batch: dict, number: int, *, continues=1, **changes) -> dict:
    """Row `number` of the stream: positions and groups begin again."""
    part = {n: column[:, number * S : (number + 1) * S] for n, column in batch.items()}
    part["positions"] = part["positions"] - number * S
    part["continues"] = np.broadcast_to(np.asarray(continues, np.int32), B)
    return part | changes


@pytest.fixture(scope="module")
def params() -> dict:
    return drawn_params(ARCH, heads=("lm",))


@quick_jit
def read_with_memory(params, batch, carry):
    """Logits of every prediction, and the carry."""
    return scored(params, batch, carry)


@quick_jit
def read_at_once(params, batch):
    return scored(params, batch, None)[0]


def scored(params, batch, carry):
    of, found = CausalLM(), {}
    model = Model(ARCH)

    def listening(tokens, **asked):
        found.update(Net(model, params)(tokens, **asked))
        return found

    keys = jax.random.split(jax.random.key(0), B)
    terms = of.terms(listening, of.corrupt(keys, batch), carry)
    return found["lm"][..., : ARCH.vocab_size], terms.carry


def in_steps(params, pieces: list[dict], length: int = 2 * S) -> list[np.ndarray]:
    carry = CausalLM(memory=length).first_carry(Model(ARCH), B)
    found = []
    for part in pieces:
        logits, carry = read_with_memory(params, part, carry)
        found.append(np.asarray(logits))
    return found


def test_a_long_text_in_steps_is_the_text_at_once(params):
    whole = text()
    expected = np.asarray(read_at_once(params, whole))
    steps = in_steps(params, [piece(whole, n) for n in range(STEPS)])
    for n, found in enumerate(steps):
        there = expected[:, n * S : (n + 1) * S - 1]
        assert excess(found, there, **OUTPUT) <= 1, n
    # A row alone is another: the memory was needed.
    alone = read_at_once(params, piece(whole, 1))
    assert excess(alone, expected[:, S : 2 * S - 1], **OUTPUT) > 1


def test_rows_that_begin_a_text_see_nothing_of_the_one_before(params):
    """In the second step two rows go on; in the third the others do, and remember the
    second step alone."""
    whole, go_on = text(), np.arange(1, B + 1, dtype=np.int32) % 2
    pieces = [piece(whole, 0), piece(whole, 1, continues=go_on)]
    pieces.append(piece(whole, 2, continues=1 - go_on))
    _, second, third = in_steps(params, pieces)
    at_once = np.asarray(read_at_once(params, whole))
    alone = [np.asarray(read_at_once(params, piece(whole, n))) for n in range(STEPS)]
    later = {name: column[:, S:] for name, column in whole.items()}
    later["positions"] = later["positions"] - S
    later = np.asarray(read_at_once(params, later))
    for row, goes_on in enumerate(go_on):
        expected = at_once[row, S : 2 * S - 1] if goes_on else alone[1][row]
        assert excess(second[row], expected, **OUTPUT) <= 1
        expected = alone[2][row] if goes_on else later[row, S:]
        assert excess(third[row], expected, **OUTPUT) <= 1


def test_documents_that_do_not_see_each_other(params):
    """across=block: of the memory a row sees the document that goes on into it; one
    that begins and ends inside a row is never remembered. Documents are counted anew in
    every row, and downwards in the second step, as in a row that runs backwards."""
    documents = [[1] * 11 + [2] * 5 + [2] * 2 + [3] * 6, [1] * 4 + [2] * 20]
    group = np.repeat(documents, B // 2, axis=0)
    whole = text(group)
    places = [[row[:i].count(row[i]) for i in range(24)] for row in documents]
    whole["positions"] = np.repeat(places, B // 2, axis=0).astype(np.int32)
    expected = np.asarray(read_at_once(params, whole))
    pieces = []
    for n in range(STEPS):
        part = piece(whole, n)
        begins = np.diff(part["group"], axis=1, prepend=0) > 0
        own = part["group"] - part["group"][:, :1] + 1
        own = own[:, -1:] + 1 - own if n == 1 else own
        start = np.maximum.accumulate(np.where(begins, np.arange(S), 0), axis=1)
        part |= {"group": own, "positions": (np.arange(S) - start).astype(np.int32)}
        pieces.append(part)
    for n, found in enumerate(in_steps(params, pieces)):
        there = expected[:, n * S : (n + 1) * S - 1]
        assert excess(found, there, **OUTPUT) <= 1, n


def test_a_row_that_ends_in_padding_leaves_no_memory(params):
    whole = text()
    cut = piece(whole, 0)
    cut["group"] = (np.arange(S) < 5) * cut["group"]
    found = in_steps(params, [cut, piece(whole, 1)])[1]
    alone = read_at_once(params, piece(whole, 1))
    assert excess(found, alone, **OUTPUT) <= 1


def test_what_is_carried(params):
    """The last M inputs of every layer, rows first; older ones move out."""
    whole, length = text(), S + 3
    carry = CausalLM(memory=length).first_carry(Model(ARCH), B)
    assert carry["states"].shape == (B, ARCH.layers, length, ARCH.width)
    assert not carry["group"].any()
    groups = []
    for n in range(STEPS):
        before = carry
        _, carry = read_with_memory(params, piece(whole, n), carry)
        groups.append(int(carry["group"][0].sum()))
        np.testing.assert_array_equal(
            carry["states"][:, :, :3], before["states"][:, :, -3:]
        )
    assert groups == [S, S + 3, S + 3]
    assert CausalLM().first_carry(Model(ARCH), B) is None
    bf16 = CausalLM(memory=2).first_carry(Model(ARCH, dtype=jnp.bfloat16), B)
    assert bf16["states"].dtype == jnp.bfloat16


# Through the step.


@pytest.mark.parametrize("name", ["causal_lm", "permuted_lm"])
def test_parts_of_a_batch_add_up_to_the_whole(name: str):
    """Two steps of gradient descent with dropout on, the second on rows of other
    lengths, which read what the first carried. The parts are on four devices, and what
    is carried stays where its rows are."""
    arch = ARCH if name == "causal_lm" else TINY.but(**XLNET)
    arch = arch.but(layers=1, dropout=0.2, attention_dropout=0.1)
    of = CausalLM(memory=5)
    if name == "permuted_lm":
        of = PermutedLM(SPECIAL, partial=3, memory=5)
    model, optimizer = Model(arch), optax.sgd(1.0)
    whole = text()
    batches = [piece(whole, n, continues=[1, 1, 0, 1] * 2) for n in range(2)]
    sizes = np.array([8, 3, 8, 6, 8, 0, 1, 8])[:, None]
    batches[1]["group"] = (np.arange(S) < sizes) * batches[1]["group"]
    params = drawn_params(arch, heads=("lm",))
    everywhere, split = shardings(jax.devices()[:4])
    found = []
    for accumulate in (1, 2):
        one = jnp.int32(0), params, optimizer.init(params), jnp.uint32(5)
        state = TrainState(*one, of.first_carry(model, B))
        step = quick_jit(make_train_step(model, of, optimizer, accumulate=accumulate))
        if accumulate == 2:
            carry = jax.device_put(state.carry, split)
            state = jax.device_put(state.replace(carry=None), everywhere)
            state = state.replace(carry=carry)
        for batch in batches:
            batch = jax.device_put(batch, split) if accumulate == 2 else batch
            state, means = step(state, batch)
        spread = {len(leaf.sharding.device_set) for leaf in state.carry.values()}
        assert spread == {1 if accumulate == 1 else 4}
        found.append(jax.device_get((state, means)))
    (whole, means), (parts, sums) = found
    its = float(sums["loss"].value)
    assert float(means["loss"].value) == pytest.approx(its, rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6),
        (whole.params, whole.carry),
        (parts.params, parts.carry),
    )
    assert whole.carry["group"].sum(1).tolist() == [5, 0, 5, 0, 5, 0, 0, 5]


def test_a_step_that_is_skipped_leaves_no_memory():
    """The text goes on behind a row of which nothing was learned: what was carried
    before is not the text before it."""
    of, model, optimizer = CausalLM(memory=5), Model(ARCH), optax.sgd(1.0)
    params = drawn_params(ARCH, heads=("lm",))
    params["embed"]["token"][43] = np.nan
    one = jnp.int32(0), params, optimizer.init(params), jnp.uint32(5)
    filled = jax.tree.map(jnp.ones_like, of.first_carry(model, B))
    state = TrainState(*one, filled)
    step = quick_jit(make_train_step(model, of, optimizer, nonfinite="skip"))
    batch = piece(text(), 0)
    assert (batch["ids"] == 43).any()
    after, _ = step(state, batch)
    assert not after.carry["states"].any()
    assert not after.carry["group"].any()


def test_a_step_that_is_left_out_for_its_loss_hands_on_its_text():
    """The row was read, by parameters that are as good as before."""
    of, model, optimizer = CausalLM(memory=5), Model(ARCH), optax.sgd(1.0)
    params = drawn_params(ARCH, heads=("lm",))
    one = jnp.int32(0), params, optimizer.init(params), jnp.uint32(5)
    filled = jax.tree.map(jnp.ones_like, of.first_carry(model, B))
    step = quick_jit(make_train_step(model, of, optimizer))
    after, skipped = {}, {}
    for usual in (0.1, 100.0):
        losses = np.full((1, WINDOW), usual, np.float32)
        state = TrainState(*one, filled, losses)
        after[usual], means = step(state, piece(text(), 0))
        skipped[usual] = float(means["skipped"].total)
    assert skipped == {0.1: 1.0, 100.0: 0.0}
    left_out, learned = after.values()
    jax.tree.map(np.testing.assert_array_equal, left_out.params, params)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), learned.params, params)
    assert np.median(jax.tree.leaves(moved)) > 0
    jax.tree.map(np.testing.assert_array_equal, left_out.carry, learned.carry)
    assert (left_out.carry["states"] != filled["states"]).mean() > 0.99


def test_what_only_memory_tells_is_learnt():
    """Every other row says again what the one before it said, or what another said: of
    itself nothing tells its next piece. Chance is 1 in 20."""
    sizes = dict(vocab_size=20, layers=1, dropout=0.0, attention_dropout=0.0)
    of, model = CausalLM(memory=S), Model(ARCH.but(**sizes))
    optimizer = optax.adam(1e-2)
    step = quick_jit(make_train_step(model, of, optimizer))
    fresh = init_params(model, jax.random.key(0), heads=("lm",))
    scores = {}
    for shuffled in (False, True):
        one = jnp.int32(0), fresh, optimizer.init(fresh), jnp.uint32(0)
        state, last = TrainState(*one, of.first_carry(model, 32)), []
        for number in range(80):
            said = counting(32, S, seed=number, shuffled=True)
            for again in (0, 1):
                rows = said | {"continues": np.full(32, again, np.int32)}
                rows["ids"] = np.roll(said["ids"], again * shuffled, axis=0)
                state, means = step(state, rows)
            last = [*last[-19:], float(means["causal_lm_accuracy"].value)]
        scores[shuffled] = np.mean(last)
    assert scores[False] > 0.9
    assert scores[True] < 0.1


# Bad input.


def test_what_memory_needs():
    for of in (CausalLM(memory=7), PermutedLM(SPECIAL, memory=7)):
        first, second, *_ = of.problems(TINY, "full")
        assert "config.objective.memory=7 needs config.arch.position='xl', it" in first
        assert "config.objective.memory=7 needs config.rows=stream" in second
        assert of.problems(TINY.but(**XLNET), "stream") == []
        assert of.columns == ("continues",)
    assert CausalLM().problems(TINY, "full") == []


def test_members_remember_as_much_as_their_releases_train_with():
    assert preset("transfo-xl-wt103").hyper == {"memory": 384}
    assert preset("transfo-xl-wt103-base").hyper == {"memory": 150}
