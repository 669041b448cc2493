"""FLOPs of one training step, counted from the program that computes it.

    matrix product [.., m, k] x [.., k, n]:  2 · m · k · n for each of the leading ones

The loss and its gradient are traced, nothing is computed, and every product in the
trace is counted: towers, heads, both streams, memory and embedding projections are
counted because they are there, and a new objective needs no formula of its own.
Elementwise work is not counted (as in the usual 6 · parameters · tokens), nor is what
rematerialisation computes again, nor the optimizer.
"""

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.extend import core

from bert_jax.errors import InputError
from bert_jax.models.model import Model, param_shapes
from bert_jax.objectives.base import Objective, loss_of
from bert_jax.step import Net


@lru_cache
def step_flops(model: Model, objective: Objective, *, batch: int, length: int) -> float:
    """Of the loss and its gradient on `batch` rows of `length` tokens, one example a
    row where there are pairs."""

    def plain(arch):
        return arch.definition.but(remat="none")

    towers = tuple((name, plain(arch)) for name, arch in model.towers)
    model = Model(plain(model.arch), model.dtype, towers)
    params = param_shapes(model.arch, heads=objective.heads, towers=model.towers)
    clean = clean_batch(objective, batch=batch, length=length)

    def loss(params, clean):
        keys = jax.vmap(jax.random.key)(clean["row_id"])
        hidden = objective.corrupt(keys, clean)
        carry = objective.first_carry(model, batch)
        terms = objective.terms(Net(model, params), hidden, carry)
        return loss_of(objective, terms.means)

    return float(count(jax.make_jaxpr(jax.grad(loss))(params, clean).jaxpr))


def clean_batch(
    objective: Objective, *, batch: int, length: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Every column that an objective may read of a batch, as shapes."""
    rows = dict.fromkeys(("ids", "types", "positions", "group", "words"), (length,))
    rows |= dict.fromkeys(objective.columns, (length,))
    rows |= {"row_id": (), "epoch": (), "continues": ()}
    rows |= {"first": (1,), "next_sentence": (1,)}
    rows |= {"label": (1,), "tags": (length,)}
    return {
        name: jax.ShapeDtypeStruct((batch, *shape), jnp.int32)
        for name, shape in rows.items()
    }


def count(jaxpr: core.Jaxpr) -> int:
    """FLOPs of all products whose result is used, each once: the compiler drops what
    is not used, and computes once what is written twice (the keys of two streams)."""
    first: dict = {}  # what was computed, by what and from what
    alias: dict[core.Var, core.Var] = {}
    kept = []
    for equation in jaxpr.eqns:
        came_from = tuple(
            str(v) if isinstance(v, core.Literal) else id(alias.get(v, v))
            for v in equation.invars
        )
        how = (equation.primitive.name, came_from, str(equation.params))
        before = first.setdefault(how, equation)
        if before is equation:
            kept.append(equation)
        else:
            alias |= zip(equation.outvars, before.outvars, strict=True)
    total = 0
    used = {alias.get(v, v) for v in jaxpr.outvars if isinstance(v, core.Var)}
    for equation in reversed(kept):
        if used.intersection(equation.outvars):
            there = (v for v in equation.invars if isinstance(v, core.Var))
            used.update(alias.get(v, v) for v in there)
            total += count_equation(equation)
    return total


def count_equation(equation: core.JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        inner = math.prod(shape[axis] for axis in contracted)
        return 2 * inner * math.prod(equation.outvars[0].aval.shape)
    inside = [count(inner) for inner in core.jaxprs_in_params(params)]
    if name == "while" and any(inside):
        raise InputError("products in a loop of unknown length cannot be counted")
    if name == "cond":
        return max(inside)
    return sum(inside) * (params["length"] if name == "scan" else 1)
