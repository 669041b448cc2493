"""Every config file: it loads, its docstring shows its command, and a toy-sized run of
it goes through its stages."""

import re
from pathlib import Path

import numpy as np
import pytest

from bert_jax.config import load_config, override, resolve
from bert_jax.course import course_of
from bert_jax.data.prepare import prepare
from bert_jax.data.tokenizers import train_wordpiece
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
SIZES += ("window", "max_distance", "types")


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
    ends = [*course.starts[1:], run.steps]
    for start, end in zip(course.starts, ends, strict=True):
        top = course.legs[course.leg_of[start]].run.optim.lr
        rates = course.rate(np.linspace(start, end, 1000).astype(int))
        assert 0 < float(rates.max()) <= top


@pytest.fixture(scope="module")
def corpora(tiny_corpus, tmp_path_factory) -> dict[str, Path]:
    """What the recipes are trained on: text; cased text; text with tagged words."""
    folder = tmp_path_factory.mktemp("recipes")
    text = tiny.write_text(folder / "text.txt")
    cased = train_wordpiece(
        [text.read_text()], vocab_size=100, lowercase=False, progress=False
    )
    prepare([str(text)], tokenizer=cased, out=folder / "cased", progress=False)
    tagged = "\n\n".join(
        "\n".join(
            f"[{a}/n {b}/n]nt {b}/v {c}/nr ./w"
            for a, b, c in zip("猫狗鸟", "看画听", "山水月", strict=True)
        )
        for _ in range(60)
    )
    (folder / "tagged.txt").write_text(tagged, encoding="utf-8")
    chars = train_wordpiece([tagged], vocab_size=27, progress=False)
    prepare(
        [str(folder / "tagged.txt")],
        tokenizer=chars,
        out=folder / "tagged",
        words="tags",
        progress=False,
    )
    return {
        "": tiny_corpus.path,
        "ernie_1": folder / "tagged",
        "ernie_2": folder / "cased",
    }


def toy(name: str, corpus: Path):
    """What makes a recipe small: two steps a stage, or one of each task; eight rows of
    16 tokens in the first stage, then of 32."""
    config = load_config(name)
    arch = tiny_arch(preset(config.preset).arch)
    stages = []
    for number, stage in enumerate(config.stages):
        stage = stage | {"steps": 2, "batch": 8, "length": 32 if number else 16}
        if "tasks" in stage:
            stage |= {"tasks": dict.fromkeys(stage["tasks"], 1)}
            stage["steps"] = len(stage["tasks"])
        stages.append(stage)
    steps = sum(stage["steps"] for stage in stages) or 2
    changes = {f"arch.{size}": getattr(arch, size) for size in SIZES}
    changes |= {"data": str(corpus), "length": 32, "batch": 8, "steps": steps}
    changes |= {"stages": tuple(stages), "optim.warmup": 0.1, "log_every": 1}
    if "memory" in config.objective:
        changes["objective.memory"] = 16
    override(config, changes)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_toy_of_each_recipe_trains(corpora, tmp_path, name: str):
    run = resolve(toy(name, corpora.get(name, corpora[""])))
    result = train(run, tmp_path / "run", progress=False)
    assert result["finished"]
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, run.steps + 1))
    assert all(np.isfinite(row["loss"]) for row in rows)
    # Another kind of optimizer than that of the recipe would have other metrics.
    assert ("trust_embed" in rows[-1]) == (run.optim.name == "lamb")
