"""UniLM's four forms: who sees whom, what is drawn, what it costs, what is learnt."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from scipy import stats

from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.models.tokens import Tokens, visible
from bert_jax.objective import make_objective
from bert_jax.objectives import corrupt
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.unilm import FORMS, UniLM, in_form
from bert_jax.parity import OUTPUT, excess
from bert_jax.presets import preset
from bert_jax.step import Net, TrainState, make_train_step, row_keys
from tests.models.made import drawn_params
from tests.reference import (
    QUICK,
    assert_devices_do_not_talk,
    compare_gradients,
    failures,
    fresh_params,
    ours_from,
    random_rows,
    reference_model,
)

V, MASK, SPECIAL = 60, 4, (0, 1, 2, 3, 4)
ARCH = Arch(
    **dict(vocab_size=V, width=24, layers=2, heads=2, inner=40, max_positions=24),
    types=6,
)
CONFIDENCE = 1e-4  # as in test_corrupt.py


def objective(**changes) -> UniLM:
    return UniLM(V, MASK, SPECIAL, **changes)


def row(*examples: tuple[int, int], length: int) -> dict[str, list[int]]:
    """[CLS] A [SEP] B [SEP] for each (words of A, words of B), then padding."""
    columns = {name: [] for name in ("ids", "types", "positions", "group")}
    for number, (a, b) in enumerate(examples, 1):
        ids = [2, *[7] * a, 3, *[8] * b, *[3] * (b > 0)]
        columns["ids"] += ids
        columns["types"] += [int(n > a + 1) for n in range(len(ids))]
        columns["positions"] += range(len(ids))
        columns["group"] += [number] * len(ids)
    return {name: [*x, *[0] * (length - len(x))] for name, x in columns.items()}


def batch_of(rows: list[dict]) -> dict[str, np.ndarray]:
    return {name: np.array([r[name] for r in rows], np.int32) for name in rows[0]}


def tokens_of(batch: dict) -> Tokens:
    fields = ("ids", "types", "positions", "group", "rank")
    return Tokens(**{name: jnp.asarray(batch[name]) for name in fields})


def in_all_forms(one: dict) -> dict[str, np.ndarray]:
    """The row four times, once in each form."""
    batch = batch_of([one] * 4)
    return batch | in_form(jnp.arange(4), batch["types"], batch["positions"])


# --- who sees whom -------------------------------------------------------------------

BY_HAND = {  # [CLS] a b c [SEP] d e [SEP], then padding
    "bidirectional": "11111111 " * 8,
    "seq2seq": "11111000 " * 5 + "11111100 11111110 11111111",
    "left_to_right": (
        "10000000 11000000 11100000 11110000 11111000 11111100 11111110 11111111"
    ),
    "right_to_left": (
        "11111111 01111111 00111111 00011111 00001111 00000111 00000011 00000001"
    ),
}


def test_by_hand():
    batch = in_all_forms(row((3, 2), length=9))
    tokens = tokens_of(batch)
    seen = np.asarray(visible(tokens, tokens))
    for number, form in enumerate(FORMS):
        lines = BY_HAND[form].split()
        expected = [[letter == "1" for letter in f"{line}0"] for line in lines]
        np.testing.assert_array_equal(seen[number], [*expected, [False] * 9])
    assert batch["types"][:, :8].tolist() == [
        [0, 0, 0, 0, 0, 1, 1, 1],
        [4, 4, 4, 4, 4, 5, 5, 5],
        [2] * 8,
        [3] * 8,
    ]


def definition(form: str, one: dict) -> np.ndarray:
    """Pair by pair, from the paper: each packed example has a part A of its own."""
    group, types = np.array(one["group"]), np.array(one["types"])
    S = len(group)
    sees = np.zeros((S, S), bool)
    for q in range(S):
        for k in range(S):
            allowed = {
                "bidirectional": True,
                "seq2seq": types[k] == 0 or (types[q] == 1 and k <= q),
                "left_to_right": k <= q,
                "right_to_left": k >= q,
            }[form]
            sees[q, k] = group[q] == group[k] > 0 and allowed
    return sees


PACKED = row((3, 2), (1, 4), (2, 0), length=20)  # and one example without a part B


@pytest.fixture(scope="module")
def influence():
    """Of the vector of each token on the prediction at each: bool [form, q, k]."""
    batch = {name: jnp.asarray(x) for name, x in in_all_forms(PACKED).items()}
    S = batch["ids"].shape[1]
    batch["where"] = jnp.broadcast_to(jnp.arange(S), (4, S))
    batch |= {"targets": batch["ids"], "weights": jnp.ones((4, S))}
    batch["form"] = jnp.arange(4)
    params = drawn_params(ARCH, heads=("lm",))
    vectors = jax.random.normal(jax.random.key(0), (4, S, ARCH.width))
    weights = jax.random.normal(jax.random.key(1), (V,))
    of = objective(next_sentence=0.0)

    @partial(jax.jit, compiler_options=QUICK)
    def jacobian(vectors):
        def scores(vectors):
            found = []

            def net(tokens, **asked):
                shown = tokens.replace(vectors=vectors)
                out = Net(Model(ARCH), params)(shown, **asked)
                found.append(out["lm"][..., :V] @ weights)
                return out

            of.terms(net, batch)
            return found[0].sum(0)  # rows see nothing of each other: [S]

        return jax.jacrev(scores)(vectors)  # [q, form, k, D]

    return np.moveaxis(np.abs(jacobian(vectors)).max(-1), 0, 1) > 0


@pytest.mark.parametrize("form", FORMS)
def test_no_prediction_sees_what_its_form_hides(influence, form):
    """Exactly zero where it may not, and not where it may: packed rows, too."""
    expected = definition(form, PACKED) | np.eye(20, dtype=bool)
    np.testing.assert_array_equal(influence[FORMS.index(form)], expected)


def test_part_a_knows_nothing_of_part_b(influence):
    of_a, of_b = slice(0, 5), slice(5, 8)
    seen = {form: influence[n] for n, form in enumerate(FORMS)}
    assert not seen["seq2seq"][of_a, of_b].any()
    assert seen["bidirectional"][of_a, of_b].all()
    assert seen["seq2seq"][of_b, of_a].all()


# --- what is drawn -------------------------------------------------------------------


def random_batch(count: int, *, seed: int = 0, length: int = 40) -> dict:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        a, b = rng.integers(4, 17, 2)
        rows.append(row((int(a), int(b)), length=length))
    batch = batch_of(rows)
    words = np.isin(batch["ids"], (7, 8))
    batch["ids"][words] = rng.integers(5, V, words.sum())
    batch["first"] = np.zeros((count, 1), np.int32)
    batch["next_sentence"] = rng.integers(0, 2, (count, 1)).astype(np.int32)
    return batch


@cache
def compiled(of: UniLM):
    return jax.jit(of.corrupt, compiler_options=QUICK)


def drawn(of: UniLM, batch: dict, seed: int = 0) -> dict[str, np.ndarray]:
    keys = row_keys(jax.random.key(seed), jnp.arange(len(batch["ids"])))
    return jax.device_get(compiled(of)(keys, batch))


@pytest.fixture(scope="module")
def many():
    batch = random_batch(2000)
    return batch, drawn(objective(), batch)


def test_shares_of_the_forms(many):
    counts = np.bincount(many[1]["form"], minlength=4)
    expected = np.array([1 / 3, 1 / 3, 1 / 6, 1 / 6]) * 2000
    assert stats.chisquare(counts, expected).pvalue > CONFIDENCE
    some = drawn(objective(seq2seq=3, left_to_right=0, right_to_left=0), many[0])
    counts = np.bincount(some["form"], minlength=4)
    assert counts[2:].tolist() == [0, 0]
    low, high = stats.binom.interval(1 - CONFIDENCE, 2000, 3 / (3 + 1 / 3))
    assert low <= counts[1] <= high
    only = drawn(objective(bidirectional=0, seq2seq=0, left_to_right=0), many[0])
    assert (only["form"] == 3).all()


def test_what_a_row_of_each_form_is(many):
    """Types, ranks and labels follow from the form; nothing special is chosen; the
    budget is met exactly."""
    batch, out = many
    expected = in_form(jnp.asarray(out["form"]), batch["types"], batch["positions"])
    np.testing.assert_array_equal(out["types"], expected["types"])
    np.testing.assert_array_equal(out["rank"], expected["rank"])
    asked = out["next_sentence"][:, 0] >= 0
    np.testing.assert_array_equal(asked, out["form"] == 0)
    labels = batch["next_sentence"][asked]
    np.testing.assert_array_equal(out["next_sentence"][asked], labels)
    budget = corrupt.budget(40, 0.15)[(batch["group"] > 0).sum(1)]
    np.testing.assert_array_equal(out["weights"].sum(1), budget)
    filled = out["weights"] > 0
    assert not np.isin(out["targets"][filled], SPECIAL).any()
    at = np.take_along_axis(batch["ids"], out["where"], 1)
    np.testing.assert_array_equal(out["targets"], at)
    shown = np.take_along_axis(out["ids"], out["where"], 1)[filled]
    hidden, kept = (shown == MASK).mean(), (shown == out["targets"][filled]).mean()
    n = int(filled.sum())
    for share, wanted in ((hidden, 0.8 + 0.1 / V), (kept, 0.1 + 0.1 / V)):
        low, high = stats.binom.interval(1 - CONFIDENCE, n, wanted)
        assert low <= share * n <= high


def test_runs_of_tokens():
    """Three predictions in a long row are drawn as 3 (10 %), 2 + 1 (10 %), 1 + 2 (80 %
    of 20 %: a third one would be too many) or 1 + 1 + 1 (64 %)."""
    S, count = 150, 1000
    zeros = np.zeros((count, S), np.int32)
    batch = {"ids": zeros + 9, "group": zeros + 1, "types": zeros}
    batch["positions"] = zeros + np.arange(S, dtype=np.int32)
    out = drawn(objective(rate=3 / S, next_sentence=0.0), batch)
    assert (out["weights"] == 1).all()
    touching = (np.diff(out["where"], axis=1) == 1).sum(1)
    found = np.bincount(touching, minlength=3) / count
    by_chance = 3 * 2 / S  # two that were drawn apart are neighbours
    for share, wanted in zip(found, (0.64, 0.26, 0.1), strict=True):
        low, high = stats.binom.interval(1 - CONFIDENCE, count, wanted)
        assert low / count - by_chance <= share <= high / count + by_chance


def test_same_key_same_draw(many):
    batch, out = many
    again, other = drawn(objective(), batch), drawn(objective(), batch, seed=1)
    np.testing.assert_array_equal(out["ids"], again["ids"])
    np.testing.assert_array_equal(out["form"], again["form"])
    assert (other["form"] != out["form"]).mean() > 0.5


def test_eight_devices_do_not_talk():
    batch, of = random_batch(16), objective()
    assert_devices_do_not_talk(
        lambda b: of.corrupt(row_keys(jax.random.key(0), jnp.arange(16)), b), batch
    )


# --- what it costs -------------------------------------------------------------------


def test_the_loss_by_hand():
    """Two rows: of three predictions one is bidirectional; only its row is a pair."""
    of = objective(next_sentence=0.5)
    lm = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]] * 2))
    nsp = jnp.log(jnp.array([[[0.75, 0.25]], [[0.5, 0.5]]]))
    batch = batch_of([row((2, 1), length=6)] * 2)
    batch |= in_form(jnp.array([0, 1]), batch["types"], batch["positions"])
    batch |= {"form": jnp.array([0, 1]), "first": np.zeros((2, 1), int)}
    batch |= {"where": np.array([[1, 2]] * 2), "targets": np.array([[0, 2], [1, 2]])}
    batch["weights"] = np.array([[1.0, 0.0], [1.0, 1.0]])
    batch["next_sentence"] = np.array([[1], [-1]])

    def net(tokens, *, where, first, heads):
        assert heads == ("lm", "pooler", "nsp")
        np.testing.assert_array_equal(tokens.rank, batch["rank"])
        np.testing.assert_array_equal(tokens.types, batch["types"])
        return {"lm": lm, "nsp": nsp}

    means = of.terms(net, batch).means
    losses = [math.log(2), math.log(4), -math.log(0.6)]
    assert float(means["unilm_loss"].value) == pytest.approx(sum(losses) / 3)
    assert float(means["bidirectional_loss"].value) == pytest.approx(losses[0])
    assert float(means["seq2seq_loss"].value) == pytest.approx(sum(losses[1:]) / 2)
    assert float(means["left_to_right_loss"].count) == 0
    assert float(means["unilm_accuracy"].total) == 2
    assert float(means["next_sentence_loss"].value) == pytest.approx(math.log(4))
    total = sum(losses) / 3 + 0.5 * math.log(4)
    assert float(loss_of(of, means)) == pytest.approx(total)
    counts = {name: float(count) for name, count in of.counts(batch).items()}
    assert counts == {"unilm_loss": 3, "next_sentence_loss": 1}


def test_without_pairs():
    for of in (objective(next_sentence=0.0), objective(bidirectional=0.0)):
        assert of.heads == ("lm",)
        assert of.weights == {"unilm_loss": 1.0}


def test_the_same_as_bert_for_pretraining():
    """Loss and gradient of theirs, fed the same corrupted rows, one of each form; what
    a form hides is told to it pair by pair."""
    model = reference_model(ARCH)
    rows = random_rows(ARCH.but(types=2), [24, 24, 19, 24], 24)
    parts = np.broadcast_to(np.arange(24) > [[9], [13], [4], [9]], (4, 24))
    form = jnp.arange(4)
    batch = rows.batch() | {"types": parts.astype(np.int32), "form": form}
    whole = {name: batch[name].tolist() for name in ("group", "types")}
    batch |= in_form(form, batch["types"], batch["positions"])
    batch["next_sentence"] = np.where(form[:, None] == 0, rows.next_sentence, -1)
    sees = np.stack(
        [
            definition(name, {k: v[n] for k, v in whole.items()})
            for n, name in enumerate(FORMS)
        ]
    )
    labels = torch.tensor(
        np.where(batch["next_sentence"] < 0, -100, rows.next_sentence)
    )
    out = model(
        input_ids=torch.tensor(rows.ids),
        token_type_ids=torch.tensor(np.asarray(batch["types"])),
        attention_mask=torch.tensor(np.where(sees, 0.0, -1e30)[:, None]).float(),
        labels=torch.tensor(rows.labels),
        next_sentence_label=labels[:, 0].long(),
    )
    out.loss.backward()
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters()}
    of, params = objective(), ours_from(model, ARCH)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params, batch):
        return jax.value_and_grad(
            lambda p: loss_of(of, of.terms(Net(Model(ARCH), p), batch).means)
        )(params)

    loss, gradients = jax.device_get(compute(params, batch))
    assert excess(loss, out.loss.detach().numpy(), **OUTPUT) <= 1
    assert not failures(compare_gradients(ARCH, gradients, theirs))
    # In another form every row has another loss.
    moved = batch | in_form(form[::-1], jnp.asarray(parts, int), batch["positions"])
    assert excess(compute(params, moved)[0], loss, **OUTPUT) > 1


def test_loss_at_initialisation():
    of, batch = objective(), random_batch(64)
    params = fresh_params(ARCH.but(max_positions=40))

    @partial(jax.jit, compiler_options=QUICK)
    def score(params, batch):
        keys = row_keys(jax.random.key(0), jnp.arange(64))
        net = Net(Model(ARCH.but(max_positions=40)), params)
        return of.terms(net, of.corrupt(keys, batch)).means

    means = score(params, batch)
    for name in ("unilm_loss", *(f"{form}_loss" for form in FORMS)):
        assert abs(float(means[name].value) - math.log(V)) < 0.15
    assert abs(float(means["next_sentence_loss"].value) - math.log(2)) < 0.1


# --- what is learnt ------------------------------------------------------------------


COPIES = dict(rate=0.3, next_sentence=0.0, hide=1.0, randomise=0.0)


def copies(rng, count: int, *, shuffled: bool) -> dict[str, np.ndarray]:
    """[CLS] A [SEP] B [SEP] where B repeats A: four words out of eight; or B is that of
    another row."""
    batch = batch_of([row((4, 4), length=11)] * count)
    words = rng.integers(5, 13, (count, 4))
    batch["ids"][:, 1:5] = words
    batch["ids"][:, 6:10] = rng.permutation(words) if shuffled else words
    return batch


def share_that_is_known() -> dict[str, float]:
    """Of the predictions of each form: those whose twin, five places on or back, is
    shown and seen."""
    out = drawn(objective(**COPIES), copies(np.random.default_rng(1), 4000, shuffled=0))
    one = row((4, 4), length=11)
    found = {}
    for number, form in enumerate(FORMS):
        where = out["where"][out["form"] == number]
        twin = np.where(where > 5, where - 5, where + 5)
        hidden = (twin[:, :, None] == where[:, None]).any(-1)
        sees = definition(form, one)[where, twin]
        found[form] = float((sees & ~hidden).mean())
    return found


def learnt(shuffled: bool) -> dict[str, float]:
    """The mean loss of each form over the last steps of a short training."""
    arch = Arch(
        **dict(vocab_size=16, width=32, layers=1, heads=2, inner=64, max_positions=16),
        **dict(types=6, dropout=0.0, attention_dropout=0.0, init_std=0.1),
    )
    of = UniLM(16, MASK, SPECIAL, **COPIES)
    params = fresh_params(arch, heads=of.heads)
    optimizer = optax.adam(optax.linear_schedule(1e-2, 1e-3, 300))
    step = make_train_step(Model(arch), of, optimizer)
    step = jax.jit(step, compiler_options=QUICK)
    state = TrainState(jnp.int32(0), params, optimizer.init(params), jnp.uint32(0))
    rng, sums = np.random.default_rng(0), None
    for number in range(300):
        state, means = step(state, copies(rng, 64, shuffled=shuffled))
        if number >= 220:
            means = {form: means[f"{form}_loss"] for form in FORMS}
            sums = means if sums is None else {n: sums[n] + means[n] for n in means}
    return {form: float(mean.value) for form, mean in sums.items()}


def test_what_each_form_can_know():
    """Where B repeats A, a hidden word is known where its twin is seen: in B alone for
    seq2seq and left to right, in A alone for right to left. The loss is what is left:
    no more, or it was not learnt, and no less, or something was seen."""
    chance, known = math.log(8), share_that_is_known()
    assert known["bidirectional"] > 0.7
    assert all(known[form] < 0.4 for form in FORMS[1:])
    for form, loss in learnt(shuffled=False).items():
        assert loss == pytest.approx((1 - known[form]) * chance, rel=0.1), form
    for loss in learnt(shuffled=True).values():
        assert loss == pytest.approx(chance, rel=0.05)


# --- what does not fit ---------------------------------------------------------------


def test_wrong_hyper_parameters():
    with pytest.raises(InputError) as caught:
        objective(seq2seq=-1, rate=0, hide=0.8, randomise=0.3)
    assert str(caught.value).splitlines() == [
        "objective.rate=0 predicts nothing",
        "objective.hide=0.8 and objective.randomise=0.3 add up to more than 1",
        "objective.seq2seq=-1 is negative",
    ]
    with pytest.raises(InputError, match="are all 0: no row has a form"):
        objective(**dict.fromkeys(FORMS, 0.0))


def test_what_it_is_made_from(tiny_tokenizer):
    member, said = preset("unilm-base-cased"), []
    assert (member.objective, member.rows) == ("unilm", "pair")
    told = dict(preset=member, tokenizer=tiny_tokenizer, say=said.append)
    of = make_objective({}, arch=member.arch, rows="pair", **told)
    assert of.heads == ("lm", "pooler", "nsp")
    assert not said
    shares = {"seq2seq": 1.0, "next_sentence": 1.0}
    of = make_objective(shares, arch=member.arch, rows="full", **told)
    assert (of.seq2seq, of.next_sentence) == (0, 0)
    assert "rows=full have no part B: the form seq2seq is off" in said
    with pytest.raises(InputError, match=r"config\.arch\.types=2 must be at least 6"):
        make_objective({}, arch=member.arch.but(types=2), rows="pair", **told)
