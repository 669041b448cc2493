"""Hosts that meet over real sockets: what each is told when they cannot."""

import json
import signal
import socket
import struct
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from bert_jax import meeting, peers
from bert_jax.checkpoint import SaveError
from bert_jax.cli import main
from bert_jax.errors import InputError
from bert_jax.meeting import Hosts, Line, excused, meet
from bert_jax.peers import Peers
from tests.ports import free_ports

ABOUT = {"config": {"batch": 8, "optim.lr": 1e-3}, "data": {"text": "abc"}}


@pytest.fixture
def port() -> int:
    return free_ports()


def together(*work) -> list:
    """What each returns or raises, all at the same time."""
    found = [None] * len(work)

    def do(number: int) -> None:
        try:
            found[number] = work[number]()
        except InputError as error:
            found[number] = error

    threads = [threading.Thread(target=do, args=(n,)) for n in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


class Place:
    """Hosts of one port, with one workdir."""

    def __init__(self, port: int, workdir, names=("a", "b", "c"), within: float = 5.0):
        self.port, self.workdir, self.within = port, workdir, within
        self.names = ("localhost", *names[1:])

    def hosts(self, index: int, names=None) -> Hosts:
        return Hosts(names or self.names, index, self.port, self.within)

    def come(self, index: int, *, workdir=None, names=None, **about):
        hosts = self.hosts(index, names)
        return lambda: meet(hosts, workdir or self.workdir, {**ABOUT, **about})

    def meet(self, *work) -> list:
        begin = time.monotonic()
        found = together(*work)
        assert time.monotonic() - begin < self.within + 3
        return found


@pytest.fixture
def place(port, tmp_path):
    return Place(port, tmp_path / "run")


def texts(found: list) -> set[str]:
    assert all(isinstance(one, InputError) for one in found), found
    return {str(one) for one in found}


def test_all_come_and_agree(place):
    found = place.meet(*(place.come(index) for index in (1, 0, 2)))
    assert [set(lines) for lines in found] == [{0}, {1, 2}, {0}]
    for lines in found:
        for line in lines.values():
            line.close()
    assert [path.name for path in place.workdir.iterdir()] == []  # no trace is left


def test_where_the_data_lie_may_differ(place):
    there = {"config": {**ABOUT["config"], "data": "/b", "eval.data": "/c"}}
    here = {"config": {**ABOUT["config"], "data": "/d", "eval.data": "/e"}}
    found = place.meet(
        place.come(0, **here), place.come(1, **there), place.come(2, **here)
    )
    assert [set(lines) for lines in found] == [{1, 2}, {0}, {0}]


def test_a_missing_host_is_named_on_all_that_came(place):
    place.within = 0.7
    found = place.meet(place.come(0), place.come(2))
    assert len(texts(found)) == 1
    text = str(found[0])
    assert text.startswith("host 1 (b) has not come within 0.7 s. Start the same")
    assert f"port {place.port} and {place.port + 1} of host 0 (localhost)" in text


def test_time_is_up_for_a_host_before_host_0(place):
    """It knows from host 0 whom all wait for."""
    early = Hosts(place.names, 2, place.port, 1.0)
    place.within = 4.0
    found = place.meet(place.come(0), lambda: meet(early, place.workdir, ABOUT))
    assert str(found[1]).startswith("host 1 (b) has not come within 1 s")
    assert str(found[0]).startswith("host 1 (b), host 2 (c) have not come within 4 s")


def test_no_host_0(place):
    place.within = 0.3
    (error,) = place.meet(place.come(1))
    where = f"host 0 (localhost) cannot be reached at localhost:{place.port}"
    assert str(error).startswith(f"{where} within 0.3 s: Connection refused. Start")
    assert f"open its ports {place.port} and {place.port + 1}" in str(error)


def test_a_name_that_nobody_knows(place):
    place.within = 0.3
    names = ("no-such-host.invalid", "b")
    (error,) = place.meet(place.come(1, names=names))
    assert "host 0 (no-such-host.invalid) cannot be reached" in str(error)


def test_everything_that_differs_is_named_on_every_host(place, tmp_path, monkeypatch):
    said = []  # the other version is that of the thread that asks second
    real = meeting.versions()
    monkeypatch.setattr(
        meeting,
        "versions",
        lambda: said.append(1) or {**real, "jax": f"0.{len(said)}"},
    )
    config = {"batch": 16, "optim.lr": 1e-3, "accumulate": 2}
    found = place.meet(
        place.come(0),
        place.come(1, config=config, data={"text": "def"}),
        place.come(2, workdir=tmp_path / "elsewhere"),
    )
    assert len(texts(found)) == 1
    text = str(found[0])
    on = "on host 0 (localhost)"
    for line in (
        f"host 1 (b) has another config: accumulate is 2, {on} 'not there'",
        f"host 1 (b) has another config: batch is 16, {on} 8",
        f"host 1 (b) has another data: text is 'def', {on} 'abc'",
        f"host 2 (c): its --workdir {tmp_path / 'elsewhere'} is not the folder that "
        f"host 0 (localhost) has as {place.workdir}: give a folder that all hosts",
    ):
        assert line in text
    assert text.count("has another versions: jax is '0.") == 2


def test_versions_tell_one_code_from_another(monkeypatch, tmp_path):
    before = meeting.versions()
    assert {"python", "bert_jax", "jax", "jaxlib", "flax"} < set(before)
    (tmp_path / "step.py").write_text("1")
    monkeypatch.setattr(meeting, "__file__", str(tmp_path / "meeting.py"))
    one = meeting.versions()["code of bert_jax"]
    (tmp_path / "step.py").write_text("2")
    two = meeting.versions()["code of bert_jax"]
    assert len({before["code of bert_jax"], one, two}) == 3


def test_two_processes_with_one_number(place, monkeypatch):
    monkeypatch.setattr(meeting, "TELL_LATER_ONES", 0.5)
    found = place.meet(place.come(0), place.come(1), place.come(1))
    assert len(texts(found)) == 1
    assert "two processes were started with --host 1: process " in str(found[0])


def test_another_number_of_hosts(place, monkeypatch):
    monkeypatch.setattr(meeting, "TELL_LATER_ONES", 0.5)
    more = (*place.names, "d")
    found = place.meet(place.come(0), place.come(1), place.come(2, names=more))
    assert len(texts(found)) == 1
    assert "--host 2, was started with --hosts localhost,b,c,d, host 0 " in str(
        found[0]
    )


def test_the_port_to_meet_by_is_taken(place):
    """By what does not answer the other hosts."""
    place.within = 0.7
    with socket.create_server(("", place.port)):
        first, other = place.meet(place.come(0), place.come(1))
    taken = "cannot be listened on: Address already in use. Is another run there"
    assert str(first).startswith(f"port {place.port} of host 0 (localhost) {taken}")
    assert "a second process started with --host 0" in str(first)
    where = f"host 0 (localhost) cannot be reached at localhost:{place.port}"
    assert str(other).startswith(f"{where} within 0.7 s: it does not answer. Start")


def test_the_port_of_jax_is_taken(place, monkeypatch):
    """All are told at once, without waiting for those that have not come."""
    monkeypatch.setattr(meeting, "TELL_LATER_ONES", 0.5)
    place.within = 20.0
    begin = time.monotonic()
    with socket.create_server(("", place.port + 1)):
        found = place.meet(place.come(0), place.come(1))
    assert time.monotonic() - begin < 10
    (text,) = texts(found)
    taken = "cannot be listened on: Address already in use"
    assert text.startswith(f"port {place.port + 1} of host 0 (localhost) {taken}")
    assert text.endswith("give all hosts another --port. JAX connects the hosts by it")


@pytest.mark.parametrize("index", [0, 1])
def test_a_host_that_cannot_start_says_so(place, index):
    def fails():
        with excused(place.hosts(index)):
            raise InputError("its corpus is not there")

    others = [place.come(n) for n in range(3) if n != index]
    name = place.hosts(0).called(index)
    place.within = 30.0  # nobody waits for that long
    begin = time.monotonic()
    mine, *theirs = together(fails, *others)
    assert time.monotonic() - begin < 10
    assert str(mine) == "its corpus is not there"
    assert texts(theirs) == {f"{name} cannot start: its corpus is not there"}


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",  # says nothing
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 1 << 31),
        struct.pack("!I", 4) + b"\x80\x04K\x01",  # a pickle
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 200_000) + b"[" * 200_000,
        struct.pack("!I", 100) + b"{",  # and no more
    ],
    ids=["silent", "http", "long", "pickle", "list", "deep", "cut"],
)
def test_strangers_change_nothing(place, rubbish):
    ready = threading.Event()

    def stranger():
        until = time.monotonic() + 5
        while True:
            try:
                line = socket.create_connection(("localhost", place.port), 5)
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.01)
        with line:
            line.sendall(rubbish)
            ready.set()
            line.settimeout(10)
            try:
                return line.recv(100)  # until we hang up
            except ConnectionResetError:
                return b""

    def late(index):
        def come():
            ready.wait(5)
            return place.come(index)()

        return come

    place.within = 8.0
    heard, *found = place.meet(stranger, place.come(0), late(1), late(2))
    assert heard == b""
    assert [set(lines) for lines in found] == [{1, 2}, {0}, {0}]


def test_a_host_may_go_and_come_again(place):
    """Killed and started again while all wait for a third."""
    hosts = place.hosts(1)
    hello = {**meeting.introduction(hosts), "about": {}}

    def killed_then_come():
        for _ in range(100):
            try:
                line = Line(socket.create_connection(("localhost", place.port), 5))
                break
            except OSError:
                time.sleep(0.02)
        line.send(hello)
        time.sleep(0.3)
        line.close()
        return place.come(1)()

    def late():
        time.sleep(0.8)
        return place.come(2)()

    found = place.meet(place.come(0), killed_then_come, late)
    assert [set(lines) for lines in found] == [{1, 2}, {0}, {0}]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--hosts", "a,b"], "--hosts needs --host"),
        (["--host", "1"], "--host needs --hosts"),
        (["--hosts", "a,b", "--host", "2"], "--host 2: --hosts names 2"),
        (["--hosts", "a,,b", "--host", "0"], "a name is empty"),
        (["--hosts", "a,b", "--host", "x", "--port", "y"], "--host x is no number"),
        (["--hosts", "a,b", "--host", "0", "--port", "65535"], "--port 65535: from"),
        (["--hosts", "a,b", "--host", "0", "--meet_within", "0"], "--meet_within 0:"),
    ],
)
def test_flags_that_cannot_be(words, text, tmp_path, capsys, monkeypatch):
    for name in ("HOSTS", "HOST", "PORT", "MEET_WITHIN"):
        monkeypatch.delenv(f"BERT_JAX_{name}", raising=False)
    with pytest.raises(SystemExit) as left:
        main(["train", "--config", "pretrain", "--workdir", str(tmp_path), *words])
    assert left.value.code == 1
    assert text in capsys.readouterr().err


# While the run goes on. A thread stands for a process, and `leave` for its end.


class Clock:
    """Hours pass in no time."""

    def __init__(self):
        self.real, self.late = time.monotonic, 0.0

    def __call__(self) -> float:
        return self.real() + self.late


class Company:
    """Peers of one process that have met, each with what ended it."""

    def __init__(self, place, clock: Clock, count: int = 3, **how):
        self.clock = clock
        lines = together(*(place.come(index) for index in range(count)))
        self.codes: dict[int, int] = {}  # in the order in which they ended

        def leave(index: int, code: int) -> None:
            self.codes.setdefault(index, code)
            for line in lines[index].values():
                line.close()

        self.peers = [
            Peers(place.hosts(index), lines[index], leave=partial(leave, index), **how)
            for index in range(count)
        ]
        for one in self.peers:
            one.__enter__()

    def ended(self, *indices: int, within: float = 5.0) -> dict[int, int]:
        until = time.monotonic() + within
        while not {*indices} <= {*self.codes} and time.monotonic() < until:
            time.sleep(0.02)
        return {index: self.codes.get(index) for index in indices}

    def after(self, seconds: float, *, mute: int | None = None) -> None:
        """So much later, once all have heard of all again, but of `mute`."""
        self.clock.late += seconds
        now = self.clock()
        until = time.monotonic() + 10
        while time.monotonic() < until and not self.codes:
            pairs = [(one, n) for one in self.peers for n in one.lines if n != mute]
            if all(one.heard[n] >= now for one, n in pairs):
                return
            time.sleep(0.01)

    def close(self) -> None:
        for one in self.peers:
            one.over.set()
            one.thread.join(10)


@pytest.fixture
def company(place, monkeypatch):
    monkeypatch.setattr(peers, "BEAT", 0.05)
    monkeypatch.setattr(peers, "GRACE", 0.3)
    clock = Clock()
    monkeypatch.setattr(
        peers, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep)
    )
    made = []

    def make(**how) -> Company:
        made.append(Company(place, clock, **how))
        return made[0]

    yield make
    for one in made:
        one.close()


def kill(one: Peers) -> None:
    """What the others see when a process is killed: nothing but closed connections."""
    one.over.set()
    one.thread.join()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_is_gone_is_named_by_all(company, capsys, victim):
    made = company()
    for one in made.peers:
        assert one.stops(7, None) is None
    time.sleep(0.3)
    kill(made.peers[victim])
    others = [index for index in range(3) if index != victim]
    assert made.ended(*others) == dict.fromkeys(others, 75)
    name = made.peers[0].hosts.called(victim)
    text = (
        f"error: {name} is gone: its connection broke; it was last heard of at step 7"
    )
    assert capsys.readouterr().err.count(text) >= 2


def test_a_silent_host_is_gone(company, capsys):
    made = company(stall_after=600.0)
    made.peers[2].tell = lambda _: None  # stopped, its connection is still there
    for _ in range(4):
        made.after(40.0, mute=2)
    assert made.ended(0, 1) == {0: 75, 1: 75}
    assert "error: host 2 (c) is silent since 1" in capsys.readouterr().err


def test_who_is_silent_while_all_wait_is_what_they_wait_for(company, capsys):
    made = company(stall_after=100.0)
    made.peers[2].tell = lambda _: None
    for _ in range(3):
        made.after(30.0, mute=2)
    assert made.codes == {}
    made.after(9.0, mute=2)
    assert made.ended(0, 1) == {0: 75, 1: 75}
    assert "error: host 2 (c) is silent since " in capsys.readouterr().err


def test_a_host_that_does_not_get_on_is_named(company, capsys):
    made = company(stall_after=100.0)
    for index, one in enumerate(made.peers):
        for step in range(1, 4 if index == 1 else 6):
            one.stops(step, None)
    made.after(60.0)
    made.after(39.0)
    assert made.codes == {}
    assert made.ended(0, 1, 2) == {0: 75, 1: 75, 2: 75}  # a second later
    text = (
        "error: no step was finished for 100 s (config.stall_after): host 1 (b) at "
        "step 3, others at step 5."
    )
    assert capsys.readouterr().err.count(text) == 3


@pytest.mark.parametrize("hungry", [0, 1])
def test_of_those_at_the_same_step_the_one_without_a_batch_is_named(
    company, capsys, hungry
):
    made = company(stall_after=100.0)
    made.peers[hungry].reads = lambda: True
    made.peers[2].reads = lambda: True  # for the batch of a later step
    for index, one in enumerate(made.peers):
        for step in range(1, 6 if index == 2 else 4):
            one.stops(step, None)
    made.after(60.0)
    made.after(39.0)
    assert made.ended(0, 1, 2) == {0: 75, 1: 75, 2: 75}  # a second later
    name = made.peers[0].hosts.called(hungry)
    text = f": {name} at step 3, without a batch, others at step 5."
    assert capsys.readouterr().err.count(text) == 3


@pytest.mark.parametrize("stall_after", [100.0, 0.0])
def test_batches_of_an_evaluation_are_progress(company, stall_after):
    made = company(stall_after=stall_after)
    for _ in range(5):
        for one in made.peers:
            if stall_after:
                one.tick()
        made.after(60.0)
    assert made.codes == {}


@pytest.mark.parametrize("asked", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("scored", [0, 7])
def test_all_stop_after_the_same_turn(company, asked, number, scored):
    """Hosts run on by themselves, at most two turns apart, as collectives have it. A
    turn is a step, or one of the batches `scored` after each."""
    made = company()
    at = [0, 0, 0]
    stopped = {}

    def run(index: int):
        def go():
            for turn in range(1, 500):
                while turn > min(at[n] for n in range(3) if n not in stopped) + 2:
                    time.sleep(0.001)
                time.sleep(0.002 * (index + 1))
                at[index], step = turn, (turn - 1) // (1 + scored) + 1
                signalled = number if index == asked and turn >= 5 else None
                if found := made.peers[index].stops(step, signalled):
                    stopped[index] = turn, found
                    return

        return go

    together(*(run(index) for index in range(3)))
    assert len(stopped) == 3
    assert len({*stopped.values()}) == 1
    turn, found = stopped[0]
    assert 5 <= turn < 100
    assert found == number
    name = made.peers[0].hosts.called(asked)
    assert {one.reason for one in made.peers} == {f" ({number.name} on {name})"}


@pytest.mark.parametrize("index", [0, 1])
def test_a_host_that_fails_tells_the_others_why(company, capsys, index):
    made = company()
    error = InputError("the disk is full")
    made.peers[index].__exit__(InputError, error, None)
    assert made.ended(0, 1, 2) == {0: 1, 1: 1, 2: 1}
    told = capsys.readouterr().err
    name = made.peers[0].hosts.called(index)
    assert told.count(f"error: {name} failed: the disk is full\n") == 2
    assert told.count("error: the disk is full\n") == 1
    assert [*made.codes][-1] == 0  # or JAX would end those that are left


@pytest.mark.parametrize("index", [0, 1])
def test_a_save_that_fails_waits_for_who_may_be_gone(company, capsys, index):
    """It is told in the end, without a traceback."""
    made = company()
    begin = time.monotonic()
    made.peers[index].__exit__(SaveError, SaveError("no room"), None)
    assert time.monotonic() - begin > 2 * peers.GRACE
    assert made.ended(0, 1, 2) == {0: 1, 1: 1, 2: 1}
    told = capsys.readouterr().err
    assert told.count("error: no room\n") == 1
    assert told.count("failed: no room\n") == 2
    assert "Traceback" not in told
    assert [*made.codes][-1] == 0


def test_all_that_fail_alike_each_say_it_themselves(company, capsys):
    """As of a loss that is not finite, which all of them see."""
    made = company()
    error = InputError("the loss is not finite")
    together(*(lambda p=one: p.__exit__(InputError, error, None) for one in made.peers))
    assert made.ended(0, 1, 2) == {0: 1, 1: 1, 2: 1}
    told = capsys.readouterr().err
    assert told.count("error: the loss is not finite\n") == 3
    assert "failed" not in told


@pytest.mark.parametrize("kind", [RuntimeError, SaveError])
def test_an_error_that_a_lost_host_causes_is_not_what_is_told(company, capsys, kind):
    """A collective fails on the others, and by then it is known who is gone."""
    made = company()
    kill(made.peers[2])
    made.peers[1].__exit__(kind, kind("gloo: closed by peer"), None)
    assert made.ended(0, 1) == {0: 75, 1: 75}
    told = capsys.readouterr().err
    assert "host 2 (c) is gone" in told
    assert "failed" not in told
    assert [*made.codes] == [1, 0]


def test_the_end_of_a_run_is_no_death(company, monkeypatch):
    monkeypatch.setattr(peers.jax.distributed, "shutdown", lambda: None)
    made = company()

    def end(one: Peers, after: float):
        def go():
            time.sleep(after)
            one.__exit__(None, None, None)

        return go

    waits = zip(made.peers, (0.0, 0.4, 0.2), strict=True)
    together(*(end(one, after) for one, after in waits))
    assert all(one.over.is_set() for one in made.peers)
    assert made.codes == {}


def test_one_process_alone_has_no_peers():
    with Peers() as alone:
        alone.connect()
        assert alone.stops(3, None) is None
        assert alone.stops(4, signal.SIGTERM) == signal.SIGTERM
        assert alone.reason == ""


def test_a_port_that_is_closed_for_jax(port):
    hosts = Hosts(("localhost", "b"), 1, port - 1, 0.3)
    with pytest.raises(InputError) as error:
        peers.reach(hosts, port)
    assert f"host 1 (b) met the others by port {port - 1} of host 0" in str(error.value)
    assert f"cannot reach port {port} there" in str(error.value)


def test_hosts_in_another_order_than_the_workers_of_a_tpu(company, monkeypatch):
    """JAX takes their numbers from the TPU."""
    monkeypatch.setattr(peers, "reach", lambda *_: None)
    monkeypatch.setattr(peers.jax.config, "update", lambda *_: None)
    told = {}
    how = lambda address, **more: told.update(more, address=address)  # noqa: E731
    monkeypatch.setattr(peers.jax.distributed, "initialize", how)
    one = company().peers[1]
    with pytest.raises(InputError, match="is process 0 of 1 to JAX: name the hosts"):
        one.connect()
    assert told["address"] == f"localhost:{one.hosts.port + 1}"
    assert (told["num_processes"], told["process_id"]) == (3, 1)
    # Another host that gives up, or is silent, is known before JAX's time is up.
    assert told["initialization_timeout"] > one.hosts.meet_within + peers.SILENCE


def test_a_message_in_pieces():
    ours, theirs = socket.socketpair()
    line = Line(ours)
    text = json.dumps({"at": 1}).encode()
    whole = 2 * (struct.pack("!I", len(text)) + text)
    found = []
    for place in range(len(whole)):
        theirs.sendall(whole[place : place + 1])
        found += line.receive()
    assert found == [{"at": 1}, {"at": 1}]
    theirs.close()
    assert line.receive() == []
    assert line.closed
    line.close()
