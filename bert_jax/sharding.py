"""The mesh, and what lies where on it.

    data    rows; every device has all parameters
    fsdp    rows, too; parameters are split, and gathered layer by layer where they are
            used (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023,
            arXiv:2304.11277)
    tensor  heads, inner units and pieces of the vocabulary: all devices have the same
            rows, and each a part of every layer (Shoeybi et al. 2019, arXiv:1909.08053)

The dimensions of a parameter get names by an ordered list of rules, the names get mesh
axes. What the optimizer holds of a parameter lies where the parameter does. A table of
pieces is split by pieces, so no device ever has the logits of all of them: each adds
up its own, and their sums are what cross-entropy needs. Several slices, which are
joined by a slower network, split rows and nothing else.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bert_jax.errors import InputError
from bert_jax.models.heads import HEADS
from bert_jax.models.model import Model, path_name
from bert_jax.placing import ROWS
from bert_jax.rules import by_rule

# Names of a parameter's dimensions; "" is never split. Only what is large is.
HEAD = rf"(^|/)({'|'.join(HEADS)})/"
RULES = (
    (r"(^|/)embed/token$", ("pieces", "")),
    (r"(^|/)(lm|sbo)/bias$", ("pieces",)),
    (r"/attention/(q|k|v|r)(_global)?/kernel$", ("", "width", "heads")),
    (r"/attention/(q|k|v|r)(_global)?/bias$", ("", "heads")),
    (r"/attention/o/kernel$", ("", "heads", "width")),
    (r"/ffn/inner/kernel$", ("", "width", "inner")),
    (r"/ffn/inner/bias$", ("", "inner")),
    (r"/ffn/outer/kernel$", ("", "inner", "width")),
    (r"(^|/)project/kernel$", ("width", "")),
    # Heads, biases, norms, and small tables: on every device.
    (rf"{HEAD}(\w+/)?kernel$|(^|/)(bias|scale)$", ()),
    (r"(^|/)embed/(position|type|task|query)$|(^|/)sbo/position$", ()),
    (r"/layers/(position|types)/(u|v|bias|table)$", ()),
)
# The mesh axes that split a dimension, if they divide it.
OVER = {
    "pieces": ("tensor", "fsdp"),
    "heads": ("tensor",),
    "inner": ("tensor",),
    "width": ("fsdp",),
    "": (),
}
ADVICE = "bert_jax/sharding.py, RULES, must say how they are split"


@dataclasses.dataclass(frozen=True)
class Axes:
    """How many devices lie along each axis of the mesh; -1: all that are left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    slices: int = 1  # of a pod, joined by a slower network: each has a part of `data`

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("data", "fsdp", "tensor")}
        problems = [
            f"config.mesh.{name}={size}: at least 1, or -1 for all devices that are "
            "left"
            for name, size in sizes.items()
            if size < 1 and size != -1
        ]
        if list(sizes.values()).count(-1) > 1:
            problems.append(f"config.mesh: only one size may be -1, got {sizes}")
        if self.slices < 1:
            problems.append(f"config.mesh.slices={self.slices}: at least 1")
        if problems:
            raise InputError("\n".join(problems))

    def fit(self, devices: int) -> tuple[int, int, int]:
        """The sizes for so many devices."""
        sizes = [self.data, self.fsdp, self.tensor]
        known = math.prod(size for size in sizes if size != -1)
        told = f"config.mesh.data={self.data}, fsdp={self.fsdp}, tensor={self.tensor}"
        if devices % known or (-1 not in sizes and known != devices):
            raise InputError(
                f"{told} do not fit {devices} devices: their product must be "
                f"{devices}, or divide it where one of them is -1"
            )
        sizes = [devices // known if size == -1 else size for size in sizes]
        if sizes[0] % self.slices:
            raise InputError(
                f"config.mesh.slices={self.slices} does not divide the axis `data` of "
                f"{sizes[0]}: slices split rows and nothing else"
            )
        return tuple(sizes)


def make_mesh(axes: Axes | None = None, devices: list | None = None) -> Mesh:
    """All devices of all processes (or those given) along the axes data, fsdp, tensor;
    neighbours in the network are neighbours in the mesh."""
    axes = axes or Axes()
    devices = jax.devices() if devices is None else list(devices)
    data, fsdp, tensor = axes.fit(len(devices))
    shape = (data // axes.slices, fsdp, tensor)
    laid = [
        mesh_utils.create_device_mesh(shape, one, allow_split_physical_axes=True)
        for one in slices_of(devices, axes.slices)
    ]
    names = ("data", "fsdp", "tensor")
    return Mesh(np.concatenate(laid), names, axis_types=(AxisType.Auto,) * 3)


def slices_of(devices: list, count: int) -> list[list]:
    """The devices of each slice. A TPU knows its slice; elsewhere they are counted
    off."""
    named: dict[int, list] = {}
    for device in devices:
        named.setdefault(getattr(device, "slice_index", 0), []).append(device)
    if len(named) == 1:
        each = len(devices) // count
        return [devices[n * each : (n + 1) * each] for n in range(count)]
    if len(named) != count:
        raise InputError(
            f"config.mesh.slices={count}, but the devices are in {len(named)} slices"
        )
    return [named[number] for number in sorted(named)]


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """What the compiler is told of a step on this mesh. Left to itself, that of TPUs
    multiplies by a large parameter that is split over `fsdp` part by part, while the
    next part comes in: by its own estimate that takes twice as long as to gather the
    parameter first (docs/speed.md)."""
    if mesh.devices.flat[0].platform != "tpu":
        return None
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": str(2**20)}


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(ROWS))


def param_shardings(
    mesh: Mesh, params, model: Model, *, say: Callable = lambda _: None
) -> dict:
    """A place for every parameter. `say` is told what cannot be split, and why."""
    heads = {"": model.arch.heads} | {f"{n}/": a.heads for n, a in model.towers}
    names = by_rule(params, RULES, advice=ADVICE)
    uneven = {}  # (dimension, its size): axes that do not divide it

    def axes_of(tower: str, name: str, size: int) -> tuple[str, ...]:
        if name == "heads":  # a head is never cut
            size = heads[tower]
        axes = tuple(axis for axis in OVER[name] if mesh.shape[axis] > 1)
        while axes and size % math.prod(mesh.shape[axis] for axis in axes):
            uneven.setdefault((name, size), axes)
            axes = axes[:-1]
        return axes

    def place(path, leaf, dimensions) -> NamedSharding:
        name = path_name(path)
        tower = next((t for t in heads if t and name.startswith(t)), "")
        split = zip(dimensions, leaf.shape, strict=False)  # (): none of them is
        spec = [axes_of(tower, which, size) or None for which, size in split]
        return NamedSharding(mesh, PartitionSpec(*spec))

    places = jax.tree_util.tree_map_with_path(place, params, names)
    for (name, size), axes in uneven.items():
        over = " and ".join(f"{axis} ({mesh.shape[axis]})" for axis in axes)
        say(f"mesh: {size} {name} do not divide over {over}: they are not split there")
    return places


def like_params(mesh: Mesh, tree, params, places):
    """Places for what an optimizer holds: that of a parameter where something has its
    name and its shape, else on every device (counts, factored moments)."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    known = {
        path_name(path): (leaf.shape, place)
        for (path, leaf), place in zip(leaves, jax.tree.leaves(places), strict=True)
    }

    def place(path, leaf) -> NamedSharding:
        at = max(
            (n for n, part in enumerate(path) if not hasattr(part, "key")), default=-1
        )
        shape, its = known.get(path_name(path[at + 1 :]), (None, None))
        return its if shape == leaf.shape else replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, tree)


def spread(tree, places):
    """What every process has whole, as arrays that lie where they are told."""

    def put(x, place: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, place, lambda index: x[index])

    return jax.tree.map(put, tree, places)


class Feed:
    """The rows of a batch of `size` that this process feeds to its own devices."""

    def __init__(self, mesh: Mesh, size: int, *, field: str):
        self.apart = math.prod(mesh.shape[axis] for axis in ROWS)
        if size % self.apart:
            raise InputError(
                f"config.{field}={size} does not divide over {self.apart} devices"
            )
        self.size, self.places = size, by_rows(mesh)
        mine = self.places.addressable_devices_indices_map((size,)).values()
        self.rows = np.unique(
            np.concatenate([np.arange(size)[index] for index in mine])
        )

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """These rows as a part of the batch of all processes."""

        def put(x: np.ndarray) -> jax.Array:
            def part(index: tuple[slice, ...]) -> np.ndarray:
                first, last, _ = index[0].indices(self.size)
                at = np.searchsorted(self.rows, first)
                return x[at : at + last - first]

            return jax.make_array_from_callback(
                (self.size, *x.shape[1:]), self.places, part
            )

        return {name: put(x) for name, x in batch.items()}
