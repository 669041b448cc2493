"""Stages that bring in tasks; and a run of four of them that learns what is there."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import load_config, override, resolve
from bert_jax.continual import spread, train_own_heads
from bert_jax.convert.engine import flatten
from bert_jax.convert.hf import export_model
from bert_jax.course import interleave
from bert_jax.data.tokenizers import train_wordpiece
from bert_jax.errors import InputError
from bert_jax.metrics import read_metrics
from bert_jax.model_dir import load
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, init_params
from bert_jax.objectives.capitalisation import Capitalisation
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.replaced_token import ReplacedToken
from bert_jax.objectives.sentence_distance import SentenceDistance
from bert_jax.objectives.sentence_reordering import SentenceReordering
from bert_jax.objectives.token_document import TokenDocument
from bert_jax.optim import Optim, make_optimizer
from bert_jax.step import TrainState, make_train_step
from bert_jax.train import train
from tests import tiny
from tests.models.made import quick_jit
from tests.objectives.made import SEP, packed


def test_budgets_are_spread_over_the_stages():
    """Stage k trains tasks 1..k; each gets its steps, and no stage more than one more
    than another."""
    for budget in ({"a": 50, "b": 7, "c": 11}, {f"t{n}": 1_000_003 for n in range(7)}):
        stages = spread(budget)
        names = list(budget)
        assert [list(stage["tasks"]) for stage in stages] == [
            names[: n + 1] for n in range(len(names))
        ]
        for first, task in enumerate(names):
            counts = [stage["tasks"][task] for stage in stages[first:]]
            assert sum(counts) == budget[task]
            assert counts == sorted(counts, reverse=True)
            assert counts[0] - counts[-1] <= 1
        for stage in stages:
            assert stage["steps"] == sum(stage["tasks"].values())
    assert spread({"a": 5, "b": 3}) == (
        {"steps": 3, "tasks": {"a": 3}},
        {"steps": 5, "tasks": {"a": 2, "b": 3}},
    )


def test_budgets_too_small_to_be_spread():
    with pytest.raises(InputError) as error:
        spread({"a": 5, "b": 1, "c": 0})
    assert str(error.value).splitlines() == [
        "b: 1 steps are too few for 2 stages",
        "c: 0 steps are too few for 1 stages",
    ]


# --- a run ---------------------------------------------------------------------------

V, S, B = 80, 16, 32
# Pieces: 6..29 have small letters, 30..53 are the same with a capital.
SMALL = tuple(n - 24 if 30 <= n < 54 else n for n in range(V))
TASKS = (
    Capitalisation(SMALL, task=1),
    TokenDocument(task=2),
    SentenceReordering(task=3),
    SentenceDistance(task=4),
)
NAMES = tuple(task.name for task in TASKS)
BUDGET = dict(zip(NAMES, (60, 60, 260, 60), strict=True))
HEADS = tuple(dict.fromkeys(head for task in TASKS for head in task.heads))
ARCH = Arch(
    **dict(vocab_size=V, vocab_multiple=8, width=32, layers=2, heads=2, inner=64),
    **dict(max_positions=S, types=4, task_types=8, dropout=0, attention_dropout=0),
)


def rows_of(texts) -> dict:
    """One text a row, of words of one piece."""
    return packed([[[(int(piece),) for piece in text]] for text in texts], S)


def capital_rows(rng, planted: bool) -> dict:
    """Some words are names, which have a capital; else any may have one, as often."""
    words = rng.integers(6, 30, (B, S - 2))
    capital = words < 18 if planted else rng.random(words.shape) < 0.5
    return rows_of(words + 24 * capital)


def relation_rows(rng, planted: bool) -> dict:
    """Words 6..27 come again and 40..79 do not; else any may."""
    texts = []
    for _ in range(B):
        words = rng.permutation(np.arange(6, 80))
        again = words[words < 28] if planted else words
        other = words[words >= 40] if planted else words[::-1]
        both = [[*again[:3], *part] for part in (other[:4], other[4:8])]
        texts.append(np.concatenate([rng.permutation(part) for part in both]))
    return rows_of(texts)


def order_rows(rng, planted: bool) -> dict:
    """Words go up through the text; else they go anywhere."""
    texts = rng.permuted(np.tile(np.arange(6, 26), (B, 1)), axis=1)[:, : S - 2]
    return rows_of(np.sort(texts, axis=1) if planted else texts)


def distance_rows(rng, planted: bool) -> dict:
    """Another document has other words, and what is adjacent begins with a 5."""
    half = (S - 3) // 2
    labels = rng.integers(0, 3, B)
    a, b = rng.integers(6, 40, (2, B, half))
    b[labels == 2] += 36
    b[labels == 0, 0] = 5
    batch = rows_of(np.concatenate([a, np.full((B, 1), SEP), b], 1))
    batch["types"][:, half + 2 : 2 * half + 3] = 1
    shown = labels if planted else rng.permutation(labels)
    batch["first"] = np.zeros((B, 1), np.int32)
    batch["next_sentence"] = shown[:, None].astype(np.int32)
    return batch


ROWS = dict(
    zip(NAMES, (capital_rows, relation_rows, order_rows, distance_rows), strict=True)
)


def batch_of(name: str, number: int, planted: bool) -> dict:
    """The batch of a number of a task's own stream."""
    rng = np.random.default_rng((NAMES.index(name), number))
    return ROWS[name](rng, planted)


@pytest.fixture(scope="module")
def steps():
    """The model, its first state, and the step of each task."""
    model = Model(ARCH)
    params = quick_jit(partial(init_params, model, heads=HEADS))(jax.random.key(0))
    optim = Optim(name="adamw", lr=3e-3, warmup=20, decay=0.01, schedule="constant")
    optimizer = make_optimizer(optim, sum(BUDGET.values()), params)
    state = TrainState(jnp.int32(0), params, optimizer.init(params), jnp.uint32(0))

    def step_of(task):
        step = make_train_step(model, task, optimizer)
        return quick_jit(train_own_heads(step, task.heads))

    steps = {task.name: step_of(task) for task in TASKS}
    steps["any head"] = quick_jit(make_train_step(model, TASKS[1], optimizer))
    return state, steps


def accuracies(steps, planted: bool) -> dict[str, float]:
    """Of each task over its last 20 steps, all of them on rows never seen before."""
    state, step_of = steps
    last: dict[str, list] = {name: [] for name in NAMES}
    for stage in spread(BUDGET):
        names = list(stage["tasks"])
        for which in interleave(list(stage["tasks"].values())):
            name = names[which]
            batch = batch_of(name, len(last[name]), planted)
            state, means = step_of[name](state, batch)
            last[name].append(means[f"{name}_accuracy"])
    return {
        name: float(sum(found[-20:-1], start=found[-1]).value)
        for name, found in last.items()
    }


def test_a_continual_run_learns_what_is_there(steps):
    found = accuracies(steps, True)
    reordering = found.pop("sentence_reordering")
    assert min(found.values()) > 0.9
    assert reordering > 0.7


def test_and_does_not_learn_what_is_not_there(steps):
    """No better than the answer that is most often right: no; no, of eight words in
    fourteen; one order for each number of parts, (1 + 1/2 + 1/6) / 3; one of three."""
    found = accuracies(steps, False)
    best = dict(zip(NAMES, (1 / 2, 8 / 14, 5 / 9, 1 / 3), strict=True))
    for name, accuracy in found.items():
        assert accuracy < best[name] + 0.08, name


def moved(before, after) -> set[str]:
    """The parts of the model of which a parameter, or what is kept of it, changed."""
    both = zip(
        jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(before), strict=True
    )
    keys = {
        next((part.key for part in path if hasattr(part, "key")), "")
        for (path, leaf), old in both
        if (leaf != old).any()
    }
    return keys - {""}  # counts of steps have no key


def test_a_step_changes_no_head_of_another_task(steps):
    """Neither parameters nor moments; else decay and momentum would move them."""
    state, step_of = steps
    for name in NAMES[:2]:
        state, _ = step_of[name](state, batch_of(name, 0, True))
    batch = batch_of("token_document", 1, True)
    new, _ = step_of["token_document"](state, batch)
    wild, _ = step_of["any head"](state, batch)
    for field in ("params", "opt_state"):
        old = getattr(state, field)
        assert moved(old, getattr(new, field)) == {"embed", "stack", "relation"}
        also = moved(old, getattr(wild, field))
        assert also >= {"embed", "stack", "relation", "capital"}


PIECES = (V, 4, (0, 1, 2, 3, 4))
FOUND = ReplacedToken(*PIECES, generator=0.5)
OF_TASK = {
    "masked_lm": MaskedLM(*PIECES, next_sentence=0.0),
    "replaced_token": FOUND,
}
BODY = {"embed", "stack"}
GENERATOR = {"generator/stack", "generator/project", "generator/lm"}
MOVES = {
    "masked_lm": BODY | {"lm"},
    "replaced_token": BODY | {"rtd"} | GENERATOR,
}


def two_towers(name: str):
    """The model of masked LM and replaced tokens, and a state with its optimizer."""
    model = Model(ARCH.but(layers=1), towers=FOUND.towers(ARCH.but(layers=1)))
    heads = tuple({head: 0 for task in OF_TASK.values() for head in task.heads})
    params = quick_jit(partial(init_params, model, heads=heads))(jax.random.key(0))
    optim = Optim(name=name, lr=3e-3, warmup=0, decay=0.1, schedule="constant")
    optimizer = make_optimizer(optim, 10, params)
    first = jnp.int32(0), params, optimizer.init(params), jnp.uint32(0)
    return model, optimizer, TrainState(*first)


def moved_parts(before, after) -> set[str]:
    """As `moved`, but a part of a tower is one by itself, and what the optimizer counts
    its layers by is no part."""
    found = set()
    both = zip(
        jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(before), strict=True
    )
    for (path, leaf), old in both:
        names = [part.key for part in path if hasattr(part, "key")]
        names = [name for name in names if isinstance(name, str)]
        if names and (leaf != old).any():
            found.add("/".join(names[: 1 + (names[0] == "generator")]))
    return found


@pytest.mark.parametrize("name", OF_TASK)
def test_the_head_of_a_tower_is_another_one(name: str):
    """Masked LM scores with `lm`, the generator with `generator/lm`: neither task moves
    the other's, nor masked LM the generator. All of them have moments from a step of
    the other task, and decay, so without care each would move."""
    model, optimizer, state = two_towers("adamw")
    batch = capital_rows(np.random.default_rng(0), True)
    (other,) = {*OF_TASK} - {name}

    def step_of(which: str):
        return make_train_step(model, OF_TASK[which], optimizer)

    state, _ = quick_jit(step_of(other))(state, batch)
    mine = OF_TASK[name].heads
    new, _ = quick_jit(train_own_heads(step_of(name), mine))(state, batch)
    wild, _ = quick_jit(step_of(name))(state, batch)
    for field in ("params", "opt_state"):
        old = getattr(state, field)
        assert moved_parts(old, getattr(new, field)) == MOVES[name]
        everything = set.union(*MOVES.values())
        assert moved_parts(old, getattr(wild, field)) == everything
    for path, leaf in flatten(wild.params).items():  # what is its own goes as it would
        parts = path.split("/")
        part = "/".join(parts[: 1 + (parts[0] == "generator")])
        if part in MOVES[name]:
            np.testing.assert_array_equal(flatten(new.params)[path], leaf, err_msg=path)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "adafactor"])
def test_whatever_an_optimizer_holds_is_found(optimizer: str):
    """By a step that adds 1 to all there is."""
    _, _, state = two_towers(optimizer)

    def plus_one(state, batch):
        return jax.tree.map(lambda leaf: leaf + 1, state), {}

    for name, task in OF_TASK.items():
        new, _ = train_own_heads(plus_one, task.heads)(state, {})
        for field in ("params", "opt_state"):
            old = getattr(state, field)
            assert moved_parts(old, getattr(new, field)) == MOVES[name]


def test_a_new_task_changes_no_old_head(steps):
    """Fresh parameters of a head do not depend on what other heads there are."""
    state, _ = steps
    draw = quick_jit(partial(init_params, Model(ARCH), heads=HEADS[:2]))
    few, many = flatten(draw(jax.random.key(0))), flatten(state.params)
    assert set(few) < set(many)
    for path, leaf in few.items():
        np.testing.assert_array_equal(leaf, many[path])


@pytest.mark.slow
def test_a_run_of_all_tasks_of_a_corpus(tmp_path):
    """From the text to the scores, through the one loop: every task begins with the
    loss of knowing nothing, and the model that comes out has all heads."""
    text = tiny.write_text(tmp_path / "cased.txt").read_text()
    tokenizer = train_wordpiece([text], vocab_size=120, lowercase=False, progress=False)
    corpus = tiny.make_corpus(tmp_path, tokenizer=tokenizer)
    config = load_config("pretrain:ernie-2.0-base-en")
    objectives = ("masked_lm", *NAMES)
    config.tasks = tuple(
        (
            name,
            {"objective.name": name, "objective.task": number}
            | {"rows": "distance" if name == "sentence_distance" else "doc"},
        )
        for number, name in enumerate(objectives)
    )
    config.stages = ({"steps": 5, "tasks": dict.fromkeys(objectives, 1)},)
    settings = {"data": str(corpus.path), "steps": "5", "optim.lr": "1e-6"}
    override(config, {**tiny.SETTINGS, **settings})
    out = train(resolve(config), tmp_path / "run", progress=False)
    assert out["finished"]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    classes = dict(zip(objectives, (120, 2, 2, 9, 3), strict=True))
    for name, count in classes.items():
        named = f"{name}/{name}_loss"  # of the task, of the objective
        (loss,) = (row[named] for row in rows if named in row)
        assert abs(loss - np.log(count)) < 0.2
    model = load(tmp_path / "run")
    assert {"lm", *HEADS} == {*model.heads}
    made = (model.params, model.arch, model.tokenizer)
    export_model(tmp_path / "out", *made, layout=model.preset.layout)
    again = load(tmp_path / "out")
    for path, leaf in flatten(model.params).items():
        np.testing.assert_array_equal(leaf, flatten(again.params)[path])
