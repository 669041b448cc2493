"""`make demo`: the whole road as a person takes it, and the same command again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(workdir: Path) -> str:
    # On one device, as a person has it, not on the eight of the tests.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "bert_jax", "demo", "--workdir", str(workdir)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_whole_road(tmp_path):
    first = run(tmp_path / "demo")
    assert "what next:" in first
    report = json.loads((tmp_path / "demo/report.json").read_text())
    assert report["steps"] > 1000
    assert report["vocab_size"] >= 8000
    assert report["tokens_per_second"] > 0
    assert report["final_loss"] < 6
    assert report["export_max_abs_diff"] <= 1e-4
    assert report["eval_predictions"] > 1000
    assert report["eval_accuracy"] >= 2 * report["unigram_accuracy"]
    assert (tmp_path / "demo/loss.png").stat().st_size > 10_000
    assert (tmp_path / "demo/exported/model.safetensors").is_file()
    again = run(tmp_path / "demo")
    assert "is finished" in again
    summary = first[first.index(f"  {report['steps']} steps, final loss") :]
    assert f"{report['eval_accuracy']:.1%}" in summary
    assert again.endswith(summary)
