"""Our training step, as `bert_jax train` compiles it, on tokens that never change."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.sizes import (
    CLIP,
    DECAY,
    EPS,
    HIDE,
    LR,
    MASK_ID,
    PARTIAL,
    SPECIAL_IDS,
    WEIGHT,
    S,
    Size,
)
from bert_jax.flops import step_flops
from bert_jax.models.model import Model, count_params, init_params
from bert_jax.objectives.base import Objective
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.permuted_lm import PermutedLM
from bert_jax.objectives.replaced_token import ReplacedToken
from bert_jax.optim import Optim, make_optimizer
from bert_jax.step import TrainState, make_train_step


def objective_of(size: Size) -> Objective:
    pieces = (size.arch.vocab_size, MASK_ID, SPECIAL_IDS)
    if size.objective == "replaced_token":
        return ReplacedToken(*pieces, hide=HIDE, weight=WEIGHT, generator=0.25)
    if size.objective == "permuted_lm":
        return PermutedLM(SPECIAL_IDS, partial=PARTIAL)
    return MaskedLM(*pieces, next_sentence=0.0)


def model_of(size: Size) -> Model:
    return Model(size.arch, towers=objective_of(size).towers(size.arch))


def our_flops(size: Size) -> float:
    """Of one step's loss and gradient: the products in its trace (bert_jax/flops)."""
    its = (model_of(size), objective_of(size))
    return step_flops(*its, batch=size.batch, length=S)


def our_step(size: Size) -> tuple[Callable[[], object], dict]:
    """A step that trains once, waits until all is done, and returns the loss, not yet
    read; and what is told of the model."""
    model, objective = model_of(size), objective_of(size)
    params = init_params(model, jax.random.key(0), heads=objective.heads)
    optim = Optim(lr=LR, decay=DECAY, eps=EPS, clip=CLIP)
    optimizer = make_optimizer(optim, 1000, params)
    state = TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        seed=jnp.uint32(0),
    )
    ids = jnp.asarray(size.clean_ids())
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), ids.shape)
    batch = {
        "ids": ids,
        "types": jnp.zeros_like(ids),
        "positions": positions,
        "group": jnp.ones_like(ids),
        "words": positions + 1,  # each piece is a word
    }
    train_step = jax.jit(make_train_step(model, objective, optimizer), donate_argnums=0)

    def step():
        nonlocal state
        state, means = train_step(state, batch)
        jax.block_until_ready(state)
        return means["loss"].value

    parameters = count_params(model.arch, heads=objective.heads, towers=model.towers)
    return step, {"parameters": parameters}
