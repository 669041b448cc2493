"""NEZHA and Transformer-XL, which transformers 5 no longer has, against stored numbers.

The goldens were written once by transformers 4.57 (tests/goldens/make.py).
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import parity
from bert_jax.convert import engine
from bert_jax.convert.hf import read_arch
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.models.tokens import plain, remember
from bert_jax.parity import GRADIENT, OUTPUT, QUICK, Rows, excess
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


def xl_tree(arrays: dict, under: str) -> tuple[Arch, dict, dict]:
    config = json.loads(str(arrays["config/lm"]))
    # With a memory of its own length the class does what it does with the one given.
    arch, layout = read_arch(config | {"mem_len": 0}, source="lm")
    tensors = tensors_of(arrays, "lm", under)
    tree = engine.to_ours(tensors, arch, layout, source="lm")
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
