"""Linear probes: what a logistic regression reads from the states of a frozen model.

The features of a text are its states averaged over its tokens, in each of the last
`layers` layers, side by side; of a word those of its first piece. They are
standardised, and

    min over W, b of  mean -log softmax(W f + b)[label]  +  λ/2 ‖W‖²

is minimised (L-BFGS) for a few λ, of which the best on a held-out fifth of the training
examples (whole sentences, where each word is labelled) is used for all of them (as in
SentEval, Conneau and Kiela 2018, arXiv:1803.05449). Nothing in it is
drawn, so the same states give the same score.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from bert_jax.data.labelled import Labelled
from bert_jax.data.tasks import Task
from bert_jax.errors import InputError
from bert_jax.evaluators.scores import score_task
from bert_jax.models.model import Model
from bert_jax.objectives.base import tokens_of

STRENGTHS = (1e-1, 1e-2, 1e-3)  # λ
ITERATIONS = 100
BATCH = 64


@dataclasses.dataclass(frozen=True)
class Probe:
    layers: int = 2  # the last ones are read
    examples: int = 2000  # of the training part, at most,
    sentences: int = 1000  # and where each word is one

    def __post_init__(self):
        problems = [
            f"probe.{name}={getattr(self, name)}: at least {least}"
            for name, least in (("layers", 1), ("examples", 10), ("sentences", 10))
            if getattr(self, name) < least
        ]
        if problems:
            raise InputError("\n".join(problems))

    def run(
        self, model: Model, params: dict, task: Task, train: Labelled, dev: Labelled
    ) -> dict[str, float]:
        """The score on the dev part."""
        tagged = task.objective == "tag"
        read = partial(features, model, params, layers=self.layers)
        some = train.some(self.sentences if tagged else self.examples)
        fit, labels, owner = read(some)
        test, _, _ = read(dev)
        mean, scale = fit.mean(0), fit.std(0) + 1e-6
        fit, classes = (fit - mean) / scale, len(train.labels)
        weights = fit_best(fit, labels, owner, classes=classes)
        said = predict(weights, (test - mean) / scale)
        return score_task(task, dev, said)


@lru_cache
def reader(model: Model, layers: int, *, tagged: bool) -> Callable:
    """(params, batch) -> features, of every token or of every text: jitted."""

    @jax.jit
    def read(params, batch):
        tokens = tokens_of(batch, order=model.arch.order)
        out = model.apply({"params": params}, tokens, capture=("hidden",))
        states = jnp.concatenate(out["hidden"][-layers:], axis=-1)  # [B, S, layers·D]
        if tagged:
            return states
        real = (batch["group"] > 0)[..., None]
        return (states * real).sum(1) / jnp.maximum(real.sum(1), 1)

    return read


def features(
    model: Model, params: dict, data: Labelled, *, layers: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [n, layers · D] of texts, or of words, their labels [n], and the number
    of the example that each is from [n]."""
    tagged = "tags" in data.arrays
    read = reader(model, layers, tagged=tagged)
    found, labels, owner = [], [], []
    for number, batch in enumerate(data.in_order(BATCH)):
        gold = batch["tags"] if tagged else batch["label"][:, 0]
        there = gold >= 0
        found.append(np.asarray(read(params, batch))[there])
        labels.append(gold[there])
        owner.append(number * BATCH + np.nonzero(there)[0])
    return np.concatenate(found), np.concatenate(labels), np.concatenate(owner)


def fit_best(
    x: np.ndarray, labels: np.ndarray, owner: np.ndarray, *, classes: int
) -> np.ndarray:
    """W and, in the last row, b, with the λ that does best on a held-out fifth of the
    examples: words of one sentence know too much of each other."""
    held = owner % 5 == 0
    fit = partial(fit_logistic, classes=classes)
    losses = {}
    for strength in STRENGTHS:
        weights = fit(x[~held], labels[~held], strength=strength)
        losses[strength] = logistic_loss(weights, x[held], labels[held])[0]
    return fit(x, labels, strength=min(losses, key=losses.get))


def fit_logistic(
    x: np.ndarray, labels: np.ndarray, *, classes: int, strength: float
) -> np.ndarray:
    shape = (x.shape[1] + 1, classes)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(shape).astype(x.dtype)
        loss, gradient = logistic_loss(weights, x, labels)
        loss += strength / 2 * (weights[:-1] ** 2).sum()
        gradient[:-1] += strength * weights[:-1]
        return loss, gradient.ravel().astype(np.float64)

    options = {"maxiter": ITERATIONS}
    found = scipy.optimize.minimize(
        objective, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options=options
    )
    return found.x.reshape(shape).astype(x.dtype)


def logistic_loss(
    weights: np.ndarray, x: np.ndarray, labels: np.ndarray
) -> tuple[float, np.ndarray]:
    """Mean cross-entropy and its gradient."""
    logits = x @ weights[:-1] + weights[-1]
    logits -= logits.max(1, keepdims=True)
    total = np.exp(logits).sum(1, keepdims=True)
    each = np.arange(len(x))
    loss = float((np.log(total[:, 0]) - logits[each, labels]).mean())
    slope = np.exp(logits) / total
    slope[each, labels] -= 1
    slope /= len(x)
    return loss, np.concatenate([x.T @ slope, slope.sum(0, keepdims=True)])


def predict(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    return (x @ weights[:-1] + weights[-1]).argmax(1)
