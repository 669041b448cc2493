"""Runs of several processes, by the command line: the same numbers, and no hang.

A process has two devices and stands for a host. What one of them suffers (SIGKILL,
SIGSTOP, SIGTERM, Ctrl-C) all of them end by, with the exit code that says whether to go
on. However often a run suffers, it ends bit-equal to the one that nobody disturbed;
`make soak` kills fifty times at random moments.
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.metrics import read_metrics
from tests import tiny
from tests.faults.test_kills import DIES, MOMENTS, NO_INPUT, NOTICE, SLOW_SCORING
from tests.models.made import XLNET
from tests.ports import free_ports
from tests.test_tpu_scripts import SCRIPTS

pytestmark = pytest.mark.slow
STEPS, BATCH = 36, 8
VICTIMS = {  # of runs of one process, and of two
    1: [((0,), "the only process")],
    2: [((0,), "host 0"), ((1,), "host 1"), ((0, 1), "both hosts")],
}
KILLS = int(os.environ.get("BERT_JAX_KILLS", "4"))
PATIENCE = 600  # seconds: a machine may be busy
SETTINGS = {
    **tiny.SETTINGS,
    "arch.layers": "1",
    "batch": str(BATCH),
    "steps": str(STEPS),
    "save_every": "4",
    "keep": "20",
    "eval.every": "12",
    "eval.rows": "18",  # of the last batch most processes have only padding
    "mesh.fsdp": "2",
}
AT_START_UP, WHILE_WRITING, NO_MANIFEST, WHILE_SCORING = (
    DIES + code.replace("len(calls) == 2", "len(calls) == 1")  # the first evaluation
    for code in MOMENTS.values()
)
# As the others begin to save, and tell each other about it; wherever they then are.
ENTERS = {
    "a save": "from bert_jax.checkpoint import Checkpoints as place; name = 'save'",
    "the barrier of a save": (
        "from bert_jax import checkpoint as place; name = 'wait_for_all'"
    ),
    "an evaluation": (
        "from bert_jax.evaluators.held_out import HeldOut as place; name = 'run'"
    ),
}


def dies_at(entry: str, *, number: int, pause: float = 0.0) -> str:
    """The process dies as it comes there for the `number`th time, or a little later."""
    return f"""{DIES}
import threading, time
{ENTERS[entry]}
def dies(*arguments, begin=getattr(place, name), calls=[], **options):
    calls.append(1)
    if len(calls) == {number}:
        if {pause}:
            threading.Timer({pause}, die).start()
        else:
            die()
    return begin(*arguments, **options)
setattr(place, name, dies)
"""


# Whatever is above the median of two losses or more is a spike.
TOUCHY = """
from bert_jax import spikes
spikes.FEWEST, spikes.DEVIATIONS = 2, 0.0
"""

# The command, which also writes down what each process fed.
SPY = """
import json, os, sys, time
from bert_jax.sharding import Feed
place = Feed.place
def spy(feed, batch):
    with open(os.environ["FED"], "a") as file:
        rows = feed.rows.tolist()
        shapes = {name: list(x.shape) for name, x in batch.items()}
        file.write(json.dumps({"rows": rows, "shapes": shapes}) + "\\n")
    time.sleep(0.15)  # so that a signal finds it amid its steps
    return place(feed, batch)
Feed.place = spy
from bert_jax.cli import main
main(sys.argv[1:])
"""


class Hosts:
    """All processes of a run."""

    def __init__(
        self,
        pod,
        workdir,
        count: int,
        *,
        absent: int | None = None,
        within: int = 200,
        port: int | None = None,
        own: tuple[str, ...] = (),
        before: dict[int, str] | None = None,
        by: tuple = (),
        **changes,
    ):
        """`own` is what the last one is told beside; `absent` is not started; what
        stands in `before` is run before the command is, which is started `by` another
        one that finds the hosts in its environment."""
        fields = {**SETTINGS, **pod.data, **changes}
        words = [
            *("train", "--config", "pretrain:bert-tiny", "--workdir", str(workdir)),
            *(f"--config.{name}={value}" for name, value in fields.items()),
        ]
        about = {
            "hosts": ",".join(["localhost"] * count),
            "port": str(port or free_ports()),
            "meet_within": str(within),
        }
        told = {f"BERT_JAX_{name.upper()}": value for name, value in about.items()}
        if count > 1 and not by:
            words += [word for name in about for word in (f"--{name}", about[name])]
        self.workdir, self.logs, self.processes = workdir, [], []
        for index in range(count):
            if index == absent:
                continue
            environment = {**pod.environment, "FED": str(fed(workdir, index))}
            environment |= {"SCORING": f"{workdir}-scoring", "PAUSES": "3 3 100"}
            if count > 1:
                environment["BERT_JAX_HOST"] = str(index)
                environment |= told if by else {}
            code = (before or {}).get(index, "") + SPY
            log = workdir.with_name(f"{workdir.name}-{index}.log")
            its = [*words, *own] if index == count - 1 else words
            with open(log, "w") as file:
                process = subprocess.Popen(
                    [*by, sys.executable, "-c", code, *its],
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self.logs.append(log)
            self.processes.append(process)

    def wait(self) -> list[int]:
        """Until all have ended: their exit codes."""
        deadline = time.monotonic() + PATIENCE
        try:
            for process in self.processes:
                process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it hangs: {self.told()}") from None
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def told(self) -> list[str]:
        return [log.read_text() for log in self.logs]

    def finish(self) -> list[str]:
        codes = self.wait()
        assert codes == [0] * len(codes), self.told()
        return self.told()

    def gets_to(self, step: int) -> bool:
        """Waits until the metrics show `step`; not if it has ended before."""
        deadline = time.monotonic() + PATIENCE
        while all(process.poll() is None for process in self.processes):
            if any(row["step"] >= step for row in lines(self.workdir)):
                return True
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.03)
        return False

    def signal_at(self, step: int, index: int, number: signal.Signals) -> None:
        """Sends it once the metrics show `step`."""
        assert self.gets_to(step), self.told()
        self.processes[index].send_signal(number)

    def assert_others_name(self, victim: int, how: str) -> None:
        """One was lost; the others end with the code that starts all again."""
        codes = self.wait()
        for index, (code, told) in enumerate(zip(codes, self.told(), strict=True)):
            if index != victim:
                assert code == 75, told
                last = told.strip().splitlines()[-1]
                assert last.startswith(f"error: host {victim} (localhost) {how}")
                assert "it was last heard of at step " in last
                assert last.endswith(AGAIN_ON_ALL)
                assert "Traceback" not in told


AGAIN_ON_ALL = (
    "with exit code 75: start the same command again on all hosts; it goes on from "
    "the last checkpoint"
)


def wait_for(condition, hosts: Hosts) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, hosts.told()
        assert all(process.poll() is None for process in hosts.processes), hosts.told()
        time.sleep(0.01)


def fed(workdir, index: int):
    return workdir.with_name(f"{workdir.name}-{index}.fed")


def lines(workdir, kind: str = "train") -> list[dict]:
    rows = read_metrics(workdir / "metrics.jsonl")
    return [row for row in rows if row["kind"] == kind]


def state(workdir, last: int = STEPS) -> list[np.ndarray]:
    params = bert_jax.load(workdir, step=last).params
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def assert_close(ours, theirs, last: int = STEPS) -> None:
    for a, b in zip(state(ours, last), state(theirs, last), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def assert_equal(ours, theirs, what: str = "", last: int = STEPS) -> None:
    """Batches, scores and parameters, bit for bit."""
    batches = [[(r["step"], r["batch"]) for r in lines(w)] for w in (ours, theirs)]
    assert batches[0] == batches[1], what
    assert lines(ours, "eval") == lines(theirs, "eval") != [], what
    for a, b in zip(state(ours, last), state(theirs, last), strict=True):
        assert np.array_equal(a, b), what


class Pod:
    """What all runs of these tests share: data, and what was compiled."""

    def __init__(self, corpus, folder, tokenizer):
        held_out = tiny.make_corpus(folder, tokenizer=tokenizer, seed=1)
        self.data = {"data": str(corpus.path), "eval.data": str(held_out.path)}
        flags = (
            "--xla_force_host_platform_device_count=2 "
            "--xla_backend_optimization_level=0"  # compiles in half of the time
        )
        cache = {"BERT_JAX_CACHE": str(folder / "cache")}
        self.environment = {**os.environ, "XLA_FLAGS": flags, **cache}
        self.folder = folder


@pytest.fixture(scope="module")
def pod(tiny_corpus, tiny_tokenizer, tmp_path_factory):
    return Pod(tiny_corpus, tmp_path_factory.mktemp("pod"), tiny_tokenizer)


@pytest.fixture(scope="module")
def two(pod):
    """The run of two processes that nobody disturbed."""
    workdir = pod.folder / "two"
    told = Hosts(pod, workdir, 2).finish()
    assert "4 device(s)" in told[0]
    assert "device(s)" not in told[1]  # what is said is said once
    return workdir


@pytest.fixture(scope="module")
def one(pod):
    workdir = pod.folder / "one"
    assert "2 device(s)" in Hosts(pod, workdir, 1).finish()[0]
    return workdir


def assert_same_run(ours, theirs) -> None:
    """Metrics are written once, of the same batches, with the same losses, to 1e-5 of
    what they are."""
    steps = [row["step"] for row in lines(ours)]
    assert steps == list(range(1, STEPS + 1))
    batches = [[row["batch"] for row in lines(workdir)] for workdir in (ours, theirs)]
    assert batches[0] == batches[1]
    assert len({*batches[0]}) == STEPS
    for kind in ("train", "eval"):
        a, b = lines(ours, kind), lines(theirs, kind)
        assert [row["step"] for row in a] == [row["step"] for row in b]
        scores = [[row["masked_lm_loss"] for row in rows] for rows in (a, b)]
        np.testing.assert_allclose(*scores, rtol=1e-5)
    scored = [[row["predictions"] for row in lines(w, "eval")] for w in (ours, theirs)]
    assert scored[0] == scored[1] != []


def assert_each_fed_its_part(workdir, count: int) -> None:
    """Of each batch, training or evaluation, all rows and none twice."""
    batches = [
        [json.loads(line) for line in fed(workdir, index).read_text().splitlines()]
        for index in range(count)
    ]
    assert {len(its) for its in batches} == {STEPS + 3 * 3}
    for parts in zip(*batches, strict=True):
        rows = [row for part in parts for row in part["rows"]]
        assert sorted(rows) == list(range(BATCH))
        for part in parts:
            assert len(part["rows"]) == BATCH // count
            assert {shape[0] for shape in part["shapes"].values()} == {BATCH // count}


def test_two_processes_train_as_one(one, two):
    assert_same_run(two, one)
    assert_each_fed_its_part(one, 1)
    assert_each_fed_its_part(two, 2)
    assert_close(two, one)
    # Files are written once: one of events, and no trace of the meeting.
    assert len(list((two / "tensorboard").iterdir())) == 1
    files = [{path.name for path in workdir.iterdir()} for workdir in (one, two)]
    assert files[0] == files[1]


def test_hosts_skip_the_same_steps_also_after_a_kill(pod, tmp_path):
    """About every other one, since losses hardly fall; which, goes by losses of before
    the kill."""
    told = {"spike": "skip", "steps": "16", "optim.lr": "1e-5"}
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    both = {0: TOUCHY, 1: TOUCHY}
    Hosts(pod, undisturbed, 2, before=both, **told).finish()
    dies = both | {1: TOUCHY + dies_at("a save", number=3)}
    assert Hosts(pod, killed, 2, before=dies, **told).wait() == [75, -signal.SIGKILL]
    (again, _) = Hosts(pod, killed, 2, before=both, **told).finish()
    assert "resumed at step 8" in again
    assert_equal(killed, undisturbed, last=16)
    skipped, same = (
        [row["skipped"] for row in lines(workdir)] for workdir in (undisturbed, killed)
    )
    assert skipped == same
    for half in (skipped[:8], skipped[8:]):
        assert 0 < sum(half) < 8
    spikes = re.findall(r"step (\d+): a spike", again)
    assert spikes == [str(n) for n in range(9, 17) if skipped[n - 1]]


def test_four_processes_train_as_one(pod, one):
    workdir = pod.folder / "four"
    assert "8 device(s)" in Hosts(pod, workdir, 4).finish()[0]
    assert_same_run(workdir, one)
    assert_close(workdir, one)
    assert_each_fed_its_part(workdir, 4)


def test_a_run_that_suffers_all_of_it_ends_bit_equal(pod, two, tmp_path):
    """One run of two processes, started nine times: killed at start-up, told to stop
    amid an evaluation, killed amid a save and between two files of it, amid an
    evaluation one and then both, frozen, told by Ctrl-C; then to the end."""
    workdir = tmp_path / "run"

    def start(**how) -> Hosts:
        return Hosts(pod, workdir, 2, **how)

    def assert_stopped(hosts: Hosts, victim: int, number: signal.Signals) -> int:
        code = 130 if number == signal.SIGINT else 75
        assert hosts.wait() == [code, code], hosts.told()
        told = hosts.told()[0]
        stopped = int(told.split("stopped at step ")[1].split()[0])
        assert f"and saved ({number.name} on host {victim} (localhost))" in told
        assert bert_jax.load(workdir).step == stopped < STEPS
        return stopped

    gone = "is gone: its connection broke"
    start(before={1: AT_START_UP}).assert_others_name(1, gone)
    assert not lines(workdir)

    # On several hosts it may be one batch more, until all have agreed.
    hosts = start(before=dict.fromkeys((0, 1), SLOW_SCORING))
    wait_for(lambda: tmp_path.joinpath("run-scoring").exists(), hosts)
    begin = time.monotonic()
    hosts.processes[1].send_signal(signal.SIGTERM)
    assert assert_stopped(hosts, 1, signal.SIGTERM) == 12
    assert time.monotonic() - begin < NOTICE
    assert lines(workdir, "eval") == []

    # The scores of step 12 are made up for, which fails once.
    start(before={1: WHILE_SCORING}).assert_others_name(1, gone)
    assert lines(workdir, "eval") == []
    start(before={1: WHILE_WRITING}).assert_others_name(1, gone)
    assert [row["step"] for row in lines(workdir, "eval")] == [12]
    hosts = start(before={0: NO_MANIFEST})
    hosts.assert_others_name(0, gone)
    assert "resumed at step 12" in hosts.told()[0]

    hosts = start(before=dict.fromkeys((0, 1), WHILE_SCORING))
    assert {*hosts.wait()} <= {-signal.SIGKILL, 75}, hosts.told()
    assert "resumed at step 16" in hosts.told()[0]
    assert [row["step"] for row in lines(workdir, "eval")] == [12]

    hosts = start(stall_after="40")
    hosts.signal_at(lines(workdir)[-1]["step"] + 1, 1, signal.SIGSTOP)
    assert hosts.processes[0].wait(PATIENCE) == 75
    hosts.processes[1].kill()
    hosts.assert_others_name(1, "is silent since ")

    hosts = start()
    hosts.signal_at(lines(workdir)[-1]["step"] + 1, 0, signal.SIGINT)
    assert_stopped(hosts, 0, signal.SIGINT)
    start().finish()
    assert_equal(workdir, two)


def test_lost_as_all_save_preempted_and_without_input(pod, two, tmp_path):
    """One run of two processes, started four times: one is killed as both begin to
    save; both are told to end amid steps; the input of one hangs; then to the end."""
    workdir = tmp_path / "run"
    hosts = Hosts(pod, workdir, 2, before={1: dies_at("a save", number=2)})
    hosts.assert_others_name(1, "is gone: its connection broke")
    assert "could not be written" not in hosts.told()[0]

    hosts = Hosts(pod, workdir, 2)
    assert hosts.gets_to(lines(workdir)[-1]["step"] + 2), hosts.told()
    for process in hosts.processes:
        process.send_signal(signal.SIGTERM)
    assert hosts.wait() == [75, 75], hosts.told()
    told = hosts.told()[0]
    assert "resumed at step 4" in told
    stopped = int(told.split("stopped at step ")[1].split()[0])
    assert f"stopped at step {stopped} and saved (SIGTERM on host " in told
    assert bert_jax.load(workdir).step == stopped < STEPS

    # Either host may be the first to find that.
    hosts = Hosts(pod, workdir, 2, before={1: NO_INPUT}, stall_after="40")
    assert hosts.wait() == [75, 75], hosts.told()
    first, second = (told.strip().splitlines()[-1] for told in hosts.told())
    late = f"host 1 (localhost) at step {stopped + 8}, without a batch"
    gone = "error: host 1 (localhost) is gone: its connection broke"
    assert f"(config.stall_after): {late}" in first or first.startswith(gone)
    waits = f"error: step {stopped + 9} has waited 4"
    assert late in second or second.startswith(waits)
    Hosts(pod, workdir, 2).finish()
    assert_equal(workdir, two)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own in tmp_path/run, for whatever `small_disk.by` starts."""
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        pytest.skip("a small file system cannot be made here: no unshare")
    folder = tmp_path / "run"
    folder.mkdir()
    script = f"mount -t tmpfs -o size=1000k tmpfs '{folder}' && echo made && cat"
    holder = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said = holder.stdout.readline().strip()
        if said != "made":
            pytest.skip(f"a small file system cannot be made here: {said}")
        seen = Path(f"/proc/{holder.pid}/root{folder}")
        enter = ("nsenter", "--user", "--preserve-credentials", "--mount")
        here = ("env", f"--chdir={Path.cwd()}")  # which is left on the way
        yield SimpleNamespace(by=(*enter, "-t", str(holder.pid), *here), seen=seen)
    finally:
        holder.stdin.close()
        holder.wait(30)


def test_a_disk_that_both_fill_up(pod, two, tmp_path, small_disk):
    """There is room for some checkpoints, then there is none; made, it goes on."""
    workdir = tmp_path / "run"
    hosts = Hosts(pod, workdir, 2, by=small_disk.by)
    assert hosts.wait() == [1, 1], hosts.told()
    for told in hosts.told():
        error = told[told.rindex("\nerror: ") :]
        assert re.search(r"the checkpoint of step \d+ could not be written to", error)
        assert "No space left on device" in error
        assert error.strip().endswith("Make room and run the same command.")
        assert "cli.py" not in told  # of ours, no traceback
    room = ("mount", "-o", "remount,size=200m", str(workdir))
    subprocess.run([*small_disk.by, *room], check=True)
    assert "resumed at step " in Hosts(pod, workdir, 2, by=small_disk.by).finish()[0]
    done = shutil.copytree(small_disk.seen, tmp_path / "done")
    for a, b in zip(state(done), state(two), strict=True):
        assert np.array_equal(a, b)
    assert lines(done, "eval")[-1] == lines(two, "eval")[-1]


def short(**changes: str) -> dict[str, str]:
    """Of runs that are compared with each other only."""
    return {"steps": "8", "eval.every": "8", **changes}


def assert_same_steps(ours, theirs, last: int) -> None:
    batches = [[row["batch"] for row in lines(workdir)] for workdir in (ours, theirs)]
    assert batches[0] == batches[1]
    assert len({*batches[0]}) == last
    losses = [[row["loss"] for row in lines(workdir)] for workdir in (ours, theirs)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert_close(ours, theirs, last)


def test_what_is_split_by_tensor_over_processes_is_one_model(pod, tmp_path):
    """Heads, inner units and vocabulary in four parts, two of them in each process,
    which both feed all rows."""
    changes = short(**{"arch.heads": "4", "mesh.fsdp": "1"})
    one, two = tmp_path / "one", tmp_path / "two"
    Hosts(pod, one, 1, **changes).finish()
    axes = {"mesh.data": "1", "mesh.tensor": "4"}
    told = Hosts(pod, two, 2, **{**changes, **axes}).finish()
    assert "mesh: data 1, fsdp 1, tensor 4" in told[0]
    assert_same_steps(two, one, 8)
    rows = [json.loads(line)["rows"] for i in (0, 1) for line in fed(two, i).open()]
    assert {tuple(its) for its in rows} == {tuple(range(BATCH))}


def test_what_is_remembered_goes_to_other_processes(pod, tmp_path):
    """XLNet reads on in its texts: two processes as one, which goes on from what both
    remember; two that go on do so to the bit."""
    arch = {f"arch.{name}": str(value) for name, value in XLNET.items()}
    stream = {"rows": "stream", "length": "16", "direction": "both"}
    name = {"name": "permuted_lm", "memory": "20", "partial": "3"}
    objective = {f"objective.{field}": value for field, value in name.items()}
    changes = short(**arch, **stream, **objective)
    one, two = tmp_path / "one", tmp_path / "two"
    Hosts(pod, one, 1, **changes).finish()
    Hosts(pod, two, 2, **changes).finish()
    assert_same_steps(two, one, 8)
    for count in (1, 2):
        workdir = shutil.copytree(two, tmp_path / f"on-{count}")
        forget_after(workdir, 4)
        told = Hosts(pod, workdir, count, **changes).finish()[0]
        assert "resumed at step 4" in told
        if count == 1:
            assert_same_steps(workdir, two, 8)
        else:
            assert_equal(workdir, two, last=8)


def test_killed_at_random_moments_ends_bit_equal(pod, one, two, tmp_path):
    """Runs of one process and of two, by turns; of two, one of them is killed, the
    other, or both. Some seconds after the start, a little after a step, or where a
    save, its barrier or an evaluation begins."""
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    kills = runs = 0
    tally = {}
    while kills < KILLS:
        count = runs % 2 + 1
        workdir, moments = tmp_path / f"run-{runs}", []
        most = min(5, KILLS - kills, max(1, KILLS // 2))
        for _ in range(rng.randint(min(2, most), most)):
            rows = lines(workdir)
            step = (rows[-1]["step"] if rows else 0) + rng.randint(1, 6)
            victims, who = rng.choice(VICTIMS[count])
            kind = rng.choice(["its start", "a step", "a step", *ENTERS])
            pause = rng.uniform(0, 10 if kind == "its start" else 0.3)
            before = {}
            if kind in ENTERS:
                pause *= rng.random() < 0.5
                code = dies_at(kind, number=rng.randint(1, 2), pause=pause)
                before = dict.fromkeys(victims, code)
            hosts = Hosts(pod, workdir, count, within=60, before=before)
            after = f"step {step}" if kind == "a step" else kind
            if not before:
                if kind == "a step":
                    hosts.gets_to(step)
                time.sleep(pause)
                for victim in victims:
                    hosts.processes[victim].kill()
            codes = hosts.wait()
            for code, told in zip(codes, hosts.told(), strict=True):
                alone = "has not come within 60 s" in told or "cannot be reach" in told
                assert code in (0, 75, -signal.SIGKILL) or (code == 1 and alone), told
            if -signal.SIGKILL not in codes:
                break  # it was done before
            kills += 1
            tally[who] = tally.get(who, 0) + 1
            moments.append(f"{who} {pause:.2f} s after {after}")
        Hosts(pod, workdir, count).finish()
        what = f"seed {seed}: killed {', '.join(moments)}"
        assert_equal(workdir, (one, two)[count - 1], what)
        shutil.rmtree(workdir)
        runs += 1
        print(f"run {runs}, bit-equal: killed {', '.join(moments)}", flush=True)
    whom = ", ".join(f"{n} of {who}" for who, n in sorted(tally.items()))
    print(
        f"{kills} kills ({whom}), {runs} runs; each ended bit-equal to the undisturbed"
    )


def test_workers_start_again_what_was_killed(pod, two, tmp_path):
    """As on a TPU: each process has a run_on_worker, which stays. It is host 0, which
    the other one waits for."""
    run = (SCRIPTS / "run_on_worker", "run", "--pause", "1", "--restarts", "2", "--")
    hosts = Hosts(pod, tmp_path / "run", 2, by=run)
    assert hosts.gets_to(6), hosts.told()
    worker = hosts.processes[0].pid
    (child,) = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    for told in hosts.finish():
        assert told.count("ended with 75; starts again in 1 s") == 1
    assert "resumed at step " in hosts.told()[0]
    assert_equal(tmp_path / "run", two)


@pytest.mark.parametrize("count", [1, 2])
def test_a_part_that_is_altered_is_found_and_others_go_on(pod, two, tmp_path, count):
    """What process 1 of two wrote at step 12 is altered: both of them, or the one that
    takes their place, go on from step 8."""
    workdir = shutil.copytree(two, tmp_path / "run")
    forget_after(workdir, 12)
    folder = workdir / "checkpoints"
    others = json.loads((folder / "12/manifest.1.json").read_text())
    assert others
    assert all("process_1" in name for name in others)
    name = max(others, key=lambda name: others[name][0])
    content = bytearray((folder / "12" / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "12" / name).write_bytes(content)
    told = Hosts(pod, workdir, count).finish()[0]
    assert f"checkpoint 12 is not usable: {name} was altered" in told
    assert "resumed at step 8" in told
    assert_same_run(workdir, two)
    (assert_equal if count == 2 else assert_close)(workdir, two)


def test_two_processes_go_on_from_what_one_saved(pod, one, tmp_path):
    workdir = shutil.copytree(one, tmp_path / "run")
    forget_after(workdir, 8)
    told = Hosts(pod, workdir, 2).finish()[0]
    assert "resumed at step 8" in told
    assert "4 device(s)" in told
    assert_same_run(workdir, one)
    assert_close(workdir, one)


def forget_after(workdir, last: int) -> None:
    """A run that came no further than to this checkpoint."""
    for path in (workdir / "checkpoints").iterdir():
        if int(path.name) > last:
            shutil.rmtree(path)


def test_a_port_of_jax_that_is_taken(pod, tmp_path):
    port = free_ports()
    with socket.create_server(("", port + 1)):
        hosts = Hosts(pod, tmp_path / "run", 2, port=port)
        assert hosts.wait() == [1, 1]
    for told in hosts.told():
        last = told.strip().splitlines()[-1]
        assert last.startswith(
            f"error: port {port + 1} of host 0 (localhost) cannot be"
        )
        assert "Address already in use" in last
        assert last.endswith("JAX connects the hosts by it")


def last_words(hosts: Hosts) -> list[str]:
    assert not any("Traceback" in told for told in hosts.told())
    return [told.strip().splitlines()[-1] for told in hosts.told()]


def test_a_port_of_jax_that_is_closed(pod, tmp_path):
    """To host 1, while host 0 waits for it in C++: it looks at a port that nobody has
    opened."""
    code = """
from bert_jax import peers
from bert_jax.meeting import dataclasses
def elsewhere(hosts, port, reach=peers.reach):
    reach(dataclasses.replace(hosts, meet_within=2.0), 1)
peers.reach = elsewhere
"""
    hosts = Hosts(pod, tmp_path / "run", 2, before={1: code})
    assert hosts.wait() == [1, 1], hosts.told()
    first, second = last_words(hosts)
    assert second.startswith("error: host 1 (localhost) met the others by port ")
    assert second.endswith(
        "but cannot reach port 1 there: [Errno 111] Connection refused. Open it to all "
        "hosts"
    )
    assert first == second.replace("error: ", "error: host 1 (localhost) failed: ")


def test_killed_between_the_meeting_and_the_start_of_jax(pod, tmp_path):
    code = f"{DIES}\nfrom bert_jax import peers\npeers.reach = lambda *_: die()\n"
    hosts = Hosts(pod, tmp_path / "run", 2, before={1: code})
    hosts.assert_others_name(1, "is gone: its connection broke")


def test_a_host_that_is_missing(pod, tmp_path):
    hosts = Hosts(pod, tmp_path / "run", 3, absent=1, within=15)
    assert hosts.wait() == [1, 1]
    for told in hosts.told():
        text = told.strip().splitlines()[-1]
        assert text.startswith("error: host 1 (localhost) has not come within 15 s")
        assert "Traceback" not in told


def test_a_host_that_was_told_something_else(pod, tmp_path):
    hosts = Hosts(pod, tmp_path / "run", 2, own=("--config.batch=16",))
    assert hosts.wait() == [1, 1]
    for told in hosts.told():
        assert told.strip().splitlines()[-1] == (
            "error: host 1 (localhost) has another config: batch is 16, on host 0 "
            "(localhost) 8"
        )
    assert not (tmp_path / "run/run.json").exists()
