"""Schedules at points worked out by hand."""

import math

import pytest

from bert_jax.errors import InputError
from bert_jax.optim import Optim, schedule_of
from bert_jax.schedules import SCHEDULES, make_schedule

# 100 steps, 20 of warm-up, top 2: the rate at steps 0, 5, 20, 40, 60, 100 and 120.
STEPS = (0, 5, 20, 40, 60, 100, 120)
BY_HAND = {
    "bert": (0, 0.5, 1.6, 1.2, 0.8, 0, 0),
    "linear": (0, 0.5, 2, 1.5, 1, 0, 0),
    "polynomial": (0, 0.5, 2 * 0.8**3, 2 * 0.6**3, 2 * 0.4**3, 0, 0),
    "cosine": (0, 0.5, 2, 1 + math.cos(math.pi / 4), 1, 0, 0),
    "rsqrt": (0, 0.5, 2, 2 * 0.5**0.5, 2 / 3**0.5, 2 / 5**0.5, 2 / 6**0.5),
    "constant": (0, 0.5, 2, 2, 2, 2, 2),
}


def values(name: str, steps, **settings) -> list[float]:
    schedule = schedule_of(Optim(schedule=name, **settings), 100)
    return [float(schedule(t)) for t in steps]


@pytest.mark.parametrize("name", SCHEDULES)
def test_by_hand(name: str):
    found = values(name, STEPS, lr=2.0, warmup=20, power=3.0)
    assert found == pytest.approx(BY_HAND[name], abs=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_warm_up(name: str):
    assert values(name, [0], lr=2.0, warmup=0) == pytest.approx([2.0])


def test_berts_line_is_not_started_anew():
    """1.95, then 1.2: the jump of the release."""
    found = values("bert", (0, 1, 20, 39, 40, 41, 70, 99), lr=2.0, warmup=40)
    expected = [0, 0.05, 1.0, 1.95, 1.2, 1.18, 0.6, 0.02]
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("warmup", "steps", "top"), [(0.1, 50, 5), (0.01, 20, 0), (1, 50, 1), (0, 50, 0)]
)
def test_warm_up_as_share_or_number(warmup: float, steps: int, top: int):
    schedule = make_schedule("bert", lr=1.0, warmup=warmup, power=1.0, steps=steps)
    found = [float(schedule(t)) for t in range(steps)]
    line = [1 - t / steps for t in range(steps)]
    assert found == pytest.approx([t / top for t in range(top)] + line[top:], abs=1e-6)


def test_the_rates_of_the_76_minutes():
    """Batch 32K: 15,625 steps, a fifth of them warm-up, to 5e-3 (You et al.)."""
    schedule = make_schedule("bert", lr=5e-3, warmup=0.2, power=1.0, steps=15625)
    assert float(schedule(3124)) == pytest.approx(5e-3 * 3124 / 3125)
    assert float(schedule(3125)) == pytest.approx(4e-3)
    assert float(schedule(15624)) == pytest.approx(5e-3 / 15625, rel=1e-3)


def test_a_schedule_that_is_not_known():
    with pytest.raises(InputError, match="unknown optim.schedule 'cosin'.*cosine"):
        Optim(schedule="cosin")
