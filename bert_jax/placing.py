"""Where the states of a model lie on a mesh: by rows, and whole within a row.

Parameters bring their places with them, and the compiler works out the rest from them.
It has to be told one thing: that states between layers are split by rows and by nothing
else. Left to itself it may split them by width, as parameters are over `fsdp`, and move
the states of all rows in every layer instead of that layer's parameters.
"""

import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import PartitionSpec

ROWS = ("data", "fsdp")  # mesh axes that rows are split over


def apart_by_rows(x: jax.Array) -> jax.Array:
    """x [B, ...], split by rows; without a mesh as it is."""
    return constrain(x, ROWS)


def apart_by_pieces(table: jax.Array) -> jax.Array:
    """A table [padded V, E] as it is used: split over `tensor`, put together over
    `fsdp`. Left as it is stored, the states of all rows would be sent to its parts."""
    return constrain(table, "tensor")


def apart_by_rows_and_pieces(logits: jax.Array) -> jax.Array:
    """[B · P, padded V]: each device has those of its rows and its pieces."""
    return constrain(logits, ROWS, "tensor")


def constrain(x: jax.Array, *axes) -> jax.Array:
    """x, where it is said to lie; without a mesh as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    sizes = zip(axes, x.shape[: len(axes)], strict=True)
    spec = [names if divides(names, size) else None for names, size in sizes]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def divides(names: str | tuple[str, ...], size: int) -> bool:
    """Whether these axes of the mesh divide a dimension of that size: else they do not
    split it (sharding.param_shardings)."""
    mesh = jax.sharding.get_abstract_mesh()
    return size % math.prod(mesh.shape[name] for name in np.atleast_1d(names)) == 0


def over_rows_and_heads(
    run: Callable, takes: tuple[str, ...], gives: tuple[str, ...], *, sizes: dict
) -> Callable:
    """What runs on each device with its own rows and heads, for a kernel that the
    compiler cannot split. A letter for each dimension of what it takes and gives says
    whether it goes by rows (b) or heads (h), of which there are so many."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run
    over = {"b": ROWS, "h": "tensor"}
    over = {x: axes for x, axes in over.items() if divides(axes, sizes[x])}

    def specs(words: tuple[str, ...]) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(*(over.get(x) for x in word)) for word in words)

    return jax.shard_map(
        run, mesh=mesh, in_specs=specs(takes), out_specs=specs(gives), check_vma=False
    )


def on_tpu() -> bool:
    """Whether what is traced is for TPUs, also where there are none: see tpu.py."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device.platform if device else jax.default_backend()) == "tpu"
