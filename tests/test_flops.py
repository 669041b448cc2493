"""FLOPs of a step: by hand, against the compiler, and what they must not depend on."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from bert_jax.compare import entry_run
from bert_jax.comparison import Entry
from bert_jax.config import flatten, load_config
from bert_jax.errors import InputError
from bert_jax.flops import count, step_flops
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, param_shapes
from bert_jax.objective import make_objective
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.causal_lm import CausalLM
from bert_jax.objectives.classify import Classify
from bert_jax.objectives.corrupt import budget
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.permuted_lm import PermutedLM
from bert_jax.objectives.replaced_token import ReplacedToken
from bert_jax.objectives.tag import Tag
from bert_jax.objectives.unilm import UniLM
from bert_jax.parity import QUICK
from bert_jax.presets import preset
from bert_jax.step import Net

B, S, V = 4, 48, 2048
SPECIAL = (0, 1, 2, 3, 4)
# Wide enough that products outweigh norms, softmaxes and activations by far.
ARCH = Arch(vocab_size=V, width=192, layers=2, heads=3, inner=768, max_positions=S)
XL = ARCH.but(position="xl", type_scheme="relative", streams=2, lm_head="bias")
MASKED = MaskedLM(V, 4, SPECIAL, next_sentence=0.0)
CASES = {
    "masked": (ARCH, MASKED),
    "pairs": (ARCH, MaskedLM(V, 4, SPECIAL)),
    "narrow tables": (ARCH.but(embed_width=64), MASKED),
    "boundary": (ARCH, MaskedLM(V, 4, SPECIAL, next_sentence=0.0, boundary=1.0)),
    "causal": (ARCH, CausalLM()),
    "replaced": (ARCH, ReplacedToken(V, 4, SPECIAL)),
    "permuted": (XL, PermutedLM(SPECIAL)),
    "permuted with memory": (XL, PermutedLM(SPECIAL, memory=S)),
    "unilm": (ARCH.but(types=6), UniLM(V, 4, SPECIAL)),
    "classify": (ARCH, Classify()),
    "tag": (ARCH, Tag()),
}


def model_of(arch: Arch, objective) -> Model:
    return Model(arch, towers=objective.towers(arch))


def flops(arch: Arch, objective, *, batch: int = B, length: int = S) -> float:
    return step_flops(model_of(arch, objective), objective, batch=batch, length=length)


def by_compiler(arch: Arch, objective, *, length: int = S) -> float:
    """What XLA counts in the compiled loss and gradient of a corrupted batch."""
    model = model_of(arch, objective)
    rows = dict.fromkeys(("ids", "types", "positions", "group", "words"), (B, length))
    rows |= {
        "tags": (B, length),
        "first": (B, 1),
        "next_sentence": (B, 1),
        "label": (B, 1),
    }
    rows |= {"continues": (B,)}
    clean = {name: jax.ShapeDtypeStruct(s, jnp.int32) for name, s in rows.items()}
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
    batch = jax.eval_shape(objective.corrupt, keys, clean)
    params = param_shapes(arch, heads=objective.heads, towers=model.towers)
    carry = jax.eval_shape(lambda: objective.first_carry(model, B))

    def loss(params, batch, carry):
        terms = objective.terms(Net(model, params), batch, carry)
        return loss_of(objective, terms.means)

    lowered = jax.jit(jax.value_and_grad(loss)).lower(params, batch, carry)
    return lowered.compile(compiler_options=QUICK).cost_analysis()["flops"]


@pytest.mark.parametrize("case", CASES)
def test_the_compiler_counts_the_same(case):
    """To 5 %: it counts elementwise work, too, which is little at these sizes. Layers
    are unrolled, since it counts the body of a loop once."""
    found, theirs = flops(*CASES[case]), by_compiler(*CASES[case])
    assert found == pytest.approx(theirs, rel=0.05)
    assert found < theirs  # products are part of the work


def test_the_compiler_counts_the_same_for_the_bake_off(tiny_tokenizer):
    """Each entry at its sizes; those that only hide other pieces do the same work."""
    config, seen = load_config("compare"), set()
    told = SimpleNamespace(shared=dict(flatten(config.shared.to_dict())))
    for entry in config.entries:
        run = entry_run(told, Entry(**entry), "-")
        objective = make_objective(
            run.objective,
            preset=preset(run.preset),
            arch=run.arch,
            rows=run.rows,
            tokenizer=tiny_tokenizer,
            say=lambda _: None,
        )
        arch = run.arch.but(vocab_size=config.vocab_size)
        if (arch, objective.name, objective.heads) in seen:
            continue
        seen.add((arch, objective.name, objective.heads))
        theirs = by_compiler(arch, objective, length=run.length)
        found = flops(arch, objective, length=run.length)
        assert found == pytest.approx(theirs, rel=0.05), entry["name"]
    assert len(seen) >= 6


def test_masked_lm_by_hand():
    """2 a multiply-add; the gradient takes twice the forward pass."""
    D, F, N = ARCH.width, ARCH.inner, ARCH.layers
    P = budget(S, MASKED.rate)[-1]
    layer = 2 * S * (4 * D * D + 2 * D * F) + 4 * S * S * D
    head = 2 * P * (D * D + D * V)
    # What else is a product: types, forward and back, and the gradients of biases.
    types = 2 * (2 * S * 2 * D)
    biases = N * 2 * S * (5 * D + F) + 2 * P * (D + V)
    assert flops(ARCH, MASKED) == pytest.approx(B * 3 * (N * layer + head), rel=2e-3)
    extra = flops(ARCH, MASKED) - B * 3 * (N * layer + head)
    assert extra == B * (types + biases)


def test_the_generator_and_its_head_are_counted():
    """ELECTRA's: the discriminator has a score a token in place of the LM head."""
    objective = ReplacedToken(V, 4, SPECIAL)
    small = objective.towers(ARCH)[0][1]
    D, P = ARCH.width, budget(S, objective.rate)[-1]
    body = flops(ARCH, MASKED) - B * 6 * P * (D * D + D * V)
    score = B * 6 * S * (D * D + D)
    generator = flops(small, MASKED)
    found = flops(ARCH, objective)
    assert found == pytest.approx(body + score + generator, rel=0.01)
    assert found > flops(ARCH, objective, length=S // 2) * 2


def test_scan_and_loop_are_the_same_work():
    for arch, objective in (CASES["masked"], CASES["replaced"]):
        scanned = flops(arch.but(stack="scan"), objective)
        assert scanned == pytest.approx(flops(arch, objective), rel=1e-6)


def test_what_is_computed_again_is_no_progress():
    assert flops(ARCH.but(remat="full"), MASKED) == flops(ARCH, MASKED)


def test_rows_add_up():
    assert flops(ARCH, MASKED, batch=3 * B) == pytest.approx(3 * flops(ARCH, MASKED))


def test_memory_costs_keys_and_values():
    """Its M tokens are projected to keys and values, and scored by every query."""
    without, with_memory = (flops(*CASES[n]) for n in CASES if "permuted" in n)
    D, N, P = ARCH.width, ARCH.layers, S // 6
    forward = 2 * 2 * S * D * D + 2 * 2 * (S + P) * S * D  # k and v; scores and values
    assert with_memory - without > B * 2 * N * forward


def test_a_loop_of_unknown_length_is_refused():
    def loop(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)

    with pytest.raises(InputError, match="unknown length"):
        count(jax.make_jaxpr(loop)(jnp.ones((2, 2))).jaxpr)


def test_what_is_not_used_is_not_counted():
    def function(x):
        _ = x @ x @ x
        return jax.lax.scan(lambda y, _: (y @ x, None), x, None, length=5)[0]

    assert count(jax.make_jaxpr(function)(jnp.ones((2, 2))).jaxpr) == 5 * 16


def test_what_is_written_twice_is_counted_once():
    def function(x, y):
        return (x @ y) @ (x @ y) + (y @ x)

    ones = jnp.ones((2, 2))
    assert count(jax.make_jaxpr(function)(ones, ones).jaxpr) == 3 * 16
