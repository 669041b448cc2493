"""Scores of predicted labels, and how far chance in the dev set may have moved them.

    accuracy   share that is right
    matthews   (tp·tn - fp·fn) / √((tp+fp)(tp+fn)(tn+fp)(tn+fn)) of two labels (CoLA)
    entity_f1  2·right / (found + there) over entities, of any kind, exact in kind and
               extent (micro F1 of conlleval and seqeval)

An entity is a run of B-x I-x ...; an I-x without one before begins one, as conlleval
has it.
"""

from collections.abc import Sequence

import numpy as np

from bert_jax.data.labelled import Labelled
from bert_jax.data.tasks import Task
from bert_jax.errors import InputError, unknown

SAMPLES = 200  # of the bootstrap


def accuracy(right: np.ndarray) -> float:
    """[n, 1]: 1 where the prediction is right."""
    return float(right[:, 0].mean())


def matthews(cells: np.ndarray) -> float:
    """[n, 4]: a 1 at true positive, true negative, false positive or false negative."""
    tp, tn, fp, fn = cells.sum(0).astype(float)
    below = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return float((tp * tn - fp * fn) / np.sqrt(below)) if below else 0.0


def entity_f1(counts: np.ndarray) -> float:
    """[n, 3] of each sentence: entities right, found, there."""
    right, found, there = counts.sum(0)
    return float(2 * right / (found + there)) if found + there else 0.0


def count_right(predicted: np.ndarray, gold: np.ndarray) -> np.ndarray:
    return (predicted == gold)[:, None].astype(np.int64)


def count_cells(predicted: np.ndarray, gold: np.ndarray) -> np.ndarray:
    said, is_so = np.asarray(predicted) > 0, np.asarray(gold) > 0
    return np.stack([said & is_so, ~said & ~is_so, said & ~is_so, ~said & is_so], 1)


def count_entities(predicted: Sequence, gold: Sequence) -> np.ndarray:
    """Of the names of tags of each sentence."""
    sides = [[entities(tags) for tags in side] for side in (predicted, gold)]
    return np.asarray(
        [(len(p & g), len(p), len(g)) for p, g in zip(*sides, strict=True)]
    )


METRICS = {
    "accuracy": (count_right, accuracy),
    "matthews": (count_cells, matthews),
    "entity_f1": (count_entities, entity_f1),
}


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(kind, first word, one after the last) of each."""
    found, kind, start = set(), None, 0
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        goes_on = prefix == "I" and name == kind
        if kind is not None and not goes_on:
            found.add((kind, start, place))
            kind = None
        if prefix in ("B", "I") and not goes_on:
            kind, start = name, place
    return found


def score_task(task: Task, dev: Labelled, said: np.ndarray) -> dict[str, float]:
    """Of labels that were said of the dev part, in its order."""
    if task.objective == "tag":
        return score(task.metric, *dev.named_tags(said))
    return score(task.metric, said, dev.arrays["label"][:, 0])


def score(metric: str, predicted, gold) -> dict[str, float]:
    """The score, and its standard error over dev sets drawn like this one: that of
    resampled examples (the bootstrap)."""
    if metric not in METRICS:
        raise InputError(unknown("metric", metric, METRICS))
    count, total = METRICS[metric]
    counts = count(predicted, gold)
    rng = np.random.default_rng(0)
    drawn = [
        total(counts[rng.integers(0, len(counts), len(counts))]) for _ in range(SAMPLES)
    ]
    return {"score": total(counts), "error": float(np.std(drawn))}
