"""The numbers of a report, by hand."""

import json
import math
import random
import statistics

import pytest

from bert_jax.report import KINDS, SMOOTH, Findings, as_html, as_markdown, draw


def findings(**scores: list[float]) -> Findings:
    """Entries by name, with the score of each seed at the only task."""
    entries = [
        {
            "name": name,
            "objective": "none" if name == "untrained" else "masked_lm",
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


def test_differences_from_what_was_not_pretrained():
    found = findings(a=[0.1, 0.2, 0.3], b=[0.5, 0.7], untrained=[0.1])
    (_, head, rows), (_, other, turned) = found.differences()
    assert (head[0], other[0]) == ("minus a", "minus untrained")
    assert [row[0] for row in rows] == ["b", "untrained"]
    assert [row[0] for row in turned] == ["a", "b"]
    assert rows[1][1] == "-0.100 ± 0.424"
    assert turned[0][1] == "+0.100 ± 0.424"


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


# The picture.


def random_results() -> dict:
    """Two tasks; entries of three, of two and of one seed, the last not trained."""
    rng = random.Random(0)
    tasks = {"t": "matthews", "u": "accuracy"}
    places = {"one": [1e6, 2e6, 4e6], "two": [1e6, 3e6], "start": [0.0]}

    def seed(name: str) -> dict:
        probe = [
            {"task": task, "flops": place, "score": rng.random(), "error": 0.1}
            for place in places[name]
            for task in tasks
        ]
        tune = [
            {
                "task": task,
                "score": rng.random(),
                "losses": [rng.random() for _ in range(3 * SMOOTH)],
            }
            for task in tasks
        ]
        return {"probe": probe, "finetune": tune}

    entries = [
        {"name": name, "wanted": count, "seeds": [seed(name) for _ in range(count)]}
        for name, count in (("one", 3), ("two", 2), ("start", 1))
    ]
    return json.loads(json.dumps({"metrics": tasks, "entries": entries}))


@pytest.fixture
def axes(monkeypatch) -> list:
    """Of the picture of these results: those of both tasks, row by row."""
    from matplotlib import pyplot

    figures, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", figures.append)
    assert draw(Findings(random_results())).startswith(b"\x89PNG")
    (figure,) = figures
    yield figure.axes
    close(figure)


def points(line) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]


def close_to(points: list) -> list:
    return [pytest.approx(point) for point in points]


def test_curves_of_probes_are_the_results(axes):
    """The median over seeds at each place; the least and the most around it."""
    results = random_results()
    for axis, task in zip(axes[:2], results["metrics"], strict=True):
        assert axis.get_xscale() == "log"
        bands = iter(axis.collections)
        for entry, line in zip(results["entries"], axis.get_lines(), strict=True):
            assert line.get_label().strip() == entry["name"]
            rows = [row for run in entry["seeds"] for row in run["probe"]]
            rows = [row for row in rows if row["task"] == task]
            scores = {
                place: [row["score"] for row in rows if row["flops"] == place]
                for place in sorted({row["flops"] for row in rows})
            }
            if entry["name"] == "start":  # a line from end to end
                assert [y for _, y in points(line)] == 2 * scores[0.0]
                continue
            middle = [(x, statistics.median(ys)) for x, ys in scores.items()]
            assert points(line) == close_to(middle)
            edge = next(bands).get_paths()[0].vertices.tolist()
            for place, there in scores.items():
                ends = {y for x, y in edge if x == place}
                assert sorted(ends) == close_to([min(there), max(there)])
        assert not list(bands)


def test_curves_of_finetuning_are_the_results(axes):
    """Means over a few steps, in the middle of these; the median over seeds."""
    results = random_results()
    for axis, task in zip(axes[2:4], results["metrics"], strict=True):
        for entry, line in zip(results["entries"], axis.get_lines(), strict=True):
            assert line.get_label().strip() == entry["name"]
            runs = [
                row["losses"]
                for run in entry["seeds"]
                for row in run["finetune"]
                if row["task"] == task
            ]
            expected = [
                (n + 5, statistics.median(sum(run[n : n + 10]) / 10 for run in runs))
                for n in (0, 10, 20)
            ]
            assert points(line) == close_to(expected)


def test_a_dot_is_the_score_of_a_seed(axes):
    results = random_results()
    for axis, task in zip(axes[4:], results["metrics"], strict=True):
        lines = iter(axis.get_lines())
        for place, entry in enumerate(results["entries"]):
            dots, mean = points(next(lines)), points(next(lines))
            rows = (row for run in entry["seeds"] for row in run["finetune"])
            scores = [row["score"] for row in rows if row["task"] == task]
            assert dots == close_to([(score, place) for score in scores])
            assert mean == close_to([(statistics.mean(scores), place)])
    names = [label.get_text().strip() for label in axes[4].get_yticklabels()]
    assert names == [entry["name"] for entry in results["entries"]]
