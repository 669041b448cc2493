"""Memory: the text before a row, as the layers read it, carried from step to step.

Row b of a step goes on where row b of the step before ended, and its tokens see what
was read there: the states that entered every layer, without a gradient (Transformer-XL,
Dai et al. 2019, arXiv:1901.02860). The carry has the rows first, so that it is split
and placed as the batch is:

    states  [B, N, M, D], the inputs of every layer at the last M tokens
    group   [B, M], 1 at tokens of the text that the row ended in, else 0

Where a row does not go on (`continues` 0: the beginning of the text) it sees nothing of
it. A row that ends in padding leaves no memory.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.models.tokens import Tokens, memory_of, remember
from bert_jax.objectives.base import Net

Carry = dict[str, jax.Array]


def memory_problems(length: int, arch: Arch, rows: str) -> list[str]:
    """Why such a model cannot remember on such rows."""
    problems = []
    if length and arch.position != "xl":
        problems.append(
            f"config.objective.memory={length} needs config.arch.position='xl', it is "
            f"{arch.position!r}; 0 is no memory"
        )
    if length and rows != "stream":
        problems.append(
            f"config.objective.memory={length} needs config.rows=stream, in which a "
            f"row goes on where the last ended, not {rows}; 0 is no memory"
        )
    return problems


def first_memory(model: Model, rows: int, length: int) -> Carry | None:
    """Of nothing; None where the length is 0."""
    if not length:
        return None
    states = (rows, model.arch.layers, length, model.arch.width)
    return {
        "states": jnp.zeros(states, model.dtype),
        "group": jnp.zeros((rows, length), jnp.int32),
    }


def read_on(
    net: Net, tokens: Tokens, carry: Carry | None, continues: jax.Array | None, **asked
) -> tuple[dict[str, Any], Carry | None]:
    """What the net answers, having read what is carried, and the next carry.

    continues [B] says which rows go on; without a carry it is not looked at.
    """
    if carry is None:
        return net(tokens, **asked), None
    # What is seen at all belongs to the text that the row begins with.
    group = carry["group"] * continues[:, None] * tokens.group[:, :1]
    before = memory_of(jnp.moveaxis(carry["states"], 1, 0), group)
    out = net(tokens, memory=before, capture=("hidden",), **asked)
    after = remember(tokens, out["hidden"], length=group.shape[1], before=before)
    last = tokens.group[:, -1:]
    same = (after.tokens.group == last) & (last > 0)
    states = jnp.moveaxis(after.states, 0, 1)
    return out, {"states": states, "group": same.astype(jnp.int32)}
