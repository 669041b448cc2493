"""How the cost of a training step grows, beside what theory says of it.

    python -m benchmarks.growth --json runs/growth.json --out docs/growth.png

Masked LM by AdamW in bfloat16, arch.stack=scan and arch.remat=kept, compiled for a pod
of v5e that is not here (`bert_jax compile`). One size is varied at a time, around one
small model; FLOPs, the compiler's ESTIMATE of cycles, memory of a chip and bytes that a
chip sends are told beside a formula that nothing is fitted in:

    FLOPs     3 · (tokens · N (8D² + 4DF + 4SD) + predictions · (2D² + 2DV))
    cycles    no less than products at the peak, and AdamW's seven passes over memory
    memory    parameters, two moments, gradients; what layers keep, N (11D + F) a token
              in bf16; logits; what one layer of dense attention has of S² a head
    sent      in a ring of n chips, of an array of b bytes: b (n - 1) / n to gather it
              or to sum its parts, twice as much to sum it for all

N layers, D width, F inner, S length, V pieces. What each chip has of it is divided by
the chips that it is split over. A compile takes half a minute of one core; what FILE
has already is not compiled again.
"""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bert_jax.errors import InputError, fail
from bert_jax.tpu import Topology, check_compiler

ROOT = Path(__file__).parents[1]
KIND = "v5e"
PODS = {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
HEAD = 64  # K
RATE = 0.15  # of the tokens is predicted
TYPES, POSITIONS = 2, 1024  # rows of the other tables
# Bytes of a number: of parameters, moments and logits; and of what is computed.
EXACT, LOW = 4, 2


@dataclasses.dataclass(frozen=True)
class Point:
    """One step that is compiled."""

    layers: int
    width: int
    length: int
    vocabulary: int
    rows: int  # on a chip: with `tensor` all chips have the same
    chips: int
    attention: str = "dense"
    axis: str = "data"  # of the mesh, that all chips lie along

    def but(self, **changes) -> "Point":
        new = dataclasses.replace(self, **changes)
        # One chip is the same by any name.
        return dataclasses.replace(new, axis="data") if new.chips == 1 else new

    @property
    def name(self) -> str:
        return " ".join(f"{k}={v}" for k, v in dataclasses.asdict(self).items())

    @property
    def batch(self) -> int:
        return self.rows * (1 if self.axis == "tensor" else self.chips)

    @property
    def tokens(self) -> int:
        """On a chip."""
        return self.rows * self.length

    @property
    def predictions(self) -> int:
        """On a chip."""
        return self.rows * round(RATE * self.length)

    @property
    def inner(self) -> int:
        return 4 * self.width

    def over(self, *axes: str) -> int:
        """Chips that something is split over which these axes split."""
        return self.chips if self.axis in axes else 1

    def fields(self) -> dict:
        mesh = {"data": 1, "fsdp": 1, "tensor": 1} | {self.axis: self.chips}
        found = {f"mesh.{axis}": size for axis, size in mesh.items()}
        found |= {"arch.layers": self.layers, "arch.width": self.width}
        found |= {"arch.heads": self.width // HEAD, "arch.inner": self.inner}
        found |= {"arch.vocab_size": self.vocabulary, "arch.types": TYPES}
        found |= {"arch.max_positions": POSITIONS, "arch.attention": self.attention}
        found |= {"arch.stack": "scan", "arch.remat": "kept", "optim.name": "adamw"}
        found |= {"rows": "full", "batch": self.batch, "length": self.length}
        return found | {"dtype": "bfloat16"}


# What theory says.


def parameters(p: Point) -> dict[str, tuple[int, int]]:
    """(how many, chips that they are split over) of each kind, by bert_jax/sharding.py.
    Heads and inner units go over `tensor`, the other side of the same products over
    `fsdp`; pieces over both."""
    D, F, N, V = p.width, p.inner, p.layers, p.vocabulary
    return {
        "kernels": (N * (4 * D * D + 2 * D * F), p.over("fsdp", "tensor")),
        "biases before": (N * (3 * D + F), p.over("tensor")),
        "biases behind": (N * 2 * D, 1),
        "norms": (N * 4 * D + 2 * D + 2 * D, 1),
        "pieces": (V * D, p.over("fsdp", "tensor")),
        "piece biases": (V, p.over("fsdp", "tensor")),
        "tables": ((TYPES + POSITIONS) * D, 1),
        "head": (D * D + D, 1),
    }


def flops_in_theory(p: Point) -> float:
    """A product of [m, k] and [k, n] is 2mkn; its two gradients are as much each. A
    layer has D² for each of q, k, v, o and DF twice; q with S keys, and S values."""
    D, F, N, S, V = p.width, p.inner, p.layers, p.length, p.vocabulary
    layers = N * (8 * D * D + 4 * D * F + 4 * S * D)
    rows = p.batch
    head = round(RATE * S) * (2 * D * D + 2 * D * V)  # a dense layer; the table
    return 3.0 * rows * (S * layers + head)


def cycles_in_theory(p: Point) -> float:
    """The least. q kᵀ is computed once more in the backward pass, since its result is
    not kept; AdamW reads gradient, parameter and two moments and writes three."""
    chip = Topology.parse(f"{KIND}:1x1").chip
    again = p.layers * 2 * p.length * p.width * p.batch * p.length
    products = (flops_in_theory(p) + again) / p.chips / chip.flops_per_cycle
    there = sum(count / over for count, over in parameters(p).values())
    return products + 7 * EXACT * there * chip.clock / chip.hbm_bandwidth


def memory_in_theory(p: Point) -> float:
    """Bytes on a chip, without the program itself."""
    D, F, N, H, S = p.width, p.inner, p.layers, p.width // HEAD, p.length
    there = sum(count / over for count, over in parameters(p).values())
    state = 4 * EXACT * there  # parameter, two moments, gradient
    # What a layer keeps of a token: its input and the two norms' x̂ whole; q, k, v, the
    # mixed values and the inner units by heads. Attention's o and the sums are not.
    kept = N * p.tokens * LOW * (3 * D + (4 * D + F) / p.over("tensor"))
    logits = EXACT * p.predictions * p.vocabulary / p.over("tensor")
    # Dense attention has two operands of products at a time, dropout(P) and dS; flash
    # attention keeps L, a number a query and head, in each layer.
    asked = H * p.tokens / p.over("tensor")
    inside = (2 * LOW * S if p.attention == "dense" else EXACT * N) * asked
    return state + kept + logits + inside


def sent_in_theory(p: Point) -> dict[str, float]:
    """Bytes that a chip sends in a step, by kind (tests/test_collectives.py has the
    same to the byte). Of the layers and the head 16 bits go over the links, of tables
    and norms 32; the table's gradient comes from two places and is summed twice."""
    count = {name: size for name, (size, _) in parameters(p).items()}
    exact = count["norms"] + count["pieces"] + count["piece biases"] + count["tables"]
    low = sum(count.values()) - exact + count["pieces"]
    n, all_reduce, all_gather = p.chips, 0.0, 0.0
    if p.axis in ("data", "fsdp"):  # each gradient once
        all_reduce = EXACT * exact + LOW * low
    if p.axis == "fsdp":  # layers forward and backward, tables once
        all_gather = LOW * 2 * count["kernels"]
        all_gather += EXACT * (count["pieces"] + count["piece biases"])
    if p.axis == "tensor":
        # In each layer: behind attention and feed-forward part, before the latter, and
        # before q, k and v apart; then the gradient of the predicted states.
        states = 6 * p.layers * p.tokens + p.predictions
        all_reduce = LOW * states * p.width
        # What is looked up in the table; of a prediction two maxima and two sums.
        all_reduce += EXACT * (p.tokens * p.width + 4 * p.predictions)
    ring = (n - 1) / n
    told = {"all-reduce": 2 * ring * all_reduce, "all-gather": ring * all_gather}
    return {kind: size for kind, size in told.items() if size}


# What is varied.


@dataclasses.dataclass(frozen=True)
class Series:
    label: str
    field: str  # of a point, along x
    curves: dict[str, tuple[Point, ...]]


BASE = Point(layers=4, width=512, length=128, vocabulary=8192, rows=32, chips=4)
VALUES = {
    "layers": (2, 4, 8, 16),
    "width": (256, 512, 1024),
    "tokens": (128, 256, 512, 1024),  # lengths at as many tokens
    "rows": (128, 512, 1024),  # lengths at as many rows
    "vocabulary": (8192, 16384, 32768, 65536),
    "data": (1, 4, 16, 64),
    "fsdp": (1, 4, 16, 64),
    "tensor": (1, 4, 8),
}
TOY = Point(layers=2, width=128, length=128, vocabulary=1024, rows=16, chips=4)
TOY_VALUES = {
    "layers": (2, 4),
    "width": (128,),
    "tokens": (128,),
    "rows": (128, 1024),
    "vocabulary": (1024, 4096),
    "data": (4, 16),
    "fsdp": (16,),
    "tensor": (),
}
SIZES = {"small": (BASE, VALUES), "toy": (TOY, TOY_VALUES)}


def series_of(base: Point, values: dict[str, tuple[int, ...]]) -> dict[str, Series]:
    def along(field: str, **more) -> tuple[Point, ...]:
        return tuple(base.but(**{field: n}, **more) for n in values[field])

    def lengths(name: str, kind: str) -> tuple[Point, ...]:
        alike = {n: base.rows for n in values[name]}
        if name == "tokens":
            alike = {n: base.tokens // n for n in values[name]}
        points = (base.but(length=n, rows=rows) for n, rows in alike.items())
        return tuple(point.but(attention=kind) for point in points)

    def chips(axis: str) -> tuple[Point, ...]:
        return tuple(base.but(chips=n, axis=axis) for n in values[axis])

    kinds, axes = ("dense", "flash"), ("data", "fsdp", "tensor")
    return {
        "layers": Series("layers", "layers", {"": along("layers")}),
        "width": Series("width", "width", {"": along("width")}),
        "tokens": Series(
            f"length, {base.tokens} tokens a chip",
            "length",
            {kind: lengths("tokens", kind) for kind in kinds},
        ),
        "rows": Series(
            f"length, {base.rows} rows a chip",
            "length",
            {kind: lengths("rows", kind) for kind in kinds},
        ),
        "vocabulary": Series("vocabulary", "vocabulary", {"": along("vocabulary")}),
        "chips": Series(
            f"chips, {base.rows} rows on each",
            "chips",
            {axis: chips(axis) for axis in axes},
        ),
    }


# What the compiler says.


@dataclasses.dataclass(frozen=True)
class Found:
    flops: float  # of the step, counted from the trace (bert_jax/flops.py)
    cycles: float  # of a chip
    modelled: float  # the same, of what has no cycles
    memory: int  # bytes of a chip, without the program
    program: int
    parameters: int
    sent: dict[str, int]  # bytes of a chip and step, by kind of collective
    compile_seconds: float

    @property
    def total(self) -> float:
        return self.cycles + self.modelled


def compiled(point: Point) -> Found:
    """By `bert_jax compile`, in a process of its own."""
    topology = Topology.parse(f"{KIND}:{PODS[point.chips]}")
    command = [sys.executable, "-m", "bert_jax", "compile", "--json"]
    command += ["--config", "pretrain:bert-base-uncased", "--topology", str(topology)]
    command += [f"--config.{name}={value}" for name, value in point.fields().items()]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | topology.environment,
        capture_output=True,
        text=True,
    )
    if not done.stdout:
        raise InputError(f"{point.name}: compile failed:\n{done.stderr[-2000:]}")
    (report,) = json.loads(done.stdout)
    if not report["fits"]:
        raise InputError(f"{point.name} does not fit: {report['needed']} bytes")
    told, memory, sent = report["estimate"], report["memory"], {}
    for one in told["collectives"]:
        sent[one["kind"]] = sent.get(one["kind"], 0) + one["sent"]
    return Found(
        flops=report["flops"],
        cycles=told["cycles"],
        modelled=sum(told["modelled"].values()) * told["clock"],
        memory=report["needed"] - memory["program"],
        program=memory["program"],
        parameters=report["parameters"],
        sent=sent,
        compile_seconds=report["compile_seconds"],
    )


def find(points: list[Point], path: Path | None, *, workers: int) -> dict[Point, Found]:
    known = json.loads(path.read_text()) if path and path.exists() else {}
    found = {p: Found(**known[p.name]) for p in points if p.name in known}
    left = [p for p in points if p not in found]
    with ThreadPoolExecutor(workers) as pool:
        for point, one in zip(left, pool.map(compiled, left), strict=True):
            found[point] = one
            print(
                f"{len(found)} of {len(points)}: {point.name} "
                f"({one.compile_seconds:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
            known[point.name] = dataclasses.asdict(one)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(known, indent=1))
    return found


# What is shown.


def ratios(point: Point, found: Found) -> dict[str, float]:
    """What was found of each, over what theory says."""
    sent = sum(sent_in_theory(point).values())
    return {
        "flops": found.flops / flops_in_theory(point),
        "cycles": found.total / cycles_in_theory(point),
        "memory": found.memory / memory_in_theory(point),
        "sent": sum(found.sent.values()) / sent if sent else math.nan,
    }


def table_of(series: dict[str, Series], found: dict[Point, Found]) -> Iterator[str]:
    yield (
        "| | | GFLOPs | of theory | M cycles | modelled | over the least | MB a chip "
        "| of theory | MB sent | of theory |"
    )
    yield "|" + "---|" * 11
    for one in series.values():
        for curve, points in one.curves.items():
            for n, point in enumerate(points):
                there, ratio = found[point], ratios(point, found[point])
                name = f"{one.label}; {curve}" if curve else one.label
                sent = ", ".join(
                    f"{kind} {size / 1e6:.2f}"
                    for kind, size in sorted(there.sent.items())
                    if size > 1e4
                )
                cells = (
                    name if n == 0 else "",
                    f"{getattr(point, one.field):,}",
                    f"{there.flops / 1e9:,.0f}",
                    f"{ratio['flops']:.3f}",
                    f"{there.cycles / 1e6:.2f}",
                    f"{there.modelled / 1e6:.2f}",
                    f"{ratio['cycles']:.2f}",
                    f"{there.memory / 1e6:,.0f}",
                    f"{ratio['memory']:.2f}",
                    sent or "none",
                    "" if math.isnan(ratio["sent"]) else f"{ratio['sent']:.3f}",
                )
                yield f"| {' | '.join(cells)} |"


COLOURS = {"": "C0", "dense": "C0", "flash": "C1"}
COLOURS |= {"data": "C0", "fsdp": "C2", "tensor": "C3"}
COLOURS |= {"all-reduce": "C4", "all-gather": "C5"}


def draw(series: dict[str, Series], found: dict[Point, Found], path: Path) -> None:
    """From above: FLOPs, cycles, memory; below, what each chip sends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {
        "TFLOPs a step": (lambda p: found[p].flops / 1e12, flops_in_theory, 1e12),
        "M cycles a chip": (lambda p: found[p].total / 1e6, cycles_in_theory, 1e6),
        "MB a chip": (lambda p: found[p].memory / 1e6, memory_in_theory, 1e6),
    }
    figure = pyplot.figure(figsize=(3.1 * len(series), 12.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(3, 1.15))
    axes = above.subplots(3, len(series), squeeze=False, sharey="row", sharex="col")
    for row, (label, (value, theory, unit)) in enumerate(shown.items()):
        for column, one in enumerate(series.values()):
            axis = axes[row][column]
            for curve, points in one.curves.items():
                x = [getattr(p, one.field) for p in points]
                look = dict(color=COLOURS[curve])
                axis.plot(x, [theory(p) / unit for p in points], "--", **look)
                axis.plot(x, [value(p) for p in points], "o", label=curve, **look)
            curves = one.curves.values()
            scale_axis(axis, [getattr(p, one.field) for c in curves for p in c])
            axis.set_xlabel(one.label if row == 2 else "")
            axis.set_ylabel(label if column == 0 else "")
            if row == 0 and len(one.curves) > 1:
                axis.legend(fontsize=8)
    curves = series["chips"].curves if "chips" in series else {}
    axes = below.subplots(1, max(1, len(curves)), squeeze=False, sharey=True)[0]
    for axis, (curve, points) in zip(axes, curves.items(), strict=False):
        several = [p for p in points if p.chips > 1]
        x = [p.chips for p in several]
        for kind in ("all-reduce", "all-gather"):
            said = [sent_in_theory(p).get(kind, 0) / 1e6 for p in several]
            if any(said):
                told = [found[p].sent.get(kind, 0) / 1e6 for p in several]
                axis.plot(x, said, "--", color=COLOURS[kind])
                axis.plot(x, told, "o", color=COLOURS[kind], label=kind)
        scale_axis(axis, x)
        axis.set_title(f"mesh.{curve}", fontsize=10)
        axis.set(yscale="linear", xlabel=series["chips"].label)
        axis.legend(fontsize=8, loc="upper left")
    axes[0].set(ylabel="MB sent by a chip", ylim=(0, None))
    figure.suptitle(
        "Cost of a training step. Dots: what was counted, and the compiler's estimates "
        "(no TPU has run it); dashed: theory, nothing fitted",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


def scale_axis(axis, values: list[int]) -> None:
    """Both sides in logarithms, with the values that x has."""
    values = sorted(set(values))
    axis.set(xscale="log", yscale="log")
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.set_xticks(values, [f"{value:,}" for value in values], fontsize=8)
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    names = [*series_of(BASE, VALUES)]
    parser.add_argument("--series", nargs="+", choices=names, default=names)
    parser.add_argument("--workers", type=int, default=1, help="compiles at a time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="PICTURE")
    told = parser.parse_args()
    check_compiler()
    series = {
        name: one
        for name, one in series_of(*SIZES[told.size]).items()
        if name in told.series
    }
    curves = (points for one in series.values() for points in one.curves.values())
    points = list(dict.fromkeys(point for curve in curves for point in curve))
    found = find(points, told.json, workers=told.workers)
    for line in table_of(series, found):
        print(line)
    if told.out:
        draw(series, found, told.out)
        print(f"\ndrawn in {told.out}")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        fail(error)
