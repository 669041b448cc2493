"""Stands for `gcloud` in tests/test_tpu_scripts.py: notes each call, and does it here.

The folder STAND_IN holds what it is told and what it notes:

    calls.jsonl      the words of every call
    fail_at          numbers of the calls that fail
    GROUP.states     what `describe` says, one after the other; the last one stays.
                     GONE is an error as of Google's, BROKEN one of another kind
    answers.jsonl    what `ssh` prints, one after the other; [code, text]. Where there
                     is no such file, ssh and scp are done in worker-0, worker-1, ...,
                     which are the home folders of the workers
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ["STAND_IN"])


def next_line(path: Path, *, stays: bool) -> str:
    first, *others = path.read_text().splitlines()
    if others or not stays:
        path.write_text("".join(f"{line}\n" for line in others))
    return first


def option(words: list[str], name: str, default: str = "") -> str:
    found = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return found[0] if found else default


def describe(group: str) -> int:
    state = next_line(FOLDER / f"{group}.states", stays=True)
    if state == "GONE":
        print("ERROR: (gcloud.describe) NOT_FOUND: no such thing", file=sys.stderr)
    elif state == "BROKEN":
        print("ERROR: (gcloud.describe) the network is down", file=sys.stderr)
    else:
        print(state)
    return int(state in ("GONE", "BROKEN"))


def workers(words: list[str]) -> list[Path]:
    chosen = option(words, "worker", "0")
    there = sorted(FOLDER.glob("worker-*"))
    return there if chosen == "all" else [FOLDER / f"worker-{chosen}"]


def ssh(words: list[str]) -> int:
    if (FOLDER / "answers.jsonl").exists():
        code, text = json.loads(next_line(FOLDER / "answers.jsonl", stays=False))
        print(text)
        return code
    codes = []
    names = ",".join(["localhost"] * len(list(FOLDER.glob("worker-*"))))
    for home in workers(words):
        number = home.name.partition("-")[2]
        about = {"HOME": str(home), "TPU_WORKER_HOSTNAMES": names}
        result = subprocess.run(
            ["bash", "-c", option(words, "command")],
            cwd=home,
            env={**os.environ, **about, "TPU_WORKER_ID": number},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        if into := option(words, "output-directory"):
            (Path(into) / f"{number}.log").write_bytes(result.stdout)
        else:
            sys.stdout.buffer.write(result.stdout)
        codes.append(result.returncode)
    return next((code for code in codes if code), 0)


def scp(words: list[str]) -> int:
    *sources, target = [word for word in words if not word.startswith("--")]
    for home in workers(words):
        for source in sources:
            here, there = source, target
            if ":" in target:
                there = home / target.partition(":")[2]
            else:
                here = home / source.partition(":")[2]
            if Path(here).is_dir():
                shutil.copytree(here, there)
            else:
                shutil.copy(here, there)
    return 0


def main(words: list[str]) -> int:
    with open(FOLDER / "calls.jsonl", "a") as file:
        file.write(json.dumps(words) + "\n")
    count = len((FOLDER / "calls.jsonl").read_text().splitlines())
    told = FOLDER / "fail_at"
    if told.exists() and str(count) in told.read_text().split():
        print("ERROR: (gcloud) there is no quota", file=sys.stderr)
        return 3
    group, verb = words[2:4]
    if verb == "describe":
        return describe(group)
    if verb == "ssh":
        return ssh(words[5:])
    if verb == "scp" and not (FOLDER / "answers.jsonl").exists():
        return scp(words[4:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
