"""However the layers are walked, and whatever they share, the function is one."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.models.arch import Arch
from bert_jax.models.dropout import Noise
from bert_jax.models.model import Model, init_params
from bert_jax.models.tokens import Tokens, plain, remember
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.permuted_lm import PermutedLM
from bert_jax.step import Net, row_keys
from tests.models.made import (
    GPT2,
    LONGFORMER,
    NEZHA,
    TINY,
    TRANSFORMER_XL,
    XLNET,
    assert_same_gradients,
    assert_same_outputs,
    drawn_params,
    probe,
    quick_jit,
    random_tokens,
)
from tests.objectives.made import SPECIAL, counting

S = 9
# Sums in another order: a few of the last of 24 bits.
OUTPUT = dict(relative=2e-6, floor=1.0, absolute=0.0)
GRADIENT = dict(relative=1e-5, floor=0.0, absolute=1e-8)

MEMBERS = {
    "bert": {},
    "albert": dict(share="all", embed_width=12),
    "two-groups": dict(share="all", groups=2),
    "two-in-a-group": dict(share="all", group_layers=2),
    "shared-attention": dict(share="attention", groups=2),
    "shared-ffn": dict(share="ffn"),
    "gpt": GPT2 | dict(norm_place="post"),
    "gpt2": GPT2,
    "nezha": NEZHA,
    "xlnet": XLNET,
    "xlnet-pre": XLNET | dict(norm_place="pre"),
    "transformer-xl": TRANSFORMER_XL | dict(position_biases="shared"),
    "longformer": LONGFORMER,
}
SHARING = [name for name, choices in MEMBERS.items() if "share" in choices]
REMEMBERING = ("xlnet", "xlnet-pre", "transformer-xl")


def arch_of(name: str, **changes) -> Arch:
    choices = MEMBERS[name]
    layers = 4 if "groups" in choices or "group_layers" in choices else 2
    return TINY.but(**choices, layers=layers).but(**changes)


def tokens_of(arch: Arch) -> Tokens:
    """Two texts in the first row, padding in the second."""
    group = [[1] * 5 + [2] * 4, [1] * 7 + [0] * 2]
    fields = {}
    if arch.attention == "window":
        fields["reach"] = [[1, 0, 0, 0, 0, 0, 1, 0, 0], [0] * 9]
    if arch.streams == 2:
        fields["rank"] = [[3, 1, -1, 0, 2, 3, -1, 0, 1], [0, 5, 2, 1, 3, -1, 4, 0, 0]]
    return random_tokens(arch, 2, S, group=group, **fields)


@lru_cache
def function_of(arch: Arch, memory: bool):
    """params -> outputs, and gradients of parameters and vectors."""
    model, tokens = Model(arch), tokens_of(arch)
    options: dict = dict(capture=("hidden",))
    if arch.streams == 2:
        options = dict(capture=("hidden", "query"), streams=2)
        options["where"] = jnp.array([[0, 3, 7], [1, 6, 2]])
    if memory:
        before = random_tokens(arch, 2, 6, group=[[1] * 6, [0] * 2 + [1] * 4], seed=1)
        states = jnp.asarray(probe((arch.layers + 1, 2, 6, arch.width)))
        options["memory"] = remember(before, states, length=6)

    @quick_jit
    def compute(params):
        vectors = jnp.asarray(params["embed"]["token"])[tokens.ids]

        def total(params, vectors):
            given = tokens.replace(vectors=vectors)
            out = model.apply({"params": params}, given, **options)
            sums = [
                (leaf * probe(leaf.shape, seed=n)).sum() / leaf.size
                for n, leaf in enumerate(jax.tree.leaves(out))
            ]
            return sum(sums), out

        by = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
        (_, out), (inside, outside) = by(params, vectors)
        return out, inside | {"vectors": outside}

    return compute


def given_params(arch: Arch) -> dict:
    """The same, however they are walked."""
    return drawn_params(arch.but(stack="loop", remat="none"))


@lru_cache
def results(arch: Arch, memory: bool = False):
    return jax.device_get(function_of(arch, memory)(given_params(arch)))


def assert_same(ours, theirs) -> None:
    assert_same_outputs(ours[0], theirs[0], limits=OUTPUT)
    assert_same_gradients(ours[1], theirs[1], limits=GRADIENT)


@pytest.mark.parametrize("stack", ["scan", "scan:2"])
@pytest.mark.parametrize("name", MEMBERS)
def test_loop_is_scan(name: str, stack: str):
    memory = name in REMEMBERING
    plain = results(arch_of(name), memory)
    assert_same(results(arch_of(name, stack=stack), memory), plain)


@pytest.mark.parametrize(
    ("name", "remat", "stack"),
    [
        ("xlnet", "full", "loop"),
        ("xlnet", "dots", "scan"),
        ("xlnet", "kept", "scan"),
        ("shared-attention", "full", "scan"),
    ],
)
def test_remat_changes_nothing(name: str, remat: str, stack: str):
    memory = name in REMEMBERING
    arch = arch_of(name, stack=stack)
    plain = results(arch, memory)
    assert_same(results(arch.but(remat=remat), memory), plain)


def test_what_the_backward_pass_finds_saved():
    """Of a layer: its input, q, k, v, what attention mixed, the inner product and x̂ of
    two norms, all in bfloat16, and 1 / σ of these, in f32."""
    B, N, D, F = 3, 4, 64, 128

    def saved(remat: str) -> int:
        """Bytes of activations, all layers together."""
        sizes = dict(layers=N, width=D, heads=4, inner=F)
        arch = TINY.but(**sizes, stack="scan", remat=remat, dropout=0.1)
        model = Model(arch, jnp.bfloat16)
        params = jax.eval_shape(
            partial(init_params, model, heads=()), jax.random.key(0)
        )
        noise = Noise.of(jax.random.key(1), jnp.arange(B))

        def backward(params):
            def forward(params):
                tokens = plain(jnp.zeros((B, S), jnp.int32))
                return model.apply({"params": params}, tokens, noise=noise)["last"]

            return jax.vjp(forward, params)[1]

        leaves = jax.tree.leaves(jax.eval_shape(backward, params))
        return sum(x.size * x.dtype.itemsize for x in leaves if x.shape[:2] == (N, B))

    by_hand = N * B * S * ((7 * D + F) * 2 + 2 * 4)
    assert saved("kept") == by_hand
    # Norms store no more without it, since their derivative is written by hand.
    assert saved("none") > 1.5 * by_hand
    assert saved("full") == N * B * S * D * 2


def test_the_comparison_can_fail():
    """Two copies, used as 0 0 1 1 or as 0 1 0 1."""
    with pytest.raises(AssertionError, match="hidden"):
        assert_same(results(arch_of("two-groups")), results(arch_of("two-in-a-group")))


@pytest.mark.parametrize("name", MEMBERS)
def test_shapes_do_not_depend_on_the_walk(name: str):
    def shapes(**changes):
        model = Model(arch_of(name, **changes))
        draw = partial(init_params, model, heads=("lm", "pooler"))
        return jax.eval_shape(draw, jax.random.key(0))

    assert shapes(stack="scan:2", remat="full") == shapes()


# Two streams, where norms stand before.


def test_queries_end_in_the_final_norm():
    """Of mean 0 and variance 1 where it scales by 1 and adds nothing, which no layer's
    own output is; and what is predicted from them teaches it."""
    arch = arch_of("xlnet-pre", norm_eps=1e-12)
    params, tokens = drawn_params(arch, heads=("lm",)), tokens_of(arch)
    plain_norm = {"scale": np.ones(arch.width), "bias": np.zeros(arch.width)}
    params["stack"]["final_norm"] = plain_norm
    of = PermutedLM(SPECIAL, partial=3)
    rows = counting(2, S, turns=arch.vocab_size)
    batch = of.corrupt(row_keys(jax.random.key(0), rows["row_id"]), rows)

    @quick_jit
    def compute(params):
        where = jnp.array([[0, 3, 7], [1, 6, 2]])
        ask = partial(Net(Model(arch), params), tokens, where=where, streams=2)

        def loss(params):
            return loss_of(of, of.terms(Net(Model(arch), params), batch).means)

        found = ask()["query"], ask(capture=("query",))["query"]
        return *found, jax.grad(loss)(params)["stack"]["final_norm"]

    last, each, gradient = jax.device_get(compute(params))
    np.testing.assert_allclose(last.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(last.var(-1), 1, rtol=1e-5)
    assert (np.abs(each[:-1].var(-1) - 1) > 0.01).all()
    assert len(each) == arch.layers + 1
    np.testing.assert_allclose(each[-1], last, rtol=0, atol=1e-6)
    for leaf in gradient.values():
        assert np.abs(leaf).max() > 1e-3


# Sharing.


def by_part(arch: Arch, params: dict, change) -> dict:
    """change(leaf, copies) of every leaf of every layer, the rest as it is."""

    def changed(part: str, tree: dict) -> dict:
        copies = np.array(arch.copies(part))
        return jax.tree.map(lambda leaf: change(leaf, copies), tree)

    layers = params["stack"]["layers"]
    layers = {part: changed(part, tree) for part, tree in layers.items()}
    return params | {"stack": params["stack"] | {"layers": layers}}


def repeated(leaf: np.ndarray, copies: np.ndarray) -> np.ndarray:
    return leaf[copies]


def added(leaf: np.ndarray, copies: np.ndarray) -> np.ndarray:
    return np.stack([leaf[copies == n].sum(0) for n in range(max(copies) + 1)])


@pytest.mark.parametrize("name", SHARING)
def test_stored_copies(name: str):
    arch = arch_of(name)
    for part, tree in given_params(arch)["stack"]["layers"].items():
        side = "ffn" if part.startswith("ffn") else "attention"
        shared = arch.share in ("all", side)
        stored = arch.groups * arch.group_layers if shared else arch.layers
        for leaf in jax.tree.leaves(tree):
            assert len(leaf) == stored, part


@pytest.mark.parametrize("name", SHARING)
def test_gradient_of_what_is_shared_is_the_sum(name: str):
    """An untied copy with equal weights computes the same; the gradients of the copies
    add up to the shared one's."""
    arch = arch_of(name)
    out, gradients = results(arch)
    untied = arch.but(share="none", groups=1, group_layers=1, stack="scan")
    copied = by_part(arch, given_params(arch), repeated)
    out_apart, apart = jax.device_get(function_of(untied, False)(copied))
    assert_same_outputs(out, out_apart, limits=OUTPUT)
    assert_same_gradients(gradients, by_part(arch, apart, added), limits=GRADIENT)
    # The copies do not hear the same.
    for kernel in (
        apart["stack"]["layers"]["ffn"]["inner"]["kernel"],
        apart["stack"]["layers"]["attention"]["q"]["kernel"],
    ):
        assert np.abs(kernel[0] - kernel[-1]).max() > 0.1 * np.abs(kernel).max()
