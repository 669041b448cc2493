"""Our training step against `transformers` on PyTorch, on the cores of one machine.

    python -m benchmarks.train_step        # from the root of the repository
    python -m benchmarks.train_step --sizes mini --rounds 3 --json mini.json
    python -m benchmarks.train_step --sizes rtd-small permuted-small

All train on the same tokens: f32, 128 tokens a row, dropout 0.1, gradient clipped at
norm 1, AdamW. BERT as a masked language model (mini, small, base; 19 predictions a
row), ELECTRA's two towers (rtd-...; 19) and XLNet's two streams (permuted-...; 21).
Each contender runs in a process of its own, bound to the same cores; they take turns,
round after round, and the fastest step of all rounds counts, because other jobs can
only slow one down.

"all" is BertForMaskedLM with labels, as `transformers` trains it: every position is
scored. "gathered" takes the predicted positions before the LM head, as we do: of BERT,
and of ELECTRA's generator, an ElectraForMaskedLM on the embeddings of an
ElectraForPreTraining. "released" is XLNetLMHeadModel with perm_mask and target_mapping,
as it is; "lean" is the same with dropout only where our step draws it (not inside the
feed-forward part, nor on sinusoids, queries and last states) and with the sinusoids
projected once, not for each row. Torch runs with the attention that `transformers`
chooses (the table names it) and with fused AdamW, its fastest on a CPU.

What favours torch: its tokens are corrupted before the clock starts (what ELECTRA's
generator says is sampled in the step, as it must be), and it is passed no visibility,
but for XLNet's order, and no types; our step corrupts, compares groups, scores XLNet's
types and reports accuracy and norm each time.

of peak: (model FLOPs of a step / its best time) / the best f32 rate of a product of two
2048 x 2048 matrices that numpy, torch or jax reached on the same cores, each asked once
in every round. Model FLOPs are the products in the trace of our loss and its gradient
(bert_jax/flops.py), without the optimizer. They are the same number for all contenders
of a size, since they stand for the useful work: what torch computes beyond it (the LM
head over the other positions, XLNet's query stream at all positions, its sinusoids for
each row) takes time and counts for nothing.

step MB: the most memory that the process has in a step, less what it had before the
model was built, when all libraries were loaded: parameters, optimizer state, gradients,
activations. For this, steps are done after the timed ones, and before them all free
memory goes back to the system. all MB: the same of all that was before, the compiler
included. Both are the least of all rounds; torch.compile finds from the second round on
what it compiled in the first. The JSON has the whole process, libraries and all, too.
"""

import argparse
import functools
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.matmul import LIBRARIES
from benchmarks.sizes import DROPOUT, FORMS, FORMS_OF, OURS, PEERS, SIZES, S
from benchmarks.worker import FLOPS, MATMULS, run_worker

LEAST = ("step_megabytes", "peak_megabytes", "process_megabytes")  # of all rounds


def run_size(size: str, *, rounds: int, peers: list[str], run: Callable) -> dict:
    """Contenders in turn, round after round; one that failed is not tried again."""
    results = {name: [] for name in (*MATMULS, OURS, *peers)}
    errors = dict.fromkeys(results)
    counted = run(size, FLOPS)
    for turn in range(1, rounds + 1):
        for name in results:
            if errors[name]:
                continue
            print(f"{size}: round {turn} of {rounds}: {name}", file=sys.stderr)
            result = run(size, name)
            errors[name] = result.get("error")
            if errors[name]:
                print(f"{name} failed:\n{errors[name]}", file=sys.stderr)
            else:
                results[name].append(result)

    its = SIZES[size]
    rates = {
        library: max(result["flops_per_s"] for result in results[name])
        for library, name in zip(LIBRARIES, MATMULS, strict=True)
        if results[name]
    }
    contenders = {
        name: summary(results[name], tokens=its.batch * S) | {"error": errors[name]}
        for name in (OURS, *peers)
    }
    speed = {name: entry.get("tokens_per_s") for name, entry in contenders.items()}
    for name, entry in contenders.items():
        if speed[name] and rates and "step_flops" in counted:
            rate = counted["step_flops"] / entry["best_step_s"]
            entry["share_of_peak"] = rate / max(rates.values())
        if name != OURS and speed[OURS] and speed[name]:
            entry["ratio"] = speed[OURS] / speed[name]
    best = {}
    for form in FORMS_OF[its.objective]:
        able = [n for n in peers if n.endswith(form) and "ratio" in contenders[n]]
        if able:
            peer = max(able, key=speed.get)
            best[form] = {"contender": peer, "ratio": contenders[peer]["ratio"]}
    return {
        "preset": its.preset,
        "objective": its.objective,
        "layers": its.arch.layers,
        "width": its.arch.width,
        "batch": its.batch,
        "predicted": its.predicted,
        "step_flops": counted.get("step_flops"),
        "matmul_flops_per_s": rates,
        "measures_failed": {
            name: error
            for name, error in {FLOPS: counted.get("error"), **errors}.items()
            if error and name not in contenders
        },
        "contenders": contenders,
        "best_torch": best,
    }


def summary(results: list[dict], *, tokens: int) -> dict:
    """Best of all rounds; the first step is that of round 1, whose caches are empty."""
    if not results:
        return {}
    times = [seconds for result in results for seconds in result["steps_s"]]
    first = {k: v for k, v in results[0].items() if k != "steps_s"}
    return {
        "tokens_per_s": tokens / min(times),
        "best_step_s": min(times),
        "median_step_s": statistics.median(times),
        **first,
        **{name: min(result[name] for result in results) for name in LEAST},
    }


def table(size: str, result: dict) -> str:
    entries = result["contenders"].values()
    attention = {entry["attention"] for entry in entries if "attention" in entry}
    lines = [
        f"{size}: {result['objective']}, {result['layers']} layers x "
        f"{result['width']}, batch {result['batch']} x {S}, torch attention "
        f"{', '.join(sorted(attention))}"
    ]
    if result["step_flops"]:
        lines.append(f"  model FLOPs of a step: {result['step_flops'] / 1e9:.1f} G")
    rates = [f"{n} {r / 1e9:.1f}" for n, r in result["matmul_flops_per_s"].items()]
    if rates:
        lines.append(f"  f32 matrix products, GFLOP/s: {', '.join(rates)}")
    lines.append(
        f"  {'':24}{'tokens/s':>9}{'best ms':>9}{'median ms':>10}{'of peak':>9}"
        f"{'step MB':>9}{'all MB':>8}{'first step s':>14}{'ours / it':>11}"
    )
    for name, entry in result["contenders"].items():
        if "tokens_per_s" in entry:
            ratio = f"{entry['ratio']:.2f}" if "ratio" in entry else ""
            share = f"{entry['share_of_peak']:.3f}" if "share_of_peak" in entry else ""
            lines.append(
                f"  {name:24}{entry['tokens_per_s']:9.0f}"
                f"{1e3 * entry['best_step_s']:9.1f}{1e3 * entry['median_step_s']:10.1f}"
                f"{share:>9}{entry['step_megabytes']:9.0f}{entry['peak_megabytes']:8.0f}"
                f"{entry['first_step_s']:14.1f}{ratio:>11}"
            )
        if entry["error"]:
            lines.append(f"  {name:24}FAILED: {entry['error'].splitlines()[0]}")
    for name, error in result["measures_failed"].items():
        lines.append(f"  {name:24}FAILED: {error.splitlines()[0]}")
    for form, best in result["best_torch"].items():
        lines.append(
            f"  ours / best torch, {FORMS[form]}: {best['ratio']:.2f} "
            f"({best['contender']})"
        )
    return "\n".join(lines)


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def parse() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=SIZES,
        default=["mini", "small", "base"],
        help="those with toy only check that everything runs "
        "(default: mini small base)",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=list(PEERS),
        help="default: all that train what is asked for; torch-compile takes minutes "
        "to compile base",
    )
    count = functools.partial(parser.add_argument, type=int)
    count("--rounds", default=5, help="turns of each contender (default: 5)")
    count("--steps", default=10, help="timed steps in a turn (default: 10)")
    count("--threads", default=cores, help=f"cores to use (default: all {cores})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results here")
    args = parser.parse_args()
    problems = [
        f"--{name} {getattr(args, name)} must be at least 1"
        for name in ("rounds", "steps", "threads")
        if getattr(args, name) < 1
    ]
    problems += [
        f"--sizes {size}: none of --peers {' '.join(args.peers)} trains "
        f"{SIZES[size].objective}: {', '.join(SIZES[size].peers())} do"
        for size in args.sizes
        if not SIZES[size].peers(args.peers)
    ]
    if args.threads > cores:
        problems.append(f"--threads {args.threads}: this process may use {cores} cores")
    if problems:
        parser.error("\n".join(problems))
    return args


def main() -> int:
    args = parse()
    counts = {"steps": args.steps, "threads": args.threads}
    # All that is started inherits it: numpy counts these cores, and so does XLA.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"load {load:.1f}: other jobs run, figures will be off", file=sys.stderr)
    report = {
        "cpu": cpu_name(),
        "load": load,
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("jax", "jaxlib", "flax", "torch", "transformers")
        },
        "rounds": args.rounds,
        **counts,
        "dtype": "float32",
        "length": S,
        "dropout": DROPOUT,
        "sizes": {},
    }
    failed = False
    with tempfile.TemporaryDirectory() as cache:
        run = functools.partial(run_worker, cache=Path(cache), **counts)
        for size in args.sizes:
            peers = SIZES[size].peers(args.peers)
            result = run_size(size, rounds=args.rounds, peers=peers, run=run)
            report["sizes"][size] = result
            print(table(size, result), flush=True)
            failed |= any(entry["error"] for entry in result["contenders"].values())
            failed |= bool(result["measures_failed"])
            if args.json:  # after each size, so that a stop loses only one
                args.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
