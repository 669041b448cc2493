"""The one training step, and the one evaluation step.

    (state, clean batch) -> corrupt -> forward -> loss -> gradient -> new state

Everything random in step k is a function of (seed, k): nothing but the step number
has to be kept for an exact resume.
"""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import optax

from bert_jax.lamb import layer_ratios
from bert_jax.models.dropout import Noise
from bert_jax.models.model import Model
from bert_jax.objectives.base import Batch, Mean, Objective, loss_of


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # int32, steps done
    params: dict
    opt_state: optax.OptState
    seed: jax.Array  # uint32


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


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """One key for each row number."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def make_train_step(
    model: Model, objective: Objective, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Mean]]]:
    def train_step(state: TrainState, batch: Batch):
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        corrupt_key, noise_key = jax.random.split(key)
        rows = jnp.arange(batch["ids"].shape[0], dtype=jnp.uint32)
        batch = objective.corrupt(row_keys(corrupt_key, rows), batch)
        noise = Noise.of(noise_key, rows)

        def loss_fn(params):
            means = objective.terms(Net(model, params, noise), batch)
            return loss_of(objective, means), means

        (loss, means), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        one = jnp.ones([], jnp.float32)
        means |= {
            "loss": Mean(loss, one),
            "grad_norm": Mean(optax.tree.norm(grads), one),
            "real_tokens": Mean.of(batch["group"] > 0, jnp.ones_like(batch["group"])),
        }
        means |= {name: Mean(r, one) for name, r in layer_ratios(opt_state).items()}
        return state.replace(
            step=state.step + 1, params=params, opt_state=opt_state
        ), means

    return train_step


def make_eval_step(
    model: Model, objective: Objective
) -> Callable[[dict, jax.Array, Batch, jax.Array], dict[str, Mean]]:
    def eval_step(params: dict, seed: jax.Array, batch: Batch, frequent: jax.Array):
        """Scores with the corruption fixed by (seed, row id).

        `frequent` is the piece that a model without any context would always guess;
        its accuracy is taken on the same predicted positions. Rows with id -1 fill
        up the last batch and are padding throughout.
        """
        keys = row_keys(jax.random.key(seed), batch["row_id"])
        batch = objective.corrupt(keys, batch)
        means = objective.terms(Net(model, params), batch)
        guess = Mean.of(batch["targets"] == frequent, batch["weights"])
        return means | {"unigram_accuracy": guess}

    return eval_step
