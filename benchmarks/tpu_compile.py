"""Our training step beside Hugging Face's last Flax models, compiled for a TPU pod.

    python -m benchmarks.tpu_compile       # from the root; no TPU is needed
    python -m benchmarks.tpu_compile --layers 2 --shapes 32x128 --dropout rbg
    python -m benchmarks.tpu_compile --objectives replaced_token permuted_lm

The large models, rows split over all chips, bfloat16, AdamW with clipping, dropout 0.1,
by the compiler's own estimate of its cycles (bert_jax/estimate.py): no chip has
measured any of it, and only the ratio of two programs compiled in one run says
something. What has no cycles in a program (random bits, sorts, look-ups, collectives,
the kernels of flash attention) is modelled, in a column of its own; "total" is the sum,
and "of peak" counts the FLOPs that our step needs, for both.

    masked_lm        BERT, beside theirs
    replaced_token   ELECTRA, beside the sum of its parts: their generator trained as a
                     masked LM and their discriminator; nothing is sampled there
    permuted_lm      XLNet, which they have none of in Flax

Theirs runs in an environment of its own, which is made on first use (transformers
4.57.6 has no place beside the release that we test with), scores every position, as its
example trains, and draws its dropout from either of JAX's generators. Ours has one,
which is counted in the cycles.
"""

import argparse
import dataclasses
import functools
import json
import operator
import os
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path

from bert_jax.errors import InputError, fail
from bert_jax.estimate import estimate
from bert_jax.hlo import Program
from bert_jax.preflight import GIB
from bert_jax.tpu import Topology, check_compiler

ROOT = Path(__file__).parents[1]
THEIRS = ROOT / ".venv" / "flax_bert"  # the environment
SHAPES = ("8x512", "32x128")  # rows on a chip, tokens in a row
GENERATORS = ("rbg", "threefry2x32")
OURS = "bert_jax"
# objective: our preset, and the models of flax_bert.py that do the same together
TRAINED = {
    "masked_lm": ("bert-large-uncased", ("bert",)),
    "replaced_token": ("electra-large-discriminator", ("generator", "discriminator")),
    "permuted_lm": ("xlnet-large-cased", ()),
}
FASTEST = {"arch.stack": "scan", "arch.remat": "kept", "mesh.data": 1, "mesh.fsdp": -1}
FASTEST |= {"arch.attention": "flash"}


@dataclasses.dataclass(frozen=True)
class Found:
    cycles: float  # millions, of one step
    modelled: float  # the same, of what has no cycles
    gigabytes: float  # of a chip's memory
    compile_seconds: float

    @property
    def total(self) -> float:
        return self.cycles + self.modelled

    def __add__(self, other: "Found") -> "Found":
        """One after the other, on the same chips."""
        return Found(
            self.cycles + other.cycles,
            self.modelled + other.modelled,
            max(self.gigabytes, other.gigabytes),
            self.compile_seconds + other.compile_seconds,
        )


def ours(
    topology: Topology, rows: int, length: int, layers: int, preset: str, changes
) -> tuple[Found, float]:
    """By `bert_jax compile`, in a process of its own; and the FLOPs of a chip."""
    fields = {"batch": rows * topology.chips, "length": length, "arch.layers": layers}
    fields |= {"optim.name": "adamw", **FASTEST}
    fields["rows"] = "stream" if preset.startswith("xlnet") else "full"
    command = [sys.executable, "-m", "bert_jax", "compile", "--json"]
    command += ["--config", f"pretrain:{preset}", "--topology", str(topology)]
    fields |= changes
    command += [f"--config.{name}={value}" for name, value in fields.items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if not done.stdout:
        raise InputError(f"bert_jax compile failed:\n{done.stderr[-2000:]}")
    (report,) = json.loads(done.stdout)
    if not report["fits"]:
        raise InputError(
            f"{rows} rows of {length} do not fit: {report['needed']} bytes"
        )
    told = report["estimate"]
    found = Found(
        cycles=told["cycles"] / 1e6,
        modelled=sum(told["modelled"].values()) * told["clock"] / 1e6,
        gigabytes=report["needed"] / GIB,
        compile_seconds=report["compile_seconds"],
    )
    return found, report["flops"] / topology.chips


def theirs(
    topology: Topology, rows: int, length: int, layers: int, model: str, bits: str
) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "program.txt"
        command = [THEIRS / "bin/python", ROOT / "benchmarks/flax_bert.py", out]
        command += ["--topology", topology, "--rows", rows, "--length", length]
        command += ["--layers", layers, "--model", model, "--dropout", bits]
        environment = os.environ | topology.environment | {"PYTHONPATH": ""}
        done = subprocess.run(
            [str(word) for word in command],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise InputError(f"flax_bert.py failed:\n{done.stderr[-2000:]}")
        told = json.loads(out.with_suffix(".json").read_text())
        mesh = {"data": topology.chips}
        found = estimate(Program(out.read_text()), topology.chip, mesh)
    return Found(
        cycles=found.cycles / 1e6,
        modelled=sum(found.modelled.values()) * found.clock / 1e6,
        gigabytes=told["needed"] / GIB,
        compile_seconds=told["compile_seconds"],
    )


def make_environment() -> None:
    """For the other side, with the same JAX and the same compiler."""
    if (THEIRS / "done").exists():
        return
    print(f"making the environment {THEIRS.relative_to(ROOT)}", flush=True)
    venv.create(THEIRS, with_pip=True, clear=True)
    same = [f"{name}=={version(name)}" for name in ("jax", "flax", "optax")]
    wanted = ["transformers==4.57.6", *same, "libtpu==0.0.42.*"]
    pip = [THEIRS / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*map(str, pip), *wanted], check=True)
    (THEIRS / "done").touch()


def shape_of(text: str) -> tuple[int, int]:
    rows, _, length = text.partition("x")
    if not (rows.isdigit() and length.isdigit()):
        raise InputError(f"--shapes {text}: rows on a chip x tokens, as 32x128")
    return int(rows), int(length)


def field_of(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--ours {text}: FIELD=VALUE, as arch.stack=loop")
    return name, value


def tell(results: dict[str, Found], least: float) -> None:
    """`least` is how many million cycles the FLOPs take at the peak."""
    print("| | M cycles | modelled | total | of peak | GiB | compiled in, s |")
    print("|---|---|---|---|---|---|---|")
    for name, one in results.items():
        print(
            f"| {name} | {one.cycles:.1f} | {one.modelled:.1f} | {one.total:.1f} "
            f"| {least / one.total:.2f} | {one.gigabytes:.2f} "
            f"| {one.compile_seconds:.0f} |"
        )
    for name, one in results.items():
        if name != OURS:
            cost = results[OURS].total / one.total
            wait = results[OURS].compile_seconds / one.compile_seconds
            told_time = f"{wait:.2f} of its compile time"
            print(f"of {name}: {cost:.2f} of the total, {told_time}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument(
        "--objectives", nargs="+", choices=TRAINED, default=["masked_lm"]
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dropout", nargs="+", choices=GENERATORS, default=GENERATORS)
    parser.add_argument(
        "--ours", nargs="*", default=[], metavar="FIELD=VALUE", help="of our config"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    told = parser.parse_args()
    topology = Topology.parse(told.topology)
    shapes = [shape_of(shape) for shape in told.shapes]
    changes = dict(field_of(change) for change in told.ours)
    check_compiler()
    make_environment()
    results = {}
    for objective in told.objectives:
        for rows, length in shapes:
            sizes = (topology, rows, length, told.layers)
            preset, models = TRAINED[objective]
            found, flops = ours(*sizes, preset, changes)
            all_found = {OURS: found}
            for bits in told.dropout if models else ():
                parts = [theirs(*sizes, model, bits) for model in models]
                all_found[f"flax, {bits}"] = functools.reduce(operator.add, parts)
            results[f"{objective}, {rows}x{length}"] = all_found
            shape = f"{rows} rows of {length} tokens on each chip"
            print(f"\n{objective}: {preset}, {told.layers} layers, {shape}")
            tell(all_found, flops / topology.chip.flops_per_cycle / 1e6)
    if told.json:
        plain = {
            shape: {name: dataclasses.asdict(one) for name, one in found.items()}
            for shape, found in results.items()
        }
        told.json.write_text(json.dumps(plain, indent=2))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        fail(error)
