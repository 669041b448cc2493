"""Every config file: it loads, has the numbers of its paper, its docstring shows its
command and a published score, and a toy-sized run of it goes through its stages."""

import ast
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from bert_jax.configs import ernie_2

from bert_jax.config import flatten, load_config, override, resolve
from bert_jax.course import course_of
from bert_jax.data.prepare import prepare
from bert_jax.data.tokenizers import train_wordpiece
from bert_jax.metrics import read_metrics
from bert_jax.parity import tiny as tiny_arch
from bert_jax.presets import PRESETS, preset
from bert_jax.schedules import warmup_steps
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


ADAM = {"name": "bert_adamw", "schedule": "bert", "decay": 0.01, "clip": 1.0}
ADAM |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
CORRECTED = ADAM | {"name": "adamw", "schedule": "linear"}
LAMB = ADAM | {"name": "lamb", "schedule": "polynomial", "power": 1.0}
MASKED = {"name": "masked_lm", "rate": 0.15, "hide": 0.8, "randomise": 0.1}
REPLACED = {"name": "replaced_token", "weight": 50.0, "hide": 0.85}
# Of each stage: steps, tokens a row, rows a step, rate, steps of warm-up; then what
# the optimizer, the objective and the rest are told. What a paper does not give
# (NEZHA's rate, the warm-up of BERT-wwm) is what the recipe says it took instead.
NUMBERS = {
    "bert:bert-base-uncased": (
        [(900_000, 128, 256, 1e-4, 10_000), (100_000, 512, 256, 1e-4, 10_000)],
        ADAM,
        MASKED | {"choose": "token", "next_sentence": 1.0},
        {"rows": "pair", "arch.dropout": 0.1},
    ),
    "roberta:roberta-base": (
        [(500_000, 512, 8192, 6e-4, 24_000)],
        CORRECTED | {"beta2": 0.98, "clip": 0.0},
        MASKED | {"choose": "token"},
        {"rows": "full", "copies": 0},
    ),
    "roberta:roberta-large": (
        [(500_000, 512, 8192, 4e-4, 30_000)],
        CORRECTED | {"beta2": 0.98, "clip": 0.0},
        MASKED | {"choose": "token"},
        {"rows": "full", "copies": 0},
    ),
    "albert:albert-base-v2": (
        [(125_000, 512, 4096, 1.76e-3, 3125)],
        LAMB | {"variant": "albert"},
        MASKED | {"choose": "ngram"},
        {"rows": "order", "arch.dropout": 0.0, "arch.attention_dropout": 0.0},
    ),
    "electra:electra-small-discriminator": (
        [(1_000_000, 128, 128, 5e-4, 10_000)],
        ADAM,
        REPLACED | {"rate": 0.15, "generator": 1 / 4},
        {"rows": "electra"},
    ),
    "electra:electra-base-discriminator": (
        [(766_000, 512, 256, 2e-4, 10_000)],
        ADAM,
        REPLACED | {"rate": 0.15, "generator": 1 / 3},
        {"rows": "electra"},
    ),
    "electra:electra-large-discriminator": (
        [(400_000, 512, 2048, 2e-4, 10_000)],
        ADAM,
        REPLACED | {"rate": 0.25, "generator": 1 / 4},
        {"rows": "electra"},
    ),
    "spanbert:spanbert-base-cased": (
        [(2_400_000, 512, 256, 1e-4, 10_000)],
        CORRECTED | {"eps": 1e-8},
        MASKED | {"choose": "span", "replace": "run", "boundary": 1.0},
        {"rows": "doc"},
    ),
    "xlnet:xlnet-large-cased": (
        [(500_000, 512, 8192, 4e-4, 40_000)],
        CORRECTED,
        {"name": "permuted_lm", "memory": 384, "partial": 6, "longest": 5},
        {"rows": "stream", "direction": "both"},
    ),
    "bert_wwm:chinese-bert-wwm": (
        [(100_000, 128, 2560, 1e-4, 1000), (100_000, 512, 384, 1e-4, 1000)],
        ADAM | {"name": "lamb", "variant": "google"},
        MASKED | {"choose": "word"},
        {"rows": "pair"},
    ),
    "nezha:nezha-cn-base": (
        [(125_000, 128, 4096, 1.768e-3, 3125)],
        LAMB | {"variant": "nvidia"},
        MASKED | {"choose": "word"},
        {"rows": "pair"},
    ),
    "lamb:bert-large-uncased": (
        [(7038, 128, 65_536, 6e-3, 2001), (1563, 512, 32_768, 4e-3, 200)],
        LAMB | {"variant": "nvidia", "power": 0.5},
        MASKED | {"choose": "token", "next_sentence": 1.0},
        {"rows": "pair"},
    ),
}


@pytest.mark.parametrize("asked", NUMBERS)
def test_the_numbers_of_a_recipe(asked: str):
    stages, optim, objective, rest = NUMBERS[asked]
    config = load_config(asked)
    override(config, {"data": "corpus"})
    run = resolve(config)
    assert run.preset == asked.partition(":")[2]
    course = course_of(run)
    lengths = np.diff([*course.starts, run.steps]).tolist()
    found = [
        (
            *(steps, leg.run.length, leg.run.batch, leg.run.optim.lr),
            warmup_steps(leg.run.optim.warmup, leg.run.steps),
        )
        for steps, leg in zip(lengths, course.legs, strict=True)
    ]
    assert found == stages
    assert course.moments == ("keep",) * len(stages)
    expected = {f"optim.{name}": value for name, value in optim.items()}
    expected |= {f"objective.{name}": value for name, value in objective.items()} | rest
    for leg in course.legs:
        told = dict(flatten(dataclasses.asdict(leg.run)))
        assert {name: told[name] for name in expected} == expected


def test_the_labelled_tasks_that_ernie_2_tells_how_to_add(monkeypatch):
    """As its docstring has them, behind those that it trains."""
    added = re.search(r'(?s)    (\("discourse".*?\)),\n\n', ernie_2.__doc__)[1]
    added = ast.literal_eval(f"({added})")
    monkeypatch.setattr(ernie_2, "TASKS", ernie_2.TASKS + added)
    config = ernie_2.get_config()
    override(config, {"data": "corpus"})
    run = resolve(config)
    assert run.preset == "ernie-2.0-base-en"
    course = course_of(run)
    last = {leg.task: leg.run for leg in course.legs if leg.stage == 6}
    labelled = {
        "discourse": ("discourse_relation", "relations.tsv", 5),
        "relevance": ("ir_relevance", "titles.tsv", 6),
    }
    assert [*last][5:] == [*labelled]
    for name, (objective, data, task) in labelled.items():
        told = last[name].objective
        assert (told["name"], last[name].data, told["task"]) == (objective, data, task)
        assert last[name].rows == "labelled"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_published_score(name: str):
    tree = ast.parse((ROOT / f"configs/{name}.py").read_text())
    assert re.search(r"(?is)(published|paper).*\b\d\d\.\d", ast.get_docstring(tree))


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
