"""The mesh and what lies where: rows over devices, parameters on every device."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bert_jax.errors import InputError


def make_mesh() -> Mesh:
    """All devices of all processes along one axis, `data`."""
    return jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("data"))


def own_rows(mesh: Mesh, size: int, *, field: str) -> slice:
    """Which rows of a batch of `size` this process feeds."""
    if size % mesh.size:
        raise InputError(
            f"config.{field}={size} does not divide over {mesh.size} devices"
        )
    per_process = size // jax.process_count()
    begin = jax.process_index() * per_process
    return slice(begin, begin + per_process)


def place(mesh: Mesh, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's rows as a part of the global batch."""
    return jax.make_array_from_process_local_data(by_rows(mesh), batch)
