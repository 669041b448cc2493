"""The one training step, and the one evaluation step.

    (state, clean batch) -> corrupt -> forward -> loss -> gradient -> new state

Everything random in step k is a function of (seed, k): nothing but the step number
has to be kept for an exact resume.
"""

import dataclasses
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from bert_jax.lamb import layer_ratios
from bert_jax.models.dropout import Noise
from bert_jax.models.model import Model
from bert_jax.objectives.base import Batch, Mean, Objective, Terms, loss_of
from bert_jax.optim import with_rate_of
from bert_jax.sharding import param_shardings
from bert_jax.spikes import judge, remember

# How the names begin of what is told of any step; all else is told by the objective.
OF_ANY_STEP = ("loss", "grad_norm", "real_tokens", "skipped", "usual_loss", "trust_")


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # int32, steps done
    params: dict
    opt_state: optax.OptState
    seed: jax.Array  # uint32
    carry: Any = None  # what the objective hands on, rows first; None: nothing
    # f32 [lanes, WINDOW], the last losses of each lane (spikes.py); None: no step is
    # left out for its loss.
    losses: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Net:
    """The model with its parameters, as an objective calls it."""

    model: Model
    params: dict
    noise: Noise | None = None

    def __call__(self, tokens, **asked) -> dict[str, jax.Array]:
        return self.model.apply(
            {"params": self.params}, tokens, noise=self.noise, **asked
        )


def on_mesh(mesh: jax.sharding.Mesh | None) -> Callable:
    """A decorator: what the function traces may say where it lies on the mesh."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def traced(*arguments):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return function(*arguments)

        return traced if mesh else function

    return decorate


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """One key for each row number."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def make_train_step(
    model: Model,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    copies: int = 0,
    nonfinite: str = "stop",
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Mean]]]:
    """`accumulate` parts of the batch are scored one after the other, to the same
    update. With `copies` each row is corrupted in so many ways that never change
    (RoBERTa's static masking); 0 draws anew at every step. Where the gradient is not
    finite, nonfinite="skip" leaves everything but the step number and the learning
    rate as it was. A state that remembers losses has a step left out so where the loss
    stands out from those of its lane."""

    @on_mesh(mesh)
    def train_step(state: TrainState, batch: Batch, lane: jax.Array | int = 0):
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        corrupt_key, noise_key = jax.random.split(key)
        rows = jnp.arange(batch["ids"].shape[0], dtype=jnp.uint32)
        keys = row_keys(corrupt_key, rows)
        if copies:
            fixed = row_keys(jax.random.key(state.seed), batch["row_id"])
            keys = jax.vmap(jax.random.fold_in)(fixed, batch["epoch"] % copies)
        with jax.named_scope("corrupt"):
            batch = objective.corrupt(keys, batch)
        counts = objective.counts(batch)

        @partial(jax.value_and_grad, has_aux=True)
        def score(params, part):
            rows, batch, carry = part
            net = Net(model, params, Noise.of(noise_key, rows))
            terms = objective.terms(net, batch, carry)
            return loss_of(objective, terms.means, counts), terms

        whole = (rows, batch, state.carry)
        if accumulate == 1:
            (loss, terms), grads = score(state.params, whole)
        else:
            (loss, terms), grads = in_parts(
                partial(score, state.params), whole, accumulate
            )
        if mesh:  # from here on each device has its part of them alone
            places = param_shardings(mesh, grads, model)
            grads = jax.lax.with_sharding_constraint(grads, places)
        with jax.named_scope("optimizer"):
            size = optax.tree.norm(grads)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        one = jnp.ones([], jnp.float32)
        means = terms.means | {
            "loss": Mean(loss, one),
            "grad_norm": Mean(size, one),
            "real_tokens": Mean.of(batch["group"] > 0, jnp.ones_like(batch["group"])),
        }
        means |= {name: Mean(r, one) for name, r in layer_ratios(opt_state).items()}
        carry, losses = terms.carry, state.losses
        finite = jnp.isfinite(loss) & jnp.isfinite(size)
        leave_out = jnp.array(False)
        if nonfinite == "skip":
            leave_out = ~finite
            # The text goes on, and what was carried is not of the row before it.
            carry, means = jax.tree.map(
                lambda x: jnp.where(finite, x, 0), (carry, means)
            )
        if losses is not None:
            usual, stands_out = judge(losses[lane], loss, jnp)
            leave_out |= finite & stands_out  # what is carried is as good as ever
            known = losses.at[lane].set(remember(losses[lane], loss, jnp))
            losses = jnp.where(finite, known, losses)
            means["usual_loss"] = Mean(jnp.nan_to_num(usual), 1.0 - jnp.isnan(usual))
        if nonfinite == "skip" or losses is not None:
            before = (state.params, state.opt_state)
            rate = opt_state  # it goes by the step, whatever the step did
            params, opt_state = jax.tree.map(
                lambda x, old: jnp.where(leave_out, old, x), (params, opt_state), before
            )
            opt_state = with_rate_of(opt_state, rate)
            means["skipped"] = Mean(1.0 * leave_out, one)
        new = TrainState(
            state.step + 1, params, opt_state, state.seed, carry=carry, losses=losses
        )
        return new, means

    return train_step


def in_parts(score: Callable, batch, count: int):
    """What `score` gives for the whole batch, as a sum over `count` parts of its rows.

    Part i has the rows i, i + count, ...: of each device's rows as many, so that none
    has to move.
    """

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])

    def add(sums, part):
        (loss, terms), grads = score(part)
        sums = jax.tree.map(jnp.add, sums, (loss, terms.means, grads))
        return sums, terms.carry

    parts = jax.tree.map(split, batch)
    first = jax.tree.map(lambda x: x[0], parts)
    (loss, terms), grads = jax.eval_shape(score, first)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), (loss, terms.means, grads)
    )
    (loss, means, grads), carry = jax.lax.scan(add, zeros, parts)
    return (loss, Terms(means, jax.tree.map(join, carry))), grads


def make_eval_step(
    model: Model, objective: Objective, *, mesh: jax.sharding.Mesh | None = None
) -> Callable[[dict, jax.Array, Batch, jax.Array], dict[str, Mean]]:
    @on_mesh(mesh)
    def eval_step(params: dict, seed: jax.Array, batch: Batch, frequent: jax.Array):
        """Scores with the corruption fixed by (seed, row id).

        `frequent` is the piece that a model without any context would always guess;
        its accuracy is taken on the same predicted positions. Rows with id -1 fill
        up the last batch and are padding throughout.
        """
        keys = row_keys(jax.random.key(seed), batch["row_id"])
        batch = objective.corrupt(keys, batch)
        carry = objective.first_carry(model, batch["ids"].shape[0])
        means = objective.terms(Net(model, params), batch, carry).means
        if "lm" not in {head.rpartition("/")[2] for head in objective.heads}:
            return means  # what it predicts are no pieces
        guess = Mean.of(batch["targets"] == frequent, batch["weights"])
        return means | {"unigram_accuracy": guess}

    return eval_step
