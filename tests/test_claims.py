"""Two claims about pretraining, at the size of a test (benchmarks/claims.py)."""

import numpy as np
import pytest

from benchmarks.claims import draw, pairs_and_order, pretrained_and_scratch, wilson


def test_the_interval_of_a_share():
    """50 of 100: with z² = 3.8415, half of 1 ± z √(100 + z²) / (100 + z²)."""
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    low, high = wilson(1.0, 10)  # z² / (10 + z²) below 1
    assert (low, high) == (pytest.approx(0.72247, abs=1e-5), pytest.approx(1.0))


@pytest.mark.slow
def test_what_pairs_teach_and_what_pretraining_gives(tmp_path):
    """Sentence order teaches more than next sentences (ALBERT, table 5: 52.0 % and
    78.9 % there); a pretrained model finetunes at a lower loss all the way."""
    pairs = pairs_and_order(tmp_path, documents=1500, steps=1200)
    accuracy = {name: score["accuracy"] for name, score in pairs.items()}
    assert accuracy["pair asked pair"] > 0.85
    assert accuracy["order asked order"] > 0.75
    assert abs(accuracy["pair asked order"] - 0.5) < 0.1
    assert accuracy["order asked pair"] > 0.65
    assert pairs["order asked pair"]["95 % interval"][0] > 0.5

    losses = pretrained_and_scratch(tmp_path, tmp_path / "pair", seeds=2)
    learned, scratch = (np.mean(losses[name], 0) for name in losses)
    thirds = [slice(0, 33), slice(33, 66), slice(66, 100)]
    for third in thirds:
        assert learned[third].mean() < scratch[third].mean()
    assert learned[:33].mean() < 0.9 * scratch[:33].mean()
    draw(pairs, losses, tmp_path / "claims.png")
    assert (tmp_path / "claims.png").stat().st_size > 10_000
