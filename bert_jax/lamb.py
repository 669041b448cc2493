"""LAMB: Adam's direction, as long for each parameter as the parameter is large.

    r = m / (√v + ε);  u = r + λ w;  w ← w - η · φ(‖w‖) / ‖u‖ · u

(You et al. 2020, arXiv:1904.00962, algorithm 2). φ(‖w‖) / ‖u‖ is the trust ratio; it is
1 where either norm is 0. Releases differ in what they leave out, so a variant has a
name:

    variant  m, v without bias   φ              parameters with a ratio
    paper    yes                 at most 10     all
    nvidia   yes                 the identity   all
    optax    yes                 the identity   all
    google   no                  the identity   those with weight decay
    albert   the same as google: google-research/albert, lamb_optimizer.py

nvidia is that of NVIDIA's BERT in TensorFlow, which clips the gradient by its global
norm first (optim.clip=1); apex's FusedLAMB has no ratio where there is no decay, unless
its use_nvlamb is set. The paper bounds φ by numbers that it does not give.

A parameter is what it was before layers were stacked: norms are taken over all axes but
that of the layers, in f32, and over the whole parameter wherever its parts lie.
"""

import dataclasses
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bert_jax.models.model import path_name

# All layers of a tower lie along the first axis; only the main one has no name.
LAYERS = re.compile(r"(\w+/)?stack/layers/")


@dataclasses.dataclass(frozen=True)
class Variant:
    corrected: bool = True  # whether m and v are freed of their bias
    largest: float | None = None  # bound of φ
    of_decayed: bool = False  # whether only parameters with decay have a ratio


VARIANTS = {
    "paper": Variant(largest=10.0),
    "nvidia": Variant(),
    "optax": Variant(),
    "google": Variant(corrected=False, of_decayed=True),
    "albert": Variant(corrected=False, of_decayed=True),
}


class TrustState(NamedTuple):
    trust_ratios: dict  # of each parameter, [L] or []


def is_stacked(path) -> bool:
    """Whether a parameter is one of every layer, of whatever tower."""
    return LAYERS.match(path_name(path)) is not None


def norm(path, x: jax.Array) -> jax.Array:
    """‖x‖, one for each layer where layers are stacked."""
    first = 1 if is_stacked(path) else 0
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), range(first, x.ndim)))


def scale_by_trust_ratio(
    variant: Variant, decayed: dict
) -> optax.GradientTransformation:
    """u -> φ(‖w‖) / ‖u‖ · u. `decayed` tells which parameters have weight decay."""

    def ratio(path, w: jax.Array, u: jax.Array, has_decay: bool) -> jax.Array:
        size, length = norm(path, w), norm(path, u)
        if variant.of_decayed and not has_decay:
            return jnp.ones_like(size)
        bounded = size if variant.largest is None else size.clip(max=variant.largest)
        known = (size > 0) & (length > 0)
        return jnp.where(known, bounded / jnp.where(known, length, 1.0), 1.0)

    def init(params) -> TrustState:
        return TrustState(
            jax.tree_util.tree_map_with_path(
                lambda path, w: jnp.ones_like(norm(path, w)), params
            )
        )

    def update(updates, state, params=None):
        ratios = jax.tree_util.tree_map_with_path(ratio, params, updates, decayed)

        def scale(u: jax.Array, found: jax.Array) -> jax.Array:
            return u * found.reshape(*found.shape, *[1] * (u.ndim - found.ndim))

        return jax.tree.map(scale, updates, ratios), TrustState(ratios)

    return optax.GradientTransformation(init, update)


def layer_ratios(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """What the last step trusted: the mean ratio of a layer's matrices, layer by layer
    of each tower, and of the embedding tables; nothing where the optimizer has no
    ratios."""
    ratios = optax.tree.get(opt_state, "trust_ratios")
    if ratios is None:
        return {}
    towers = {}  # the ratios of their matrices, [N] each
    for path, ratio in jax.tree_util.tree_leaves_with_path(ratios):
        name = path_name(path)
        if (layer := LAYERS.match(name)) and name.endswith("kernel"):
            towers.setdefault(layer[1] or "", []).append(ratio)
    found = {"trust_embed": ratios["embed"]["token"]}
    for tower, kernels in towers.items():
        if len({len(ratio) for ratio in kernels}) > 1:  # layers share some of them
            continue
        name = f"trust_{tower.replace('/', '_')}layer"
        means = jnp.stack(kernels).mean(0)
        found |= {f"{name}_{n}": mean for n, mean in enumerate(means)}
    return found
