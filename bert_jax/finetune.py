"""Short finetuning on a labelled task: the one step with another objective."""

import dataclasses
import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from bert_jax.data.labelled import Labelled
from bert_jax.data.tasks import Task
from bert_jax.errors import InputError
from bert_jax.evaluators.scores import score_task
from bert_jax.models.model import Model, init_params, param_shapes
from bert_jax.objectives import OBJECTIVES
from bert_jax.objectives.labels import Labels
from bert_jax.optim import Optim, make_optimizer
from bert_jax.step import Net, TrainState, make_train_step


@dataclasses.dataclass(frozen=True)
class Finetune:
    """The recipe; a few hundred steps, the same for all that are compared."""

    steps: int = 300
    batch: int = 32
    lr: float = 5e-4
    warmup: float = 0.1
    dropout: float = 0.1

    def __post_init__(self):
        problems = [
            f"finetune.{name}={getattr(self, name)}: at least 1"
            for name in ("steps", "batch")
            if getattr(self, name) < 1
        ]
        if not 0 < self.lr < math.inf:
            problems.append(f"finetune.lr={self.lr} must be more than 0, and finite")
        if not 0 <= self.dropout < 1:
            problems.append(f"finetune.dropout={self.dropout} must be in [0, 1)")
        if not (0 <= self.warmup < 1 or 1 <= self.warmup <= self.steps):
            problems.append(
                f"finetune.warmup={self.warmup}: below 1 a share of the steps, else a "
                f"number of steps, at most finetune.steps={self.steps}"
            )
        if problems:
            raise InputError("\n".join(problems))

    def run(
        self,
        model: Model,
        params: dict,
        task: Task,
        train: Labelled,
        dev: Labelled,
        *,
        seed: int,
        progress: str = "",
    ) -> dict:
        """The score on the dev part, and the loss of every step."""
        noise = dict(dropout=self.dropout, attention_dropout=self.dropout)
        arch = model.arch.but(labels=len(train.labels), **noise)
        model = Model(arch, dtype=model.dtype)
        objective = OBJECTIVES[task.objective](order=arch.order)
        fresh = init_params(model, jax.random.key(seed), heads=objective.heads)
        # Where a part was pretrained it is taken over; the head of the task is new.
        params = {name: params.get(name, part) for name, part in fresh.items()}
        optimizer, step, predict = functions(self, model, objective)
        state = TrainState(
            step=jnp.zeros([], jnp.int32),
            params=jax.tree.map(jnp.array, params),  # copies: the step takes them
            opt_state=optimizer.init(params),
            seed=jnp.uint32(seed),
        )
        losses = []
        bar = tqdm(range(self.steps), desc=progress, leave=False, disable=not progress)
        for number in bar:
            batch = train.batch(number, size=self.batch, seed=seed)
            state, means = step(state, batch)
            losses.append(means["loss"].total)
        losses = [float(loss) for loss in jax.device_get(losses)]
        if not np.isfinite(losses).all():
            raise InputError(
                f"finetuning on {task.name} diverged: a lower finetune.lr than "
                f"{self.lr} may help"
            )
        said = []
        for batch in dev.in_order(2 * self.batch):
            there = batch[objective.column] >= 0
            said.append(np.asarray(predict(state.params, batch))[there])
        scores = score_task(task, dev, np.concatenate(said))
        return {**scores, "losses": losses}


@lru_cache
def functions(recipe: Finetune, model: Model, objective: Labels):
    """The optimizer, the step, and the most probable labels: compiled once for all
    seeds and for all models of one shape."""
    shapes = param_shapes(model.arch, heads=objective.heads)
    optim = Optim(name="adamw", schedule="linear", lr=recipe.lr, warmup=recipe.warmup)
    optimizer = make_optimizer(optim, recipe.steps, shapes)
    step = jax.jit(make_train_step(model, objective, optimizer), donate_argnums=0)
    predict = jax.jit(
        lambda params, batch: objective.logits(Net(model, params), batch).argmax(-1)
    )
    return optimizer, step, predict
