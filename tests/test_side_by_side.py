"""Processes with cores of their own: what they say, how they end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bert_jax.errors import InputError
from bert_jax.side_by_side import share_cores, side_by_side

TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="has one core")


def report(text: str) -> bool:
    print(text, *os.sched_getaffinity(0))
    return True


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def until_told(begun: Path, ended: Path) -> bool:
    """Works until SIGTERM, and then takes a while to save."""

    def note(number, _):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one would kill
        time.sleep(1.2)
        ended.write_text("saved")
        raise InterruptedError

    signal.signal(signal.SIGTERM, note)
    begun.write_text(str(os.getpid()))
    try:
        time.sleep(60)
    except InterruptedError:
        return False
    return True


def fails(begun: Path) -> bool:
    wait_for(begun)
    raise InputError("there is no such thing")


def dies(begun: Path) -> bool:
    wait_for(begun)
    os.kill(os.getpid(), signal.SIGKILL)
    return True


@TWO
def test_each_has_cores_of_its_own_and_a_log(tmp_path):
    jobs = {tmp_path / f"logs/{n}.log": (f"job {n}",) for n in range(3)}
    assert {*side_by_side(report, jobs, workers=2)} == {*jobs}
    said = [log.read_text().split() for log in jobs]
    assert [words[:2] for words in said] == [["job", str(n)] for n in range(3)]
    half = len(os.sched_getaffinity(0)) // 2
    assert {len(words[2:]) for words in said} == {half}


def test_cores_are_shared_out():
    there = os.sched_getaffinity(0)
    parts = share_cores(len(there))
    assert sorted(core for part in parts for core in part) == sorted(there)
    for workers in (0, len(there) + 1):
        with pytest.raises(InputError, match=f"--workers {workers}: from 1 to the"):
            share_cores(workers)


@TWO
@pytest.mark.parametrize(
    ("job", "words"),
    [(fails, "error: there is no such thing"), (dies, "it was ended by SIGKILL")],
)
def test_one_that_fails_ends_the_others_which_save(tmp_path, job, words):
    log, other, never = (tmp_path / f"{n}.log" for n in range(3))
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    jobs = {
        log: (job, begun),
        other: (until_told, begun, ended),
        never: (report, "begun after all"),
    }
    with pytest.raises(InputError) as caught:
        list(side_by_side(call, jobs, workers=2))
    assert str(caught.value).startswith(f"{log}: ")
    assert str(caught.value).endswith(words)
    assert str(other) not in str(caught.value)
    assert ended.read_text() == "saved"
    assert not never.exists()


def call(function, *told) -> bool:
    return function(*told)


@TWO
def test_an_interrupt_is_passed_on_once(tmp_path):
    jobs = {
        tmp_path / f"{n}.log": (until_told, tmp_path / f"begun-{n}", tmp_path / f"{n}")
        for n in range(3)
    }

    def interrupt():
        for n in range(2):
            wait_for(tmp_path / f"begun-{n}")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    assert list(side_by_side(call, jobs, workers=2)) == []
    assert [(tmp_path / f"{n}").exists() for n in range(3)] == [True, True, False]


def test_workers_do_not_outlive_a_killed_command(tmp_path):
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    script = (
        "from pathlib import Path\n"
        "from bert_jax.side_by_side import side_by_side\n"
        "from tests.test_side_by_side import until_told\n"
        "if __name__ == '__main__':\n"
        f"    told = Path({str(begun)!r}), Path({str(ended)!r})\n"
        f"    list(side_by_side(until_told, {{told[0].parent / 'log': told}}, "
        "workers=1))\n"
    )
    (tmp_path / "main.py").write_text(script)
    command = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    wait_for(begun)
    time.sleep(0.2)
    command.kill()
    command.wait()
    wait_for(ended)
