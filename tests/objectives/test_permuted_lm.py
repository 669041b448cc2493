"""The permutation LM: its loss by hand, XLNet's class, and what must not be known."""

import math
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from transformers import DataCollatorForPermutationLanguageModeling

from bert_jax import parity
from bert_jax.convert import engine
from bert_jax.convert.tables import LAYOUTS
from bert_jax.errors import InputError
from bert_jax.models.model import Model, init_params
from bert_jax.objectives import OBJECTIVES
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.permuted_lm import PermutedLM
from bert_jax.parity import GRADIENT, OUTPUT, excess
from bert_jax.presets import preset
from bert_jax.step import Net, TrainState, make_eval_step, make_train_step, row_keys
from tests.models import definitions as defined
from tests.models.made import (
    TINY,
    XLNET,
    assert_same_gradients,
    drawn_params,
    quick_jit,
)
from tests.reference import assert_devices_do_not_talk

SPECIAL = (0, 1, 2, 3, 4)
ARCH = TINY.but(**XLNET, pool_from="last", dropout=0.0, attention_dropout=0.0)
SMALL = ARCH.but(vocab_size=25, layers=1)
S = 16
OBJECTIVE = PermutedLM(SPECIAL, partial=3, longest=2)


def clean_batch(count: int = 4, *, seed: int = 0, vocab: int = 50) -> dict:
    """Rows of a stream with a separator in every other one."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, vocab, (count, S)).astype(np.int32)
    ids[::2, 5] = 3
    place = np.broadcast_to(np.arange(S, dtype=np.int32), ids.shape)
    return {
        "ids": ids,
        "types": np.zeros_like(ids),
        "positions": place,
        "group": np.ones_like(ids),
        "words": np.where(ids > 4, place + 1, 0).astype(np.int32),
        "row_id": np.arange(count, dtype=np.int32),
        "continues": np.ones(count, np.int32),
    }


@cache
def corrupting(of: PermutedLM):
    return quick_jit(of.corrupt)


def corrupted(batch: dict, seed: int = 0, of: PermutedLM = OBJECTIVE) -> dict:
    keys = row_keys(jax.random.key(seed), jnp.arange(len(batch["ids"])))
    return jax.device_get(corrupting(of)(keys, batch))


@pytest.fixture(scope="module")
def params() -> dict:
    return drawn_params(ARCH, heads=("lm",))


def definition(batch: dict, row: int, *, stream: str) -> np.ndarray:
    """Who sees whom in a corrupted row, in the paper's words: [S, S]."""
    targets = batch["where"][row][batch["weights"][row] > 0]
    special = np.isin(batch["ids"][row], SPECIAL)
    kinds = np.where(special, "functional", "word").astype("U10")
    kinds[targets] = "target"
    order = batch["rank"][row] - (np.arange(S) >= S // 2) * (S // 2 + 1)
    kinds, order = kinds.tolist(), order.tolist()
    sees = defined.permutation(kinds, order, S // 2, stream=stream)
    return defined.table(sees, S)


# What is asked, and what it costs.


def test_corruption_hides_nothing():
    batch = clean_batch(8)
    out = corrupted(batch)
    for name in batch:
        np.testing.assert_array_equal(out[name], batch[name])
    assert out["where"].shape == (8, S // OBJECTIVE.partial) == (8, 5)
    assert (out["weights"] == 1).all()
    asked = np.take_along_axis(batch["ids"], out["where"], 1)
    np.testing.assert_array_equal(out["targets"], asked)
    assert (np.diff(out["where"]) > 0).all()
    assert (out["targets"] > 4).all()
    assert float(OBJECTIVE.counts(out)["permuted_lm_loss"]) == 40
    row = np.zeros((1, 512), np.int32)
    wide = {name: row for name in ("ids", "group", "words")}
    keys = row_keys(jax.random.key(0), np.arange(1))
    shapes = jax.eval_shape(PermutedLM(SPECIAL).corrupt, keys, wide)
    assert shapes["where"].shape == (1, 85)
    # An empty row, such as evaluation fills up with, asks nothing.
    empty = {name: np.zeros_like(column) for name, column in batch.items()}
    assert not corrupted(empty)["weights"].any()


def test_terms_by_hand():
    """Three slots, one of them empty: the target has 1/2 once, and 1/8 once."""
    batch = {name: jnp.zeros((1, 6), jnp.int32) for name in ("ids", "types")}
    batch |= {name: jnp.arange(6)[None] for name in ("positions", "rank")}
    batch |= {"group": jnp.ones((1, 6), jnp.int32), "where": jnp.array([[1, 4, 0]])}
    batch |= {"targets": jnp.array([[7, 2, 0]]), "weights": jnp.array([[1.0, 1, 0]])}

    def net(tokens, *, where, streams, heads):
        assert (streams, heads) == (2, ("lm",))
        assert tokens.rank.tolist() == [[0, 1, 2, 3, 4, 5]]
        assert where.tolist() == [[1, 4, 0]]
        half = jnp.log(jnp.full(8, 1 / 14)).at[7].set(math.log(1 / 2))
        even = jnp.log(jnp.full(8, 1 / 8))
        return {"lm": jnp.stack([half, even, 9 * half])[None]}

    terms = OBJECTIVE.terms(net, batch)
    loss = terms.means["permuted_lm_loss"]
    assert float(loss.value) == pytest.approx((math.log(2) + math.log(8)) / 2)
    assert float(loss.count) == 2
    assert float(terms.means["permuted_lm_accuracy"].value) == 1 / 2
    assert terms.carry is None
    assert OBJECTIVE.weights == {"permuted_lm_loss": 1.0}


@pytest.mark.parametrize("memory", [0, 24])
def test_loss_at_initialisation(memory):
    """ln V: of text, and of text that goes on with what is remembered."""
    arch = preset("xlnet-base-cased").arch
    model = Model(arch.but(layers=1, width=64, heads=2, inner=64, vocab_size=3000))
    of = PermutedLM(SPECIAL, partial=3, longest=2, memory=memory)
    batches = [corrupted(clean_batch(16, seed=n, vocab=3000), n, of) for n in (0, 1)]

    @quick_jit
    def losses():
        params = init_params(model, jax.random.key(0), heads=("lm",))
        carry, found = of.first_carry(model, 16), []
        for batch in batches:
            terms = of.terms(Net(model, params), batch, carry)
            found.append(terms.means["permuted_lm_loss"].value)
            carry = terms.carry
        return found, carry

    found, carry = losses()
    for loss in found:
        assert float(loss) == pytest.approx(math.log(3000), abs=0.05)
    assert (carry is None) == (memory == 0)
    assert carry is None or (carry["group"] == 1).all()


# XLNet's class.


def test_losses_gradients_and_memory_are_those_of_xlnets_class(params):
    """Three rows of a stream, one after the other, with a memory of a row and a half;
    what cannot be seen is told them pair by pair, from the definition."""
    B, M = 3, 24
    of = PermutedLM(SPECIAL, partial=3, longest=2, memory=M)
    layout, heads, model = LAYOUTS["xlnet"], ("lm",), Model(ARCH)
    tensors, _ = engine.to_theirs(params, ARCH, layout, heads=heads)
    reference = parity.their_model(ARCH, layout, heads, tensors)
    reference.transformer.mem_len = M

    @quick_jit
    def compute(params, batch, carry):
        def total(params):
            terms = of.terms(Net(model, params), batch, carry)
            return loss_of(of, terms.means), terms.carry

        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(total, has_aux=True)(params)

    carry, mems = of.first_carry(model, B), None
    for step in range(3):
        batch = corrupted(clean_batch(B, seed=step), step, of)
        seen = np.stack([definition(batch, row, stream="query") for row in range(B)])
        hides = torch.tensor(~seen, dtype=torch.float32)
        P = batch["where"].shape[1]
        mapping = np.zeros((B, P, S), np.float32)
        np.put_along_axis(mapping, batch["where"][:, :, None].astype(int), 1, axis=2)
        reference.zero_grad()
        out = reference(
            torch.tensor(batch["ids"]).long(),
            perm_mask=hides,
            target_mapping=torch.tensor(mapping),
            labels=torch.tensor(batch["targets"]).long(),
            mems=mems,
            use_mems=True,
        )
        out.loss.backward()
        (loss, after), gradients = compute(params, batch, carry)
        assert excess(loss, out.loss.detach(), **OUTPUT) <= 1
        its = {name: tensor.grad for name, tensor in reference.named_parameters()}
        flat = engine.flatten(params)
        theirs = parity.gradients_of(its, ARCH, layout, heads, flat)
        mine = engine.flatten(gradients)
        assert theirs.keys() == mine.keys()
        worst = {n: excess(mine[n], theirs[n], **GRADIENT) for n in theirs}
        assert not {n: value for n, value in worst.items() if not value <= 1}
        mems = [states.detach() for states in out.mems]
        length = min(M, (step + 1) * S)
        assert len(mems) == ARCH.layers
        assert after["group"].sum(1).tolist() == [length] * B
        for n, states in enumerate(mems):  # time first
            kept = after["states"][:, n, M - length :]
            assert excess(kept, states.transpose(0, 1), **OUTPUT) <= 1
        if step:  # without the memory it is another loss
            other = compute(params, batch, of.first_carry(model, B))[0][0]
            assert excess(other, out.loss.detach(), **OUTPUT) > 1
        carry = after


def test_loss_and_gradients_on_the_collators_rows(params):
    """What transformers' own collator has permuted: one order for the whole row, in
    which words that are no targets come first. (No functional tokens: it shows them to
    all, and to them what is before them.)"""
    tokenizer = SimpleNamespace(
        mask_token="<mask>", mask_token_id=4, pad_token="<pad>", pad_token_id=0
    )
    tokenizer.get_special_tokens_mask = lambda ids, **_: [0] * len(ids)
    torch.manual_seed(0)
    collator = DataCollatorForPermutationLanguageModeling(
        tokenizer, plm_probability=1 / 3, max_span_length=3
    )
    clean = clean_batch(4)
    clean["ids"][:, 5] = 9
    ids, hides, mapping, labels = collator.torch_mask_tokens(
        torch.tensor(clean["ids"]).long()
    )
    layout, heads = LAYOUTS["xlnet"], ("lm",)
    tensors, _ = engine.to_theirs(params, ARCH, layout, heads=heads)
    reference = parity.their_model(ARCH, layout, heads, tensors)
    out = reference(ids, perm_mask=hides, target_mapping=mapping, labels=labels)
    out.loss.backward()

    targets = (labels >= 0).numpy()
    before = ((hides.numpy() == 0) & targets[:, None]).sum(-1)  # targets that it sees
    assert targets.sum(1).min() > 1
    where = np.argsort(~targets, axis=1, kind="stable")[:, : targets.sum(1).max()]
    at = np.take_along_axis(labels.numpy(), where, 1)
    batch = clean | {
        "ids": ids.numpy().astype(np.int32),
        "rank": np.where(targets, before, -1).astype(np.int32),
        "where": where,
        "targets": np.maximum(at, 0),
        "weights": (at >= 0).astype(np.float32),
    }

    @quick_jit
    def compute(params):
        def total(params):
            net = Net(Model(ARCH), params)
            return loss_of(OBJECTIVE, OBJECTIVE.terms(net, batch).means)

        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(total)(params)

    loss, gradients = compute(params)
    assert excess(loss, out.loss.detach(), **OUTPUT) <= 1
    its = {name: tensor.grad for name, tensor in reference.named_parameters()}
    flat = engine.flatten(params)
    theirs = parity.gradients_of(its, ARCH, layout, heads, flat)
    assert_same_gradients(gradients, engine.unflatten(theirs))


# What must not be known.


def with_vectors(model: Model, params: dict, vectors):
    def net(tokens, **asked):
        return Net(model, params)(tokens.replace(vectors=vectors), **asked)

    return net


def losses_at(net, batch: dict, carry=None, of: PermutedLM = OBJECTIVE):
    """The loss of each prediction by itself, through the objective, and the carry."""
    found = {}

    def listening(tokens, **asked):
        found.update(net(tokens, **asked))
        return found

    carry = of.terms(listening, batch, carry).carry
    return cross_entropy(found["lm"], batch["targets"]), carry


def test_a_prediction_hears_what_is_before_it_and_nothing_else(params):
    batch, model = corrupted(clean_batch(2)), Model(ARCH)
    vectors = jax.random.normal(jax.random.key(1), (2, S, ARCH.width))

    @quick_jit
    def heard(vectors):
        net = lambda v: losses_at(with_vectors(model, params, v), batch)[0]  # noqa: E731
        return jnp.abs(jax.jacrev(net)(vectors)).sum(-1)  # [B, P, B, S]

    found = np.asarray(heard(vectors))
    for row in range(2):
        sees = definition(batch, row, stream="query")[batch["where"][row]]
        np.testing.assert_array_equal(found[row, :, row] > 0, sees)
        assert not found[row, :, 1 - row].any()
        assert 0 < sees.mean() < 1


def test_memory_is_heard_where_a_row_goes_on_and_learns_nothing(params):
    """Another text before changes the loss of the row that goes on, and of no other;
    no gradient goes back to it."""
    of = PermutedLM(SPECIAL, partial=3, longest=2, memory=10)
    model = Model(ARCH)
    first, second = (corrupted(clean_batch(2, seed=n), n, of) for n in (0, 1))
    second["continues"] = np.array([1, 0], np.int32)
    vectors = jax.random.normal(jax.random.key(1), (2, 2, S, ARCH.width))

    @quick_jit
    def both(params, vectors):
        def total(vectors):
            net = with_vectors(model, params, vectors[0])
            carry = losses_at(net, first, of.first_carry(model, 2), of)[1]
            net = with_vectors(model, params, vectors[1])
            each = losses_at(net, second, carry, of)[0]
            alone = losses_at(net, second, of=of)[0]
            return each.sum(), (each, alone)

        return jax.grad(total, has_aux=True)(vectors)

    gradient, (each, alone) = both(params, vectors)
    assert not np.asarray(gradient[0]).any()
    assert np.abs(gradient[1]).max() > 0
    _, (other, _) = both(params, vectors.at[0].add(0.5))
    assert (np.asarray(each[0]) != np.asarray(other[0])).all()
    np.testing.assert_array_equal(each[1], other[1])
    # The row that begins a text is read as if there were no memory at all.
    np.testing.assert_allclose(each[1], alone[1], rtol=1e-5)
    assert np.abs(each[0] - alone[0]).max() > 1e-3


# Steps.


def test_evaluation():
    """A row is scored by itself: that there might be a memory makes no difference."""
    batch, model, found = clean_batch(8, vocab=25), Model(SMALL), []
    params = drawn_params(SMALL, heads=("lm",))
    for memory in (0, 10):
        of = PermutedLM(SPECIAL, partial=3, longest=2, memory=memory)
        step = quick_jit(make_eval_step(model, of))
        means = step(params, jnp.uint32(0), batch, jnp.int32(7))
        found.append({name: float(mean.value) for name, mean in means.items()})
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert set(found[0]) == {
        *("permuted_lm_loss", "permuted_lm_accuracy", "unigram_accuracy")
    }


def text_rows(step: int, *, shuffled: bool) -> dict:
    """Counting on from row to row, modulo 20; or the same pieces in any order."""
    begin = np.random.default_rng(0).integers(0, 20, (16, 1))
    ids = 5 + (begin + step * S + np.arange(S)) % 20
    if shuffled:
        ids = np.random.default_rng(step).permutation(ids.ravel()).reshape(16, S)
    return clean_batch(16) | {"ids": ids.astype(np.int32)}


def test_it_learns_to_count_and_not_what_was_shuffled():
    """Chance is 1 in 20."""
    model, optimizer = Model(SMALL), optax.adam(1e-2)
    of = PermutedLM(SPECIAL, partial=3, memory=8)
    step = quick_jit(make_train_step(model, of, optimizer))
    fresh = init_params(model, jax.random.key(0), heads=("lm",))
    last = {}
    for shuffled in (False, True):
        one = jnp.int32(0), fresh, optimizer.init(fresh), jnp.uint32(1)
        state, found = TrainState(*one, of.first_carry(model, 16)), []
        for number in range(120):
            state, means = step(state, text_rows(number, shuffled=shuffled))
            scores = means["permuted_lm_accuracy"], means["permuted_lm_loss"]
            found.append([float(score.value) for score in scores])
        last[shuffled] = np.array(found[-20:])
    assert last[False][-1, 0] > 0.9
    accuracy, loss = last[True].mean(0)
    assert accuracy < 0.1
    assert loss > math.log(20) - 0.02


# By name, devices, bad input.


def test_names():
    assert OBJECTIVES["permuted_lm"] is PermutedLM
    for name in ("xlnet-base-cased", "xlnet-large-cased"):
        member = preset(name)
        assert (member.objective, member.hyper) == ("permuted_lm", {"memory": 384})
        assert PermutedLM(SPECIAL, **member.hyper).columns == ("continues",)
    assert OBJECTIVE.columns == ()


def test_eight_devices_do_not_talk():
    seed = jax.random.key(0)

    def from_step(batch):
        return OBJECTIVE.corrupt(row_keys(seed, jnp.arange(16)), batch)

    assert_devices_do_not_talk(from_step, clean_batch(16))


def test_wrong_numbers_and_members():
    with pytest.raises(InputError) as caught:
        PermutedLM(SPECIAL, partial=0, longest=0, memory=-1)
    text = str(caught.value)
    assert "objective.partial=0 must be at least 1" in text
    assert "objective.longest=0 must be at least 1" in text
    assert "objective.memory=-1 must be at least 0" in text
    (problem,) = OBJECTIVE.problems(TINY, "full")
    assert "needs config.arch.streams=2 (with config.arch.position='xl')" in problem
    assert OBJECTIVE.problems(ARCH, "full") == []
