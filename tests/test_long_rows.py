"""Long rows on a chip, by the compiler's word."""

import json

import pytest

from tests.tpu import run_compile

SMALL = {"layers": 1, "width": 128, "heads": 2, "inner": 256, "vocab_size": 300}
SMALL |= {"stack": "scan", "remat": "kept"}


def compiled(attention: str, *, length: int) -> dict:
    arch = {"attention": attention, "window": 256, "max_positions": length + 2}
    words = ["--config", "pretrain:longformer-base-4096", "--topology", "v5e:1x1"]
    words += [f"--config.arch.{name}={value}" for name, value in (SMALL | arch).items()]
    words += [f"--config.length={length}", "--config.batch=1", "--config.rows=full"]
    done = run_compile(*words, "--json")
    assert done.returncode == 0, done.stderr
    [report] = json.loads(done.stdout)
    told = report["estimate"]
    seconds = told["seconds"] + sum(told["modelled"].values())
    return {"seconds": seconds, "bytes": report["memory"]["temporaries"]}


@pytest.mark.slow
def test_a_window_costs_less_than_dense_attention():
    window, dense = (compiled(how, length=4096) for how in ("window", "dense"))
    assert window["seconds"] < 0.7 * dense["seconds"]
    assert window["bytes"] < 0.5 * dense["bytes"]
