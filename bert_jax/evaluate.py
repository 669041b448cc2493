"""Scores of a saved model on a prepared corpus."""

from pathlib import Path

import jax

from bert_jax.config import objective_fields
from bert_jax.course import leg_at
from bert_jax.data.corpus import check_same_tokenizer, open_corpus
from bert_jax.data.rows import Rows
from bert_jax.errors import InputError
from bert_jax.evaluators.held_out import HeldOut
from bert_jax.model_dir import load, read_run
from bert_jax.models.model import Model
from bert_jax.objective import check_rows, make_objective
from bert_jax.sharding import make_mesh, replicated


def evaluate(
    path: str | Path,
    *,
    data: str | Path,
    rows: str | None = None,
    length: int | None = None,
    batch: int = 32,
    count: int | None = None,
) -> dict[str, float]:
    """Loss, accuracy, perplexity and the unigram baseline on the same predictions.

    Rows and length are those the model was trained with last, or full and 128.
    """
    model = load(path)
    corpus = open_corpus(data)
    check_same_tokenizer(corpus, model.tokenizer.hash, f"the model {path}")
    is_workdir = (Path(path) / "run.json").is_file()
    trained = {}
    if is_workdir:  # as it was trained at that step
        trained = leg_at(read_run(Path(path))["config"], model.step).as_dict()
    kind = rows or trained.get("rows", "full")
    if length is None:
        length = trained.get("length", min(128, model.arch.max_length or 128))
    problems = []
    if length > (model.arch.max_length or length):
        problems.append(
            f"--length {length}: the model has positions for {model.arch.max_length}"
        )
    for name, value in (("batch", batch), ("count", count)):
        if value is not None and value < 1:
            problems.append(f"--{name} {value} must be at least 1")
    if problems:
        raise InputError("\n".join(problems))
    mesh = make_mesh()
    found = Rows(corpus, kind, length, trained.get("across", "attend"), seed=0)
    total = len(found) if count is None else min(count, len(found))
    batch = min(batch, -(-total // mesh.size) * mesh.size)  # no more than is needed
    hyper = objective_fields(model.preset.objective)
    hyper = dict(trained.get("objective", hyper))
    if model.preset.pair_head not in model.heads and "next_sentence" in hyper:
        hyper["next_sentence"] = 0.0
    if "memory" in hyper:  # each row is scored by itself
        hyper["memory"] = 0
    objective = make_objective(
        hyper,
        preset=model.preset,
        arch=model.arch,
        rows=kind,
        tokenizer=model.tokenizer,
        corpus=corpus,
        say=lambda _: None,
    )
    check_rows(objective, found)
    theirs = ("" if "/" in head and model.towers else head for head in objective.heads)
    lacking = sorted({*theirs} - {"", *model.heads})
    if lacking:
        raise InputError(
            f"{path} has no head {', '.join(lacking)}, which {objective.name} scores"
        )
    held_out = HeldOut(
        found,
        model=Model(model.arch, towers=model.towers),
        objective=objective,
        mesh=mesh,
        batch=batch,
        count=count,
    )
    return dict(held_out.run(jax.device_put(model.params, replicated(mesh))))
