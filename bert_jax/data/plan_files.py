"""A plan of rows is made once and kept beside the data.

    DIR/plans/<kind>-<length>[-<seed>]-v<format>/plan.json, a.bin, b.bin, ...

Columns are raw files that are mapped, not read, so that a plan of any size is there at
once. A plan that is damaged, or of other data, is made again: it is a function of
(data, kind, length, seed).
"""

import contextlib
import hashlib
import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bert_jax.data.corpus import Corpus
from bert_jax.data.pairs import RULES
from bert_jax.data.plans import (
    Plan,
    check,
    covered_count,
    plan_parts,
    read_text,
    token_count,
)
from bert_jax.errors import InputError
from bert_jax.whole import cache_folder, locked, whole_folder, write_text

FORMAT = 4
COLUMNS = {  # name: type, shape of one entry
    "a": (np.int64, (2,)),
    "b": (np.int64, (2,)),
    "labels": (np.int8, ()),
    "rows": (np.int64, ()),
    "blocks": (np.int64, ()),
    "inputs": (np.int32, ()),
}


def write_plan(folder: Path, corpus: Corpus, kind: str, length: int, seed: int) -> None:
    """Columns as raw files, part after part; rows and blocks as running totals."""
    totals = {"rows": 0, "blocks": 0}
    tokens = covered = 0
    parts = plan_parts(corpus, kind, length, seed)
    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(open(folder / f"{name}.bin", "wb"))
            for name in COLUMNS
        }
        for name in totals:
            files[name].write(np.zeros(1, np.int64).tobytes())
        for part in tqdm(parts, desc=f"plan {kind} rows", disable=None, leave=False):
            tokens += token_count(part, kind)
            covered += covered_count(part, kind)
            for name, (dtype, _) in COLUMNS.items():
                column = part[name]
                if name in totals:
                    column = totals[name] + np.cumsum(column)
                    totals[name] = int(column[-1])
                files[name].write(np.ascontiguousarray(column, dtype).tobytes())
    longest = length - (3 if kind in RULES else 2)
    cut = sum(
        int((read_text(corpus, record).lengths > longest).sum())
        for record in range(corpus.records)
    )
    about = {
        "cut": cut,
        "tokens": tokens,
        "pieces": corpus.about["pieces"],
        "covered": covered,
        "content": corpus.about["content"],
        "checksums": {name: checksum(folder, name) for name in COLUMNS},
    }
    write_text(folder / "plan.json", json.dumps(about))


def checksum(folder: Path, name: str) -> int:
    found = 0
    with open(folder / f"{name}.bin", "rb") as file:
        while data := file.read(1 << 22):
            found = zlib.crc32(data, found)
    return found


def read_plan(folder: Path, corpus: Corpus, kind: str, length: int) -> Plan | None:
    """The plan in a folder; None where there is none, or not just what was written."""
    try:
        about = json.loads((folder / "plan.json").read_text())
        found = {name: checksum(folder, name) for name in COLUMNS}
        if found != about["checksums"] or about["content"] != corpus.about["content"]:
            return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    columns = {
        name: np.memmap(folder / f"{name}.bin", dtype, "r").reshape(-1, *shape)
        for name, (dtype, shape) in COLUMNS.items()
    }
    return Plan(kind, length, **columns, about=about)


def open_plan(corpus: Corpus, kind: str, length: int, seed: int) -> Plan:
    """The plan that lies beside the data, made now if it is not there or damaged.

    Data that cannot be written to, or lies in a bucket, has its plans in the cache.
    """
    check(corpus, kind, length)
    name = f"{kind}-{length}" + (f"-{seed}" if kind in RULES else "") + f"-v{FORMAT}"
    beside = Path(corpus.path) / "plans"
    if corpus.remote or not os.access(corpus.path, os.W_OK):
        about = hashlib.sha256(json.dumps(corpus.about).encode()).hexdigest()[:16]
        beside = cache_folder() / "plans" / about
    folder = beside / name
    with locked(beside, wait=True):  # another process may be making it
        verify_once(corpus, beside)
        plan = read_plan(folder, corpus, kind, length)
        if plan is None:
            shutil.rmtree(folder, ignore_errors=True)
            with whole_folder(folder) as scratch:
                write_plan(scratch, corpus, kind, length, seed)
            plan = read_plan(folder, corpus, kind, length)
    if plan is None:
        raise InputError(f"{folder} does not keep what is written to it: a bad disk?")
    return plan


def verify_once(corpus: Corpus, folder: Path) -> None:
    """Checks every bit of a corpus the first time that just these files are used.

    A copy of the corpus, also one that brings its plans along, is checked anew.
    """
    shards = (
        [] if corpus.remote else corpus.shards
    )  # those of a bucket stay as they are
    times = [shard.written() for shard in shards]
    known = json.dumps({"path": str(corpus.path), "written": times})
    path = folder / "verified.json"
    if not path.is_file() or path.read_text() != known:
        corpus.verify()
        write_text(path, known)
