"""An objective from a run's settings: what it is told, and what the data decide."""

import dataclasses
from collections.abc import Collection
from pathlib import Path

from bert_jax.config import DECIDED
from bert_jax.data.corpus import Corpus, similar_words
from bert_jax.data.pairs import RULES
from bert_jax.data.plans import PAIRS
from bert_jax.data.rows import Rows
from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import CHOICES, Arch
from bert_jax.objectives import OBJECTIVES
from bert_jax.objectives.base import Objective
from bert_jax.objectives.capitalisation import small_letters
from bert_jax.presets import Preset


def make_objective(
    hyper: dict,
    *,
    preset: Preset,
    arch: Arch,
    rows: str,
    tokenizer,
    corpus: Corpus | None = None,
    say=print,
) -> Objective:
    """`hyper` has the objective's name (else it is the preset's) and hyper-parameters;
    `rows` is the kind of rows of `corpus` it will see."""
    hyper = dict(hyper)
    name = hyper.pop("name", preset.objective)
    if name not in OBJECTIVES:
        raise InputError(unknown("config.objective.name", name, OBJECTIVES))
    kind = OBJECTIVES[name]
    fields = {field.name for field in dataclasses.fields(kind)}
    valid = {f"objective.{field}" for field in fields - {*DECIDED}}
    problems = [
        unknown("config field", f"objective.{field}", valid)
        for field in hyper
        if f"objective.{field}" not in valid
    ]
    if problems:
        raise InputError("\n".join(problems))
    if "mask_id" in fields and tokenizer.mask_id is None:
        raise InputError(
            f"the {tokenizer.kind} tokenizer of the data has no token to hide others "
            f"behind ([MASK]), which {name} needs: prepare with another one"
        )
    if rows not in PAIRS and hyper.get("next_sentence"):
        hyper["next_sentence"] = 0.0
        if preset.rows in PAIRS:
            say(f"rows={rows} are no pairs: next-sentence prediction is off")
    if rows not in RULES and hyper.get("seq2seq"):
        hyper["seq2seq"] = 0.0
        say(f"rows={rows} have no part B: the form seq2seq is off")
    decided = {
        "vocab_size": tokenizer.size,
        "mask_id": tokenizer.mask_id,
        "special_ids": tokenizer.special_ids,
        "pair_head": preset.pair_head,
        "table": None,
    }
    if "small" in fields:
        decided["small"] = small_letters(tokenizer.vocab)
    if hyper.get("replace") == "similar" and corpus is not None:
        decided["table"] = similar_words(corpus, hyper.get("similar", ""))
    decided = {field: decided[field] for field in DECIDED if field in fields}
    objective = kind(**decided, **hyper)
    problems = objective.problems(arch, rows)
    if problems:
        raise InputError("\n".join(problems))
    if (order := objective.order) != arch.order:
        can = order in CHOICES["order"]
        how = f": to make them agree, give --config.arch.order={order}" if can else ""
        say(
            f"{name} trains the model to read in the order {order!r}, but probes, "
            f"finetuning and bert_jax.load go by config.arch.order={arch.order}{how}"
        )
    return objective


def check_rows(objective: Objective, rows: Rows) -> None:
    """Raises where rows, to learn from or to score on, lack what it asks for."""
    check_columns(objective, rows.empty(1), rows.corpus.path)
    if "words" in objective.columns and (why := rows.corpus.hides_words):
        chooses = hasattr(objective, "choose")
        other = ", or use config.objective.choose=token" if chooses else ""
        raise InputError(
            f"{objective.name} needs words, which {rows.corpus.path} does not show: "
            f"{why}. Prepare it with --words jieba (or spaces, tags){other}"
        )


def check_columns(
    objective: Objective, columns: Collection[str], path: str | Path
) -> None:
    lacking = sorted({*objective.columns} - {*columns})
    if lacking:
        how = {
            "label": "config.rows=labelled and a file of labelled pairs as config.data",
            "tags": "bert_jax/finetune.py, which alone reads tags",
        }.get(lacking[0], "`bert_jax prepare --words`")
        raise InputError(
            f"{objective.name} needs {', '.join(lacking)}: {path} has no such column; "
            f"see {how}"
        )
