"""An objective from a run's settings: what it is told, and what the data decide."""

import dataclasses

from bert_jax.config import DECIDED
from bert_jax.data.corpus import Corpus, similar_words
from bert_jax.data.pairs import RULES
from bert_jax.data.plans import PAIRS
from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch
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
        "small": small_letters(tokenizer.vocab),
        "table": None,
    }
    if hyper.get("replace") == "similar" and corpus is not None:
        decided["table"] = similar_words(corpus, hyper.get("similar", ""))
    decided = {field: decided[field] for field in DECIDED if field in fields}
    objective = kind(**decided, **hyper)
    problems = objective.problems(arch, rows)
    if problems:
        raise InputError("\n".join(problems))
    return objective
