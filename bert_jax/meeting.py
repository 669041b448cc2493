"""The hosts of a run meet before anything is computed, or each says why not.

`jax.distributed.initialize` dies in C++ when a host is missing, and names none. So host
0 first listens on a port, the others connect and say who they are and what they were
told: versions, config, data, the workdir they see. Host 0 compares, and answers all of
them alike: "go", or what is wrong and where. The messages are JSON, of bounded length;
whoever connects and says anything else is not heard. The connections stay open as long
as the run (peers.py).
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

import bert_jax
from bert_jax.errors import InputError

PORT = 8476  # JAX's coordinator gets the one after it
MEET_WITHIN = 300.0  # seconds
LONGEST = 1 << 20  # bytes of a message
TELL_LATER_ONES = 10.0  # seconds for which hosts that come late are told what is wrong
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "libtpu")
CODE = "code of bert_jax"  # a version number tells too little
MAY_DIFFER = ("data", "eval.data", "init")  # where it lies: what it holds is compared


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Where the processes of a run are, and which of them this one is."""

    names: tuple[str, ...]  # host 0 is reached by its name
    index: int
    port: int = PORT
    meet_within: float = MEET_WITHIN

    def __post_init__(self):
        problems = []
        if not all(self.names):
            problems.append(f"--hosts {','.join(self.names)}: a name is empty")
        if not 0 <= self.index < len(self.names):
            problems.append(
                f"--host {self.index}: --hosts names {len(self.names)}, so it is from "
                f"0 to {len(self.names) - 1}"
            )
        if not 0 < self.port < 65535:
            problems.append(f"--port {self.port}: from 1 to 65534")
        if not self.meet_within > 0:
            problems.append(f"--meet_within {self.meet_within:g}: seconds, more than 0")
        if problems:
            raise InputError("\n".join(problems))

    def called(self, index: int) -> str:
        return f"host {index} ({self.names[index]})"

    @property
    def place(self) -> str:
        return f"{self.names[0]}:{self.port}"


class Line:
    """Messages over a socket: the length in four bytes, then a dict as JSON."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection, self.came, self.closed = connection, b"", False
        self.index: int | None = None  # of the host at the other end, once it is known

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: dict) -> None:
        """Nothing where nobody listens any more: `receive` is what tells."""
        text = json.dumps(message).encode()
        with contextlib.suppress(OSError):
            self.connection.settimeout(5.0)
            try:
                self.connection.sendall(struct.pack("!I", len(text)) + text)
            finally:
                self.connection.settimeout(0.0)

    def receive(self) -> list[dict]:
        """What has come since; `closed` says that nothing more will."""
        try:
            part = self.connection.recv(1 << 16)
            self.closed = not part
        except BlockingIOError:
            part = b""
        except OSError:
            part, self.closed = b"", True
        self.came += part
        found = []
        while len(self.came) >= 4:
            size = struct.unpack("!I", self.came[:4])[0]
            if size > LONGEST:
                self.closed = True  # no host of ours
                break
            if len(self.came) < 4 + size:
                break
            text, self.came = self.came[4 : 4 + size], self.came[4 + size :]
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self.closed = True
                break
            found.append(message)
        return found

    def close(self) -> None:
        self.closed = True
        self.connection.close()


def close(lines: Iterable[Line], *, linger: float) -> None:
    """When the other ends have read all and closed, or after `linger` seconds: a socket
    that is closed with unread bytes takes back what was sent last."""
    until = time.monotonic() + linger
    lines = [line for line in lines if not line.closed]
    for line in lines:
        with contextlib.suppress(OSError):
            line.connection.shutdown(socket.SHUT_WR)
    still = lines
    while still and (left := until - time.monotonic()) > 0:
        for line in wait(still, left):
            line.receive()
        still = [line for line in still if not line.closed]
    for line in lines:
        line.close()


def versions() -> dict[str, str]:
    """Of all that decides what a step computes."""
    found = {"python": platform.python_version(), "bert_jax": bert_jax.__version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found | {CODE: digest.hexdigest()[:12]}


@contextlib.contextmanager
def proof(workdir: Path) -> Iterator[dict]:
    """A file in the workdir that the others must be able to read."""
    name, word = f".host-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text(word)
    except OSError as error:
        raise InputError(f"{workdir} cannot be written: {error}") from None
    try:
        yield {"path": str(workdir.absolute()), "file": name, "word": word}
    finally:
        (workdir / name).unlink(missing_ok=True)


def meet(hosts: Hosts, workdir: Path, about: dict) -> dict[int, Line]:
    """Lines to the others: host 0 has one to each, each has one to host 0.

    `about` is the same on all hosts: {"config": flat dict, "data": dict of hashes}.
    """
    with proof(workdir) as seen:
        about = {"versions": versions(), **about, "workdir": seen}
        return come_together(hosts, workdir, about)


def come_together(hosts: Hosts, workdir: Path, about: dict) -> dict[int, Line]:
    """The same, of hosts that are alike in nothing but what `about` tells."""
    if hosts.index == 0:
        return Chief(hosts, about, workdir).gather()
    return join(hosts, {**introduction(hosts), "about": about})


def excuse(hosts: Hosts, reason: str) -> None:
    """Tells the others why this host cannot come, for as long as it is cheap."""
    within = min(hosts.meet_within, TELL_LATER_ONES)
    hosts = dataclasses.replace(hosts, meet_within=within)
    text = f"{hosts.called(hosts.index)} cannot start: {reason}"
    with contextlib.suppress(InputError):
        if hosts.index == 0:
            Chief(hosts, {}, Path()).tell(text)
        else:
            join(hosts, {**introduction(hosts), "cannot": text})


@contextlib.contextmanager
def excused(hosts: Hosts | None) -> Iterator[None]:
    """What keeps this host from the meeting is told to the others."""
    try:
        yield
    except Exception as error:
        if hosts:
            name = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            excuse(hosts, f"{name}{error}")
        raise


def introduction(hosts: Hosts) -> dict:
    process = f"process {os.getpid()} on {socket.gethostname()}"
    return {"bert_jax": 1, "hosts": hosts.names, "host": hosts.index, "is": process}


class Chief:
    """Host 0: waits for the others, compares, and answers."""

    def __init__(self, hosts: Hosts, about: dict, workdir: Path):
        self.hosts, self.about, self.workdir = hosts, about, workdir
        self.until = time.monotonic() + hosts.meet_within
        self.here: dict[int, Line] = {}
        self.said: dict[int, dict] = {}  # what they said of themselves
        self.fatal: list[str] = []  # what no waiting can mend
        self.strangers: list[Line] = []  # connected, and not known yet
        self.refused: list[Line] = []  # known, to be told, and no host of this run
        self.door = open_door(hosts, hosts.port)

    @property
    def missing(self) -> list[int]:
        return [n for n in range(1, len(self.hosts.names)) if n not in self.here]

    def gather(self) -> dict[int, Line]:
        try:  # what JAX does about a port that is taken, it does without a word
            open_door(self.hosts, self.hosts.port + 1).close()
        except InputError as error:
            self.fatal.append(f"{error}. JAX connects the hosts by it")
        with self.door:
            while self.missing and not self.fatal and time.monotonic() < self.until:
                self.listen(self.until)
            problems = [*self.fatal, *self.unlike()]
            if self.missing and not self.fatal:
                problems.append(not_come(self.hosts, self.missing))
            if problems:
                text = "\n".join(problems)
                self.tell(text)
                raise InputError(text)
            for line in self.strangers:
                line.close()
        for line in self.here.values():
            line.send({"go": True})
        return self.here

    def listen(self, until: float) -> None:
        """Hears what comes, for a second at most."""
        at_most = max(0.0, min(1.0, until - time.monotonic()))
        lines = [*self.strangers, *self.refused, *self.here.values()]
        before = self.missing
        for ready in wait([self.door, *lines], at_most):
            if ready is self.door:
                with contextlib.suppress(OSError):  # it has gone again
                    self.strangers.append(Line(self.door.accept()[0]))
                continue
            for message in ready.receive():
                self.hear(ready, message)
            if ready.closed:
                self.forget(ready)
        if self.missing != before:
            for line in self.here.values():
                line.send({"missing": self.missing})

    def forget(self, line: Line) -> None:
        line.close()
        for some in (self.strangers, self.refused):
            if line in some:
                some.remove(line)
        if self.here.get(line.index) is line:
            del self.here[line.index], self.said[line.index]

    def hear(self, line: Line, message: dict) -> None:
        index, names = message.get("host"), message.get("hosts")
        known = message.get("bert_jax") == 1 and line in self.strangers
        if not known or type(index) is not int or not isinstance(names, list):
            line.closed = True
            return
        self.strangers.remove(line)
        line.index = index
        problem = self.against(index, names, message)
        if problem:
            self.fatal.append(problem)
            self.refused.append(line)
        else:
            self.here[index], self.said[index] = line, message

    def against(self, index: int, names: list, message: dict) -> str | None:
        """Why one who came is no host of this run."""
        if "cannot" in message:
            return str(message["cannot"])
        who, ours = message.get("is"), self.hosts.names
        if tuple(names) != ours:
            return (
                f"{who}, --host {index}, was started with --hosts "
                f"{','.join(map(str, names))}, host 0 with --hosts {','.join(ours)}: "
                "they must be the same"
            )
        if index in self.here or not 0 < index < len(ours):
            other = self.said[index]["is"] if index in self.here else "host 0"
            return (
                f"two processes were started with --host {index}: {other}, and {who}; "
                "each host has a number of its own"
            )
        return None

    def unlike(self) -> list[str]:
        """In what those who came differ from host 0."""
        problems = []
        for index in sorted(self.here):
            its = self.said[index].get("about")
            its = its if isinstance(its, dict) else {}
            who = self.hosts.called(index)
            for what, ours in self.about.items():
                if what == "workdir":
                    problems += self.elsewhere(who, its.get(what))
                else:
                    problems += differences(who, what, ours, its.get(what), self.hosts)
        return problems

    def elsewhere(self, who: str, seen) -> list[str]:
        try:
            if (self.workdir / Path(seen["file"]).name).read_text() == seen["word"]:
                return []
        except (OSError, TypeError, KeyError, ValueError):
            pass
        there = seen.get("path") if isinstance(seen, dict) else seen
        return [
            f"{who}: its --workdir {there} is not the folder that "
            f"{self.hosts.called(0)} has as {self.about['workdir']['path']}: give a "
            "folder that all hosts share (NFS, Filestore)"
        ]

    def tell(self, text: str) -> None:
        """Tells all that are here, and for a while those that come."""
        until = min(self.until, time.monotonic() + TELL_LATER_ONES)
        others, told = {*range(1, len(self.hosts.names))}, []
        while True:
            for line in (*self.here.values(), *self.refused):
                if line not in told:
                    line.send({"end": text})
                    told.append(line)
            others -= {line.index for line in told}
            if not others or time.monotonic() >= until:
                break
            self.listen(until)
        self.door.close()
        for line in self.strangers:
            line.close()
        close(told, linger=0.5)


def open_door(hosts: Hosts, port: int) -> socket.socket:
    """Listens on a port of this machine, which is host 0."""
    try:
        # "" is every address of this machine, whatever its own name leads to.
        dual = socket.has_dualstack_ipv6()
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            dualstack_ipv6=dual,
            backlog=128,
        )
    except OSError as error:
        raise InputError(
            f"port {port} of {hosts.called(0)} cannot be listened on: "
            f"{os.strerror(error.errno)}. Is another run there, an earlier one still "
            "ending, or a second process started with --host 0? End it, or give all "
            "hosts another --port"
        ) from None


def differences(who: str, what: str, ours, its, hosts: Hosts) -> list[str]:
    """One line for each thing in which a host differs."""
    ours, its = json.loads(json.dumps(ours)), its if isinstance(its, dict) else {}
    return [
        f"{who} has another {what}: {name} is {its.get(name, 'not there')!r}, on "
        f"{hosts.called(0)} {ours.get(name, 'not there')!r}"
        for name in sorted({*ours, *its})
        if ours.get(name) != its.get(name)
        and not (what == "config" and name in MAY_DIFFER)
    ]


def not_come(hosts: Hosts, missing: list[int]) -> str:
    names = ", ".join(map(hosts.called, missing))
    have = "has" if len(missing) == 1 else "have"
    return (
        f"{names} {have} not come within {hosts.meet_within:g} s. Start the same "
        "command on all hosts, each with its own --host, and let them reach port "
        f"{hosts.port} and {hosts.port + 1} of {hosts.called(0)}; the logs of those "
        "that did not come may say why"
    )


def join(hosts: Hosts, message: dict) -> dict[int, Line]:
    """Goes to host 0, says who this is, and waits for the answer."""
    # Host 0, if it was started at the same moment, is the first to say that time is up.
    until = time.monotonic() + hosts.meet_within + 1.0
    why, missing = "", None
    while (left := until - time.monotonic()) > 0:
        try:
            address = hosts.names[0], hosts.port
            line = Line(socket.create_connection(address, timeout=min(left, 5.0)))
        except OSError as error:
            why, missing = str(error.strerror or error), None
            time.sleep(min(0.2, left))
            continue
        line.send(message)
        while not line.closed and (left := until - time.monotonic()) > 0:
            if not wait([line], left):
                break
            for answer in line.receive():
                if "go" in answer:
                    return {0: line}
                if "end" in answer:
                    line.close()
                    raise InputError(str(answer["end"]))
                missing = answer.get("missing")
        if line.closed:  # host 0 ended, or it is something else that listens there
            why, missing = "it closes the connection without an answer", None
        line.close()
        time.sleep(min(0.2, max(0.0, left)))
    if missing:
        raise InputError(not_come(hosts, [n for n in missing if type(n) is int]))
    raise InputError(
        f"{hosts.called(0)} cannot be reached at {hosts.place} within "
        f"{hosts.meet_within:g} s: {why or 'it does not answer'}. Start the same "
        f"command there, with --host 0, and open its ports {hosts.port} and "
        f"{hosts.port + 1} to the other hosts"
    )
