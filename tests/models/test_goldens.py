"""What transformers 5 has no class for, against stored numbers: NEZHA, Transformer-XL,
UniLM, SpanBERT's boundary head.

The goldens were written once by transformers 4.57 (tests/goldens/make.py).
"""

import json
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import parity
from bert_jax.convert import engine
from bert_jax.convert.hf import read_arch
from bert_jax.models.arch import Arch
from bert_jax.models.heads import SPAN_WORDS
from bert_jax.models.model import Model
from bert_jax.models.tokens import plain, remember
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.causal_lm import CausalLM
from bert_jax.objectives.corrupt import borders_of
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.parity import GRADIENT, OUTPUT, QUICK, Rows, excess
from bert_jax.step import Net
from tests.goldens import below, load, tensors_of

NEZHA_KINDS = {
    "pretraining": "NezhaForPreTraining",
    "classify": "NezhaForSequenceClassification",
    "tag": "NezhaForTokenClassification",
    "span": "NezhaForQuestionAnswering",
    "choice": "NezhaForMultipleChoice",
}
NEZHA_HEADS = ("lm", "pooler", "nsp", "classify", "tag", "span", "choice")


def arch_of(arrays: dict, kind: str):
    config = json.loads(str(arrays[f"config/{kind}"]))
    return read_arch(config, source=kind)


def nezha_tree(arrays: dict, under: str) -> tuple[Arch, dict[str, np.ndarray]]:
    """Our flat tree with every head; of gradients too."""
    arch, layout = arch_of(arrays, "classify")
    flat = {}
    for kind, name in NEZHA_KINDS.items():
        tensors = tensors_of(arrays, kind, under)
        tree = engine.to_ours(tensors, arch, layout, source=kind, architectures=(name,))
        flat |= engine.flatten(tree)
    return arch, flat


def nezha_found(arrays: dict, side: str, arch: Arch, flat: dict) -> dict[str, float]:
    """How far we are from every stored output and gradient, in tolerances."""
    given, want = below(arrays, f"in/{side}"), below(arrays, f"out/{side}")
    labels = {
        name.removesuffix("_labels"): value
        for name, value in given.items()
        if name.endswith("_labels")
    }
    labels["span"] = np.stack([labels.pop("start"), labels.pop("end")], -1)
    real = given["real"] > 0
    blank = np.zeros_like(given["ids"])
    rows = Rows(given["ids"], given["types"], real, blank, blank, labels)
    tokens = rows.tokens(arch)
    first = jnp.asarray(real.argmax(1))[:, None]
    model = Model(arch)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params):
        def total(params):
            out = model.apply(
                {"params": params},
                tokens,
                first=first,
                heads=NEZHA_HEADS,
                capture=("hidden", "attentions"),
            )
            losses = {
                head: parity.loss_of(head, arch, out, tokens, labels)
                for head in NEZHA_HEADS
            }
            return sum(losses.values()), out | {"loss": losses}

        return jax.value_and_grad(total, has_aux=True)(params)

    (_, out), gradients = compute(engine.unflatten(flat))
    found = {}
    for n, (a, b) in enumerate(zip(out["hidden"], want["hidden"], strict=True)):
        found[f"hidden {n}"] = excess(a[real], b[real], **OUTPUT)
    for n, (a, b) in enumerate(zip(out["attentions"], want["attentions"], strict=True)):
        a, b = (probabilities.swapaxes(1, 2)[real] for probabilities in (a, b))
        found[f"attentions {n}"] = excess(a, b, **OUTPUT)
    V = arch.vocab_size
    found["lm"] = excess(out["lm"][real][:, :V], want["lm"][real], **OUTPUT)
    found["tag"] = excess(out["tag"][real], want["tag"][real], **OUTPUT)
    found["span"] = excess(out["span"][real], want["span"][real], **OUTPUT)
    found["pooled"] = excess(out["pooler"][:, 0], want["pooled"], **OUTPUT)
    found["nsp"] = excess(out["nsp"][:, 0], want["nsp"], **OUTPUT)
    found["classify"] = excess(out["classify"][:, 0], want["classify"], **OUTPUT)
    choice = out["choice"][:, 0].reshape(-1, 2)
    found["choice"] = excess(choice, want["choice"], **OUTPUT)
    for head in ("lm", "nsp", "classify", "tag", "span", "choice"):
        loss = out["loss"][head]
        found[f"{head} loss"] = excess(loss, want[f"{head}_loss"], **OUTPUT)
    mine = engine.flatten(gradients)
    for name, leaf in nezha_tree(arrays, f"grad/{side}")[1].items():
        found[f"gradient {name}"] = excess(mine[name], leaf, **GRADIENT)
    return found


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["clipped", "far"])
def test_nezha(name: str, side: str):
    arrays = load("nezha")[name]
    arch, flat = nezha_tree(arrays, "param")
    assert (arch.position, arch.max_distance) == (
        "functional",
        {"clipped": 5, "far": 64}[name],
    )
    found = nezha_found(arrays, side, arch, flat)
    assert len(found) > 40
    assert not {key: value for key, value in found.items() if not value <= 1}


@pytest.mark.parametrize(
    "change",
    [dict(max_distance=6), dict(norm_eps=1e-5), dict(activation="gelu_tanh")],
    ids=["distance", "epsilon", "gelu"],
)
def test_nezha_sees(change: dict):
    arrays = load("nezha")["clipped"]
    arch, flat = nezha_tree(arrays, "param")
    found = nezha_found(arrays, "right", arch.but(**change), flat)
    assert any(value > 1 for value in found.values())


# Transformer-XL: two pieces of text, the second with the memory of the first.


def xl_found(arrays: dict, arch: Arch, params: dict, *, forget: bool = False) -> dict:
    mem = arrays["out/first/mems"].shape[2]
    model, V = Model(arch), arch.vocab_size
    first, second = (
        plain(arrays[f"in/{piece}/ids"], order="causal")
        for piece in ("first", "second")
    )
    options = dict(heads=("lm",), capture=("hidden", "attentions"))

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params):
        out = model.apply({"params": params}, first, **options)
        memory = remember(first, out["hidden"], length=mem)
        assert memory.states.shape == arrays["out/first/mems"].shape

        def loss(params):
            read = None if forget else memory
            out = model.apply({"params": params}, second, memory=read, **options)
            logs = jax.nn.log_softmax(out["lm"][..., :V])
            labels = arrays["in/second/labels"][:, 1:]
            chosen = jnp.maximum(labels, 0)[..., None]
            each = -jnp.take_along_axis(logs[:, :-1], chosen, axis=-1)[..., 0]
            mean = (each * (labels >= 0)).sum() / (labels >= 0).sum()
            return mean, out | {"log_probs": logs}

        (value, after), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        new = remember(second, after["hidden"], length=mem_after, before=memory)
        out["log_probs"] = jax.nn.log_softmax(out["lm"][..., :V])
        return out, memory, value, after, new, gradients

    mem_after = arrays["out/second/mems"].shape[2]
    out, memory, value, after, new, gradients = compute(params)
    found = {"loss": excess(value, arrays["out/second/loss"], **OUTPUT)}
    for piece, mine in (("first", out), ("second", after)):
        want = below(arrays, f"out/{piece}")
        for name in ("hidden", "log_probs", "attentions"):
            if forget and name == "attentions":
                continue
            found[f"{piece} {name}"] = excess(mine[name], want[name], **OUTPUT)
    for name, states in (("first", memory.states), ("second", new.states)):
        found[f"{name} memory"] = excess(states, arrays[f"out/{name}/mems"], **OUTPUT)
    mine = engine.flatten(gradients)
    for name, leaf in xl_tree(arrays, "grad")[2].items():
        found[f"gradient {name}"] = excess(mine[name], leaf, **GRADIENT)
    return found


def xl_tree(arrays: dict, under: str, kind: str = "lm") -> tuple[Arch, dict, dict]:
    config = json.loads(str(arrays[f"config/{kind}"]))
    # With a memory of its own length the class does what it does with the one given.
    arch, layout = read_arch(config | {"mem_len": 0}, source=kind)
    tensors = tensors_of(arrays, kind, under)
    tree = engine.to_ours(tensors, arch, layout, source=kind)
    return arch, tree, engine.flatten(tree)


@pytest.mark.parametrize("name", ["clamped", "unclamped", "untied"])
def test_transformer_xl(name: str):
    arrays = load("transfo_xl")[name]
    arch, params, _ = xl_tree(arrays, "param")
    shared = "layer" if name == "untied" else "shared"
    assert arch.position_biases == shared
    found = xl_found(arrays, arch, params)
    assert len(found) > 20
    assert not {key: value for key, value in found.items() if not value <= 1}


@pytest.mark.parametrize("forget", [False, True], ids=["memory", "none"])
def test_transformer_xl_through_the_objective(forget: bool):
    """The second piece with what the objective carries over from the first: loss and
    gradients of the release; without it they are not."""
    arrays = load("transfo_xl")["untied"]
    arch, params, _ = xl_tree(arrays, "param")
    of = CausalLM(memory=arrays["out/first/mems"].shape[2])
    net = partial(Net, Model(arch))
    pieces = []
    for piece in ("first", "second"):
        ids = arrays[f"in/{piece}/ids"]
        rows = {"ids": ids, "types": np.zeros_like(ids), "group": np.ones_like(ids)}
        rows["positions"] = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        rows["continues"] = np.full(len(ids), piece == "second" and not forget)
        pieces.append(of.corrupt(None, rows))
    pieces[1]["weights"] *= arrays["in/second/labels"][:, 1:] >= 0
    targets, labels = pieces[1]["targets"], arrays["in/second/labels"][:, 1:]
    np.testing.assert_array_equal(targets[labels >= 0], labels[labels >= 0])

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params):
        fresh = of.first_carry(Model(arch), len(labels))
        carry = of.terms(net(params), pieces[0], fresh).carry

        def loss(params):
            return loss_of(of, of.terms(net(params), pieces[1], carry).means)

        return jax.value_and_grad(loss)(params)

    value, gradients = compute(params)
    found = gradients_found(gradients, xl_tree(arrays, "grad")[1])
    found["loss"] = excess(value, arrays["out/second/loss"], **OUTPUT)
    assert len(found) > 10
    assert all(value <= 1 for value in found.values()) == (not forget)
    assert (found["loss"] <= 1) == (not forget)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("clamped", dict(max_distance=7)),
        ("clamped", dict(embed_scale="none")),
        ("unclamped", dict(norm_eps=1e-5)),
        ("untied", dict(activation="gelu")),
        ("clamped", None),
    ],
    ids=["distance", "scale", "epsilon", "activation", "memory"],
)
def test_transformer_xl_sees(name: str, change: dict | None):
    arrays = load("transfo_xl")[name]
    arch, params, _ = xl_tree(arrays, "param")
    found = xl_found(arrays, arch.but(**change or {}), params, forget=change is None)
    assert any(value > 1 for value in found.values())


# Its classifier, which reads the last token before the padding.


def classify_found(arrays: dict, *, real: bool = True, **changes) -> dict[str, float]:
    """Without `real`, padding is not told from words."""
    arch, params, _ = xl_tree(arrays, "param", kind="classify")
    arch = arch.but(**changes)
    ids, labels = (arrays[f"in/second/{name}"] for name in ("ids", "labels"))
    tokens = plain(ids, real=ids > 0 if real else None, order="causal")
    model = Model(arch)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params):
        memory = None
        if "in/first/ids" in arrays:
            first = plain(arrays["in/first/ids"], order="causal")
            out = model.apply({"params": params}, first, capture=("hidden",))
            length = arrays["out/first/mems"].shape[2]
            memory = remember(first, out["hidden"], length=length)

        def loss(params):
            out = model.apply(
                {"params": params},
                tokens,
                memory=memory,
                heads=("classify",),
                capture=("hidden", "attentions"),
            )
            return parity.cross_entropy(out["classify"][:, 0], labels), out

        return jax.value_and_grad(loss, has_aux=True)(params), memory

    ((value, out), gradients), memory = compute(params)
    found = read_found(out, below(arrays, "out/second"), ids > 0)
    found["loss"] = excess(value, arrays["out/second/loss"], **OUTPUT)
    logits = out["classify"][:, 0]
    found["classify"] = excess(logits, arrays["out/second/classify"], **OUTPUT)
    if memory is not None:
        found["memory"] = excess(memory.states, arrays["out/first/mems"], **OUTPUT)
    return found | gradients_found(gradients, xl_tree(arrays, "grad", "classify")[2])


@pytest.mark.parametrize("name", ["alone", "memory"])
def test_transformer_xl_classifies(name: str):
    arrays = load("transfo_xl_classify")[name]
    assert (arrays["in/second/ids"] == 0).any()
    found = classify_found(arrays)
    assert ("memory" in found) == (name == "memory")
    assert len(found) > 20
    assert not {key: value for key, value in found.items() if not value <= 1}


@pytest.mark.parametrize(
    "change",
    [dict(real=False), dict(pool_from="first"), dict(max_distance=7)],
    ids=["padding", "first", "distance"],
)
def test_transformer_xl_classifier_sees(change: dict):
    found = classify_found(load("transfo_xl_classify")["alone"], **change)
    assert found["classify"] > 1


# UniLM: BERT with six types and the ranks of its four objectives.

FORMS = {
    "bidirectional": "all",
    "left_to_right": "causal",
    "right_to_left": "backward",
    "seq2seq": "prefix",
}


def bert_tree(arrays: dict, kind: str, under: str) -> tuple[Arch, dict]:
    arch, layout = arch_of(arrays, kind)
    tensors = tensors_of(arrays, kind, under)
    names = ("BertForMaskedLM",)
    tree = engine.to_ours(tensors, arch, layout, source=kind, architectures=names)
    return arch, tree


def read_found(out: dict, want: dict, real: np.ndarray) -> dict[str, float]:
    """Hidden states and attention of every layer, at real tokens."""
    found = {}
    for n, (a, b) in enumerate(zip(out["hidden"], want["hidden"], strict=True)):
        found[f"hidden {n}"] = excess(a[real], b[real], **OUTPUT)
    for n, (a, b) in enumerate(zip(out["attentions"], want["attentions"], strict=True)):
        a, b = (probabilities.swapaxes(1, 2)[real] for probabilities in (a, b))
        found[f"attentions {n}"] = excess(a, b, **OUTPUT)
    return found


def gradients_found(gradients: dict, want: dict) -> dict[str, float]:
    mine, want = engine.flatten(gradients), engine.flatten(want)
    assert mine.keys() == want.keys()
    return {f"gradient {n}": excess(mine[n], want[n], **GRADIENT) for n in want}


@cache
def unilm_function(arch: Arch):
    """Of rows of all forms, one below the other; compiled once."""
    model = Model(arch)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params, tokens, labels):
        def total(params):
            out = model.apply(
                {"params": params},
                tokens,
                heads=("lm",),
                capture=("hidden", "attentions"),
            )
            parts = (jnp.split(x, len(FORMS)) for x in (out["lm"], labels))
            losses = [parity.cross_entropy(*pair) for pair in zip(*parts, strict=True)]
            return sum(losses), out | {"loss": losses}

        return jax.value_and_grad(total, has_aux=True)(params)

    return compute


def unilm_found(
    arrays: dict, *, orders: dict = FORMS, shift: int = 0, types: bool = True
) -> dict[str, float]:
    """`shift` moves the border of source and target; without `types`, 4 and 5 are
    taken for 0 and 1."""
    arch, params = bert_tree(arrays, "lm", "param")
    V, sets = arch.vocab_size, {form: below(arrays, f"in/{form}") for form in FORMS}

    def tokens(form: str):
        rows, order = sets[form], orders[form]
        prefix = rows["starts"] + shift if order == "prefix" else None
        kinds = rows["types"] if types else rows["types"] % 2
        return plain(
            rows["ids"], types=kinds, real=rows["real"], order=order, prefix=prefix
        )

    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *map(tokens, FORMS))
    labels = np.concatenate([rows["lm_labels"] for rows in sets.values()])
    (_, out), gradients = unilm_function(arch)(params, whole, labels)
    found = {}
    for n, (form, rows) in enumerate(sets.items()):
        want, real = below(arrays, f"out/{form}"), rows["real"]
        here = slice(n * len(real), (n + 1) * len(real))
        captured = {name: out[name][:, here] for name in ("hidden", "attentions")}
        mine = read_found(captured, want, real)
        mine["lm"] = excess(out["lm"][here][real][:, :V], want["lm"][real], **OUTPUT)
        mine["loss"] = excess(out["loss"][n], want["loss"], **OUTPUT)
        found |= {f"{form} {name}": value for name, value in mine.items()}
    return found | gradients_found(gradients, bert_tree(arrays, "lm", "grad")[1])


def test_unilm():
    arrays = load("unilm")["tiny"]
    assert arch_of(arrays, "lm")[0].types == 6
    found = unilm_found(arrays)
    assert len(found) > 50
    assert not {key: value for key, value in found.items() if not value <= 1}


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (dict(shift=1), {"seq2seq"}),
        (dict(shift=-1), {"seq2seq"}),
        (dict(orders=FORMS | {"seq2seq": "all"}), {"seq2seq"}),
        (dict(orders=FORMS | {"right_to_left": "causal"}), {"right_to_left"}),
        (dict(types=False), {"left_to_right", "right_to_left", "seq2seq"}),
    ],
    ids=["later", "earlier", "all", "turned", "types"],
)
def test_unilm_sees(change: dict, seen: set[str]):
    found = unilm_found(load("unilm")["tiny"], **change)
    assert {form for form in FORMS if found[f"{form} lm"] > 1} == seen
    assert any(found[name] > 1 for name in found if name.startswith("gradient"))


# SpanBERT's boundary head, as its release computes it.


def boundary_found(
    arrays: dict, *, move: tuple[int, int] = (0, 0), later: int = 0, **changes
) -> dict[str, float]:
    """`move` is added to the two borders, `later` to the number of a word."""
    arch, params = bert_tree(arrays, "pretraining", "param")
    arch = arch.but(**changes)
    rows, want = below(arrays, "in/mixed"), below(arrays, "out/mixed")
    labels = rows["sbo_labels"]
    B, Q, T = labels.shape
    S, V = rows["ids"].shape[1], arch.vocab_size
    borders = np.clip(rows["pairs"] + np.array(move), 0, S - 1)[:, :, None]
    borders = np.broadcast_to(borders, (B, Q, T, 2))
    numbers = np.broadcast_to(np.arange(T) + later, (B, Q, T))[..., None]
    spans = np.concatenate([borders, numbers], -1).reshape(B, Q * T, 3)
    tokens = plain(rows["ids"], types=rows["types"], real=rows["real"])
    model = Model(arch)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params):
        def total(params):
            out = model.apply(
                {"params": params},
                tokens,
                spans=jnp.asarray(spans),
                heads=("lm", "sbo"),
                capture=("hidden", "attentions"),
            )
            out["sbo"] = out["sbo"].reshape(B, Q, T, -1)
            out["lm_loss"] = parity.cross_entropy(out["lm"], rows["lm_labels"])
            # The release divides the sum by one more than there are words.
            words = (labels >= 0).sum()
            mean = parity.cross_entropy(out["sbo"], labels)
            out["sbo_loss"] = mean * words / (words + 1)
            return out["lm_loss"] + out["sbo_loss"], out

        return jax.value_and_grad(total, has_aux=True)(params)

    (value, out), gradients = compute(params)
    real = rows["real"]
    found = read_found(out, want, real)
    found["lm"] = excess(out["lm"][real][:, :V], want["lm"][real], **OUTPUT)
    found["sbo"] = excess(out["sbo"][..., :V], want["sbo"], **OUTPUT)
    found["loss"] = excess(value, want["loss"], **OUTPUT)
    for name in ("lm_loss", "sbo_loss"):
        found[name] = excess(out[name], want[name], **OUTPUT)
    tree = bert_tree(arrays, "pretraining", "grad")[1]
    return found | gradients_found(gradients, tree)


def test_boundary():
    arrays = load("boundary")["tiny"]
    found = boundary_found(arrays)
    assert sum(name.startswith("gradient sbo/") for name in found) == 10
    assert not {key: value for key, value in found.items() if not value <= 1}


def test_boundary_through_the_objective():
    """The release divides by one more than there are words, and so has a loss that is
    n / (n + 1) of ours: with that weight all gradients are its own."""
    arrays = load("boundary")["tiny"]
    arch, params = bert_tree(arrays, "pretraining", "param")
    rows, want = below(arrays, "in/mixed"), below(arrays, "out/mixed")
    labels, n = rows["lm_labels"], (rows["sbo_labels"] >= 0).sum()
    of = MaskedLM(arch.vocab_size, 4, (), next_sentence=0.0, boundary=n / (n + 1))
    S = labels.shape[1]
    place = np.broadcast_to(np.arange(S), labels.shape)
    spans = jax.vmap(borders_of)(jnp.asarray(labels >= 0)).clip(0, S - 1)
    weights = (labels >= 0).astype(np.float32)
    batch = {name: rows[name] for name in ("ids", "types")}
    batch |= {"positions": place, "group": rows["real"].astype(np.int32)}
    batch |= {"where": place, "targets": np.maximum(labels, 0), "weights": weights}
    batch |= {"spans": spans, "bounded": weights * (spans[..., 2] < SPAN_WORDS)}

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params, batch):
        def total(params):
            means = of.terms(Net(Model(arch), params), batch).means
            return loss_of(of, means), means

        return jax.value_and_grad(total, has_aux=True)(params)

    (loss, means), gradients = compute(params, batch)
    mean = means["boundary_loss"]
    assert float(mean.count) == n < weights.sum()
    assert excess(mean.value * n, want["sbo_loss"] * (n + 1), **OUTPUT) <= 1
    assert excess(means["masked_lm_loss"].value, want["lm_loss"], **OUTPUT) <= 1
    assert excess(loss, want["loss"], **OUTPUT) <= 1
    found = gradients_found(gradients, bert_tree(arrays, "pretraining", "grad")[1])
    assert not {key: value for key, value in found.items() if not value <= 1}


@pytest.mark.parametrize(
    "change",
    [
        dict(move=(1, -1)),
        dict(move=(1, 0)),
        dict(later=1),
        dict(activation="gelu_tanh"),
        dict(norm_eps=1e-5),
    ],
    ids=["inside", "left", "place", "gelu", "epsilon"],
)
def test_boundary_sees(change: dict):
    found = boundary_found(load("boundary")["tiny"], **change)
    assert found["sbo"] > 1
    assert any(found[name] > 1 for name in found if name.startswith("gradient sbo/"))
