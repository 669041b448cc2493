"""Scores of a saved model on a prepared corpus."""

import dataclasses
import json
from pathlib import Path

from bert_jax.data.prepare import open_corpus
from bert_jax.data.rows import Rows
from bert_jax.errors import InputError
from bert_jax.evaluators.held_out import HeldOut
from bert_jax.model_dir import load
from bert_jax.models.model import Model
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.sharding import make_mesh, own_rows
from bert_jax.train import check_same_tokenizer


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

    Rows and length are those the model was trained with, or full and 128.
    """
    model = load(path)
    if "lm" not in model.heads:
        raise InputError(f"{path} has no masked-LM head: there is nothing to score")
    corpus = open_corpus(data)
    check_same_tokenizer(corpus, model.tokenizer.hash, f"the model {path}")
    run = Path(path) / "run.json"
    trained = json.loads(run.read_text())["config"] if run.is_file() else {}
    kind = rows or trained.get("rows", "full")
    if kind == "pair" and "nsp" not in model.heads:
        kind = "full" if rows is None else kind
    length = length or trained.get("length", min(128, model.arch.max_positions))
    mesh = make_mesh()
    own_rows(mesh, batch, field="batch")
    objective = MaskedLM(
        vocab_size=model.tokenizer.size,
        mask_id=model.tokenizer.mask_id,
        special_ids=model.tokenizer.special_ids,
    )
    if kind != "pair" or "nsp" not in model.heads:
        objective = dataclasses.replace(objective, next_sentence=0.0)
    held_out = HeldOut(
        Rows(corpus, kind, length, trained.get("across", "attend"), seed=0),
        model=Model(model.arch),
        objective=objective,
        mesh=mesh,
        frequent_id=corpus.frequent_id,
        batch=batch,
        count=count,
    )
    return dict(held_out.run(model.params))
