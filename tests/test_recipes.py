"""Every config file: it loads, its docstring shows its command, and a toy-sized run of
it goes through its stages."""

import re
from pathlib import Path

import pytest

from bert_jax.config import load_config, override, resolve
from bert_jax.course import course_of
from bert_jax.metrics import read_metrics
from bert_jax.parity import tiny as tiny_arch
from bert_jax.presets import PRESETS, preset
from bert_jax.train import train
from tests import tiny
from tests.conftest import ROOT

# compare.py names many runs; pretrain.py is trained all over the tests.
RECIPES = sorted(
    path.stem
    for path in (ROOT / "configs").glob("[a-z]*.py")
    if path.stem not in ("compare", "pretrain")
)
SIZES = ("width", "layers", "heads", "inner", "max_positions", "embed_width")
SIZES += ("window", "max_distance", "types", "task_types")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_it_is_run(name: str):
    text = (ROOT / f"configs/{name}.py").read_text()
    (asked,) = set(re.findall(r"bert_jax train --config (\S+)", text))
    assert asked.partition(":")[0] == name
    config = load_config(asked)
    override(config, {"data": "corpus"})
    run = resolve(config)
    assert run.preset in PRESETS
    course = course_of(run)
    assert len(course.leg_of) == run.steps
    assert max(float(course.rate(n)) for n in course.starts) <= 0.01


def toy(name: str, corpus: Path) -> dict:
    """What makes a recipe small: two steps a stage, eight rows of 16 or 32 tokens."""
    config = load_config(name)
    arch = tiny_arch(preset(config.preset).arch)
    stages = tuple(
        stage
        | {"steps": 2, "batch": 8, "length": 16 * (n + 1)}
        | ({"tasks": even(stage["tasks"])} if "tasks" in stage else {})
        for n, stage in enumerate(config.stages)
    )
    stages = tuple(
        stage | {"steps": sum(stage.get("tasks", {"": 2}).values())} for stage in stages
    )
    steps = sum(stage["steps"] for stage in stages) or 2
    changes = {f"arch.{size}": getattr(arch, size) for size in SIZES}
    changes |= {"data": str(corpus), "length": 32, "batch": 8, "steps": steps}
    changes |= {"stages": stages, "optim.warmup": 0.1, "log_every": 1}
    if "memory" in config.objective:
        changes["objective.memory"] = 16
    override(config, changes)
    return config


def even(tasks: dict) -> dict:
    return dict.fromkeys(tasks, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_toy_of_each_recipe_trains(tiny_corpus, tmp_path, name: str):
    run = resolve(toy(name, tiny_corpus.path))
    result = train(run, tmp_path / "run", progress=False)
    assert result["finished"]
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, run.steps + 1))
    # Another kind of optimizer than that of the recipe would have other metrics.
    assert ("trust_embed" in rows[-1]) == (run.optim.name == "lamb")
    assert tiny.SETTINGS["length"] == "32"  # the corpus has rows of that length
