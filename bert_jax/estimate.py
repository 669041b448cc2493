"""How long a compiled step may take on a TPU, by the compiler's own estimates.

    seconds = cycles of all fusions, in loops as often as they go round / clock

Sorts, look-ups, custom calls, random bits and collectives have no cycles in the text.
They are modelled and kept apart, so that work moved into them is no gain:

    Pallas kernels         max(FLOPs / peak, bytes / bandwidth of HBM), as they say
    sorts, look-ups, ...   bytes read and written / bandwidth of HBM
    collectives            bytes that a chip sends, in a ring / bandwidth of its links

That of kernels is the least they can take: where the vector unit has more to do than
the matrix unit it is longer (flash attention: docs/flash.md).

Copies between HBM and the memory on the chip run ahead, beside other work: how long
they would take alone is told, and added to nothing. What goes between slices is told in
bytes alone: the network that joins them belongs to no chip, and its time is in no sum.
"""

import dataclasses
import re
from collections import Counter

from bert_jax.hlo import (
    BETWEEN_SLICES,
    COLLECTIVES,
    Collective,
    Executed,
    Instruction,
    Program,
    bytes_of,
)
from bert_jax.tpu import Chip

# What does nothing by itself: names for what is there, loops, and copies ahead.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while")
FREE += ("call", "conditional", "partition-id", "replica-id", "after-all")
FREE += ("opt-barrier", "copy-done", "slice-done", "async-start", "async-update")
FREE += ("async-done", *(f"{kind}-done" for kind in COLLECTIVES))
FREE += ("send-done", "recv", "recv-done")
AHEAD = ("copy-start", "slice-start")
FREE_CALLS = ("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound")
# Parts of an operation's name that are no module: what traced it, loops, formulas, and
# the parts of the model that everything is in.
NO_MODULE = re.compile(
    r".*[(<].*|.*->.*|while|body|cond|closed_call|Block|main|checkpoint|remat\w*|train_step"
)


@dataclasses.dataclass(frozen=True)
class Told:
    """Collectives of one kind over the same axes, in one step."""

    kind: str
    axes: tuple[str, ...] | None  # of the mesh; None: other groups of chips
    count: int
    bytes: int  # of their arrays on one chip, the larger side
    sent: int  # bytes that a chip sends
    seconds: float | None  # modelled; None: between slices, which is not


@dataclasses.dataclass(frozen=True)
class Module:
    """What was traced from one module of the model. A fusion has the name of its last
    operation, whatever else was put into it."""

    name: str
    forward: int  # cycles
    backward: int

    @property
    def cycles(self) -> int:
        return self.forward + self.backward


@dataclasses.dataclass(frozen=True)
class Estimate:
    cycles: int  # of one step, of what has cycles
    clock: float  # a second
    seconds: float  # of these cycles
    peak: float  # FLOP/s of a chip
    modelled: dict[str, float]  # seconds of what has no cycles, by kind
    ahead: float  # seconds of copies beside other work, were they alone
    collectives: tuple[Told, ...]
    modules: tuple[Module, ...]  # the costliest first


def estimate(program: Program, chip: Chip, mesh: dict[str, int]) -> Estimate:
    told = tell(program.collectives(), chip, program.in_slice(mesh))
    modelled: Counter[str] = Counter()
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    ahead = 0
    for one in program.executed():
        instruction = one.instruction
        if one.fused:
            continue
        if instruction.cycles is not None:
            name, back = module_of(instruction.operation)
            (backward if back else forward)[name] += one.times * instruction.cycles
        elif instruction.opcode in AHEAD:
            ahead += one.times * bytes_of(instruction.shape) // 2  # there and here
        elif takes_time(one, program):
            seconds = seconds_of(one, program, chip)
            modelled[kind_of(instruction)] += one.times * seconds
    modules = [Module(n, forward[n], backward[n]) for n in {*forward, *backward}]
    cycles = sum(module.cycles for module in modules)
    in_collectives = sum(one.seconds or 0.0 for one in told)
    return Estimate(
        cycles=cycles,
        clock=chip.clock,
        seconds=cycles / chip.clock,
        peak=chip.peak,
        modelled={"collectives": in_collectives} | merged(modelled),
        ahead=ahead / chip.hbm_bandwidth,
        collectives=told,
        modules=tuple(sorted(modules, key=lambda one: (-one.cycles, one.name))),
    )


def seconds_of(one: Executed, program: Program, chip: Chip) -> float:
    """Modelled, of something without cycles."""
    if kernel := one.instruction.kernel:
        return max(kernel.flops / chip.peak, kernel.bytes / chip.hbm_bandwidth)
    if kind_of(one.instruction) == "gather":  # reads as much of the table as it writes
        return 2 * bytes_of(one.instruction.shape) / chip.hbm_bandwidth
    return program.traffic(one) / chip.hbm_bandwidth


def takes_time(one: Executed, program: Program) -> bool:
    """Whether something without cycles does work that is not counted elsewhere."""
    instruction = one.instruction
    if instruction.collective:
        return False
    if instruction.opcode == "fusion":  # around a part of a collective, or it is not
        inside = program.computations[instruction.called("calls")[0]].values()
        return not any(i.collective for i in inside)
    target = re.search(r'custom_call_target="(\w+)"', instruction.attributes)
    if target and target[1] in FREE_CALLS:
        return False
    return instruction.opcode not in FREE


def kind_of(instruction: Instruction) -> str:
    """What it does; of a fusion, what it was made for; of a kernel, its name."""
    if kernel := instruction.kernel:
        return kernel.name
    if instruction.opcode != "fusion" or not instruction.operation:
        return instruction.opcode
    return instruction.operation.rpartition("/")[2]


def merged(seconds: Counter[str]) -> dict[str, float]:
    """By kind; those that are next to nothing in one sum."""
    least = 0.02 * seconds.total()
    large = {kind: value for kind, value in seconds.most_common() if value > least}
    rest = seconds.total() - sum(large.values())
    return large | ({"other": rest} if rest else {})


def tell(
    collectives: list[Collective], chip: Chip, mesh: dict[str, int]
) -> tuple[Told, ...]:
    """The collectives of a step by kind and axes of a slice's mesh, what takes longest
    first, and last what no time is known of."""
    kinds: dict[tuple, list[Collective]] = {}
    for one in collectives:
        kinds.setdefault((one.kind, one.axes(mesh)), []).append(one)
    told = []
    for (kind, axes), ones in kinds.items():
        sent = sum(one.times * one.sent for one in ones)
        told.append(
            Told(
                kind=kind,
                axes=axes,
                count=sum(one.times for one in ones),
                bytes=sum(one.times * one.bytes for one in ones),
                sent=int(sent),
                seconds=None if kind == BETWEEN_SLICES else sent / chip.link_bandwidth,
            )
        )
    return tuple(sorted(told, key=lambda one: -(one.seconds or 0.0)))


def module_of(operation: str) -> tuple[str, bool]:
    """layers/attention/q of jit(train_step)/jvp(Model)/main/stack/Block/attention/q/
    dot_general; and whether it belongs to the backward pass."""
    backward = "transpose(" in operation
    parts = operation.split(";")[0].split("/")
    names = [part for part in parts[1:-1] if not NO_MODULE.fullmatch(part)]
    name = "/".join("layers" if part == "stack" else part for part in names)
    if name:
        return name, backward
    if "jvp(" in operation:
        return "loss", backward
    # What the compiler made by itself has no path: a cast of a weight, mostly.
    return ("the rest of the step" if len(parts) > 1 else "made by the compiler"), False
