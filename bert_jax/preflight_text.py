"""What a preflight found, for people."""

from bert_jax.estimate import Estimate
from bert_jax.preflight import GIB, Memory, Report

MODULES = 16  # the costliest that are shown


def describe(report: Report) -> str:
    lines = [*about(report), "", *memory(report)]
    if report.fits:
        lines += ["", *times(report)]
        lines += ["", *told(report.estimate), "", *modules(report.estimate)]
    return "\n".join(lines) + "\n"


def describe_batch(report: Report, too_many: int) -> str:
    rows = report.batch // report.chips
    rows = "1 row" if rows == 1 else f"{rows} rows"
    return (
        f"{describe(report)}\n--config.batch={report.batch} fits {report.topology} "
        f"({rows} for each chip), {too_many} does not"
    )


def about(report: Report) -> list[str]:
    mesh = ", ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    parts = f" in {report.accumulate} parts" if report.accumulate > 1 else ""
    chips = "1 chip" if report.chips == 1 else f"{report.chips} chips"
    return [
        f"{report.preset} on {report.topology}: {chips}, mesh {mesh}",
        f"step of {report.step}: {report.batch} rows of {report.length} tokens{parts}, "
        f"{report.dtype}",
        f"traced in {report.tracing_seconds:.0f} s, compiled in "
        f"{report.compile_seconds:.0f} s",
        "",
        f"parameters  {report.parameters:,}",
        f"FLOPs       {report.flops:.4g} a step, {report.flops / report.chips:.4g} a "
        "chip (products of the model, forward and backward)",
    ]


def memory(report: Report) -> list[str]:
    needed, hbm = report.needed / GIB, report.hbm / GIB
    if not report.fits:
        return [
            f"HBM         DOES NOT FIT: a chip needs {needed:.2f} GiB and has "
            f"{hbm:.2f}, {needed - hbm:.2f} GiB too little",
            "            A smaller config.batch (--find-batch), config.accumulate, "
            "config.arch.remat=full,",
            "            config.mesh.fsdp or config.mesh.tensor make it smaller.",
        ]
    return [
        f"HBM         fits: a chip needs {needed:.2f} of {hbm:.2f} GiB",
        f"            {parts_of(report.memory)}",
    ]


def parts_of(memory: Memory) -> str:
    new = memory.outputs - memory.aliased
    return (
        f"arguments {memory.arguments / GIB:.2f}, outputs {memory.outputs / GIB:.2f} "
        f"(all but {new / 2**20:.1f} MiB in the place of arguments), temporaries "
        f"{memory.temporaries / GIB:.2f}, program {memory.program / GIB:.2f}"
    )


def times(report: Report) -> list[str]:
    found = report.estimate
    lines = [
        "Time of a step, an ESTIMATE of the compiler, measured nowhere:",
        f"  cycles      {found.cycles / 1e6:10.2f} M at {found.clock / 1e9:.3f} GHz = "
        f"{found.seconds * 1e3:.2f} ms: {report.share_of_peak:.2f} of the peak of "
        f"{found.peak / 1e12:.0f} TFLOP/s",
        "  has no cycles in the program, and is modelled by bytes / bandwidth:",
    ]
    for kind, seconds in found.modelled.items():
        lines.append(f"  {kind:30} {seconds * 1e3:10.2f} ms")
    lines.append(
        "  were all this added, nothing beside the rest: "
        f"{report.share_with_modelled:.2f} of the peak"
    )
    lines.append(
        f"  (copies ahead into the memory on the chip: {found.ahead * 1e3:.2f} ms if "
        "they were alone; not added)"
    )
    return lines


def told(found: Estimate) -> list[str]:
    if not found.collectives:
        return ["Chips tell each other nothing."]
    lines = ["What chips tell each other in a step, for each chip:"]
    lines.append(f"  {'':20} {'over':>18} {'count':>6} {'MB':>10} {'modelled':>12}")
    for one in found.collectives:
        axes = "other groups" if one.axes is None else ", ".join(one.axes) or "itself"
        time = "not modelled" if one.seconds is None else f"{one.seconds * 1e3:9.3f} ms"
        lines.append(
            f"  {one.kind:20} {axes:>18} {one.count:6} {one.bytes / 1e6:10.3f} "
            f"{time:>12}"
        )
    if any(one.seconds is None for one in found.collectives):
        lines.append(
            "  (between slices: what a chip gives to the network that joins them; its "
            "time is in no sum)"
        )
    return lines


def modules(found: Estimate) -> list[str]:
    lines = ["The costliest modules, estimated cycles in millions:"]
    lines.append(f"  {'':32} {'forward':>9} {'backward':>9} {'together':>9}  share")
    for one in found.modules[:MODULES]:
        lines.append(
            f"  {one.name:32} {one.forward / 1e6:9.3f} {one.backward / 1e6:9.3f} "
            f"{one.cycles / 1e6:9.3f}  {one.cycles / max(1, found.cycles):5.1%}"
        )
    rest = sum(one.cycles for one in found.modules[MODULES:])
    if rest:
        lines.append(f"  {'all others':32} {'':9} {'':9} {rest / 1e6:9.3f}")
    return lines
