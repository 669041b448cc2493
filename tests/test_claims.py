"""Two claims about pretraining, at the size of a test (benchmarks/claims.py)."""

import numpy as np
import pytest

from benchmarks.claims import draw, pairs_and_order, pretrained_and_scratch, wilson


def test_the_interval_of_a_share():
    """50 of 100: with z² = 3.8415, half of 1 ± z √(100 + z²) / (100 + z²)."""
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    low, high = wilson(1.0, 10)  # z² / (10 + z²) below 1
    assert (low, high) == (pytest.approx(0.72247, abs=1e-5), pytest.approx(1.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("claims")


@pytest.fixture(scope="module")
def pairs(folder):
    return pairs_and_order(folder, documents=1500, steps=1200)


@pytest.mark.slow
def test_next_sentences_teach_no_order(pairs):
    """A model of next sentences is at chance when it is asked for their order (ALBERT,
    table 5: 52.0 %), which can be learned."""
    accuracy = {name: score["accuracy"] for name, score in pairs.items()}
    assert accuracy["pair asked pair"] > 0.85
    assert accuracy["order asked order"] > 0.75
    assert abs(accuracy["pair asked order"] - 0.5) < 0.1


@pytest.mark.slow
def test_pretraining_lowers_the_loss_from_the_start(folder, pairs):
    losses = pretrained_and_scratch(folder, folder / "pair", seeds=2)
    learned, scratch = (np.mean(losses[name], 0) for name in losses)
    for third in (slice(0, 33), slice(33, 66), slice(66, 100)):
        assert learned[third].mean() < scratch[third].mean()
    draw(pairs, losses, folder / "claims.png")
    assert (folder / "claims.png").stat().st_size > 10_000
