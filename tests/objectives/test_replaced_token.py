"""Replaced-token detection: draws, labels and losses by hand, and ELECTRA's classes."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats

import bert_jax
from bert_jax import parity
from bert_jax.config import load_config
from bert_jax.convert import engine
from bert_jax.convert.tables import LAYOUTS
from bert_jax.errors import InputError
from bert_jax.metrics import read_metrics
from bert_jax.models.model import Model, count_params, init_params
from bert_jax.objectives.base import loss_of, tokens_of
from bert_jax.objectives.losses import binary_cross_entropy
from bert_jax.objectives.replaced_token import PHASES, ReplacedToken, put, sample
from bert_jax.parity import GRADIENT, OUTPUT, QUICK, excess
from bert_jax.presets import preset
from bert_jax.step import Net, row_keys
from bert_jax.train import train
from tests import tiny
from tests.models.made import TINY, drawn_params
from tests.reference import assert_devices_do_not_talk

SPECIAL = (0, 1, 2, 3, 4)
ARCH = TINY.but(embed_width=12, pooler="gelu", dropout=0.0, attention_dropout=0.0)
V, S = ARCH.vocab_size, 24
OBJECTIVE = ReplacedToken(V, 4, SPECIAL, generator=0.5)
TOWERS = OBJECTIVE.towers(ARCH)


def clean_batch(count: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    real = np.arange(S) < np.linspace(S // 2, S, count).astype(int)[:, None]
    ids = np.where(real, rng.integers(5, V, (count, S)), 0).astype(np.int32)
    ids[:, 0] = 2
    place = np.broadcast_to(np.arange(S, dtype=np.int32), ids.shape)
    return {
        "ids": ids,
        "types": (place > 8).astype(np.int32),
        "positions": place,
        "group": real.astype(np.int32),
    }


def corrupted(batch: dict, seed: int = 0, of: ReplacedToken = OBJECTIVE) -> dict:
    keys = row_keys(jax.random.key(seed), jnp.arange(len(batch["ids"])))
    return jax.jit(of.corrupt, compiler_options=QUICK)(keys, batch)


# Drawing.


def test_pieces_are_drawn_from_the_softmax():
    logits = np.array([0.0, 1.0, -np.inf, 2.0, -1.0, -np.inf], np.float32)
    draws = jax.random.uniform(jax.random.key(0), (1, 20000))
    found = sample(jnp.broadcast_to(logits, (1, 20000, 6)), draws)
    counts = np.bincount(np.ravel(found), minlength=6)
    expected = np.exp(logits, dtype=np.float64)
    expected *= 20000 / expected.sum()
    assert (counts[[2, 5]] == 0).all()
    there = expected > 0
    assert stats.chisquare(counts[there], expected[there]).pvalue > 1e-4


def test_draws_at_the_ends():
    """Surplus pieces, whose logits are -inf, are never drawn, at either end."""
    logits = np.full((1, 2, 30592), -np.inf, np.float32)
    logits[..., 7:30000] = np.random.default_rng(0).normal(size=29993)
    found = sample(logits, jnp.array([[0.0, np.nextafter(np.float32(1), 0)]]))
    assert found[0, 0] == 7
    assert 7 < found[0, 1] < 30000


@pytest.mark.parametrize("count", [1024, 1000, 997])
def test_drawing_by_blocks_is_the_inverse_of_the_sums(count: int):
    """Whether or not blocks divide the pieces, in f64: the first piece at which the
    sums reach the draw. Impossible pieces fill blocks at the ends and in the middle;
    the third row has all of its chance in one piece, and the last in the pieces around
    an edge."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, count)) * [[0.1], [3.0], [0.1], [0.0]]
    logits[:, :20] = logits[:, 400:430] = logits[:, -20:] = -np.inf
    logits[2, 500] = 40.0
    logits[3, :510], logits[3, 514:] = -np.inf, -np.inf
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    so_far = np.cumsum(chances, axis=1)
    draws = rng.uniform(size=(4, 2000))
    draws[:, :2] = 0.0, np.nextafter(np.float32(1), 0)
    draws, logits = draws.astype(np.float32), logits.astype(np.float32)
    found = np.asarray(sample(np.repeat(logits[:, None], 2000, 1), draws))
    lowest = (chances > 0).argmax(1)
    reach = [np.searchsorted(*row) for row in zip(so_far, draws, strict=True)]
    expected = np.maximum(reach, lowest[:, None])
    here = np.take_along_axis(chances, found, 1)
    reached = np.take_along_axis(so_far, found, 1)
    assert (here > 0).all()
    assert (reached > draws - 1e-6).all()
    assert (reached - here < draws + 1e-6).all()
    assert (found == expected).mean(1).min() > 0.99
    np.testing.assert_array_equal(found[:, 0], lowest)
    assert len({*found[3].tolist()}) == 4


def test_what_is_put_where():
    batch = {
        "clean": jnp.array([[2, 5, 6, 7, 3]]),
        "where": jnp.array([[1, 3, 0]]),
        "weights": jnp.array([[1.0, 1.0, 0.0]]),
    }
    ids, replaced = put(jnp.array([[9, 7, 8]]), batch)
    assert ids.tolist() == [[2, 9, 6, 7, 3]]  # the 7 was guessed right
    assert replaced.tolist() == [[False, True, False, False, False]]


def test_corruption():
    """Of thousands of predictions 85 % are hidden: 80 % or 90 % would be seen."""
    batch = clean_batch(2000)
    out = jax.device_get(corrupted(batch))
    np.testing.assert_array_equal(out["clean"], batch["ids"])
    assert out["draws"].shape == out["where"].shape
    filled = out["weights"] > 0
    shown = np.take_along_axis(out["ids"], out["where"], 1)[filled]
    original = out["targets"][filled]
    assert set(shown[shown != original]) == {4}  # hidden or kept, never random
    kept = int((shown == original).sum())
    assert stats.binomtest(kept, len(shown), 0.15).pvalue > 1e-4
    assert len(shown) > 4000
    for other in (0.1, 0.2):
        assert stats.binomtest(kept, len(shown), other).pvalue < 1e-9
    again, other = corrupted(batch), corrupted(batch, seed=1)
    np.testing.assert_array_equal(again["draws"], out["draws"])
    assert (np.asarray(other["draws"]) != out["draws"]).all()


# Losses.


def test_binary_cross_entropy_by_hand():
    scores, answers = jnp.array([0.0, 2.0, -3.0]), jnp.array([True, False, True])
    found = binary_cross_entropy(scores, answers)
    expected = [math.log(2), math.log1p(math.e**2), math.log1p(math.e**3)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("phase", PHASES)
def test_terms_by_hand(phase: str):
    """Row [CLS] a b c with a and c predicted: a has 1/4 and is replaced, c is sure."""
    of = ReplacedToken(8, 4, SPECIAL, phase=phase)
    zeros = jnp.zeros((1, 5), jnp.int32)
    batch = {name: zeros for name in ("types", "positions")}
    batch |= {
        "ids": jnp.array([[2, 4, 6, 4, 0]]),
        "clean": jnp.array([[2, 5, 6, 7, 0]]),
    }
    batch |= {"group": jnp.array([[1, 1, 1, 1, 0]]), "where": jnp.array([[1, 3]])}
    batch |= {"targets": jnp.array([[5, 7]]), "weights": jnp.ones((1, 2))}
    batch["draws"] = jnp.array([[0.5, 0.5]])
    asked = []

    def net(tokens, *, heads, tower="main", where=None):
        asked.append(tower)
        if tower == "generator":
            assert (heads, tokens.ids.tolist()) == (("lm",), [[2, 4, 6, 4, 0]])
            chances = jnp.zeros((1, 2, 8)).at[0, 0, 5:7].set(jnp.array([1 / 4, 3 / 4]))
            return {"lm": jnp.log(chances.at[0, 1, 7].set(1.0))}
        assert (heads, tokens.ids.tolist()) == (("rtd",), [[2, 6, 6, 7, 0]])
        return {"rtd": jnp.array([[-1.0, 1.0, 1.0, -1.0, 9.0]])}

    found = of.terms(net, batch).means
    means = {name: float(mean.value) for name, mean in found.items()}
    good, bad = math.log1p(math.exp(-1)), math.log1p(math.e)
    detected, filled = (3 * good + bad) / 4, math.log(4) / 2
    expected = {"masked_lm_loss": filled, "masked_lm_accuracy": 1 / 2}
    if phase != "generator":
        expected |= {
            "replaced_token_loss": detected,
            "replaced_token_accuracy": 3 / 4,
            "replaced_token_recall": 1.0,
            "replaced_token_precision": 1 / 2,
            "replaced_token_share": 1 / 4,
        }
    assert means == pytest.approx(expected)
    assert asked == ["generator"] + ["main"] * (phase != "generator")
    weights, loss = {
        "joint": (
            {"replaced_token_loss": 50, "masked_lm_loss": 1},
            50 * detected + filled,
        ),
        "generator": ({"masked_lm_loss": 1}, filled),
        "discriminator": ({"replaced_token_loss": 50}, 50 * detected),
    }[phase]
    assert of.weights == weights
    assert float(loss_of(of, found, of.counts(batch))) == pytest.approx(loss)


def test_a_perfect_generator_replaces_nothing():
    batch = corrupted(clean_batch())

    def net(tokens, *, heads, tower="main", where=None):
        if tower == "generator":
            return {"lm": jnp.log(jax.nn.one_hot(batch["targets"], V))}
        np.testing.assert_array_equal(tokens.ids, batch["clean"])
        return {"rtd": jnp.zeros(tokens.ids.shape)}

    means = OBJECTIVE.terms(net, batch).means
    assert float(means["replaced_token_share"].value) == 0
    assert float(means["replaced_token_recall"].count) == 0
    assert float(means["masked_lm_accuracy"].value) == 1


@pytest.fixture(scope="module")
def params() -> dict:
    return drawn_params(ARCH, heads=OBJECTIVE.heads, towers=TOWERS)


def test_who_hears_which_loss(params):
    """The generator nothing of what is detected, the model nothing of the blanks; the
    tables hear both."""
    model, batch = Model(ARCH, towers=TOWERS), corrupted(clean_batch())

    @partial(jax.jit, compiler_options=QUICK)
    def gradients(params):
        def one(params, name):
            return (
                OBJECTIVE.terms(Net(model, params), batch).means[f"{name}_loss"].value
            )

        return [jax.grad(one)(params, n) for n in ("replaced_token", "masked_lm")]

    detected, filled = (engine.flatten(tree) for tree in gradients(params))
    for name in detected:
        heard = np.abs(detected[name]).max() > 0, np.abs(filled[name]).max() > 0
        of_generator, of_tables = (
            name.startswith("generator/"),
            name.startswith("embed/"),
        )
        assert heard == (not of_generator, of_generator or of_tables), name


def test_losses_and_gradients_are_those_of_electras_classes(params):
    """Both classes, on the same corrupted rows, with one set of tables."""
    model, batch = Model(ARCH, towers=TOWERS), corrupted(clean_batch())
    small, layout = TOWERS[0][1], LAYOUTS["electra"]
    of = dataclasses.replace(OBJECTIVE, weight=1.0)  # as tolerances are meant

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params):
        def total(params):
            means = of.terms(Net(model, params), batch).means
            return loss_of(of, means), means

        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(total, has_aux=True)(params)

    (loss, means), gradients = jax.device_get(compute(params))
    guesser = {"embed": params["embed"], **params["generator"]}
    main = {name: params[name] for name in params if name != "generator"}
    logits = Net(model, params)(
        tokens_of(batch), where=batch["where"], heads=("lm",), tower="generator"
    )["lm"]
    ids, replaced = jax.device_get(put(sample(logits, batch["draws"]), batch))
    asked = np.full(ids.shape, -100)
    for row in range(len(ids)):
        filled = np.asarray(batch["weights"][row]) > 0
        asked[row, batch["where"][row][filled]] = batch["targets"][row][filled]

    def theirs(arch, tree, heads, shown, labels):
        tensors, extra = engine.to_theirs(tree, arch, layout, heads=heads)
        assert not extra
        reference = parity.their_model(arch, layout, heads, tensors)
        out = reference(
            torch.tensor(np.asarray(shown)).long(),
            token_type_ids=torch.tensor(np.asarray(batch["types"])).long(),
            attention_mask=torch.tensor(np.asarray(batch["group"])).long(),
            labels=torch.tensor(labels).long(),
        )
        out.loss.backward()
        repeats = layout.repeats(arch, heads)
        its = {repeats.get(n, n): p.grad for n, p in reference.named_parameters()}
        flat = engine.flatten(tree)
        loss = float(out.loss.detach())
        return loss, parity.gradients_of(its, arch, layout, heads, flat)

    lm, its = theirs(small, guesser, ("lm",), batch["ids"], asked)
    rtd, whole = theirs(ARCH, main, ("rtd",), ids, replaced.astype(int))
    assert excess(means["masked_lm_loss"].value, lm, **OUTPUT) <= 1
    assert excess(means["replaced_token_loss"].value, rtd, **OUTPUT) <= 1
    assert excess(loss, lm + rtd, **OUTPUT) <= 1
    expected = dict(whole)
    for name, leaf in its.items():
        if name.startswith("embed/"):
            expected[name] = expected[name] + leaf
        else:
            expected[f"generator/{name}"] = leaf
    mine = engine.flatten(gradients)
    assert mine.keys() == expected.keys()
    for name in mine:
        assert excess(mine[name], expected[name], **GRADIENT) <= 1, name


def test_loss_at_initialisation():
    """ln V of the generator and λ ln 2."""
    arch = preset("electra-small-discriminator").arch.but(layers=2, vocab_size=3000)
    of = ReplacedToken(3000, 4, SPECIAL)
    model = Model(arch.but(stack="scan"), towers=of.towers(arch))
    batch = corrupted(clean_batch(16), of=of)

    @partial(jax.jit, compiler_options=QUICK)
    def means():
        params = init_params(model, jax.random.key(0), heads=of.heads)
        return of.terms(Net(model, params), batch).means

    found = means()
    assert float(found["masked_lm_loss"].value) == pytest.approx(
        math.log(3000), abs=0.1
    )
    assert float(found["replaced_token_loss"].value) == pytest.approx(
        math.log(2), abs=0.05
    )
    assert float(found["replaced_token_share"].value) == pytest.approx(0.15, abs=0.04)


# Sizes, devices, bad input.


@pytest.mark.parametrize(
    ("size", "count"),
    [("small", 14_196_219), ("base", 119_386_427), ("large", 354_655_291)],
)
def test_both_towers_are_counted(size: str, count: int):
    """By the shapes: joint, with shared embeddings; generators of 64, 256 and 256."""
    member = preset(f"electra-{size}-discriminator")
    of = ReplacedToken(member.arch.vocab_size, 103, SPECIAL, **member.hyper)
    towers = of.towers(member.arch)
    assert count_params(member.arch, heads=of.heads, towers=towers) == count


def test_eight_devices_do_not_talk():
    batch, seed = clean_batch(16), jax.random.key(0)

    def from_step(batch):
        out = OBJECTIVE.corrupt(row_keys(seed, jnp.arange(16)), batch)
        ids, replaced = put(
            sample(jnp.zeros((*out["where"].shape, V)), out["draws"]), out
        )
        return out | {"replaced": replaced, "put": ids}

    assert_devices_do_not_talk(from_step, batch)


def test_wrong_numbers():
    with pytest.raises(InputError) as caught:
        ReplacedToken(V, 4, SPECIAL, generator=0.0, weight=-1.0, rate=2.0)
    text = str(caught.value)
    assert "objective.generator=0.0 must be more than 0, and at most 1" in text
    assert "objective.weight=-1.0 is negative" in text
    assert "objective.rate=2.0 must be between 0 and 1" in text


def test_a_generator_that_cannot_read_the_shared_table():
    """XLNet's head scores states as they are, and a smaller generator's do not fit."""
    bare = ARCH.but(embed_width=0, lm_head="bias")
    (problem,) = OBJECTIVE.problems(bare, "full")
    assert "needs config.arch.lm_head=transform instead of bias" in problem
    assert not dataclasses.replace(OBJECTIVE, generator=1.0).problems(bare, "full")


def test_two_stages_first_the_generator_then_the_model(tiny_corpus, tmp_path):
    """The second stage begins with the generator's layers, and leaves the generator and
    the tables it reads as they are; the model's own layers and head learn."""
    rules = [
        stage["optim.rate_rules"] for stage in load_config("electra_two_stage").stages
    ]
    phases = ("generator", "discriminator")
    stages = tuple(
        {"steps": 2, "objective.phase": phase, "optim.rate_rules": rule}
        for phase, rule in zip(phases, rules, strict=True)
    )
    sizes = {"objective__name": "replaced_token", "objective__generator": 1}
    run = tiny.make_run(
        tiny_corpus,
        steps=4,
        stages=stages,
        save_every=1,
        keep=9,
        **sizes,
    )
    train(run, tmp_path / "run", progress=False)
    at = {n: bert_jax.load(tmp_path / "run", step=n).params for n in (1, 2, 3, 4)}

    def same(one, other) -> list[bool]:
        leaves = zip(*map(jax.tree.leaves, (one, other)), strict=True)
        return [bool(np.array_equal(a, b)) for a, b in leaves]

    def far(one, other) -> float:
        apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one, other)
        return max(jax.tree.leaves(apart))

    assert all(same(at[1]["rtd"], at[2]["rtd"]))  # no gradient, biases are 0
    assert not any(same(at[1]["generator"]["lm"], at[2]["generator"]["lm"]))
    assert all(same(at[2]["generator"], at[4]["generator"]))
    assert not all(same(at[2]["rtd"], at[4]["rtd"]))
    assert all(same(at[2]["embed"], at[4]["embed"]))
    assert not any(same(at[1]["embed"], at[2]["embed"]))
    # One step away from the generator's layers, far from its own of before.
    begun, before = at[2]["generator"]["stack"], at[2]["stack"]
    assert far(at[3]["stack"], begun) < 0.02 < far(before, begun)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert ["replaced_token_loss" in row for row in rows] == [False, False, True, True]
    name = dict(objective__name="replaced_token")
    small = tiny.make_run(tiny_corpus, steps=4, stages=stages, **name)
    with pytest.raises(InputError, match="must be as large as the model"):
        train(small, tmp_path / "other", progress=False)
