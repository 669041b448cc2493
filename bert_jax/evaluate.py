"""Scores of a saved model on a prepared corpus."""

from pathlib import Path

from bert_jax.data.corpus import check_same_tokenizer, open_corpus
from bert_jax.data.rows import LABELLED, Rows
from bert_jax.errors import InputError
from bert_jax.evaluators.held_out import HeldOut
from bert_jax.model_dir import LoadedModel, load, read_run
from bert_jax.models.model import Model
from bert_jax.objectives.base import Objective
from bert_jax.objectives.causal_lm import CausalLM
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.replaced_token import ReplacedToken
from bert_jax.sharding import make_mesh, own_rows


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
    if "lm" not in model.heads and not model.towers:
        raise InputError(f"{path} has no language-model head to score")
    corpus = open_corpus(data)
    check_same_tokenizer(corpus, model.tokenizer.hash, f"the model {path}")
    is_workdir = (Path(path) / "run.json").is_file()
    trained = read_run(Path(path))["config"] if is_workdir else {}
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
    own_rows(mesh, batch, field="batch")
    objective = objective_for(model, kind, dict(trained.get("objective", {})))
    held_out = HeldOut(
        found,
        model=Model(model.arch, towers=model.towers),
        objective=objective,
        mesh=mesh,
        batch=batch,
        count=count,
    )
    return dict(held_out.run(model.params))


def objective_for(model: LoadedModel, kind: str, hyper: dict) -> Objective:
    """What the model was trained for, as far as its heads and these rows allow."""
    if model.preset.objective == "causal_lm":
        return CausalLM()
    tokenizer, pair_head = model.tokenizer, model.preset.pair_head
    decided = dict(
        vocab_size=tokenizer.size,
        mask_id=tokenizer.mask_id,
        special_ids=tokenizer.special_ids,
    )
    if model.towers:
        return ReplacedToken(**decided, **hyper)
    if kind not in LABELLED or pair_head not in model.heads:
        hyper["next_sentence"] = 0.0
    return MaskedLM(**decided, pair_head=pair_head, **hyper)
