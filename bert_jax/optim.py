"""Optimizers, and lists of rules that say what they do to which parameter.

    clip:      g ← g · min(1, c / ‖g‖)              over all parameters
    adam:      m ← β₁m + (1-β₁)g;  v ← β₂v + (1-β₂)g²
    bert:      w ← w - η (m / (√v + ε) + λ w)       no bias correction
    adamw:     w ← w - η (m̂ / (√v̂ + ε) + λ w)       m̂ = m/(1-β₁ᵗ), v̂ = v/(1-β₂ᵗ)
    lamb:      adamw, times a trust ratio            lamb.py
    adafactor: v by rows and columns, no m           Shazeer and Stern 2018,
                                                     arXiv:1804.04235

BERT's release (Devlin et al. 2019, optimization.py) omits the bias correction and
decays no bias and no norm parameter. Which parameters are decayed, which learn slowly
and which not at all are ordered lists of (regex, number): the first match decides, and
a parameter that none matches is an error. The depths behind layer-wise rates are such a
list, too; each tower counts by itself, so that the top layer of ELECTRA's generator
learns as fast as that of the model. Adafactor's means count the surplus rows of the
vocabulary table, which are zero.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax import lamb
from bert_jax.errors import InputError, unknown
from bert_jax.models.heads import HEADS
from bert_jax.models.model import path_name
from bert_jax.rules import by_rule
from bert_jax.schedules import SCHEDULES, make_schedule

OPTIMIZERS = ("bert_adamw", "adamw", "lamb", "adafactor")
Rules = tuple[tuple[str, float], ...]
# Times λ. u and v are XLNet's biases of positions.
DECAY: Rules = ((r"(^|/)(bias|scale|u|v)$", 0.0), (r".*", 1.0))
ALL_ALIKE: Rules = ((r".*", 1.0),)
# Layer n of N learns at layer_decay^(N - n), tables at layer_decay^(N + 1), heads at
# the full rate. ELECTRA's code counts one more, which its authors call a mistake.
LAYER_FORMS = {"paper": 0, "electra": 1}


@dataclasses.dataclass(frozen=True)
class Optim:
    name: str = "bert_adamw"
    variant: str = "google"  # of lamb: lamb.py
    lr: float = 1e-4  # at the top of the schedule
    schedule: str = "bert"  # schedules.py
    warmup: float = 0.01  # below 1 a share of the steps, else a number of steps
    power: float = 1.0  # of the polynomial schedule
    decay: float = 0.01  # λ
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    clip: float = 1.0  # largest global norm of the gradient; 0 = no clipping
    layer_decay: float = 1.0  # each layer learns this much slower than the one above
    layer_form: str = "paper"  # paper | electra
    decay_rules: Rules = DECAY
    rate_rules: Rules = ALL_ALIKE  # times the rate; 0 = frozen

    def __post_init__(self):
        for field in ("decay_rules", "rate_rules"):  # lists, where they come from JSON
            rules = tuple(
                tuple(rule) if isinstance(rule, list) else rule
                for rule in getattr(self, field)
            )
            object.__setattr__(self, field, rules)
        problems = []
        choices = {"name": OPTIMIZERS, "schedule": SCHEDULES}
        choices |= {"variant": lamb.VARIANTS, "layer_form": LAYER_FORMS}
        for field, valid in choices.items():
            if getattr(self, field) not in valid:
                problems.append(unknown(f"optim.{field}", getattr(self, field), valid))
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                problems.append(f"optim.{field}={getattr(self, field)} not in [0, 1)")
        for field in ("lr", "warmup", "power", "decay", "eps", "clip"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                problems.append(f"optim.{field}={value} must be 0 or more, and finite")
        if not 0 < self.layer_decay <= 1:
            problems.append(f"optim.layer_decay={self.layer_decay} not in (0, 1]")
        for field in ("decay_rules", "rate_rules"):
            problems += wrong_rules(field, getattr(self, field))
        if problems:
            raise InputError("\n".join(problems))


def wrong_rules(field: str, rules) -> list[str]:
    """What is no pair of a regex and a number that is not negative."""
    wrong = []
    for rule in rules:
        try:
            pattern, value = rule
            re.compile(pattern)
            fine = value >= 0 and math.isfinite(value)
        except (TypeError, ValueError, re.error):
            fine = False
        if not fine:
            wrong.append(f"optim.{field}: {rule!r} is not (regex, number of 0 or more)")
    return wrong


def schedule_of(optim: Optim, steps: int) -> optax.Schedule:
    return make_schedule(
        optim.schedule,
        lr=optim.lr,
        warmup=optim.warmup,
        power=optim.power,
        steps=steps,
    )


def depth_rules(params, more: int) -> list[tuple[str, int | np.ndarray]]:
    """How far down from the heads of its tower a parameter stands: heads at 0, layers
    at N to 1 and what is below them at N + 1, or so many `more`."""
    layers = {}  # N of each tower
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if found := lamb.LAYERS.match(path_name(path)):
            tower = found[1] or ""
            layers[tower] = max(layers.get(tower, 0), leaf.shape[0])
    heads = "|".join(HEADS)
    rules = []
    for tower, N in layers.items():
        rules += [
            (f"^{tower}(embed|project)/", N + 1 + more),
            (f"^{tower}stack/layers/", np.arange(N, 0, -1) + more),
            (f"^{tower}(stack/final_norm|{heads})/", 0),
        ]
    return rules


def rates(optim: Optim, params) -> dict:
    """What the rate of each parameter is multiplied by; an array where its layers
    differ."""
    d, more = optim.layer_decay, LAYER_FORMS[optim.layer_form]
    rules = by_rule(params, optim.rate_rules)
    if d == 1:
        return rules

    def rate(leaf, rule: float, depth):
        if np.ndim(depth) == 0:
            return rule * d**depth
        N = leaf.shape[0]  # less than that of the tower where layers share this one
        each = jnp.asarray(d ** depth[-N:], jnp.float32)
        return rule * each.reshape(N, *[1] * (leaf.ndim - 1))

    advice = "optim.layer_decay needs their depth: bert_jax/optim.py, depth_rules"
    depths = by_rule(params, depth_rules(params, more), advice=advice)
    return jax.tree.map(rate, params, rules, depths)


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


def scale_by_adafactor(params) -> optax.GradientTransformation:
    """Adafactor's update, for every layer by itself: it has norms and means of whole
    parameters in it, which stacked layers are not."""
    each = optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )

    def stacked(path, leaf) -> int:
        """How many layers a leaf is a stack of; 0: it is no stack."""
        return leaf.shape[0] if lamb.is_stacked(path) else 0

    labels = jax.tree_util.tree_map_with_path(stacked, params)
    counts = {*jax.tree.leaves(labels)}
    kinds = {count: per_layer(each) if count else each for count in counts}
    return optax.partition(kinds, labels)


def per_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same for each slice of the first axis."""

    def init(params):
        return jax.vmap(inner.init)(params)

    def update(updates, state, params=None):
        return jax.vmap(inner.update)(updates, state, params)

    return optax.GradientTransformation(init, update)


def times(factors) -> optax.GradientTransformation:
    """Each update times a number, or an array, of its own."""
    return optax.stateless(lambda u, _: jax.tree.map(jnp.multiply, u, factors))


def add_decay(strength: float, factors) -> optax.GradientTransformation:
    """u -> u + λ f w."""

    def add(u: jax.Array, w: jax.Array, factor: float) -> jax.Array:
        return u + strength * factor * w if factor else u

    return optax.stateless(lambda u, w: jax.tree.map(add, u, w, factors))


def with_rate_of(opt_state: optax.OptState, other: optax.OptState) -> optax.OptState:
    """The state, but with the place in the schedule of the learning rate of another."""
    is_rate = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
    return jax.tree.map(
        lambda mine, its: its if is_rate(mine) else mine,
        opt_state,
        other,
        is_leaf=is_rate,
    )


def make_optimizer(
    optim: Optim, rate: int | optax.Schedule, params
) -> optax.GradientTransformation:
    """Clip, adapt, decay, trust, scale: in BERT's order. The gradient of what is frozen
    is not in the norm. `rate` is a schedule, or the steps of the one that `optim`
    names."""
    rate = rate if callable(rate) else schedule_of(optim, rate)
    factors = rates(optim, params)
    moves = by_rule(params, [(regex, float(f > 0)) for regex, f in optim.rate_rules])
    decayed = by_rule(params, optim.decay_rules)
    adam = (optim.beta1, optim.beta2, optim.eps)
    variant = lamb.VARIANTS[optim.variant]
    is_lamb = optim.name == "lamb"
    if optim.name == "adafactor":
        adapt = scale_by_adafactor(params)
    elif optim.name == "bert_adamw" or (is_lamb and not variant.corrected):
        adapt = scale_by_bert_adam(*adam)
    else:
        adapt = optax.scale_by_adam(*adam)
    trust = lamb.scale_by_trust_ratio(variant, jax.tree.map(bool, decayed))
    return optax.chain(
        times(moves),
        optax.clip_by_global_norm(optim.clip) if optim.clip else optax.identity(),
        adapt,
        add_decay(optim.decay, decayed),
        trust if is_lamb else optax.identity(),
        times(factors),
        optax.scale_by_learning_rate(rate),
    )
