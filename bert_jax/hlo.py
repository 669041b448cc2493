"""What a compiled program does, read from its text.

XLA prints a scheduled program as computations, each a list of instructions in the order
in which they run. `Program(text).executed()` walks from the entry through calls and
loops and tells how often a step runs each instruction:

    times(instruction) = product of the trip counts of the loops around it

The TPU compiler writes beside a fusion how many cycles it expects it to take; what
devices tell each other stands there with its shapes and with the groups that take part.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "token": 0}  # others: bits in name
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
COLLECTIVES += ("collective-permute", "collective-broadcast", "ragged-all-to-all")
BETWEEN_SLICES = "between slices"  # what a chip gives its host for those of others
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


class Kernel(NamedTuple):
    """What a Pallas kernel says of itself, its `cost_estimate`."""

    name: str
    flops: int
    bytes: int  # that it reads and writes


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str  # of the result, as it is written
    opcode: str
    operands: str
    attributes: str

    @property
    def operation(self) -> str:
        """What it was traced from: jit(step)/jvp(Model)/main/lm/dense/dot_general."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate; None where it has none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @property
    def kernel(self) -> "Kernel | None":
        """Of a call of a Pallas kernel that says what it costs."""
        found = re.search(r'"cost_estimate":\{([^}]*)\}', self.attributes)
        if found is None:
            return None
        told = dict(re.findall(r'"(\w+)":"(\d+)"', found[1]))
        name = re.search(r"(\w+)/pallas_call", self.operation)
        return Kernel(
            name[1] if name else "kernel",
            int(told["flops"]),
            int(told["bytes_accessed"]),
        )

    @property
    def collective(self) -> str | None:
        """The kind of collective that it is, or begins."""
        kind = self.opcode.removesuffix("-start")
        if kind == "send" and "xla_megascale_runtime" in self.attributes:
            return BETWEEN_SLICES
        return kind if kind in COLLECTIVES else None

    @property
    def channel(self) -> str | None:
        found = re.search(r"channel_id=(\d+)", self.attributes)
        return found[1] if found else None

    @property
    def arguments(self) -> list[str]:
        """Names of the instructions whose results it takes."""
        return re.findall(r"%([\w.-]+)", self.operands)

    def called(self, attribute: str) -> list[str]:
        """Names of the computations it calls as `attribute`."""
        found = re.search(rf"\b{attribute}=(%[\w.-]+|{{[^}}]*}})", self.attributes)
        return re.findall(r"%([\w.-]+)", found[1]) if found else []


def arrays_in(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(type, dimensions) of every array in a shape."""
    return [
        (kind, tuple(int(size) for size in sizes.split(",") if size))
        for kind, sizes in ARRAY.findall(re.sub(r"\{[^}]*\}", "", shape))
    ]


def size_of(kind: str) -> float:
    """Bytes of one number."""
    if kind in BYTES:
        return BYTES[kind]
    return int(re.search(r"\d+", kind)[0]) / 8


def bytes_of(shape: str) -> int:
    return int(sum(size_of(k) * math.prod(sizes) for k, sizes in arrays_in(shape)))


def closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"a bracket is never closed: {text[start : start + 80]}")


def read_instruction(line: str) -> Instruction:
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    end = closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].strip()
    start = rest.index("(")
    end = closing(rest, start)
    return Instruction(
        name.removeprefix("%"),
        shape,
        rest[:start],
        rest[start + 1 : end],
        rest[end + 1 :],
    )


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction, and how often one run of the program runs it."""

    instruction: Instruction
    times: int
    computation: str  # that it stands in
    fused: bool  # part of a fusion, whose cycles stand with the fusion


@dataclasses.dataclass(frozen=True)
class Collective:
    """Something that devices tell each other, once. Groups are those of one slice: what
    it then tells other slices is a collective of its own."""

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # on one device; the larger side
    times: int  # in a run of the program
    groups: tuple[tuple[int, ...], ...]  # devices that talk with each other
    operation: str

    @property
    def bytes(self) -> int:
        """On one device, each time."""
        return int(sum(size_of(k) * math.prod(sizes) for k, sizes in self.arrays))

    @property
    def sent(self) -> float:
        """Bytes that a device sends each time, if they go round in a ring."""
        n = max((len(group) for group in self.groups), default=1)
        if self.kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
            return self.bytes * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)
        return self.bytes

    def axes(self, mesh: dict[str, int]) -> tuple[str, ...] | None:
        """The axes of a slice's mesh that its groups run over; None: they are no such
        groups."""
        if self.kind == BETWEEN_SLICES:
            return ("data",)  # slices split rows and nothing else
        names = [name for name, size in mesh.items() if size > 1]
        numbers = np.arange(math.prod(mesh.values())).reshape(*mesh.values())
        told = {frozenset(group) for group in self.groups if len(group) > 1}
        for chosen in range(2 ** len(names)):
            over = [n for k, n in enumerate(names) if chosen >> k & 1]
            last = [list(mesh).index(name) for name in over]
            moved = np.moveaxis(numbers, last, range(len(mesh) - len(last), len(mesh)))
            rows = moved.reshape(-1, math.prod(mesh[name] for name in over))
            if told == {frozenset(row) for row in rows.tolist() if len(row) > 1}:
                return tuple(over)
        return None


class Program:
    def __init__(self, text: str):
        self.text = text
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        inside: dict[str, Instruction] | None = None
        for line in text.splitlines():
            if inside is None:
                header = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
                if header:
                    inside = self.computations[header[2]] = {}
                    self.entry = header[2] if header[1] else self.entry
            elif line.startswith("}"):
                inside = None
            elif " = " in line:
                instruction = read_instruction(line)
                inside[instruction.name] = instruction

    @cached_property
    def devices(self) -> int:
        """Devices of a slice that run the program side by side."""
        found = re.search(r"num_partitions=(\d+)", self.text)
        return int(found[1]) if found else 1

    def in_slice(self, mesh: dict[str, int]) -> dict[str, int]:
        """The part of a mesh that lies in one slice, whose devices groups number."""
        slices = math.prod(mesh.values()) // self.devices
        return mesh | {"data": mesh["data"] // slices}

    def executed(self) -> Iterator[Executed]:
        """Every instruction of a run; those inside of fusions, too, marked."""
        yield from self.walk(self.entry, 1, fused=False)

    def walk(self, name: str, times: int, *, fused: bool) -> Iterator[Executed]:
        for one in self.computations[name].values():
            yield Executed(one, times, name, fused)
            if one.opcode == "while":
                trips = self.trips(one)
                yield from self.walk(one.called("body")[0], times * trips, fused=fused)
            elif one.opcode in ("fusion", "async-start", "call"):
                inner = fused or one.opcode == "fusion"
                for called in one.called("calls") + one.called("to_apply"):
                    yield from self.walk(called, times, fused=inner)
            elif one.opcode == "conditional":  # as if all of its branches were run
                names = [*one.called("branch_computations")]
                names += one.called("true_computation")
                names += one.called("false_computation")
                for called in names:
                    yield from self.walk(called, times, fused=fused)

    def trips(self, loop: Instruction) -> int:
        """How often a loop goes round: as the compiler says, or what it counts to."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if found:
            return int(found[1])
        condition = self.computations[loop.called("condition")[0]]
        ends = [
            int(condition[name].operands)
            for one in condition.values()
            if one.opcode == "compare" and "direction=LT" in one.attributes
            for name in one.arguments
            if name in condition and condition[name].opcode == "constant"
        ]
        if len(ends) != 1:
            raise ValueError(f"no trip count of the loop {loop.name}")
        return ends[0]

    def traffic(self, one: Executed) -> int:
        """Bytes that it reads and writes each time."""
        beside = self.computations[one.computation]
        read = (beside[name] for name in one.instruction.arguments if name in beside)
        return bytes_of(one.instruction.shape) + sum(bytes_of(i.shape) for i in read)

    def collectives(self) -> list[Collective]:
        """What is told in one run. A collective that goes on beside other work stands
        in several fusions, under one number: it counts once."""
        found, seen = [], set()
        for one in self.executed():
            kind = one.instruction.collective
            if not kind:
                continue
            if one.fused and one.instruction.channel in seen:
                continue
            if one.fused:
                seen.add(one.instruction.channel)
            found.append(self.collective(one.instruction, kind, one.times))
        return found

    def collective(self, one: Instruction, kind: str, times: int) -> Collective:
        groups = groups_of(one.attributes, self.devices)
        arrays = arrays_in(one.shape)
        if kind == BETWEEN_SLICES:  # (operand, context, token)
            arrays = arrays[:1]
        if one.opcode.endswith("-start") and one.shape.startswith("("):
            if kind == "collective-permute":  # (operand, result, two counters)
                arrays = arrays[1:2]
            elif kind == "all-gather":  # (operands, results)
                arrays = arrays[len(arrays) // 2 :]
        if kind == "reduce-scatter":  # a result is a part of what each device had
            n = len(groups[0])
            arrays = [(k, (n * sizes[0], *sizes[1:])) for k, sizes in arrays]
        return Collective(kind, tuple(arrays), times, groups, one.operation)


def groups_of(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The devices that talk with each other, in each of the ways XLA writes them:

    {{0,1},{2,3}}; [2,4]<=[8], [2,4]<=[4,2]T(1,0): numbers in that order, in rows;
    mesh['a'=2,'b'=4], device_ids=([..]<=[..]) {'a','b':(2)2}: axes of such a mesh
    """
    if pairs := re.search(r"source_target_pairs=\{(\{[^=]*?\})\}", attributes):
        return lists_of(pairs[1])
    if named := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{(.*?)\}",
        attributes,
    ):
        sizes = [int(size) for size in re.findall(r"=(\d+)", named[1])]
        names = re.findall(r"'(\w+)'=", named[1])
        numbers = numbers_of(named[2] or "", math.prod(sizes))
        return along(numbers, dict(zip(names, sizes, strict=True)), named[3])
    if rows := re.search(
        r"replica_groups=\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?)", attributes
    ):
        shape = [int(size) for size in rows[1].split(",")]
        numbers = numbers_of(rows[2], math.prod(shape)).reshape(shape)
        return tuple(tuple(row) for row in numbers.tolist())
    listed = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes)
    return lists_of(listed[1]) if listed else (tuple(range(devices)),)


def lists_of(text: str) -> tuple[tuple[int, ...], ...]:
    lists = re.findall(r"\{([\d, ]*)\}", text)
    return tuple(tuple(int(n) for n in one.split(",") if n.strip()) for one in lists)


def numbers_of(order: str, count: int) -> np.ndarray:
    """0, 1, ...; or in the order of [2,2,2]T(0,2,1): laid out so, axes so exchanged."""
    found = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order)
    numbers = np.arange(count)
    if not found:
        return numbers
    shape = [int(size) for size in found[1].split(",")]
    axes = [int(axis) for axis in (found[2] or "").split(",") if axis]
    return numbers.reshape(shape).transpose(axes or None).reshape(-1)


def along(
    numbers: np.ndarray, mesh: dict[str, int], axes: str
) -> tuple[tuple[int, ...], ...]:
    """Groups along axes of a mesh. 'a':(2)4 is a part of an axis: 4 numbers in a row,
    beneath 2 of them."""
    shape, chosen = [], []
    parts = {
        name: (int(above), int(size))
        for name, above, size in re.findall(r"'(\w+)':\((\d+)\)(\d+)", axes)
    }
    for name, size in mesh.items():
        above, part = parts.get(name, (1, size))
        if f"'{name}'" in axes:
            chosen.append(len(shape) + 1)
        shape += [above, part, size // (above * part)]
    laid = np.moveaxis(
        numbers.reshape(shape), chosen, range(len(shape) - len(chosen), len(shape))
    )
    rows = laid.reshape(-1, math.prod(shape[axis] for axis in chosen))
    return tuple(tuple(row) for row in rows.tolist())
