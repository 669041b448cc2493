"""TPU chips, and their compiler where there is none of them.

libtpu is a package on PyPI with the whole TPU compiler in it: given the shape of a pod
it compiles for it on any machine. It reads the environment when it is loaded, so that
`environment` has to be there before jax is imported.
"""

import dataclasses
import importlib.util
import math
import os
import re
import subprocess
import sys

from bert_jax.errors import InputError, unknown


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks are those of Cloud TPU's pages on each kind (docs.cloud.google.com/tpu):
    bf16 FLOP/s, bytes/s of HBM, bytes/s that one chip sends to all of its neighbours
    (half of the interconnect's, which counts both directions)."""

    name: str  # what jax calls a device of this kind
    accelerator: str  # what Cloud TPU calls it
    peak: float
    hbm_bandwidth: float
    link_bandwidth: float
    # What the compiler of libtpu 0.0.42 says is available, in GiB: found by asking for
    # an array of 256 GiB.
    hbm: float
    # At the peak: two for each multiplier of its matrix units. The compiler's estimates
    # for a product of 8192 x 8192 come to 0.88 to 0.93 of this (v6e: 0.70).
    flops_per_cycle: int
    dimensions: int  # of the network

    @property
    def clock(self) -> float:
        """Cycles a second."""
        return self.peak / self.flops_per_cycle


CHIPS = {
    "v4": Chip(
        "TPU v4", "v4", 275e12, 1228e9, 300e9, 30.75, 2 * 8 * 128**2, dimensions=3
    ),
    "v5e": Chip(
        *("TPU v5 lite", "v5litepod", 197e12, 819e9, 200e9, 15.75, 2 * 4 * 128**2),
        dimensions=2,
    ),
    "v5p": Chip(
        "TPU v5", "v5p", 459e12, 2765e9, 600e9, 95.74, 2 * 8 * 128**2, dimensions=3
    ),
    "v6e": Chip(
        "TPU v6 lite", "v6e", 918e12, 1638e9, 400e9, 31.25, 2 * 4 * 256**2, dimensions=2
    ),
}
STACKS = "fibers_default_thread_stack_size"  # a flag of libtpu, bytes
LONGEST = 16  # chips along a side; of kinds with three dimensions, 24


@dataclasses.dataclass(frozen=True)
class Topology:
    kind: str
    shape: tuple[int, ...]  # chips along each dimension of the network

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """v5e:4x4, v4:2x2x2, ..."""
        kind, _, rest = text.partition(":")
        if kind not in CHIPS:
            raise InputError(unknown("--topology, kind of chip", kind, CHIPS))
        example = "4x4" if CHIPS[kind].dimensions == 2 else "2x2x2"
        form = f"--topology {text}: give it as {kind}:{example}, chips along each "
        form += f"of the {CHIPS[kind].dimensions} dimensions of its network"
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", rest):
            raise InputError(form)
        shape = tuple(int(size) for size in rest.split("x"))
        longest = LONGEST if len(shape) == 2 else 24
        if len(shape) != CHIPS[kind].dimensions:
            raise InputError(form)
        if max(shape) > longest or any(size > 1 and size % 2 for size in shape):
            raise InputError(f"{form}; each is 1 or even, and at most {longest}")
        return cls(kind, shape)

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def environment(self) -> dict[str, str]:
        """What libtpu and jax have to find in a process that compiles for it."""
        return {
            "JAX_PLATFORMS": "cpu",  # else jax waits for a TPU
            "TPU_SKIP_MDS_QUERY": "1",  # nor is there one to be asked for by network
            "TPU_ACCELERATOR_TYPE": f"{self.chip.accelerator}-{self.chips}",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it locks a file
            "LIBTPU_INIT_ARGS": with_deep_stacks(),
        }

    def devices(self, slices: int = 1) -> list:
        """One a chip, of so many slices with this shape."""
        from jax.experimental import topologies

        how: dict = {"num_slices": slices} if slices > 1 else {}
        if self.chip.dimensions == 3:  # the two cores of a chip are one device
            how["chip_config_name"] = "megacore"
        host = [min(2, size) for size in self.shape[:2]]
        how["chips_per_host_bounds"] = (*host, 1)
        found = topologies.get_topology_desc(str(self), platform="tpu", **how)
        return list(found.devices)


def with_deep_stacks() -> str:
    """The flags of libtpu that are set, and a stack of 1 MiB for each of the compiler's
    fibers. Products fused into products run over the one that they have by themselves:
    widths of 512 and 768 on rows of 128 tokens, with arch.remat=kept and dropout of
    attention, ended in "SIGSEGV STACK OVERFLOW" (libtpu 0.0.42). What could be compiled
    before comes out the same."""
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    if STACKS in given:
        return given
    return f"{given} --{STACKS}={2**20}".strip()


def check_compiler() -> None:
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "the TPU compiler is not installed. It needs no TPU: pip install "
            "'bert_jax[tpu]'"
        )


def in_own_process(topology: Topology, words: list[str]) -> bool:
    """Whether this process is one that can compile. If not, the same command, of these
    words, has been run again in one that can; this one ends where that failed."""
    wanted = topology.environment
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return True
    again = [sys.executable, "-m", "bert_jax", *words]
    done = subprocess.run(again, env=os.environ | wanted)
    if done.returncode < 0:  # a signal: it checks itself, and aborts
        raise InputError(
            f"the TPU compiler died of signal {-done.returncode}; what it said last "
            f"stands above. Is there a pod of the form {topology}?"
        )
    if done.returncode:
        sys.exit(done.returncode)
    return False
