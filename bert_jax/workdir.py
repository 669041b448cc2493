"""The folder of a run: it belongs to one configuration, and tells how far it came."""

import json
from pathlib import Path

import jax

from bert_jax import metrics
from bert_jax.config import unlike
from bert_jax.data.tokenizers import load_tokenizer
from bert_jax.errors import InputError
from bert_jax.model_dir import read_run
from bert_jax.whole import write_text


def claim_workdir(workdir: Path, about: dict, tokenizer, *, trained: bool) -> None:
    """Writes what the run is; once there is a checkpoint it must be what is there."""
    if jax.process_index():
        return
    path = workdir / "run.json"
    if trained:
        problems = unlike(read_run(workdir), about)
        if problems:
            raise InputError(
                f"{workdir} belongs to another configuration; use the same values, or "
                f"go on from it in another --workdir with --config.init={workdir}:\n"
                + "\n".join(problems)
            )
    else:
        folder = workdir / "tokenizer"
        others = ("corpus.json", "tokenizer_config.json", "config.json")
        in_the_way = [name for name in others if (workdir / name).exists()]
        if in_the_way:
            raise InputError(
                f"{workdir} holds {in_the_way[0]}: it is a corpus, a tokenizer or a "
                "model; use another --workdir"
            )
        foreign = folder.exists() and not path.is_file()  # not of a run of ours
        if foreign and load_tokenizer(folder).hash != tokenizer.hash:
            raise InputError(
                f"{folder} is another tokenizer than that of the data: it would be "
                "overwritten; use another --workdir"
            )
        tokenizer.save(folder)
        write_text(path, json.dumps(about, indent=2) + "\n")


def scored_steps(workdir: Path) -> set[int]:
    rows = metrics.read_metrics(workdir / "metrics.jsonl")
    return {row["step"] for row in rows if row["kind"] == "eval"}


def last_scores(workdir: Path) -> dict:
    """The last line of each kind in metrics.jsonl."""
    rows = metrics.read_metrics(workdir / "metrics.jsonl")
    return {row["kind"]: row for row in rows}
