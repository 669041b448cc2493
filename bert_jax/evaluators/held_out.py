"""Any objective's scores on held-out text, with a corruption that never changes.

What is hidden in a row is a function of (seed, row id), so that two models, or two
moments of one run, are scored on the same predictions. `unigram_accuracy` is what
always guessing the most frequent piece of that text would score on them.
"""

import math
import operator
from collections.abc import Callable, Iterator

import jax
import numpy as np

from bert_jax.data.pipeline import eval_batches
from bert_jax.data.rows import Rows
from bert_jax.models.model import Model
from bert_jax.objectives.base import Objective
from bert_jax.sharding import Feed, replicated
from bert_jax.step import make_eval_step

SEED = 0  # of the evaluation corruption, whatever that of the run is


class HeldOut:
    def __init__(
        self,
        rows: Rows,
        *,
        model: Model,
        objective: Objective,
        mesh: jax.sharding.Mesh,
        batch: int,
        count: int | None = None,
    ):
        self.rows, self.count = rows, count
        self.feed = Feed(mesh, batch, field="batch")
        self.objective = objective
        # What a model without context would always guess.
        self.frequent = np.int32(rows.corpus.frequent_id)
        step = make_eval_step(model, objective, mesh=mesh)
        self.step = jax.jit(step, out_shardings=replicated(mesh))

    def run(
        self, params: dict, *, stops: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[str, float]]:
        """Yields each score by name. `stops` is asked after each batch: there are none
        where it says so."""
        sums = None  # on the host and in double precision: exact for any corpus
        feed = self.feed
        how = dict(size=feed.size, count=self.count, part=feed.rows)
        for batch in eval_batches(self.rows, **how):
            placed = feed.place(batch)
            means = self.step(params, np.uint32(SEED), placed, self.frequent)
            means = jax.tree.map(np.float64, jax.device_get(means))
            sums = means if sums is None else jax.tree.map(operator.add, sums, means)
            if stops():
                return
        for name, mean in sums.items():
            yield name, float(mean.total / max(mean.count, 1.0))
        first = next(iter(self.objective.weights))
        loss = sums[first]
        if first.endswith("lm_loss"):
            yield "perplexity", math.exp(min(loss.total / max(loss.count, 1.0), 700.0))
        yield "predictions", float(loss.count)
