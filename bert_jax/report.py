"""What a comparison found: table.md, curves.png and one self-contained report.html.

Intervals, not ranks. The seeds of an entry are few, so the spread over seeds is taken
to be the same for all entries and pooled: with x̄ the mean of n seeds

    s² = Σ (x - x̄)² / Σ (n - 1)      difference:  x̄₁ - x̄₂  ±  t s √(1/n₁ + 1/n₂)

where t is Student's at 95 % for Σ (n - 1) degrees of freedom. An entry whose seeds all
score the same (MCC is exactly 0 where one class is always said) tells nothing of the
spread of the others: it is left out of both sums, and marked. That is the noise of
pretraining and finetuning again; the dev set is the same for all, and its own standard
error, by the bootstrap, is given beside.
"""

import base64
import html
import io
import json
import math
import statistics
from pathlib import Path

import scipy.stats

from bert_jax.whole import write_text

KINDS = {"probe": "linear probe", "finetune": "finetuned"}
CONSTANT = "†"  # marks what is the same with all seeds
SMOOTH = 10  # steps over which finetuning losses are averaged for the picture
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em;
       padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
th, td { border-bottom: 1px solid #ccc; padding: .3em .7em; text-align: right; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f4f4f4; padding: .7em; overflow-x: auto; font-size: 12px; }
img { max-width: 100%; }
.table { overflow-x: auto; }
"""


def write_report(results: dict, workdir: Path, *, command: str) -> None:
    found = Findings(results)
    tables = [found.work(), found.scores(), *found.differences()]
    text = "\n".join(as_markdown(*table) for table in tables)
    write_text(workdir / "table.md", text)
    picture = draw(found)
    scratch = workdir / ".curves.png.tmp"
    scratch.write_bytes(picture)
    scratch.replace(workdir / "curves.png")
    page = as_html(results, tables, picture, command=command)
    write_text(workdir / "report.html", page)


class Findings:
    """The numbers of results.json, as they are shown."""

    def __init__(self, results: dict):
        self.results = results
        self.tasks = list(results["metrics"])
        self.entries = [entry for entry in results["entries"] if entry["seeds"]]
        self.columns = [(kind, task) for kind in KINDS for task in self.tasks]

    def values(self, entry: dict, kind: str, task: str, field: str = "score") -> list:
        """At the end of the budget, of each seed."""
        return [
            [row[field] for row in run[kind] if row["task"] == task][-1]
            for run in entry["seeds"]
        ]

    def work(self) -> tuple[str, list, list]:
        head = ["", "objective", "parameters", "of these kept", "steps", "tokens"]
        head += ["FLOPs", "of the budget", "seeds", "its own accuracy, held-out text"]
        rows = [
            [
                entry["name"],
                entry["objective"],
                f"{entry['parameters']:,}",
                f"{entry['parameters_kept']:,}",
                f"{entry['steps']:,}",
                f"{entry['tokens'] / 1e6:.2f} M",
                f"{entry['flops']:.3g}",
                f"{entry['flops'] / self.results['config']['flops']:.1%}",
                f"{len(entry['seeds'])} of {entry['wanted']}",
                own_accuracy(entry),
            ]
            for entry in self.results["entries"]
        ]
        return "What was run", head, rows

    def scores(self) -> tuple[str, list, list]:
        metrics = self.results["metrics"]
        head = ["median (least – most)"]
        head += [f"{KINDS[k]}: {t}, {metrics[t]}" for k, t in self.columns]
        rows = []
        for entry in self.entries:
            cells = [spread(self.values(entry, *column)) for column in self.columns]
            rows.append([entry["name"], *cells])
        if self.entries:
            errors = [
                statistics.mean(
                    e for x in self.entries for e in self.values(x, *column, "error")
                )
                for column in self.columns
            ]
            rows.append(["± by the choice of dev examples"])
            rows[-1] += [f"{error:.3f}" for error in errors]
        return "Scores on the dev sets at the end, over seeds", head, rows

    def noise(self, kind: str, task: str) -> tuple[float, int]:
        """The standard deviation over seeds, pooled, and its degrees of freedom."""
        total, free = 0.0, 0
        for entry in self.entries:
            values = self.values(entry, kind, task)
            if constant(values):
                continue
            total += sum((x - statistics.mean(values)) ** 2 for x in values)
            free += len(values) - 1
        return (math.sqrt(total / free) if free else math.nan), free

    def differences(self) -> list[tuple[str, list, list]]:
        """Of all entries from the first, and from any that was not pretrained."""
        if len(self.entries) < 2:
            return []
        first, *others = self.entries
        untrained = [entry for entry in others if entry["objective"] == "none"]
        return [self.differences_from(entry) for entry in (first, *untrained)]

    def differences_from(self, first: dict) -> tuple[str, list, list]:
        others = [entry for entry in self.entries if entry is not first]
        head = [f"minus {first['name']}"]
        head += [f"{KINDS[kind]}: {task}" for kind, task in self.columns]
        rows, clear, count = [], 0, 0
        for entry in others:
            row = [entry["name"]]
            for column in self.columns:
                gap, reach = self.difference(entry, first, *column)
                cell = f"{gap:+.3f}"
                if not math.isnan(reach):
                    differs = abs(gap) > reach
                    count, clear = count + 1, clear + differs
                    cell += f" ± {reach:.3f}" + " *" * differs
                sides = (self.values(side, *column) for side in (entry, first))
                row.append(cell + f" {CONSTANT}" * any(map(constant, sides)))
            rows.append(row)
        title = "Differences; there is no spread over seeds to judge them by"
        if count:
            title = (
                f"Differences, with 95 % intervals: {clear} of {count} (marked *) "
                f"leave out 0; if none were real, about {0.05 * count:.0f} would. "
                f"{CONSTANT}: one of the two scores the same with all seeds; the "
                "interval is as wide as the spread of the others makes it"
            )
        return title, head, rows

    def difference(self, one: dict, other: dict, *column) -> tuple[float, float]:
        """Of the means, and how far its interval reaches; nan if no spread is known."""
        a, b = (self.values(entry, *column) for entry in (one, other))
        gap = statistics.mean(a) - statistics.mean(b)
        noise, free = self.noise(*column)
        if not free:
            return gap, math.nan
        reach = noise * float(scipy.stats.t.ppf(0.975, free))
        return gap, reach * math.sqrt(1 / len(a) + 1 / len(b))


def constant(values: list[float]) -> bool:
    """Several seeds, one score."""
    return len(values) > 1 and min(values) == max(values)


def own_accuracy(entry: dict) -> str:
    """Of what it was trained for: not to be compared with that of others."""
    name = f"{entry['objective']}_accuracy"
    scores = [run["held_out"] for run in entry["seeds"]]
    return spread([own[name] for own in scores if name in own])


def spread(values: list[float]) -> str:
    if not values:
        return ""
    middle = statistics.median(values)
    if len(values) == 1:
        return f"{middle:.3f}"
    if constant(values):
        return f"{middle:.3f} (all {len(values)} seeds) {CONSTANT}"
    return f"{middle:.3f} ({min(values):.3f} – {max(values):.3f})"


def as_markdown(title: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[html.escape(c).replace("|", "\\|") for c in line] for line in lines]
    table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
    return f"## {html.escape(title)}\n\n{table}\n"


def draw(found: Findings) -> bytes:
    """From above: scores of probes against FLOPs, losses of finetuning, and what each
    seed scores after it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = found.tasks
    figure, axes = pyplot.subplots(
        3,
        len(tasks),
        figsize=(4.2 * len(tasks), 11),
        layout="constrained",
        squeeze=False,
    )
    for column, task in enumerate(tasks):
        above, middle, below = axes[:, column]
        for number, entry in enumerate(found.entries):
            look = dict(color=f"C{number % 10}", label=plain(entry["name"]))
            draw_scores(above, entry, task, look)
            draw_losses(middle, entry, task, look)
            draw_seeds(below, number, found.values(entry, "finetune", task), look)
        metric = found.results["metrics"][task]
        above.set(title=f"{task}: linear probe", xlabel="FLOPs of pretraining")
        above.set(ylabel=metric.replace("_", " "), xscale="log")
        middle.set(title=f"{task}: finetuning", xlabel="step", ylabel="training loss")
        below.set(title=f"{task}: finetuned", xlabel=metric.replace("_", " "))
        names = [plain(entry["name"]) for entry in found.entries]
        below.set_yticks(range(len(names)), names if column == 0 else [""] * len(names))
        below.invert_yaxis()
        for axis in (above, middle, below):
            axis.grid(alpha=0.3)
    if found.entries:
        lines, names = axes[0][0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=len(tasks) + 1)
    out = io.BytesIO()
    figure.savefig(out, dpi=110, format="png", metadata={"Software": None})
    pyplot.close(figure)
    return out.getvalue()


def plain(name: str) -> str:
    """A name in a picture: a dollar is no formula, an underscore hides nothing."""
    return "\u200a" + name.replace("$", r"\$")


def draw_scores(axis, entry: dict, task: str, look: dict) -> None:
    by_flops: dict[float, list[float]] = {}
    for run in entry["seeds"]:
        for row in run["probe"]:
            if row["task"] == task:
                by_flops.setdefault(row["flops"], []).append(row["score"])
    places = sorted(by_flops)
    middle = [statistics.median(by_flops[x]) for x in places]
    if places == [0.0]:  # not trained
        axis.axhline(middle[0], linestyle="--", **look)
        return
    axis.plot(places, middle, "o-", markersize=3, **look)
    low, high = ([end(by_flops[x]) for x in places] for end in (min, max))
    axis.fill_between(places, low, high, color=look["color"], alpha=0.12)


def draw_losses(axis, entry: dict, task: str, look: dict) -> None:
    """The median over seeds, of means over a few steps."""
    runs = [
        row["losses"]
        for run in entry["seeds"]
        for row in run["finetune"]
        if row["task"] == task
    ]
    places = range(0, len(runs[0]), SMOOTH)
    means = [[statistics.mean(run[k : k + SMOOTH]) for k in places] for run in runs]
    middle = [statistics.median(values) for values in zip(*means, strict=True)]
    axis.plot([k + SMOOTH / 2 for k in places], middle, linewidth=1, **look)


def draw_seeds(axis, place: int, scores: list[float], look: dict) -> None:
    """A dot a seed; a bar is their mean."""
    axis.plot(scores, [place] * len(scores), "o", markersize=5, alpha=0.7, **look)
    mean = statistics.mean(scores)
    axis.plot([mean], [place], "|", markersize=16, color=look["color"])


def as_html(results: dict, tables: list, picture: bytes, *, command: str) -> str:
    """Nothing is loaded from anywhere; whatever was given is escaped."""
    inside = base64.b64encode(picture).decode()
    config = html.escape(json.dumps(results["config"], indent=1))
    unfinished = sum(e["wanted"] - len(e["seeds"]) for e in results["entries"])
    state = f"<p><b>{unfinished} runs are not finished yet.</b></p>" * bool(unfinished)
    finetune, probe = (results["config"][name] for name in ("finetune", "probe"))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>bert_jax compare</title>
<style>{STYLE}</style></head><body>
<h1>Objectives at equal FLOPs</h1>
{state}
<pre>{html.escape(command)}</pre>
<p>Each entry was pretrained on the same corpus with the same budget of
{results["config"]["flops"]:.3g} FLOPs (matrix products, forward and backward, of all
towers and heads), once for each seed. What is scored is what transfers, on dev sets.
A linear probe is a logistic regression on the states of the last {probe["layers"]}
layers side by side, averaged over the tokens of a text, of at most
{probe["examples"]:,} training examples (for tags: those of first pieces, in
{probe["sentences"]:,} sentences), its strength chosen on a fifth of them.
Finetuning takes {finetune["steps"]} steps of {finetune["batch"]} examples at a rate of
{finetune["lr"]:g}, the same for all.</p>
<img alt="scores of linear probes against FLOPs, losses and scores of finetuning"
 src="data:image/png;base64,{inside}">
<p>Above: the median over seeds; the band reaches from the least to the most. Dashed:
without pretraining. Before the end of the budget the learning rate has not come down,
which the scores along the way feel. In the middle: means over {SMOOTH} steps. Below: a
dot a seed, and a bar where their mean is.</p>
{"".join(as_html_table(*table) for table in tables)}
<p>An interval is the noise of other seeds alone. Seeds are few, so their spread is
pooled over the entries, and assumed to be equal for all of them; entries that score the
same with all seeds ({CONSTANT}) are left out of it. With few seeds an interval is wide,
and "no difference" means that none was seen here, not that there is none.</p>
<h2>Configuration</h2><pre>{config}</pre>
</body></html>
"""


def as_html_table(title: str, head: list[str], rows: list[list[str]]) -> str:
    def line(tag: str, cells: list[str]) -> str:
        inside = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inside}</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f'<h2>{html.escape(title)}</h2><div class="table"><table>{line("th", head)}'
        f"{body}</table></div>"
    )
