"""Every member computes what its class in transformers computes, live.

Method and tolerances are those of `bert_jax.parity`: perturbed weights, sharp
attention, every hidden state, attention probability, logit and loss, and the gradient
of the sum of all losses, with padding on either side.
"""

import dataclasses
from functools import cache, lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from bert_jax import parity
from bert_jax.convert import engine
from bert_jax.convert.tables import LAYOUTS, Layout
from bert_jax.models.arch import Arch
from bert_jax.models.heads import HEADS
from bert_jax.models.model import Model
from bert_jax.models.tokens import plain, rank_of, remember
from bert_jax.parity import GRADIENT, OUTPUT, QUICK, SHARP, Rows, excess
from bert_jax.presets import PRESETS, preset

transformers.utils.logging.set_verbosity_error()

# name: preset, what else is changed in its tiny arch, side of the padding. The second
# case of a member walks its layers by scan.
SCAN = dict(stack="scan")
CASES = {
    "bert": ("bert-tiny", dict(types=3, activation="gelu_tanh", **SCAN), "left"),
    "roberta": ("roberta-base", {}, "right"),
    "roberta-left": ("roberta-base", dict(layers=3, heads=4, inner=77, **SCAN), "left"),
    "xlm-roberta": ("xlm-roberta-base", {}, "right"),
    "albert": ("albert-base-v2", {}, "right"),
    "albert-groups": (
        "albert-base-v1",
        dict(layers=8, groups=2, group_layers=2, width=24, embed_width=24, **SCAN),
        "left",
    ),
    "electra": ("electra-small-discriminator", {}, "right"),
    "electra-base": ("electra-base-discriminator", dict(layers=3, **SCAN), "left"),
    "generator": ("electra-base-generator", dict(width=36, inner=33), "right"),
    "distilbert": ("distilbert-base-uncased", {}, "right"),
    "distilbert-left": (
        "distilbert-base-cased",
        dict(activation="relu", **SCAN),
        "left",
    ),
    "ernie": ("ernie-1.0-base-zh", SCAN, "left"),
    "ernie-tasks": ("ernie-2.0-base-en", {}, "right"),
    "xlnet": ("xlnet-base-cased", {}, "left"),
    "xlnet-right": (
        "xlnet-base-cased",
        dict(max_distance=5, activation="gelu_tanh", norm_eps=1e-5, heads=4, **SCAN),
        "right",
    ),
    "gpt": ("openai-gpt", {}, "right"),
    "gpt-left": ("openai-gpt", dict(activation="relu", norm_eps=1e-6, **SCAN), "left"),
    "gpt2": ("gpt2", {}, "right"),
    "gpt2-left": ("gpt2", dict(inner=100, activation="gelu", layers=3, **SCAN), "left"),
    "longformer": ("longformer-base-4096", {}, "right"),
    "longformer-left": (
        "longformer-base-4096",
        dict(window=6, layers=3, **SCAN),
        "left",
    ),
}
# Layouts that no case is written for: their first preset, as it is.
CASES |= {
    member.layout: (member.name, {}, "right")
    for member in reversed(PRESETS.values())
    if LAYOUTS[member.layout].verified_by == "transformers"
    and member.layout not in {preset(name).layout for name, *_ in CASES.values()}
}


@dataclasses.dataclass
class Case:
    arch: Arch
    layout: Layout
    rows: Rows
    heads: tuple[str, ...]
    params: dict
    theirs: dict


@lru_cache
def case(name: str) -> Case:
    member, changes, side = CASES[name]
    arch = parity.tiny(preset(member).arch).but(**changes)
    layout = LAYOUTS[preset(member).layout]
    rows = parity.random_rows(arch, [24, 17, 9, 24], 24, side=side)
    classes = parity.classes_for(arch, layout, rows)
    heads = tuple(head for head in HEADS if any(head in c for c in classes))
    params = parity.sharp_params(arch, heads=heads)
    theirs = parity.their_results(arch, layout, params, rows)
    return Case(arch, layout, rows, heads, params, theirs)


def found(of: Case, arch: Arch | None = None, rows: Rows | None = None) -> dict:
    arch, rows = arch or of.arch, rows or of.rows
    ours = parity.our_results(arch, of.params, rows, of.heads)
    compared = parity.compare(arch, ours, of.theirs, of.rows)
    return {name: allowed for name, (_, allowed) in compared.items()}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str):
    of = case(name)
    # The reference is what it says: padded on that side, and sharp in a full row.
    side = CASES[name][2]
    ends = of.rows.real[:, 0].all(), of.rows.real[:, -1].all()
    assert ends == ((True, False) if side == "right" else (False, True))
    if "attentions" in of.theirs["outputs"]:
        full = of.theirs["outputs"]["attentions"][:, [0, 3]]
        S = full.shape[-1]  # a first token that sees only itself is always sharp
        assert (full[..., S // 2 :, :].max((1, 2, 3, 4)) > SHARP).all()
    for leaf in jax.tree.leaves(of.params):
        assert leaf.size < 20 or leaf.std() > 0.01  # no bias is 0, no norm is 1

    compared = found(of)
    assert of.theirs["round_trip"]
    # Every head that its class has on these rows, every layer, every parameter.
    shown = set(of.heads) - {"pooler", "answer"}  # which has a loss only: test_heads.py
    asked = {f"logits {head}" for head in shown}
    assert asked <= set(compared)
    layers = {f"hidden {n}" for n in range(of.arch.layers + 1)}
    assert layers <= set(compared)
    gradients = {f"gradient {path}" for path in engine.flatten(of.params)}
    assert gradients <= set(compared)
    assert not {key: value for key, value in compared.items() if not value <= 1}


# Planted errors: one for each choice that a member makes. Each must be seen.

PLANTED = {
    "positions-from-0": ("roberta", dict(position_offset=1)),
    "epsilon-of-bert": ("roberta", dict(norm_eps=1e-12)),
    "exact-gelu": ("albert", dict(activation="gelu")),
    "other-groups": ("albert-groups", dict(groups=4, group_layers=1)),
    "tanh-pooler": ("electra", dict(pooler="tanh")),
    "tanh-summary": ("distilbert", dict(pooler="tanh")),
    "relu": ("ernie", dict(activation="gelu")),
    "first-token": ("xlnet", dict(pool_from="first")),
    "clamped": ("xlnet-right", dict(max_distance=6)),
    "sees-all": ("gpt", dict(order="all")),
    "gelu": ("gpt2", dict(activation="gelu")),
    "post-norm": ("gpt2-left", dict(norm_place="post")),
    "window": ("longformer", dict(window=10)),
}


@pytest.mark.parametrize("error", PLANTED)
def test_sees_a_planted_error(error: str):
    name, change = PLANTED[error]
    of = case(name)
    assert any(not value <= 1 for value in found(of, of.arch.but(**change)).values())


def changed(rows: Rows, **arrays) -> Rows:
    return dataclasses.replace(rows, **arrays)


def test_sees_other_types_tasks_and_global_tokens():
    for name, field in (
        ("xlnet", "types"),
        ("ernie-tasks", "task"),
        ("longformer", "reach"),
    ):
        of = case(name)
        array = getattr(of.rows, field)
        rows = changed(of.rows, **{field: np.roll(array, 1, axis=1)})
        assert any(not value <= 1 for value in found(of, rows=rows).values()), name


# XLNet: two streams, permutations, memory.


@cache
def xlnet():
    """Its LM class, our parameters, and two pieces of text."""
    arch = parity.tiny(preset("xlnet-base-cased").arch).but(layers=3)
    layout = LAYOUTS["xlnet"]
    params = parity.sharp_params(arch, heads=("lm",), seed=1)
    tensors, _ = engine.to_theirs(params, arch, layout, heads=("lm",))
    return arch, layout, params, parity.their_model(arch, layout, ("lm",), tensors)


def permuted(rng, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Ranks [B, S], -1 for words that are not predicted, and the places that are."""
    B, S, P = shape
    rank, where = np.full((B, S), -1), np.zeros((B, P), np.int32)
    for row in range(B):
        where[row] = np.sort(rng.choice(S, P, replace=False))
        rank[row, where[row]] = rng.permutation(P)
    return rank.astype(np.int32), where


@pytest.mark.parametrize("length", [0, 7, 19], ids=["no-memory", "short", "long"])
def test_two_streams_equal_xlnet(length: int):
    arch, layout, params, model = xlnet()
    rng = np.random.default_rng(3)
    B, S, P = 3, 13, 5
    ids = rng.integers(1, arch.vocab_size, (B, S)).astype(np.int32)
    types = rng.integers(0, 3, (B, S)).astype(np.int32)
    targets = rng.integers(0, arch.vocab_size, (B, P))
    rank, where = permuted(rng, (B, S, P))
    before = plain(rng.integers(1, arch.vocab_size, (B, 19)).astype(np.int32))

    # Theirs: who cannot see whom, said pair by pair.
    hides = ~(rank[:, None, :] < rank[:, :, None])
    hides &= ~((rank[:, None, :] == -1) & (rank[:, :, None] == -1))
    mapping = np.zeros((B, P, S), np.float32)
    np.put_along_axis(mapping, where[:, :, None].astype(int), 1, axis=2)
    model.zero_grad()
    given = {}
    if length:
        read = model(torch.tensor(np.asarray(before.ids)).long(), use_mems=True)
        given["mems"] = [states[-length:] for states in read.mems]  # time first
    out = model(
        torch.tensor(ids).long(),
        token_type_ids=torch.tensor(types).long(),
        perm_mask=torch.tensor(hides, dtype=torch.float32),
        target_mapping=torch.tensor(mapping),
        output_hidden_states=True,
        use_mems=False,
        **given,
    )
    loss = torch.nn.functional.cross_entropy(
        out.logits.flatten(0, 1), torch.tensor(targets).flatten()
    )
    loss.backward()

    tokens = plain(ids, types=types).replace(rank=jnp.asarray(rank))
    ours = Model(arch)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params, tokens, read):
        memory = None
        if length:
            hidden = ours.apply({"params": params}, before, capture=("hidden",))
            memory = remember(before, read * hidden["hidden"], length=length)

        def total(params):
            out = ours.apply(
                {"params": params},
                tokens,
                where=jnp.asarray(where),
                heads=("lm",),
                streams=2,
                memory=memory,
                capture=("hidden", "query"),
            )
            logs = jax.nn.log_softmax(out["lm"])
            each = jnp.take_along_axis(logs, jnp.asarray(targets)[..., None], axis=-1)
            return -each.mean(), out

        return jax.value_and_grad(total, has_aux=True)(params)

    (value, mine), gradients = compute(params, tokens, 1.0)
    assert excess(value, loss.detach(), **OUTPUT) <= 1
    logits = mine["lm"][..., : arch.vocab_size]
    assert excess(logits, out.logits.detach(), **OUTPUT) <= 1
    # Another order of prediction, and a memory of nothing, are seen.
    rolled = tokens.replace(rank=jnp.roll(tokens.rank, 1, axis=1))
    for planted in ((rolled, 1.0), *([(tokens, 0.0)] if length else [])):
        other = compute(params, *planted)[0][1]["lm"][..., : arch.vocab_size]
        assert excess(other, out.logits.detach(), **OUTPUT) > 1
    content, query = out.hidden_states[0::2], out.hidden_states[1::2]
    assert len(content) == len(query) == arch.layers + 1
    for n in range(arch.layers + 1):
        a, b = mine["hidden"][n], content[n].detach()
        assert excess(a, b, **OUTPUT) <= 1, n
        a, b = mine["query"][n], query[n].detach()
        assert excess(a, b, **OUTPUT) <= 1, n
    its = {name: tensor.grad for name, tensor in model.named_parameters()}
    flat = engine.flatten(params)
    theirs = parity.gradients_of(its, arch, layout, ("lm",), flat)
    mine = engine.flatten(gradients)
    assert theirs.keys() == mine.keys()
    worst = {n: excess(mine[n], theirs[n], **GRADIENT) for n in theirs}
    assert not {n: value for n, value in worst.items() if not value <= 1}
    # The content stream of a target never goes into the loss of the query stream
    # alone: had the gradient been zero everywhere, nothing would have been compared.
    assert all(np.abs(theirs[n]).max() > 0 for n in theirs if n != "embed/position")


# UniLM: BERT's weights, six types, and prefix ranks; theirs gets pairs of tokens.


def test_prefix_ranks_equal_bert_with_pairs():
    arch = parity.tiny(preset("unilm-base-cased").arch).but(types=6)
    layout = LAYOUTS["bert"]
    params = parity.sharp_params(arch, heads=("lm",), seed=2)
    tensors, _ = engine.to_theirs(params, arch, layout, heads=("lm",))
    model = parity.their_model(arch, layout, ("lm",), tensors)
    rng = np.random.default_rng(0)
    B, S, prefix = 3, 17, np.array([5, 9, 1])
    ids = rng.integers(1, arch.vocab_size, (B, S)).astype(np.int32)
    place = np.arange(S)
    types = np.where(place < prefix[:, None], 4, 5).astype(np.int32)
    # UniLM: all of the prefix is seen; the rest sees the prefix and its own past.
    sees = (place[None, None] < prefix[:, None, None]) | (
        (place[None, :, None] >= prefix[:, None, None])
        & (place[None, None] <= place[None, :, None])
    )
    hides = torch.tensor(np.where(sees, 0.0, -1e30)[:, None], dtype=torch.float32)
    with torch.no_grad():
        out = model(
            torch.tensor(ids).long(),
            token_type_ids=torch.tensor(types).long(),
            attention_mask=hides,
            output_hidden_states=True,
        )
    tokens = plain(ids, types=types, order="prefix", prefix=prefix)
    mine = jax.jit(
        lambda p: Model(arch).apply(
            {"params": p}, tokens, heads=("lm",), capture=("hidden",)
        ),
        compiler_options=QUICK,
    )(params)
    logits = mine["lm"][..., : arch.vocab_size]
    assert excess(logits, out.logits, **OUTPUT) <= 1
    for n in range(arch.layers + 1):
        assert excess(mine["hidden"][n], out.hidden_states[n], **OUTPUT) <= 1
    # Any other order is another model.
    rank = rank_of("causal", tokens.positions)
    other = Model(arch).apply({"params": params}, tokens.replace(rank=rank))["last"]
    assert excess(other, out.hidden_states[-1], **OUTPUT) > 1


# Longformer's attention, which theirs returns cut into window and global parts.


def test_longformer_attention():
    of = case("longformer")
    arch, rows = of.arch, of.rows
    tensors, _ = engine.to_theirs(
        {name: of.params[name] for name in ("embed", "stack", "lm")},
        arch,
        of.layout,
        heads=("lm",),
    )
    model = parity.their_model(arch, of.layout, ("lm",), tensors)
    with torch.no_grad():
        out = model(
            torch.tensor(rows.ids).long(),
            attention_mask=torch.tensor(rows.real).long(),
            global_attention_mask=torch.tensor(rows.reach).long(),
            output_attentions=True,
        )
    ours = jax.jit(partial(Model(arch).apply, capture=("attentions",)))(
        {"params": of.params}, rows.tokens(arch)
    )["attentions"]
    B, S = rows.ids.shape
    w = arch.window // 2
    widely = [np.flatnonzero(row) for row in rows.reach]
    G = max(map(len, widely))
    assert G > 1
    compared = 0
    for n in range(arch.layers):
        near = out.attentions[n].numpy()  # [B, H, S, G + 2w + 1]
        far = out.global_attentions[n].numpy()  # [B, H, S, G]: key, global query
        for b in range(B):
            for i in np.flatnonzero(rows.real[b]):
                dense = np.zeros((arch.heads, S), np.float32)
                if i in widely[b]:
                    slot = list(widely[b]).index(i)
                    dense[:] = far[b, :, :S, slot]
                else:
                    dense[:, widely[b]] = near[b, :, i, : len(widely[b])]
                    for offset in range(-w, w + 1):
                        j = i + offset
                        if 0 <= j < S and j not in widely[b]:
                            dense[:, j] = near[b, :, i, G + w + offset]
                assert excess(ours[n, b, :, i], dense, **OUTPUT) <= 1, (n, b, i)
                compared += 1
    assert compared == arch.layers * rows.real.sum()
