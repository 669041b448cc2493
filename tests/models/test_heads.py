"""Heads that the tables of parity do not show: answers in steps, span boundaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from bert_jax import parity
from bert_jax.convert import engine
from bert_jax.convert.tables import LAYOUTS
from bert_jax.errors import InputError
from bert_jax.models.heads import BEST_STARTS, HEADS, SPAN_WIDTH, SPAN_WORDS
from bert_jax.models.model import Model
from bert_jax.models.tokens import plain
from bert_jax.parity import GRADIENT, OUTPUT, excess
from bert_jax.presets import preset
from tests.models.made import TINY, XLNET, drawn_params, quick_jit, random_tokens

transformers.utils.logging.set_verbosity_error()


def test_answers_equal_xlnet_without_labels():
    """Without a start given, ends are scored for the five best starts."""
    arch, layout = parity.tiny(preset("xlnet-base-cased").arch), LAYOUTS["xlnet"]
    params = parity.sharp_params(arch, heads=("answer",))
    tensors, _ = engine.to_theirs(params, arch, layout, heads=("answer",))
    model = parity.their_model(arch, layout, ("answer",), tensors)
    rows = parity.random_rows(arch, [24, 17, 9, 24], 24, side="left")
    with torch.no_grad():
        theirs = model(
            torch.tensor(rows.ids).long(),
            token_type_ids=torch.tensor(rows.types).long(),
            attention_mask=torch.tensor(rows.real).long(),
            p_mask=torch.tensor(~rows.real).float(),
        )
    tokens = rows.tokens(arch)
    ours = Model(arch).apply({"params": params}, tokens, heads=("answer",))
    assert excess(ours["answer_class"], theirs.cls_logits, **OUTPUT) <= 1
    start = jax.nn.softmax(ours["answer_start"])
    places = ours["answer_starts"]
    np.testing.assert_array_equal(places, theirs.start_top_index)
    top = jnp.take_along_axis(start, places, axis=1)
    assert excess(top, theirs.start_top_log_probs, **OUTPUT) <= 1
    # Their best ends of each start, [B, 5 ends, 5 starts] laid out flat.
    end = jax.nn.softmax(ours["answer_end"], axis=1)  # [B, S, 5 starts]
    best = -np.sort(-np.asarray(end), axis=1)[:, :BEST_STARTS]
    assert excess(best.reshape(4, -1), theirs.end_top_log_probs, **OUTPUT) <= 1
    # A start that is given is another question.
    given = Model(arch).apply(
        {"params": params}, tokens, heads=("answer",), starts=places[:, 1:2]
    )
    again, before = (
        np.where(rows.real, found, 0)
        for found in (given["answer_end"][..., 0], ours["answer_end"][..., 1])
    )
    assert excess(again, before, **OUTPUT) <= 1
    assert excess(given["answer_class"], ours["answer_class"], **OUTPUT) > 1


def test_a_row_of_padding_gives_numbers():
    """Every head, and every gradient."""
    arch = TINY.but(**XLNET)
    heads = tuple(head for head in HEADS if head != "sbo")
    params = drawn_params(arch, heads=heads)
    tokens = random_tokens(arch, 2, 6, group=[[1] * 6, [0] * 6])

    @quick_jit
    def compute(params):
        def total(params):
            out = Model(arch).apply({"params": params}, tokens, heads=heads)
            out["lm"] = out["lm"][..., : arch.vocab_size]
            found = {name: leaf for name, leaf in out.items() if leaf.dtype != int}
            return sum(jnp.tanh(leaf).sum() for leaf in found.values()), found

        return jax.value_and_grad(total, has_aux=True)(params)

    (_, out), gradients = compute(params)
    assert {"answer_start", "answer_end", "answer_class", "classify", "rtd"} <= {*out}
    for leaf in jax.tree.leaves((out, gradients)):
        assert np.isfinite(leaf).all()


# SpanBERT's boundary head. No library has it: PyTorch's parts, put together here.


class Boundary(torch.nn.Module):
    """The names are those of the release: cls.pair_target_predictions."""

    def __init__(self, width: int, pieces: int):
        super().__init__()
        self.position_embeddings = torch.nn.Embedding(SPAN_WORDS, SPAN_WIDTH)
        self.bias = torch.nn.Parameter(torch.zeros(pieces))
        self.mlp_layer_norm = torch.nn.ModuleDict(
            {
                "linear1": torch.nn.Linear(2 * width + SPAN_WIDTH, width),
                "layer_norm1": torch.nn.LayerNorm(width, eps=1e-12),
                "linear2": torch.nn.Linear(width, width),
                "layer_norm2": torch.nn.LayerNorm(width, eps=1e-12),
            }
        )

    def forward(self, states, spans, table):
        parts = []
        for b, row in enumerate(spans.tolist()):
            for left, right, number in row:
                place = self.position_embeddings.weight[number]
                parts.append(torch.cat([states[b, left], states[b, right], place]))
        y = torch.stack(parts)
        for n in "12":
            y = torch.nn.functional.gelu(self.mlp_layer_norm[f"linear{n}"](y))
            y = self.mlp_layer_norm[f"layer_norm{n}"](y)
        return (y @ table.T + self.bias).reshape(*spans.shape[:2], -1)


SPANS = np.array([[[0, 4, 0], [0, 4, 1], [0, 4, 2]], [[3, 7, 2], [6, 8, 0], [2, 9, 5]]])


@pytest.fixture(scope="module")
def boundary():
    arch = parity.tiny(preset("spanbert-base-cased").arch)
    params = parity.sharp_params(arch, heads=("lm",))
    rng = np.random.default_rng(0)
    whole = parity.init_params(Model(arch), jax.random.key(1), heads=("lm", "sbo"))
    sbo = jax.tree.map(
        lambda leaf: np.asarray(leaf) + rng.normal(0, 0.05, leaf.shape), whole["sbo"]
    )
    sbo = jax.tree.map(lambda leaf: leaf.astype(np.float32), sbo)
    sbo["bias"][arch.vocab_size :] = 0
    ids = rng.integers(1, arch.vocab_size, (2, 12)).astype(np.int32)
    return arch, params | {"sbo": sbo}, plain(ids)


def test_the_boundary_head_and_its_names(boundary):
    arch, params, tokens = boundary
    layout = LAYOUTS["bert"]
    theirs, rest = engine.to_theirs(params, arch, layout, heads=("lm",))
    release = "cls.pair_target_predictions."
    assert all(name.startswith(release) for name in rest)
    reference = Boundary(arch.width, arch.vocab_size)
    reference.load_state_dict(
        {name.removeprefix(release): torch.tensor(leaf) for name, leaf in rest.items()}
    )
    # And back.
    back = engine.to_ours(theirs, arch, layout, source="", extra=rest)
    for name, leaf in engine.flatten(params).items():
        np.testing.assert_array_equal(engine.flatten(back)[name], leaf, err_msg=name)

    def loss(params):
        out = Model(arch).apply(
            {"params": params}, tokens, heads=("sbo",), spans=jnp.asarray(SPANS)
        )
        logits = out["sbo"][..., : arch.vocab_size]
        return (jnp.sin(logits)).sum(), (logits, out["last"])

    (_, (logits, last)), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    table = torch.tensor(params["embed"]["token"][: arch.vocab_size])
    states = torch.tensor(np.asarray(last))
    found = reference(states, torch.tensor(SPANS), table)
    assert excess(logits, found.detach(), **OUTPUT) <= 1
    torch.sin(found).sum().backward()
    _, mine = engine.to_theirs({"sbo": gradients["sbo"]}, arch, layout, heads=())
    for name, parameter in reference.named_parameters():
        assert excess(mine[release + name], parameter.grad, **GRADIENT) <= 1, name
    # The order of the three parts counts.
    turned = SPANS[..., [1, 0, 2]]
    other = reference(states, torch.tensor(turned), table)
    assert excess(logits, other.detach(), **OUTPUT) > 1


def test_the_boundary_head_does_not_look_inside(boundary):
    arch, params, _ = boundary
    head = Model(arch)
    states = jax.random.normal(jax.random.key(0), (2, 12, arch.width))

    def scores(states):
        return head.apply(
            {"params": params},
            states,
            jnp.asarray(SPANS),
            method=lambda model, x, spans: model.main.sbo(x, spans, model.embed.token),
        )[..., : arch.vocab_size]

    influence = np.abs(jax.jacobian(lambda x: scores(x).sum(-1))(states)).sum(-1)
    for b in range(2):
        for p, (left, right, _) in enumerate(SPANS[b]):
            seen = set(np.flatnonzero(influence[b, p, b]))
            assert seen == {left, right}


def test_the_boundary_head_needs_spans(boundary):
    arch, params, tokens = boundary
    with pytest.raises(InputError, match="the head sbo needs `spans`"):
        Model(arch).apply({"params": params}, tokens, heads=("sbo",))
