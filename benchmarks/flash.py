"""Flash attention beside dense attention, by the TPU compiler, without a TPU.

    python -m benchmarks.flash --topology v5e:1x1 --lengths 512 1024 2048 4096
    python -m benchmarks.flash --lengths 128 --kernels flash flash-xl --memory 384

Attention alone, forward and backward: 12 heads of 64 as in BERT-base, bf16, dropout
0.1, 16,384 tokens that ask; with --memory so many more before each row answer. flash-xl
has XLNet's relative positions and types. Of dense attention the compiler says how many
cycles it takes; of a kernel it says nothing, and two figures are told: what `bert_jax
compile` models (the least it can take: FLOPs / peak), and the instruction bundles that
the compiler has scheduled for one block, one a cycle, times the blocks. The second is
the one to compare with. Neither is a measurement.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bert_jax.tpu import Topology, check_compiler

HEADS, SIZE, TOKENS = 12, 64, 16_384
INSIDE = "BERT_JAX_BUNDLES"  # the folder of what the compiler writes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", default="v5e:1x1")
    lengths = [512, 1024, 2048, 4096]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    kernels = ("dense", "flash", "flash-xl")
    parser.add_argument(
        "--kernels", nargs="+", choices=kernels, default=["dense", "flash"]
    )
    parser.add_argument("--memory", type=int, default=0)
    given = parser.parse_args()
    topology = Topology.parse(given.topology)
    if INSIDE in os.environ:
        [length], [kernel] = given.lengths, given.kernels
        print(json.dumps(compiled(topology, length, kernel, memory=given.memory)))
        return
    check_compiler()
    print(
        "| length | attention | temporaries, MB | ms | of these the kernel | modelled |"
    )
    print("|---|---|---|---|---|---|")
    for length in given.lengths:
        for kernel in given.kernels:
            one = in_own_process(topology, length, kernel, memory=given.memory)
            names = ("temporaries", "ms", "kernel_ms", "modelled_ms")
            columns = " | ".join(f"{one[name]:.2f}" for name in names)
            print(f"| {length} | {kernel} | {columns} |", flush=True)


def in_own_process(
    topology: Topology, length: int, kernel: str, *, memory: int
) -> dict:
    """The compiler reads where to write when it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        told = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        env = os.environ | topology.environment
        flags = f"{env['LIBTPU_INIT_ARGS']} {told}"
        env |= {INSIDE: folder, "LIBTPU_INIT_ARGS": flags}
        words = ["--topology", str(topology), "--lengths", str(length)]
        words += ["--memory", str(memory)]
        command = [sys.executable, "-m", "benchmarks.flash", *words]
        done = subprocess.run(
            [*command, "--kernels", kernel], env=env, stdout=subprocess.PIPE, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def compiled(topology: Topology, length: int, kernel: str, *, memory: int) -> dict:
    import jax
    import jax.numpy as jnp

    from bert_jax.estimate import estimate
    from bert_jax.hlo import Program
    from bert_jax.models import flash
    from bert_jax.models.attention import attend
    from bert_jax.models.dropout import Noise
    from bert_jax.models.relative import Relative
    from bert_jax.models.tokens import plain, visible
    from bert_jax.sharding import Axes, make_mesh, replicated

    jax.config.update("jax_enable_compilation_cache", False)
    mesh = make_mesh(Axes(), topology.devices()[:1])
    rows, keys = TOKENS // length, memory + length

    def loss(states, ids, seed):
        q, k, v, *relative = states
        answering = plain(ids, real=ids > 0)
        asking = plain(ids[:, memory:], real=ids[:, memory:] > 0)
        noise = Noise(seed, jnp.arange(rows, dtype=jnp.uint32))
        if kernel == "dense":
            seen = visible(asking, answering)
            out, _ = attend(q, k, v, visible=seen, rate=0.1, noise=noise)
        else:
            how = dict(asking=asking, answering=answering, rate=0.1, noise=noise)
            how["relative"] = Relative(*relative) if relative else None
            out = flash.attend_flash(q, k, v, **how)
        return (out.astype(jnp.float32) ** 2).sum()

    def array(shape, kind=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, kind, sharding=replicated(mesh))

    heads = HEADS, SIZE
    states = [array((rows, n, *heads)) for n in (length, keys, keys)]
    if kernel == "flash-xl":  # the projected sinusoids, and u, v, s and two rows of t
        states += [array((keys + length, *heads)), array((5, *heads), jnp.float32)]
    others = array((rows, keys), jnp.int32), array((2,), jnp.uint32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = jax.jit(jax.value_and_grad(loss))
        done = run.lower(states, *others).compile()
    found = estimate(Program(done.as_text()), topology.chip, dict(mesh.shape))
    bundles = 0
    for path in Path(os.environ[INSIDE]).glob("*schedule-analysis_final_bundles.txt"):
        if "flash" in path.name:
            told = re.search(r"total scheduled bundles:\s+(\d+)", path.read_text())
            bundles += int(told[1])
    blocks = rows * HEADS * SIZE // flash.LANES
    for size in (length, keys):
        blocks *= -(-size // flash.block_of(size, most=flash.BLOCK))
    kernels = 1e3 * bundles * blocks / topology.chip.clock
    return {
        "temporaries": done.memory_analysis().temp_size_in_bytes / 1e6,
        "kernel_ms": kernels,
        "ms": 1e3 * found.seconds + kernels,
        "modelled_ms": 1e3 * sum(found.modelled.values()),
    }


if __name__ == "__main__":
    main()
