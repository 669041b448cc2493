"""The numbers of a report, by hand."""

import math

import pytest

from bert_jax.report import KINDS, Findings, as_html, as_markdown


def findings(**scores: list[float]) -> Findings:
    """Entries by name, with the score of each seed at the only task."""
    entries = [
        {
            "name": name,
            "wanted": len(values),
            "seeds": [
                {kind: [{"task": "t", "score": x, "error": 0.1}] for kind in KINDS}
                for x in values
            ],
        }
        for name, values in scores.items()
    ]
    return Findings({"metrics": {"t": "matthews"}, "entries": entries})


def test_the_spread_is_pooled():
    """Squares 0.01 + 0 + 0.01 with 2 degrees of freedom, 0.02 with 1."""
    found = findings(a=[0.1, 0.2, 0.3], b=[0.5, 0.7], one=[0.9])
    noise, free = found.noise("probe", "t")
    assert free == 3
    assert noise == pytest.approx(math.sqrt(0.04 / 3))
    first, second, one = found.entries
    gap, reach = found.difference(second, first, "probe", "t")
    assert gap == pytest.approx(0.4)
    # Student's t at 97.5 % with 3 degrees of freedom is 3.18245.
    assert reach == pytest.approx(3.18245 * noise * math.sqrt(1 / 2 + 1 / 3), rel=1e-5)
    gap, reach = found.difference(one, first, "probe", "t")
    assert reach == pytest.approx(3.18245 * noise * math.sqrt(1 + 1 / 3), rel=1e-5)


def test_constant_entries_do_not_narrow_the_intervals():
    """An MCC of exactly 0 with every seed says nothing of the noise of the others."""
    alone = findings(a=[0.1, 0.2, 0.3], b=[0.5, 0.7])
    found = findings(a=[0.1, 0.2, 0.3], b=[0.5, 0.7], zero=[0.0] * 3, nil=[0.0] * 3)
    assert found.noise("probe", "t") == alone.noise("probe", "t")
    first, second, zero, _ = found.entries
    assert found.difference(second, first, "probe", "t") == alone.difference(
        *reversed(alone.entries), "probe", "t"
    )
    gap, reach = found.difference(zero, first, "probe", "t")
    assert gap == pytest.approx(-0.2)
    noise = math.sqrt(0.04 / 3)
    assert reach == pytest.approx(3.18245 * noise * math.sqrt(2 / 3), rel=1e-5)
    shown = as_markdown(*found.scores())
    assert "| zero | 0.000 (all 3 seeds) † |" in shown
    assert "| a | 0.200 (0.100 – 0.300) |" in shown
    title, _, rows = found.differences()[0]
    assert "2 of 6 (marked *)" in title
    assert rows[0] == ["b"] + ["+0.400 ± 0.335 *"] * 2
    assert rows[1] == ["zero"] + ["-0.200 ± 0.300 †"] * 2


def test_without_any_spread_there_is_no_interval():
    found = findings(zero=[0.0, 0.0], one=[0.5])
    assert found.noise("probe", "t")[1] == 0
    title, _, rows = found.differences()[0]
    assert "no spread over seeds" in title
    assert rows == [["one", "+0.500 †", "+0.500 †"]]


def test_the_page_says_what_is_assumed():
    config = {"flops": 1.0, "probe": {"layers": 1, "examples": 10, "sentences": 10}}
    config["finetune"] = {"steps": 1, "batch": 1, "lr": 0.1}
    results = {"config": config, "entries": [], "metrics": {}}
    page = as_html(results, [], b"", command="")
    assert "pooled over the entries, and assumed to be equal for all" in page
