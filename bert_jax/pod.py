"""Whether a pod can do a run, before hours are spent: `tpu check` of tpu_scripts.

Every worker looks for itself and prints what it found, a line of JSON at a time, so
that one which dies on the way has still said how far it came. The lines of all workers
are compared on the machine that asked: what is to be the same on all, that each sees
the devices of all, that there is data and room.

    python -m bert_jax.pod --data CORPUS --workdir DIR     on each worker
    python -m bert_jax.pod --compare FOLDER                of what they printed

The hosts are told by BERT_JAX_HOSTS (comma-separated) and BERT_JAX_HOST (the number
of this one). They meet as those of a run do, by the same ports, so that one which is
closed or taken is named here. Comparing takes no package but Python.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bert_jax.errors import InputError, fail
from bert_jax.meeting import CODE, PACKAGES, PORT, Hosts, come_together, versions

GIGABYTE = 1e9
# What of the findings has to be equal on all workers.
SAME = ("python", "bert_jax", CODE, *PACKAGES, "hosts", "all devices", "corpus")


def look(data: str, workdir: str, *, within: int) -> Iterator[dict]:
    """What this worker finds, in the order of how likely it is to end here."""
    hosts = Hosts(
        tuple(os.environ.get("BERT_JAX_HOSTS", socket.gethostname()).split(",")),
        index=int(os.environ.get("BERT_JAX_HOST", "0")),
        port=int(os.environ.get("BERT_JAX_PORT", PORT)),
        meet_within=within,
    )
    index, count = hosts.index, len(hosts.names)
    yield {"worker": index, "hosts": count, "name": socket.gethostname()}
    yield dict.fromkeys(PACKAGES, "none") | versions()
    if data:
        yield attempt("data", lambda: look_at_data(data))
    sign = Path(workdir) / f".pod-{index}" if workdir else None
    if sign:
        yield attempt("workdir", lambda: look_at_workdir(sign))
    yield attempt("devices", lambda: look_at_devices(hosts))
    if sign:
        yield attempt("workdir", lambda: look_for_signs(sign))


def attempt(what: str, find: Callable[[], dict]) -> dict:
    """What was found, or why not: the other findings are worth having, too."""
    try:
        return find()
    except Exception as error:  # jax and file systems raise what they like
        return {"problem": f"{what}: {error}"}


def look_at_workdir(sign: Path) -> dict:
    """Whether it can be written, and the room there; leaves a sign for the others."""
    sign.parent.mkdir(parents=True, exist_ok=True)
    sign.write_bytes(bytes(1 << 20))
    return {"free GB": round(shutil.disk_usage(sign.parent).free / GIGABYTE, 1)}


def look_for_signs(sign: Path) -> dict:
    """How many workers left one in this folder: all of them, if it is one folder.

    All have met by now, so all signs are there; they stay until all have counted.
    """
    from jax.experimental.multihost_utils import sync_global_devices

    count = len(list(sign.parent.glob(".pod-*")))
    sync_global_devices("counted")
    sign.unlink()
    return {"workdir of": count}


def look_at_data(data: str) -> dict:
    """Opens the corpus and reads its first and last record with their checksums."""
    from bert_jax.data.corpus import open_corpus

    corpus = open_corpus(data)
    for record in {0, corpus.records - 1}:
        corpus.read_record(record, 0, int(corpus.index["pieces"][record]))
    told = corpus.about["content"] + corpus.tokenizer.hash  # what a run compares
    pieces = int(corpus.record_starts[-1])
    return {"corpus": hashlib.sha256(told.encode()).hexdigest()[:12], "pieces": pieces}


def look_at_devices(hosts: Hosts) -> dict:
    """The hosts meet, and JAX connects them: all as at the start of a run."""
    import jax

    from bert_jax.peers import Peers

    if len(hosts.names) > 1:
        Peers(hosts, come_together(hosts, Path(), {})).connect()
    return {
        "kind": jax.devices()[0].device_kind,
        "devices": jax.local_device_count(),
        "all devices": jax.device_count(),
    }


def read_answers(folder: Path) -> list[dict]:
    """Of each worker all it found, from the file of what it printed."""
    answers = []
    for path in sorted(folder.glob("*.log")):
        answer = {"file": str(path), "problems": []}
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    if "problem" in found:
                        answer["problems"].append(found["problem"])
                    else:
                        answer.update(found)
        answers.append(answer)
    return sorted(answers, key=lambda answer: answer.get("worker", -1))


def problems_of(answers: list[dict], *, room: float) -> list[str]:
    """All that keeps these workers from a run together."""
    problems = []
    for answer in answers:
        who = f"worker {answer.get('worker', '?')}"
        problems += [f"{who}: {problem}" for problem in answer["problems"]]
        if "all devices" not in answer and not answer["problems"]:
            problems.append(f"{who} did not come to the end: see {answer['file']}")
        if answer.get("free GB", room) < room:
            problems.append(
                f"{who}: {answer['free GB']} GB are free in the workdir, {room:g} are "
                "wanted (--room)"
            )
        if answer.get("workdir of", answer.get("hosts")) != answer.get("hosts"):
            problems.append(
                f"{who} shares its workdir with {answer['workdir of'] - 1} of "
                f"{answer['hosts'] - 1} others: mount one disk on all of them"
            )
    here = [answer["worker"] for answer in answers if "worker" in answer]
    expected = max((answer.get("hosts", 0) for answer in answers), default=0)
    missing = sorted({*range(expected)} - {*here})
    if missing or not answers:
        problems.append(f"no answer of workers {missing or 'at all'}")
    problems += [
        f"{twice} workers say that they are number {number}"
        for number in sorted({*here})
        if (twice := here.count(number)) > 1
    ]
    problems += differences(answers)
    total = sum(answer.get("devices", 0) for answer in answers)
    seen = {answer["all devices"] for answer in answers if "all devices" in answer}
    if len(seen) == 1 and seen != {total}:
        problems.append(f"the workers have {total} devices, each sees {seen.pop()}")
    return problems


def differences(answers: list[dict]) -> Iterator[str]:
    for name in SAME:
        found = {}
        for answer in answers:
            if name in answer:
                found.setdefault(answer[name], []).append(str(answer.get("worker")))
        if len(found) > 1:
            listed = "; ".join(
                f"{value} on {', '.join(workers)}" for value, workers in found.items()
            )
            yield f"{name} is not the same on all workers: {listed}"


def table(answers: list[dict]) -> str:
    """A line a worker."""
    names = ["worker", "name", "kind", "devices", "all devices", "python", "jax"]
    names += ["libtpu", CODE, "corpus", "free GB"]
    rows = [names] + [[str(row.get(name, "-")) for name in names] for row in answers]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            word.ljust(width) for word, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def compare(folder: Path, *, room: float) -> None:
    answers = read_answers(folder)
    print(table(answers), flush=True)
    problems = problems_of(answers, room=room)
    if problems:
        raise InputError("this pod cannot do the run:\n  " + "\n  ".join(problems))
    print(f"all {len(answers)} workers can do the run together")


def main(words: list[str] | None = None) -> None:
    about, _, how = __doc__.partition("\n")
    options = argparse.ArgumentParser(
        "python -m bert_jax.pod",
        description=about,
        epilog=how,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--data", default="", help="corpus of the run")
    options.add_argument("--workdir", default="", help="workdir of the run")
    options.add_argument(
        "--within", type=int, default=300, help="seconds in which all have to meet"
    )
    options.add_argument(
        "--compare", metavar="FOLDER", help="NUMBER.log of each worker"
    )
    options.add_argument(
        "--room", type=float, default=10, help="GB that have to be free in the workdir"
    )
    told = options.parse_args(words)
    try:
        if told.compare:
            compare(Path(told.compare), room=told.room)
            return
        ended_well = True
        for found in look(told.data, told.workdir, within=told.within):
            print(json.dumps(found), flush=True)
            ended_well = ended_well and "problem" not in found
    except InputError as error:
        fail(error)
    sys.exit(0 if ended_well else 1)


if __name__ == "__main__":
    main()
