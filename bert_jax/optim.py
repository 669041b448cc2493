"""Schedules and optimizers.

    clip:  g ← g · min(1, c / ‖g‖)              over all parameters
    adam:  m ← β₁m + (1-β₁)g;  v ← β₂v + (1-β₂)g²
    bert:  w ← w - η (m / (√v + ε) + λ w)       no bias correction
    adamw: w ← w - η (m̂ / (√v̂ + ε) + λ w)       m̂ = m/(1-β₁ᵗ), v̂ = v/(1-β₂ᵗ)

BERT's release (Devlin et al. 2019, optimization.py) omits the bias correction, decays
no bias and no norm parameter, and lets the rate fall along the line through the
*start* of training: it drops a little at the end of warm-up.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import optax

from bert_jax.errors import InputError, unknown
from bert_jax.models.model import path_name

OPTIMIZERS = ("bert_adamw", "adamw")
# First match decides; every parameter must match one.
DECAY = ((r"(^|/)(bias|scale|u|v)$", 0.0), (r".*", 1.0))


@dataclasses.dataclass(frozen=True)
class Optim:
    name: str = "bert_adamw"
    lr: float = 1e-4  # at the top of the schedule
    warmup: float = 0.01  # below 1 a share of the steps, else a number of steps
    decay: float = 0.01  # λ
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    clip: float = 1.0  # largest global norm of the gradient; 0 = no clipping

    def __post_init__(self):
        problems = []
        if self.name not in OPTIMIZERS:
            problems.append(unknown("optim.name", self.name, OPTIMIZERS))
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                problems.append(f"optim.{field}={getattr(self, field)} not in [0, 1)")
        for field in ("lr", "warmup", "decay", "eps", "clip"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                problems.append(f"optim.{field}={value} must be 0 or more, and finite")
        if problems:
            raise InputError("\n".join(problems))


def bert_schedule(optim: Optim, steps: int) -> optax.Schedule:
    """η t / W while t < W, then η (1 - t / T): BERT's line."""
    share = optim.warmup < 1
    W = round(optim.warmup * steps) if share else int(optim.warmup)

    def schedule(t):
        t = jnp.asarray(t, jnp.float32)
        return optim.lr * jnp.where(t < W, t / max(W, 1), jnp.maximum(0, 1 - t / steps))

    return schedule


def by_rule(params, rules) -> dict:
    """The value of the first rule whose regex matches each parameter's path.

    A parameter that no rule matches is an error naming all of them.
    """
    unmatched = []

    def value(path, _):
        name = path_name(path)
        for pattern, result in rules:
            if re.search(pattern, name):
                return result
        unmatched.append(name)
        return None

    values = jax.tree_util.tree_map_with_path(value, params)
    if unmatched:
        raise InputError(f"no rule matches the parameters {', '.join(unmatched)}")
    return values


def scale_by_bert_adam(
    b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
    """m / (√v + ε) without bias correction; the first update has size 3.16."""

    def init(params):
        m, v = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), m, v)

    def update(grads, state, params=None):
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), m, v)
        return updates, optax.ScaleByAdamState(state.count + 1, m, v)

    return optax.GradientTransformation(init, update)


def make_optimizer(optim: Optim, steps: int, params) -> optax.GradientTransformation:
    """Clip, adapt, decay, scale: in BERT's order."""
    adam = (
        scale_by_bert_adam(optim.beta1, optim.beta2, optim.eps)
        if optim.name == "bert_adamw"
        else optax.scale_by_adam(optim.beta1, optim.beta2, optim.eps)
    )
    decayed = jax.tree.map(bool, by_rule(params, DECAY))
    return optax.chain(
        optax.clip_by_global_norm(optim.clip) if optim.clip else optax.identity(),
        adam,
        optax.add_decayed_weights(optim.decay, decayed),
        optax.scale_by_learning_rate(bert_schedule(optim, steps)),
    )
