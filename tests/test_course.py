"""The course of a run: every step has a leg and a batch, and nothing is lost."""

import json

import numpy as np
import pytest

from bert_jax.config import load_config, override, resolve, run_of
from bert_jax.course import course_of, interleave, leg_at
from bert_jax.errors import InputError

TASKS = (("words", {"objective.choose": "word"}), ("order", {"rows": "order"}))


def make_run(**changes):
    config = load_config("pretrain:bert-tiny")
    settings = {"data": "corpus", "steps": 100, "optim.warmup": 0.1, "optim.lr": 1.0}
    override(config, settings | changes)
    return resolve(config)


def test_a_run_without_stages_is_one_leg():
    run = make_run()
    course = course_of(run)
    assert [leg.run for leg in course.legs] == [run]
    np.testing.assert_array_equal(course.leg_of, np.zeros(100))
    np.testing.assert_array_equal(course.batch_of, np.arange(100))


def test_stages_begin_anew_with_their_rate():
    stages = (
        {"steps": 90, "length": 128, "optim.schedule": "linear"},
        {"steps": 10, "length": 512, "optim.lr": 0.5, "optim.warmup": 0.5},
    )
    course = course_of(make_run(stages=stages))
    assert course.starts == (0, 90)
    assert [leg.run.length for leg in course.legs] == [128, 512]
    rates = [float(course.rate(step)) for step in (0, 9, 45, 90, 92, 95, 100)]
    # bert's line of stage two: 0.5 (1 - t / 10) from its fifth step on
    wanted = [0.0, 1.0, 45 / 81, 0.0, 0.2, 0.25, 0.0]
    assert rates == pytest.approx(wanted, abs=1e-6)


def test_a_stage_without_a_rate_goes_on_in_that_of_the_run():
    stages = ({"steps": 90, "length": 128}, {"steps": 10, "length": 512})
    straight, staged = course_of(make_run()), course_of(make_run(stages=stages))
    rates = [[float(c.rate(n)) for n in range(100)] for c in (straight, staged)]
    assert rates[0] == rates[1]


def test_stages_that_keep_their_rows_go_on_in_them():
    stages = (
        {"steps": 40},
        {"steps": 30, "length": 256},
        {"steps": 30, "optim.lr": 0.1, "objective.rate": 0.3},
    )
    course = course_of(make_run(stages=stages))
    assert course.batch_of[[0, 39, 40, 69, 70, 99]].tolist() == [0, 39, 0, 29, 40, 69]


@pytest.mark.parametrize("counts", [[5], [3, 3], [10, 1], [7, 2, 90], [1, 1, 1]])
def test_tasks_are_mixed_evenly(counts):
    found = interleave(counts)
    total = sum(counts)
    assert np.bincount(found).tolist() == counts
    for n, count in enumerate(counts):  # at no time more than one ahead or behind
        so_far = np.cumsum(found == n)
        assert np.abs(so_far - count / total * np.arange(1, total + 1)).max() <= 1


def test_a_stage_has_as_many_steps_of_each_task_as_it_says():
    stages = (
        {"steps": 40, "tasks": {"words": 40}},
        {"steps": 60, "tasks": {"words": 20, "order": 40}, "length": 64},
    )
    course = course_of(make_run(stages=stages, tasks=TASKS))
    names = [(leg.stage, leg.task) for leg in course.legs]
    assert names == [(0, "words"), (1, "words"), (1, "order")]
    assert np.bincount(course.leg_of).tolist() == [40, 20, 40]
    assert set(course.leg_of[:40].tolist()) == {0}
    words, order = course.legs[1].run, course.legs[2].run
    assert (words.objective["choose"], words.rows) == ("word", "pair")
    assert (order.objective["choose"], order.rows, order.length) == (
        *("token", "order"),
        64,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ({"steps": 9},)}, "config.steps=100, but the stages add up to 9"),
        ({"stages": ({"length": 9},)}, r"stages\[0\] is no dict of changes with"),
        ({"stages": (5,)}, r"stages\[0\] is no dict of changes with `steps`: 5"),
        ({"tasks": (("a",),)}, r"tasks\[0\] is no pair of a name and a dict"),
        (
            {"tasks": (("a", {"optim.lr": 1.0}),)},
            "config.tasks, a: optim.lr cannot be set there",
        ),
        ({"tasks": (("a", {"row": "doc"}),)}, "tasks, a.*'row'. Did you mean rows"),
        (
            {"tasks": TASKS, "stages": ({"steps": 100, "tasks": {"words": 100}},)},
            "config.tasks, order: no stage has steps of it",
        ),
        ({"stages": ({"steps": 100, "seed": 1},)}, "seed cannot be set there"),
        (
            {"stages": ({"steps": 100, "optim.name": "lamb"},)},
            "optim.name cannot be set there",
        ),
        (
            {"stages": ({"steps": 100, "moments": "kept"},)},
            "unknown config.stages.*moments 'kept'. Did you mean keep",
        ),
        (
            {"stages": ({"steps": 100, "lenght": 9},)},
            "unknown .*'lenght'. Did you mean length",
        ),
        (
            {"stages": ({"steps": 100, "length": 4096},)},
            r"stages\[0\]: config.length=4096 is more than",
        ),
        (
            {"stages": ({"steps": 100, "objective.rat": 1},)},
            r"stages\[0\]: unknown config field 'objective.rat'",
        ),
        ({"tasks": TASKS}, "config.tasks needs config.stages"),
        (
            {"tasks": TASKS, "stages": ({"steps": 100, "tasks": {"words": 90}},)},
            "its tasks add up to 90, not to its steps=100",
        ),
        (
            {"tasks": TASKS, "stages": ({"steps": 100, "tasks": {"wrods": 100}},)},
            "unknown config.stages.*tasks 'wrods'. Did you mean words",
        ),
        (
            {"stages": ({"steps": 100, "accumulate": 3},)},
            "config.batch=256 does not divide into config.accumulate=3 parts",
        ),
    ],
)
def test_stages_that_cannot_be(changes, message):
    with pytest.raises(InputError, match=message):
        course_of(make_run(**changes))


def test_another_objective_brings_its_own_fields():
    run = make_run(**{"objective.name": "replaced_token", "objective.weight": 25})
    assert run.objective["weight"] == 25.0
    assert "boundary" not in run.objective
    with pytest.raises(InputError, match="unknown config.objective.name 'masked'"):
        make_run(**{"objective.name": "masked"})
    with pytest.raises(InputError, match="unknown config field 'objective.boundary'"):
        make_run(**{"objective.name": "causal_lm", "objective.boundary": 1.0})


def test_a_course_survives_json():
    """As it stands in run.json: lists for tuples."""
    first = {"steps": 60, "tasks": {"words": 60}}
    second = {"steps": 40, "tasks": {"words": 10, "order": 30}, "length": 64}
    run = make_run(stages=(first, second), tasks=TASKS)
    again = run_of(json.loads(json.dumps(run.as_dict())))
    one, other = course_of(run), course_of(again)
    np.testing.assert_array_equal(one.leg_of, other.leg_of)
    assert [leg.run for leg in one.legs] == [leg.run for leg in other.legs]
    assert leg_at(json.loads(json.dumps(run.as_dict())), 100) == one.legs[2].run
