"""Our training step against `transformers` on PyTorch, on the cores of one machine.

    python -m benchmarks.train_step        # from the root of the repository
    python -m benchmarks.train_step --sizes mini --rounds 3 --json mini.json

All train BERT as a masked language model on the same tokens: f32, 128 tokens a row, 19
of them predicted, dropout 0.1, gradient clipped at norm 1, AdamW. Each contender runs
in a process of its own, bound to the same cores; they take turns, round after round,
and the fastest step of all rounds counts, because other jobs can only slow one down.

"all" is BertForMaskedLM with labels, as `transformers` trains it: every position is
scored. "gathered" takes the predicted positions before the LM head, as we do. Torch
runs with the attention that `transformers` chooses (the table names it) and with fused
AdamW, its fastest on a CPU. What favours torch: its tokens are corrupted before the
clock starts, and no visibility is passed; our step corrupts, compares groups and
reports accuracy and norm each time.
"""

import argparse
import functools
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bert_jax.host_memory import keep_freed_memory
from bert_jax.presets import preset

SIZES = {  # size: preset, rows in a batch
    "mini": ("bert-mini", 32),
    "small": ("bert-small", 32),
    "base": ("bert-base-uncased", 8),
    "toy": ("bert-tiny", 2),
}
OURS = "bert_jax"
PEERS = [
    f"torch-{how}-{form}"
    for how in ("eager", "compile")
    for form in ("all", "gathered")
]
FORMS = {
    "all": "LM head over every position",
    "gathered": "LM head over the predicted positions",
}
S, P = 128, 19  # length, predictions in a row
DROPOUT, LR, DECAY, EPS, CLIP = 0.1, 1e-4, 0.01, 1e-6, 1.0
MASK_ID, SPECIAL_IDS, FIRST_WORD = 103, (0, 100, 101, 102, 103), 1000
WARM_UP = 2  # steps after the first, which compiles
ROOT = Path(__file__).parents[1]

# A step trains once, waits until all is done, and returns the loss, not yet read.
Step = Callable[[], object]


def clean_ids(size: str) -> np.ndarray:
    """The same tokens for everyone: int32 [B, S]."""
    name, B = SIZES[size]
    rng = np.random.default_rng(0)
    high = preset(name).arch.vocab_size
    return rng.integers(FIRST_WORD, high, (B, S), dtype=np.int32)


def our_step(size: str) -> tuple[Step, dict]:
    import jax
    import jax.numpy as jnp

    from bert_jax.models.model import Model, init_params
    from bert_jax.objectives.masked_lm import MaskedLM
    from bert_jax.optim import Optim, make_optimizer
    from bert_jax.step import TrainState, make_train_step

    arch = preset(SIZES[size][0]).arch
    arch = arch.but(dropout=DROPOUT, attention_dropout=DROPOUT)
    model = Model(arch)
    objective = MaskedLM(
        vocab_size=arch.vocab_size,
        mask_id=MASK_ID,
        special_ids=SPECIAL_IDS,
        next_sentence=0.0,
    )
    params = init_params(model, jax.random.key(0), heads=objective.heads)
    optim = Optim(lr=LR, decay=DECAY, eps=EPS, clip=CLIP)
    optimizer = make_optimizer(optim, 1000, params)
    state = TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        seed=jnp.uint32(0),
    )
    ids = jnp.asarray(clean_ids(size))
    batch = {
        "ids": ids,
        "types": jnp.zeros_like(ids),
        "positions": jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), ids.shape),
        "group": jnp.ones_like(ids),
    }
    train_step = jax.jit(make_train_step(model, objective, optimizer), donate_argnums=0)

    def step():
        nonlocal state
        state, means = train_step(state, batch)
        jax.block_until_ready(state)
        return means["loss"].value

    return step, {}


def torch_step(size: str, *, how: str, form: str, threads: int) -> tuple[Step, dict]:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    arch = preset(SIZES[size][0]).arch
    config = BertConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.width,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        intermediate_size=arch.inner,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
    )
    model = BertForMaskedLM(config).train()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, LR, eps=EPS, weight_decay=DECAY, fused=True)

    ids = torch.from_numpy(clean_ids(size)).long()
    B = len(ids)
    where = torch.rand(B, S).argsort(1)[:, :P].sort(1).values  # [B, P]
    targets = ids.gather(1, where)
    shown = ids.scatter(1, where, MASK_ID)
    labels = torch.full_like(ids, -100).scatter(1, where, targets)
    flat_where = (where + S * torch.arange(B)[:, None]).flatten()  # [B P]
    flat_targets = targets.flatten()

    def loss_all():
        return model(shown, labels=labels).loss

    def loss_gathered():
        last = model.bert(shown).last_hidden_state  # [B, S, D]
        predicted = last.flatten(0, 1).index_select(0, flat_where)  # [B P, D]
        return torch.nn.functional.cross_entropy(model.cls(predicted), flat_targets)

    loss_fn = {"all": loss_all, "gathered": loss_gathered}[form]
    if how == "compile":
        loss_fn = torch.compile(loss_fn)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        return loss.detach()

    return step, {"attention": config._attn_implementation}


def work(size: str, contender: str, *, steps: int, threads: int) -> dict:
    """One contender in this process: its times, in seconds, and its first loss."""
    # Before anything starts its threads: they inherit it, and XLA counts these cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    keep_freed_memory()  # as `bert_jax train` does; for all contenders alike
    if contender == OURS:
        step, facts = our_step(size)
    else:
        _, how, form = contender.split("-")
        step, facts = torch_step(size, how=how, form=form, threads=threads)

    def timed():
        start = time.perf_counter()
        loss = step()
        return time.perf_counter() - start, loss

    first, loss = timed()
    for _ in range(WARM_UP):
        step()
    times = [timed()[0] for _ in range(steps)]
    return {"first_step_s": first, "first_loss": float(loss), "steps_s": times, **facts}


def run_worker(
    size: str, contender: str, *, steps: int, threads: int, cache: Path
) -> dict:
    """What `work` returns in a new process, or {"error": ...}."""
    command = [sys.executable, "-m", "benchmarks.train_step"]
    command += ["--worker", size, contender]
    command += ["--steps", str(steps), "--threads", str(threads)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / size / contender),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        return {"error": f"exit {done.returncode}: {done.stderr.strip()[-2000:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_size(size: str, *, rounds: int, peers: list[str], run: Callable) -> dict:
    """Contenders in turn, round after round; one that failed is not tried again."""
    results = {name: [] for name in (OURS, *peers)}
    errors = dict.fromkeys(results)
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

    member, B = SIZES[size]
    arch = preset(member).arch
    contenders = {
        name: summary(results[name], tokens=B * S) | {"error": errors[name]}
        for name in results
    }
    speed = {name: entry.get("tokens_per_s") for name, entry in contenders.items()}
    for name in peers:
        if speed[OURS] and speed[name]:
            contenders[name]["ratio"] = speed[OURS] / speed[name]
    best = {}
    for form in FORMS:
        able = [n for n in peers if n.endswith(form) and "ratio" in contenders[n]]
        if able:
            peer = max(able, key=speed.get)
            best[form] = {"contender": peer, "ratio": contenders[peer]["ratio"]}
    return {
        "preset": member,
        "layers": arch.layers,
        "width": arch.width,
        "batch": B,
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
    }


def table(size: str, result: dict) -> str:
    entries = result["contenders"].values()
    attention = {entry["attention"] for entry in entries if "attention" in entry}
    lines = [
        f"{size}: {result['layers']} layers x {result['width']}, "
        f"batch {result['batch']} x {S}, torch attention {', '.join(attention)}",
        f"  {'':24}{'tokens/s':>9}{'best ms':>9}{'median ms':>11}"
        f"{'first step s':>14}{'ours / it':>11}",
    ]
    for name, entry in result["contenders"].items():
        if "tokens_per_s" in entry:
            ratio = f"{entry['ratio']:.2f}" if "ratio" in entry else ""
            lines.append(
                f"  {name:24}{entry['tokens_per_s']:9.0f}"
                f"{1e3 * entry['best_step_s']:9.1f}{1e3 * entry['median_step_s']:11.1f}"
                f"{entry['first_step_s']:14.1f}{ratio:>11}"
            )
        if entry["error"]:
            lines.append(f"  {name:24}FAILED: {entry['error'].splitlines()[0]}")
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
        help="toy only checks that everything runs (default: mini small base)",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=PEERS,
        help="default: all; torch-compile takes minutes to compile base",
    )
    count = functools.partial(parser.add_argument, type=int)
    count("--rounds", default=5, help="turns of each contender (default: 5)")
    count("--steps", default=10, help="timed steps in a turn (default: 10)")
    count("--threads", default=cores, help=f"cores to use (default: all {cores})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results here")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    problems = [
        f"--{name} {getattr(args, name)} must be at least 1"
        for name in ("rounds", "steps", "threads")
        if getattr(args, name) < 1
    ]
    if args.threads > cores:
        problems.append(f"--threads {args.threads}: this process may use {cores} cores")
    if problems:
        parser.error("\n".join(problems))
    return args


def main() -> int:
    args = parse()
    counts = {"steps": args.steps, "threads": args.threads}
    if args.worker:
        try:
            result = work(*args.worker, **counts)
        except Exception as error:  # of whatever kind: it belongs in the results
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result))
        return 0
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
        "predicted": P,
        "dropout": DROPOUT,
        "sizes": {},
    }
    failed = False
    with tempfile.TemporaryDirectory() as cache:
        run = functools.partial(run_worker, cache=Path(cache), **counts)
        for size in args.sizes:
            result = run_size(size, rounds=args.rounds, peers=args.peers, run=run)
            report["sizes"][size] = result
            print(table(size, result), flush=True)
            failed |= any(entry["error"] for entry in result["contenders"].values())
            if args.json:  # after each size, so that a stop loses only one
                args.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
