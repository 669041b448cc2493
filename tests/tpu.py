"""A TPU's compiler, without a TPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def run_for_tpu(program: str) -> dict:
    """What a program that can compile for TPUs prints in its last line, as JSON."""
    done = with_compiler([sys.executable, "-c", program], TPU)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def run_compile(*words: str) -> subprocess.CompletedProcess:
    """`bert_jax compile` of these words; it finds its own environment."""
    return with_compiler([sys.executable, "-m", "bert_jax", "compile", *words], {})


def with_compiler(command: list[str], environment: dict) -> subprocess.CompletedProcess:
    # `make test` puts libtpu in a folder of its own: where it can be imported, every
    # start of jax looks for a TPU first.
    folder = Path(sys.prefix) / "libtpu"
    if not folder.is_dir() and importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler: `make test` installs libtpu")
    # The flags of this process are for its eight devices.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env["PYTHONPATH"] = str(folder)
    return subprocess.run(
        command,
        cwd=ROOT,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=900,  # many compiles, and machines that do much beside
    )
