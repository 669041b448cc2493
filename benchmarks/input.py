"""The input pipeline alone: tokens a second, and how long the first batch takes.

    python -m benchmarks.input CORPUS          # made by `bert_jax prepare`
    python -m benchmarks.input CORPUS --json input.json

For each kind of rows: tokens a second through the whole pipeline (read, check, rows,
tf.data) on the cores of this machine, best of several turns, and the seconds to the
first batch at step 0 and at step 1,000,000. Beside it stand what one TPU host needs
(BERT-base on 8 v5e chips at half of their peak) and what the training step of BERT-tiny
consumes on these cores, measured in the same run.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from bert_jax.data.corpus import open_corpus
from bert_jax.data.pipeline import train_batches
from bert_jax.data.rows import Rows
from bert_jax.flops import step_flops
from bert_jax.metrics import PEAK
from bert_jax.models.model import Model
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.presets import preset

CASES = [("full", 512), ("full", 128), ("doc", 512), ("pair", 512), ("pair", 128)]
CHIPS, SHARE = 8, 0.5
FAR = 1_000_000


def host_need(length: int) -> float:
    """Tokens a second that BERT-base consumes on one TPU v5e host at half of peak."""
    arch = preset("bert-base-uncased").arch
    objective = MaskedLM(arch.vocab_size, 103, (0, 100, 101, 102, 103), next_sentence=0)
    row = step_flops(Model(arch), objective, batch=1, length=length)
    return SHARE * CHIPS * PEAK["TPU v5 lite"] / row * length


def measure(corpus, kind: str, length: int, *, batch: int, seconds: float) -> dict:
    rows = Rows(corpus, kind, length)
    begin = time.perf_counter()
    count = len(rows)  # makes the plan, or opens it
    plan = time.perf_counter() - begin
    batch = min(batch, count)
    first = {}
    for start in (0, FAR):
        begin = time.perf_counter()
        next(batches(rows, batch, start))
        first[start] = time.perf_counter() - begin
    best = 0.0
    for _ in range(3):
        done, begin, before = 0, None, corpus.bytes_read
        for made in batches(rows, batch, 0):
            if begin is None:  # the first batch waits for TensorFlow
                begin = time.perf_counter()
                continue
            done += made["ids"].size
            if time.perf_counter() - begin > seconds:
                break
        best = max(best, done / (time.perf_counter() - begin))
    return {
        "rows": count,
        "real": rows.plan.real,
        "plan_s": plan,
        "tokens_per_s": best,
        "first_batch_s": first[0],
        "first_batch_far_s": first[FAR],
        "megabytes_per_s": (corpus.bytes_read - before) / 1e6 / seconds,
    }


def batches(rows: Rows, batch: int, start: int):
    stop = start + 10 * FAR
    return train_batches(rows, size=batch, start=start, stop=stop, part=slice(0, batch))


def tiny_step(length: int, batch: int) -> float:
    """Tokens a second of a BERT-tiny training step on these cores."""
    from benchmarks.ours import our_step
    from benchmarks.sizes import S, Size

    tiny = Size("bert-tiny", batch * length // S)
    step, _ = our_step(tiny)
    for _ in range(3):
        step()
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return tiny.batch * S / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", help="made by `bert_jax prepare`")
    parser.add_argument("--batch", type=int, default=256, help="rows in a batch")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results here")
    args = parser.parse_args()
    corpus = open_corpus(args.corpus)
    cores = len(os.sched_getaffinity(0))
    report = {"cores": cores, "batch": args.batch, "pieces": corpus.about["pieces"]}
    tiny = report["bert_tiny_step"] = tiny_step(128, 32)
    print(f"{cores} cores; a BERT-tiny step consumes {tiny:,.0f} tokens/s")
    print(
        f"{'rows':>10}{'tokens/s':>14}{'a core':>13}{'of a TPU host':>15}"
        f"{'of BERT-tiny':>14}{'first s':>9}{'far s':>7}{'real':>8}"
    )
    for kind, length in CASES:
        case = measure(corpus, kind, length, batch=args.batch, seconds=args.seconds)
        report[f"{kind}-{length}"] = case
        speed = case["tokens_per_s"]
        print(
            f"{kind + ' ' + str(length):>10}{speed:14,.0f}{speed / cores:13,.0f}"
            f"{speed / host_need(length):14.1f}x{speed / tiny:13.0f}x"
            f"{case['first_batch_s']:9.2f}{case['first_batch_far_s']:7.2f}"
            f"{case['real']:8.1%}"
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
