"""run_on_worker of tpu_scripts, run for real on processes of this machine."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.test_tpu_scripts import SCRIPTS, TWO


@pytest.fixture
def worker(tmp_path):
    """run_on_worker in a folder of its own, as it lies on a worker."""
    script = tmp_path / "run_on_worker"
    shutil.copy(SCRIPTS / "run_on_worker", script)
    env = {key: value for key, value in os.environ.items() if "TPU_" not in key}
    env |= {"BERT_JAX_HOSTS": TWO, "BERT_JAX_HOST": "1", "BERT_JAX_SHOWN": "yes"}

    def call(*words, code: int | None = 0, **changes) -> str:
        result = subprocess.run(
            [script, *map(str, words)],
            cwd=tmp_path,
            env={key: v for key, v in {**env, **changes}.items() if v is not None},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert code in (None, result.returncode), result.stdout + result.stderr
        return result.stdout + result.stderr

    call.begin = lambda *words: subprocess.Popen(
        [script, *map(str, words)], cwd=tmp_path, env=env, start_new_session=True
    )
    call.folder = tmp_path
    return call


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Ends with the codes given, one after the other.
TURNS = """
import os, sys
from pathlib import Path
path = Path("turn")
turn = int(path.read_text()) if path.exists() else 0
path.write_text(str(turn + 1))
print("turn", turn, os.environ["BERT_JAX_HOSTS"], os.environ["BERT_JAX_HOST"])
sys.exit(int(sys.argv[1:][turn]))
"""


@pytest.mark.parametrize(
    ("codes", "code", "turns"),
    [
        *[((75, 75, 0), 0, 3), ((75, 7, 0), 7, 2), ((1, 0), 1, 1), ((75,) * 5, 75, 4)],
        # As a shell says that it was killed, or that JAX had lost worker 0.
        *[((128 + 9, 0), 0, 2), ((128 + 6, 0), 0, 2)],
    ],
)
def test_75_starts_a_command_again(worker, codes, code, turns):
    words = ("--", sys.executable, "-c", TURNS, *codes)
    said = worker("run", "--restarts", 3, "--pause", 0, *words, code=code)
    assert said.count("turn ") == said.count(f"{TWO} 1") == turns
    assert ("given up" in said) == (code == 75)


# Notes how often it was told to end, and takes a while to save.
SAVES = """
import signal, sys, time
from pathlib import Path
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
Path("begun").touch()
while not told:
    time.sleep(0.01)
end = time.monotonic() + 0.7
while time.monotonic() < end:
    time.sleep(0.01)
Path("saved").write_text(str(len(told)))
sys.exit(75)
"""


def test_sigterm_is_passed_on_and_not_followed_by_a_restart(worker):
    process = worker.begin("run", "--pause", 60, "--", sys.executable, "-c", SAVES)
    wait_for((worker.folder / "begun").exists)
    process.terminate()
    time.sleep(0.3)
    process.terminate()  # an impatient second one must not reach what is saving
    assert process.wait(timeout=30) == 75
    assert (worker.folder / "saved").read_text() == "1"


def test_a_command_that_could_not_heed_sigterm_yet_may_be_started_again(worker):
    program = "open('begun', 'w').close(); import time; time.sleep(60)"
    process = worker.begin("run", "--pause", 60, "--", sys.executable, "-c", program)
    wait_for((worker.folder / "begun").exists)
    process.terminate()
    assert process.wait(timeout=30) == 75


def test_sigterm_between_two_starts_ends_it(worker):
    words = ("--", sys.executable, "-c", TURNS, 75, 0)
    process = worker.begin("run", "--pause", 60, *words)
    wait_for((worker.folder / "turn").exists)
    time.sleep(0.3)
    process.terminate()
    assert process.wait(timeout=30) == 75
    assert (worker.folder / "turn").read_text() == "1"


def test_a_job_lives_on_detached_until_it_is_stopped(worker):
    start = ("start", "--job", "a", "--", sys.executable, "-c", SAVES)
    assert worker("status", "--job", "a") == "worker 1 of 2: none\n"
    assert worker(*start) == "worker 1 of 2: started job a\n"
    wait_for((worker.folder / "begun").exists)
    assert worker("status", "--job", "a") == "worker 1 of 2: running\n"
    assert "job a is running already" in worker(*start, code=1)
    assert worker("stop", "--job", "a") == "worker 1 of 2: stopped 75\n"
    assert (worker.folder / "saved").read_text() == "1"
    assert "1: run_on_worker: " in worker("logs", "--job", "a")
    (worker.folder / "saved").unlink()
    worker("start", "--job", "a", "--", "true")
    wait_for((worker.folder / "jobs/a/exit_code").exists)
    wait_for(lambda: "exited 0" in worker("status", "--job", "a"))


def test_a_job_that_was_killed_with_its_machine_may_be_started_again(worker):
    worker("start", "--job", "a", "--", "sleep", "60")
    log = worker.folder / "jobs/a/log"
    wait_for(lambda: log.exists() and "runs sleep" in log.read_text())
    os.killpg(int((worker.folder / "jobs/a/pid").read_text()), 9)
    wait_for(lambda: worker("status", "--job", "a") == "worker 1 of 2: exited 75\n")


CURL = """
case $* in
    *"Metadata-Flavor: Google"*attributes/worker-network-endpoints) echo "{hosts}" ;;
    *"Metadata-Flavor: Google"*attributes/agent-worker-number) echo 1 ;;
    *) exit 22 ;;
esac
"""


@pytest.mark.parametrize(
    "hosts", ["t1v-w0,t1v-w1", "unknown:0:t1v-w0,unknown:1:t1v-w1"]
)
def test_the_metadata_server_says_who_the_workers_are(worker, hosts):
    program = worker.folder / "bin/curl"
    program.parent.mkdir()
    program.write_text("#!/usr/bin/env bash" + CURL.replace("{hosts}", hosts))
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    unset = dict(BERT_JAX_HOSTS=None, BERT_JAX_HOST=None)
    show = ("run", "--", "bash", "-c", "echo $BERT_JAX_HOST: $BERT_JAX_HOSTS")
    assert worker(*show, PATH=path, **unset) == "1: t1v-w0,t1v-w1\n"
    tpu = dict(TPU_WORKER_HOSTNAMES="a,b,c", TPU_WORKER_ID="2")
    assert worker(*show, PATH=path, **unset, **tpu) == "2: a,b,c\n"
    assert worker(*show, PATH=path, **tpu) == f"1: {TWO}\n"
    program.write_text("#!/bin/sh\nexit 6\n")
    said = worker(*show, PATH=path, **unset, code=1)
    assert "neither BERT_JAX_HOSTS nor TPU_WORKER_HOSTNAMES is set" in said
    assert "this is worker 2 of 2" in worker(*show, BERT_JAX_HOST="2", code=1)
