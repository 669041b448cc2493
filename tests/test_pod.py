"""What keeps the workers of a pod from a run together is found, and nothing else is."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bert_jax import meeting, peers, pod
from bert_jax.meeting import Hosts
from tests.ports import free_ports
from tests.test_meeting import together

HEALTHY = {
    "hosts": 2,
    "name": "w",
    "python": "3.11.7",
    "code of bert_jax": "abc",
    "jax": "0.10.2",
    "libtpu": "0.0.42",
    "corpus": "def",
    "free GB": 90.0,
    "kind": "TPU v5 lite",
    "devices": 4,
    "all devices": 8,
    "workdir of": 2,
}


def write_answers(folder: Path, *workers: dict) -> Path:
    """As gcloud leaves them: lines of JSON among others."""
    for number, changes in enumerate(workers):
        found = {"worker": number, **HEALTHY, **changes}
        found = {name: value for name, value in found.items() if value is not None}
        problem = found.pop("problem", None)
        lines = [json.dumps({name: value}) for name, value in found.items()]
        lines += [json.dumps({"problem": problem})] if problem else []
        text = "\n".join(["SSH: connecting ...", "[1, 2]", *lines, "{not json"])
        (folder / f"{number}.log").write_text(text)
    return folder


def compare(folder: Path, room: str = "10") -> None:
    pod.main(["--compare", str(folder), "--room", room])


def test_healthy_workers_pass(tmp_path, capsys):
    compare(write_answers(tmp_path, {}, {}))
    assert "all 2 workers can do the run together" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"jax": "0.9"}, "jax is not the same on all workers: 0.10.2 on 0; 0.9 on 1"),
        (
            {"code of bert_jax": "xyz"},
            "code of bert_jax is not the same on all workers: abc on 0; xyz on 1",
        ),
        ({"corpus": "ghi"}, "corpus is not the same on all workers"),
        ({"devices": 3}, "the workers have 7 devices, each sees 8"),
        ({"all devices": 4}, "all devices is not the same on all workers"),
        ({"all devices": None}, "worker 1 did not come to the end: see"),
        ({"worker": 0}, "2 workers say that they are number 0"),
        ({"worker": 0}, "no answer of workers [1]"),
        ({"free GB": 3.5}, "worker 1: 3.5 GB are free in the workdir, 10 are wanted"),
        ({"workdir of": 1}, "worker 1 shares its workdir with 0 of 1 others"),
        ({"problem": "data: there is none"}, "worker 1: data: there is none"),
    ],
)
def test_what_is_wrong_with_one_is_told(tmp_path, capsys, other, words):
    with pytest.raises(SystemExit):
        compare(write_answers(tmp_path, {}, other))
    assert words in capsys.readouterr().err


def test_workers_that_say_nothing_are_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare(tmp_path)
    assert "no answer of workers at all" in capsys.readouterr().err
    write_answers(tmp_path, {"hosts": 4}, {"hosts": 4})
    (tmp_path / "1.log").write_text("bash: bert_jax/run_on_worker: No such file\n")
    with pytest.raises(SystemExit):
        compare(tmp_path)
    said = capsys.readouterr().err
    assert "no answer of workers [1, 2, 3]" in said
    assert "worker ? did not come to the end: see" in said


def test_data_are_read_with_their_checksums(tiny_corpus, tmp_path):
    found = pod.look_at_data(str(tiny_corpus.path))
    assert found["pieces"] == tiny_corpus.record_starts[-1]
    copy = tmp_path / "corpus"
    shutil.copytree(tiny_corpus.path, copy)
    assert pod.look_at_data(str(copy)) == found
    shard = next(copy.glob("*.tfrecord"))
    data = bytearray(shard.read_bytes())
    data[int(tiny_corpus.index["ids_at"][-1]) + 10] ^= 1
    shard.write_bytes(data)
    problem = pod.attempt("data", lambda: pod.look_at_data(str(copy)))["problem"]
    assert "damaged" in problem
    nowhere = pod.attempt("data", lambda: pod.look_at_data(str(tmp_path / "no")))
    assert "does not exist" in nowhere["problem"]


def test_one_worker_alone_looks_at_all(tiny_corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("BERT_JAX_HOSTS", raising=False)
    words = ["--data", str(tiny_corpus.path), "--workdir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        pod.main(words)
    assert end.value.code == 0
    (tmp_path / "0.log").write_text(capsys.readouterr().out)
    compare(tmp_path, room="0")
    assert "all 1 workers can do the run together" in capsys.readouterr().out
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        pod.main(["--workdir", str(tmp_path / "file/run")])
    assert end.value.code == 1
    assert '"problem": "workdir: ' in capsys.readouterr().out


def test_the_ports_are_those_of_training(monkeypatch):
    """Where they meet, and the one that is left to JAX."""
    port, told = free_ports(), []
    connect = lambda address, **_: told.append(address)  # noqa: E731
    monkeypatch.setattr(peers.jax.distributed, "initialize", connect)
    monkeypatch.setattr(peers, "reach", lambda hosts, port: told.append(port))
    monkeypatch.setattr(peers.jax.config, "update", lambda *_: None)
    hosts = [Hosts(("localhost", "b"), index, port, 20.0) for index in range(2)]
    # In threads of one process JAX knows one host.
    found = together(*(lambda one=one: pod.look_at_devices(one) for one in hosts))
    assert all("of 1 to JAX" in str(error) for error in found), found
    address = f"localhost:{port + 1}"
    assert sorted(told, key=str) == sorted([port + 1, address, address], key=str)


def test_a_port_that_is_taken_is_named_by_all(monkeypatch):
    port = free_ports()
    monkeypatch.setattr(meeting, "TELL_LATER_ONES", 0.5)
    hosts = [Hosts(("localhost", "b"), index, port, 20.0) for index in range(2)]
    look = lambda one: pod.attempt("devices", lambda: pod.look_at_devices(one))  # noqa: E731
    with socket.create_server(("", port + 1)):
        found = together(*(lambda one=one: look(one) for one in hosts))
    told = f"devices: port {port + 1} of host 0 (localhost) cannot be listened on: "
    assert [one["problem"].startswith(told) for one in found] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_two_workers_meet(tmp_path, capsys, shared):
    env = {
        **os.environ,
        "BERT_JAX_HOSTS": "localhost,localhost",
        "BERT_JAX_PORT": str(free_ports()),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    workers = []
    for number in range(2):
        workdir = tmp_path / ("run" if shared else f"run-{number}")
        with open(tmp_path / f"{number}.log", "w") as log:
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "bert_jax.pod", "--workdir", workdir],
                    env={**env, "BERT_JAX_HOST": str(number)},
                    stdout=log,
                )
            )
    assert [worker.wait(timeout=200) for worker in workers] == [0, 0]
    if shared:
        compare(tmp_path, room="0")
        assert "all 2 workers can do the run" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit):
            compare(tmp_path, room="0")
        said = capsys.readouterr().err.splitlines()
        assert [line[:9] for line in said[1:]] == ["  worker ", "  worker "]
        assert "worker 1 shares its workdir with 0 of 1 others" in said[2]
