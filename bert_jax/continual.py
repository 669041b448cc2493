"""Continual learning of several tasks: none is dropped, none disturbs another's head.

Tasks are brought in one after the other, and whoever is in stays in: stage k trains
tasks 1..k together, each with a part of its steps, so that a new one does not drive out
what was learned (ERNIE 2.0, Sun et al. 2020, arXiv:1907.12412, section 3.1). The body
is shared; a step trains one task (course.py says which), and its head alone.

    config.tasks = (("words", {"rows": "doc", "objective.choose": "ngram"}),
                    ("order", {"rows": "doc", "objective.name": "sentence_reordering",
                               "objective.task": 1}))
    config.stages = spread({"words": 900, "order": 300})
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import jax

from bert_jax.errors import InputError
from bert_jax.models.heads import HEADS


def spread(budget: Mapping[str, int]) -> tuple[dict, ...]:
    """Stages as course.py reads them, each of which brings in one task: its steps are
    spread evenly over that stage and all later ones, what is left over to the earliest.
    """
    names = list(budget)
    problems = [
        f"{task}: {budget[task]} steps are too few for {len(names) - n} stages"
        for n, task in enumerate(names)
        if budget[task] < len(names) - n
    ]
    if problems:
        raise InputError("\n".join(problems))
    stages = []
    for stage in range(len(names)):
        counts = {}
        for first, task in enumerate(names[: stage + 1]):
            each, more = divmod(budget[task], len(names) - first)
            counts[task] = each + (stage - first < more)
        stages.append({"steps": sum(counts.values()), "tasks": counts})
    return tuple(stages)


def train_own_heads(step: Callable, heads: Collection[str]) -> Callable:
    """A training step that leaves all heads but these as they were, and every further
    tower that none of them stands on: parameters, and what the optimizer holds of them.
    Else weight decay and the momentum of earlier steps would move what belongs to tasks
    that this step does not train. `generator/lm` is a head of a tower, and another one
    than the model's own `lm`; the model's own body belongs to all tasks."""
    own = {(head.rpartition("/")[0], head.rpartition("/")[2]) for head in heads}
    trained = {"", *(tower for tower, _ in own)}

    def is_own(path, towers: Collection[str]) -> bool:
        # A number in it is the optimizer's, not the name of a part.
        keys = (getattr(part, "key", None) for part in path)
        first, *rest = (*(key for key in keys if isinstance(key, str)), "", "")
        tower, part = (first, rest[0]) if first in towers else ("", first)
        return tower in trained and (part not in HEADS or (tower, part) in own)

    def choose(towers, path, before: jax.Array, after: jax.Array) -> jax.Array:
        return after if is_own(path, towers) else before

    def own_step(state, *rest):
        new, means = step(state, *rest)
        # A tower has a stack of its own; of the model's own one there are the layers.
        towers = {name for name, part in state.params.items() if "stack" in part}
        kept = {
            field: jax.tree_util.tree_map_with_path(
                partial(choose, towers), getattr(state, field), getattr(new, field)
            )
            for field in ("params", "opt_state")
        }
        return new.replace(**kept), means

    return own_step
