"""ERNIE 2.0 (Sun et al. 2020, arXiv:1907.12412): tasks come in one after the other.

    bert_jax train --config ernie_2:ernie-2.0-base-en --workdir runs/ernie \
        --config.data=corpus

Words hidden as n-grams, capitals, words that come again, shuffled parts of a text, and
how far apart two sentences are: each stage brings in one task more, and those before it
go on, each with its own task id and its own head (bert_jax/continual.py). The corpus
needs a cased vocabulary. Two more tasks of the paper want labelled pairs, a TSV of
label, text and text; say where they are and add them to TASKS (50,000 steps each):

    ("discourse", {"objective.name": "discourse_relation", "rows": "labelled",
                   "data": "relations.tsv"}),
    ("relevance", {"objective.name": "ir_relevance", "rows": "labelled",
                   "data": "titles.tsv"}),

Differs from the paper in what `knowledge` hides: n-grams of words, where the paper has
phrases and entities; for these, prepare the corpus with --words tags and tell the task
{"objective.choose": "word", "objective.unit": "phrases"} (or "entities"; ernie_1.py).

The paper does not say how many steps each task gets. Published: GLUE 80.6 with base,
83.6 with large (test; PaddlePaddle/ERNIE, README).
"""

from bert_jax.configs import pretrain

from bert_jax.continual import spread

TASKS = (
    ("knowledge", {"rows": "doc", "objective.choose": "ngram"}),
    ("capitals", {"rows": "doc", "objective.name": "capitalisation"}),
    ("again", {"rows": "doc", "objective.name": "token_document"}),
    ("reordering", {"rows": "doc", "objective.name": "sentence_reordering"}),
    ("distance", {"rows": "distance", "objective.name": "sentence_distance"}),
)


def get_config(arg: str = "ernie-2.0-base-en"):
    config = pretrain.get_config(arg)
    config.length = 512
    config.batch = 768  # 393,216 tokens
    config.optim.update(
        {"lr": 5e-5, "warmup": 4000.0, "schedule": "rsqrt", "beta2": 0.98}
    )
    config.tasks = tuple(
        (name, changes | {"objective.task": number})
        for number, (name, changes) in enumerate(TASKS)
    )
    # Hidden words get half of all steps.
    budget = {name: 50_000 for name, _ in TASKS} | {"knowledge": 200_000}
    config.stages = spread(budget)
    config.steps = sum(stage["steps"] for stage in config.stages)
    return config
