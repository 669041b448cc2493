"""Preparing a corpus: ours against what people use, on the same text and vocabulary.

    python -m benchmarks.prepare TEXT --vocab vocab.txt
    python -m benchmarks.prepare books.txt.xz --vocab vocab.txt --json prepare.json

    ours       `bert_jax.data.prepare`: sentences, ids, index, checksums
    tokenizer  `tokenizers.encode_batch` alone, nothing written: the usual limit
    hf         `datasets` + fast tokenizer + group_texts, as run_mlm.py has it
    classic    BERT's create_pretraining_data: 10 masked copies, 20 predictions of 128
               tokens, tf.Example. Written here from its description; words are cut by
               the fast tokenizer, which the release did not have

Each runs in processes of its own, all cores, one after the other; the best of
several rounds counts. Peak memory is that of all its processes together. The classic
recipe gets a twentieth of the text: its speed does not depend on that, and it takes
long.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTENDERS = ("ours", "tokenizer", "hf", "classic")
LENGTH, COPIES, PREDICTIONS, RATE = 128, 10, 20, 0.15


def ours(text: Path, vocab: str, out: Path) -> None:
    from bert_jax.data.prepare import prepare
    from bert_jax.data.tokenizers import load_tokenizer

    prepare(
        [str(text)],
        tokenizer=load_tokenizer(vocab),
        out=out / "corpus",
        workers=len(os.sched_getaffinity(0)),
        progress=False,
    )


def fast_tokenizer(vocab: str):
    from tokenizers import BertWordPieceTokenizer

    return BertWordPieceTokenizer(vocab, lowercase=True)


def tokenizer(text: Path, vocab: str, out: Path) -> None:
    encode = fast_tokenizer(vocab).encode_batch
    lines = [line for line in text.read_text().splitlines() if line]
    for at in range(0, len(lines), 1000):
        encode(lines[at : at + 1000], add_special_tokens=False)


def hf(text: Path, vocab: str, out: Path) -> None:
    import datasets
    from transformers import BertTokenizerFast

    datasets.disable_progress_bars()
    encode = BertTokenizerFast(vocab_file=vocab)
    cores = len(os.sched_getaffinity(0))
    raw = datasets.load_dataset(
        "text", data_files=str(text), split="train", cache_dir=str(out / "cache")
    )
    ids = raw.map(
        lambda rows: encode(rows["text"], return_special_tokens_mask=True),
        batched=True,
        num_proc=cores,
        remove_columns=["text"],
    )

    def group(rows):
        joined = {name: sum(values, []) for name, values in rows.items()}  # noqa: RUF017
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        return {
            name: [values[i : i + LENGTH] for i in range(0, total, LENGTH)]
            for name, values in joined.items()
        }

    grouped = ids.map(group, batched=True, num_proc=cores)
    grouped.save_to_disk(str(out / "corpus"))
    for path in (out / "cache").rglob("*.arrow"):  # only the result is counted
        path.unlink()


def classic(text: Path, vocab: str, out: Path) -> None:
    import tensorflow as tf

    from bert_jax.data.pairs import next_sentence

    encode = fast_tokenizer(vocab)
    cls, sep, mask_id = (encode.token_to_id(f"[{x}]") for x in ("CLS", "SEP", "MASK"))
    size = encode.get_vocab_size()
    documents = [
        [
            encoded.ids
            for encoded in encode.encode_batch(
                document.splitlines(), add_special_tokens=False
            )
            if encoded.ids
        ]
        for document in text.read_text().split("\n\n")
    ]
    documents = [document for document in documents if document]
    rng = random.Random(12345)
    pieces, starts = [], []  # all documents one after the other
    for document in documents:
        begins = [len(pieces)]
        for sentence in document:
            pieces += sentence
            begins.append(len(pieces))
        starts.append(begins)

    def partner(a: int, wanted: int) -> tuple[int, int]:
        other = rng.choice(starts)
        at = rng.randrange(len(other) - 1)
        stop = at + 1
        while stop < len(other) - 1 and other[stop] - other[at] < wanted:
            stop += 1
        return other[at], other[stop]

    def feature(values: list) -> tf.train.Feature:
        if isinstance(values[0], float):
            return tf.train.Feature(float_list=tf.train.FloatList(value=values))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    with tf.io.TFRecordWriter(str(out / "examples.tfrecord")) as writer:
        for _ in range(COPIES):
            for begins in starts:
                for a0, a1, b0, b1, label in next_sentence(
                    begins, LENGTH, rng, partner
                ):
                    ids = [cls, *pieces[a0:a1], sep, *pieces[b0:b1], sep]
                    types = [0] * (a1 - a0 + 2) + [1] * (b1 - b0 + 1)
                    places = [i for i, x in enumerate(ids) if x not in (cls, sep)]
                    rng.shuffle(places)
                    count = min(PREDICTIONS, max(1, round(len(ids) * RATE)))
                    chosen = sorted(places[:count])
                    labels = [ids[i] for i in chosen]
                    for i in chosen:
                        draw = rng.random()
                        if draw < 0.8:
                            ids[i] = mask_id
                        elif draw < 0.9:
                            ids[i] = rng.randrange(size)
                    pad = LENGTH - len(ids)
                    less = PREDICTIONS - count
                    columns = {
                        "input_ids": ids + [0] * pad,
                        "input_mask": [1] * len(ids) + [0] * pad,
                        "segment_ids": types + [0] * pad,
                        "masked_lm_positions": chosen + [0] * less,
                        "masked_lm_ids": labels + [0] * less,
                        "masked_lm_weights": [1.0] * count + [0.0] * less,
                        "next_sentence_labels": [label],
                    }
                    features = {name: feature(v) for name, v in columns.items()}
                    example = tf.train.Example(
                        features=tf.train.Features(feature=features)
                    )
                    writer.write(example.SerializeToString())


def memory_of(pid: int) -> int:
    """Resident bytes of a process and all its descendants; shared pages count once."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    family, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in family}
        grown = not more <= family
        family |= more
    total = 0
    for member in family:
        try:
            text = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:
            continue
        lines = [line for line in text.splitlines() if line.startswith("Pss:")]
        total += 1024 * sum(int(line.split()[1]) for line in lines)
    return total


def own_peak() -> int:
    """The most resident bytes that this process ever had: one that is done between two
    looks at its memory was never seen from outside."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith("VmHWM")).split()[1])


def run(name: str, text: Path, vocab: str) -> dict:
    """One contender in a new process: seconds, peak memory, bytes on disk."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "benchmarks.prepare", str(text)]
        command += ["--vocab", vocab, "--worker", name, out]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(0.2)
        if process.returncode:
            raise SystemExit(f"{name} failed")
        *_, seconds, own = process.stdout.read().split()
        seconds, peak = float(seconds), max(peak, int(own))
        disk = sum(p.stat().st_size for p in Path(out).rglob("*") if p.is_file())
    size = text.stat().st_size
    return {
        "megabytes": size / 1e6,
        "seconds": seconds,
        "megabytes_per_s": size / 1e6 / seconds,
        "peak_megabytes": peak / 1e6,
        "disk_share": disk / size,
    }


def sample(source: str, megabytes: float, path: Path) -> Path:
    """The first documents of an input, as plain text, a blank line between them."""
    from bert_jax.data.text import documents

    size = 0
    with path.open("w", encoding="utf-8") as file:
        for document in documents([source]):
            size += file.write(document.text + "\n\n")
            if size >= megabytes * 1e6:
                break
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", help="an input of `bert_jax prepare`")
    parser.add_argument("--vocab", required=True, help="vocab.txt of an uncased BERT")
    parser.add_argument("--megabytes", type=float, default=60.0, help="of text to use")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=CONTENDERS[1:],
        default=CONTENDERS[1:],
        help="default: all; hf needs pip install 'bert_jax[bench]'",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results here")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, out = args.worker
        begin = time.perf_counter()
        globals()[name](Path(args.text), args.vocab, Path(out))
        print(time.perf_counter() - begin, own_peak())
        return
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = sample(args.text, args.megabytes, Path(folder) / "text.txt")
        part = sample(args.text, args.megabytes / 20, Path(folder) / "part.txt")
        for turn in range(args.rounds):
            for name in ("ours", *args.peers):
                print(f"round {turn + 1}: {name}", file=sys.stderr)
                found = run(name, part if name == "classic" else text, args.vocab)
                best = results.setdefault(name, found)
                if found["seconds"] < best["seconds"]:
                    results[name] = found
    mine = results["ours"]
    print(
        f"{'':10}{'MB/s':>8}{'peak MB':>10}{'disk / text':>13}{'ours faster':>13}"
        f"{'ours / its disk':>17}"
    )
    for name, found in results.items():
        faster = mine["megabytes_per_s"] / found["megabytes_per_s"]
        smaller = mine["disk_share"] / found["disk_share"] if found["disk_share"] else 0
        print(
            f"{name:10}{found['megabytes_per_s']:8.2f}{found['peak_megabytes']:10.0f}"
            f"{found['disk_share']:13.3f}{faster:12.1f}x{smaller:17.3f}"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
