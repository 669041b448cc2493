"""Small models with no parameter where it starts, and rows for them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.convert.engine import flatten
from bert_jax.models.arch import Arch
from bert_jax.models.model import param_shapes
from bert_jax.models.tokens import Tokens, plain
from bert_jax.parity import GRADIENT, OUTPUT, QUICK, excess, unflatten_like

quick_jit = partial(jax.jit, compiler_options=QUICK)

TINY = Arch(
    vocab_size=50,
    vocab_multiple=8,
    width=24,
    layers=2,
    heads=2,
    inner=40,
    max_positions=40,
)
XL = dict(position="xl", embed_norm="none", attention_bias="none")
XLNET = dict(**XL, type_scheme="relative", streams=2, lm_head="bias")
TRANSFORMER_XL = dict(**XL, types=0, order="causal", embed_scale="sqrt")
GPT2 = dict(types=0, embed_norm="none", norm_place="pre", order="causal")
NEZHA = dict(position="functional", max_distance=3)
LONGFORMER = dict(attention="window", window=8, global_slots=4)


def drawn_params(arch: Arch, *, heads=(), towers=(), seed: int = 0) -> dict:
    """Parameters far from where they start: no bias is 0, no norm 1, attention is not
    uniform. Nothing is compiled for it."""
    shapes = param_shapes(arch, heads=heads, towers=towers)
    rng = np.random.default_rng(seed)
    flat = {}
    for name, leaf in flatten(shapes).items():
        sharp = name.endswith(("q/kernel", "k/kernel", "q_global/kernel"))
        drawn = rng.normal(0, 0.4 if sharp else 0.2, leaf.shape)
        if name.endswith("scale"):
            drawn += 1
        if name.endswith(("embed/token", "lm/bias")):
            drawn[arch.vocab_size :] = 0
        flat[name] = drawn.astype(np.float32)
    return unflatten_like(shapes, flat)


def random_tokens(
    arch: Arch, rows: int, length: int, *, seed: int = 0, **fields
) -> Tokens:
    """Rows of random pieces; fields [S] or [B, S] replace what `plain` gives."""
    rng = np.random.default_rng(seed)
    shape = (rows, length)
    tokens = plain(
        rng.integers(5, arch.vocab_size, shape),
        types=rng.integers(0, max(1, arch.types), shape),
        order=arch.order,
    )
    given = {
        name: jnp.broadcast_to(jnp.asarray(field, jnp.int32), shape)
        for name, field in fields.items()
    }
    return tokens.replace(**given)


def probe(shape: tuple[int, ...], *, seed: int = 0) -> np.ndarray:
    """Random weights of a sum over outputs: norms hide a plain sum."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_same_outputs(ours: dict, theirs: dict, *, limits: dict = OUTPUT) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        found = excess(ours[name], theirs[name], **limits)
        assert found <= 1, (name, found)


def assert_same_gradients(ours: dict, theirs: dict, *, limits: dict = GRADIENT) -> None:
    a, b = flatten(ours), flatten(theirs)
    assert a.keys() == b.keys()
    for name in a:
        found = excess(a[name], b[name], **limits)
        assert found <= 1, (name, found)
