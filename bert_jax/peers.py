"""The other hosts while a run goes on: when one is gone all end, and all stop alike.

A host that waits in a collective for one that is gone waits in C++, where no Python
runs. So a thread listens on the lines of the meeting: host 0 has one to each, each has
one to host 0. A line that breaks, and a host that is silent or finishes no step, end
the process with a text that names it, and with the exit code that means "again".

All must stop at the same place. Host 0, asked by a host that got a signal, holds the
main threads of all at the end of the turn they are in, which is a step or a batch of an
evaluation, takes the last turn that any has gone beyond, and tells all to stop after
the next one; whoever is held goes on up to it.

Host 0 ends last: JAX's coordinator is there, and without it JAX ends the others by
SIGABRT before they can say why.
"""

import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import jax

from bert_jax.checkpoint import SaveError, sha256
from bert_jax.config import Run, flatten
from bert_jax.course import course_of
from bert_jax.data.corpus import Corpus, open_corpus
from bert_jax.errors import InputError
from bert_jax.interrupt import AGAIN, exit_code
from bert_jax.meeting import Hosts, Line, close, excused, meet
from bert_jax.model_dir import content_of

BEAT = 1.0  # seconds between two signs of life
SILENCE = 120.0  # seconds without one, after which a host is gone
QUIET = 10.0  # the same, where no host gets on
GRACE = 5.0  # seconds: what fails since a host is gone fails a little before we know
START_AGAIN = (
    f"This host ends with exit code {AGAIN}: start the same command again on all "
    "hosts; it goes on from the last checkpoint"
)


class Peers:
    """Without lines there are none, and nothing happens."""

    def __init__(
        self,
        hosts: Hosts | None = None,
        lines: dict[int, Line] | None = None,
        *,
        stall_after: float = 0.0,
        leave: Callable[[int], None] = os._exit,
    ):
        self.hosts, self.lines, self.leave = hosts, lines or {}, leave
        self.stall_after = stall_after
        self.silence = min(SILENCE, stall_after or SILENCE)
        self.step = 0  # the last that this host has finished
        self.reads: Callable[[], bool] = lambda: False  # whether it waits for a batch
        self.turn = threading.Condition()  # guards the next three
        self.passed = 0  # turns that the main thread has gone beyond
        self.held = False
        self.stop: dict | None = None  # turn, signal and host, once it is agreed
        self.wish: int | None = None  # the signal this host got
        self.asked = False  # of host 0: whether any host has asked
        self.answers: dict[int, int] = {}  # to host 0: what each has gone beyond
        self.moved = now = time.monotonic()  # when this host last finished something
        self.heard = dict.fromkeys(self.lines, now)
        self.at = dict.fromkeys(self.lines, 0)  # the step each was last heard of
        self.idle = dict.fromkeys(self.lines, 0.0)  # seconds, as each says
        self.reading = dict.fromkeys(self.lines, False)  # so does each
        self.done: set[int] = set()  # who has come to the end
        self.failure: dict | None = None  # of this host, to be told
        self.ends, self.over = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.listen, daemon=True)

    # What the main thread calls.

    def __enter__(self) -> "Peers":
        if self.lines:
            self.thread.start()
        return self

    def connect(self) -> None:
        """Makes the devices of all hosts known to JAX."""
        if not self.lines:
            return
        hosts, port = self.hosts, self.hosts.port + 1
        if hosts.index:
            reach(hosts, port)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                f"{hosts.names[0]}:{port}",
                num_processes=len(hosts.names),
                process_id=hosts.index,
                cluster_detection_method="deactivate",  # we know
                # Ours come first: what JAX does then, it does without a name.
                initialization_timeout=int(hosts.meet_within + SILENCE) + 60,
                heartbeat_timeout_seconds=24 * 3600,
                shutdown_timeout_seconds=60,
            )
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            raise InputError(
                f"JAX cannot connect the hosts by port {port} of {hosts.called(0)}: "
                f"{reason}. If it is in use give all hosts another --port"
            ) from None
        numbers = jax.process_index(), jax.process_count()
        if numbers != (hosts.index, len(hosts.names)):
            raise InputError(
                f"{hosts.called(hosts.index)} of {len(hosts.names)} is process "
                f"{numbers[0]} of {numbers[1]} to JAX: name the hosts of a TPU in the "
                "order of its workers, all of them"
            )
        self.tick()

    def tick(self) -> None:
        """Something was finished: this host is not stalled."""
        self.moved = time.monotonic()

    def stops(self, step: int, number: int | None) -> int | None:
        """At the end of each turn, with the signal that came if one did: the signal for
        which all stop after this turn, or None. All have the same turns."""
        if not self.lines:
            return number
        self.tick()
        self.step, self.wish = step, self.wish or number
        with self.turn:
            self.turn.wait_for(lambda: not self.held)
            if self.stop and self.passed + 1 >= self.stop["turn"]:
                return self.stop["signal"]
            self.passed += 1
            return None

    @property
    def reason(self) -> str:
        """For which all stopped."""
        if not self.stop:
            return ""
        name = signal.Signals(self.stop["signal"]).name
        return f" ({name} on {self.hosts.called(self.stop['host'])})"

    def __exit__(self, kind, error, _) -> None:
        if not self.lines:
            return
        if error is None:
            self.tick()
            self.ends.set()
            self.over.wait()  # until all are here, or one is gone
            self.thread.join()
            jax.distributed.shutdown()
            return
        # Where a collective failed since a host is gone, one of a save too, the thread
        # soon knows which.
        plain = isinstance(error, InputError | KeyboardInterrupt)
        if not plain or isinstance(error, SaveError):
            self.over.wait(2 * GRACE)
        code = exit_code(signal.SIGINT) if kind is KeyboardInterrupt else 1
        text = str(error) if isinstance(error, InputError) else repr(error)
        self.failure = {"text": text, "code": code}
        self.thread.join(3 * GRACE)  # the others know, and have gone before host 0
        if not plain:
            traceback.print_exception(error)
        self.last_words(text if plain else None, code)

    def last_words(self, text: str | None, code: int) -> None:
        """Ends the process: Python's own end would wait for the others."""
        sys.stdout.flush()
        if text is not None:
            sys.stderr.write(f"\nerror: {text}\n")  # a progress bar may stand there
        sys.stderr.flush()
        self.leave(code)

    # What the thread does.

    def listen(self) -> None:
        beat = 0.0
        while not self.over.is_set():
            for line in wait(list(self.lines.values()), 0.1):
                for message in line.receive():
                    self.hear(line, message)
                if line.closed and not self.over.is_set():
                    self.gone(self.number(line), "is gone: its connection broke")
            if time.monotonic() - beat >= BEAT:
                beat = time.monotonic()
                how = {"idle": beat - self.moved, "reads": self.reads()}
                self.tell({"at": self.step, **how})
                self.look()
            self.pass_on()
        if not self.failure:  # else this host's end is what closes them
            close(self.lines.values(), linger=2.0)

    def number(self, line: Line) -> int:
        return next(n for n, its in self.lines.items() if its is line)

    def tell(self, message: dict) -> None:
        for line in self.lines.values():
            line.send(message)

    def pass_on(self) -> None:
        """What the main thread wants the others to know."""
        chief = self.hosts.index == 0
        if self.failure:
            self.tell({"failed": self.failure, "host": self.hosts.index})
            self.over.set()
            self.let_go()
        if self.wish and not self.asked:
            self.asked = True
            if chief:
                self.hold({"signal": int(self.wish), "host": 0})
            else:
                self.tell({"wish": int(self.wish)})
        if self.ends.is_set() and not chief and 0 not in self.done:
            self.done.add(0)
            self.tell({"done": True})
        if chief and self.ends.is_set() and self.done == {*self.lines}:
            self.tell({"over": True})
            self.over.set()

    def hear(self, line: Line, message: dict) -> None:
        index = self.number(line)
        self.heard[index] = time.monotonic()
        match message:
            case {"at": step, "idle": idle, "reads": reads}:
                self.at[index], self.idle[index] = step, idle
                self.reading[index] = reads
            case {"wish": number} if not self.asked:
                self.asked = True
                self.hold({"signal": number, "host": index})
            case {"hold": _}:
                with self.turn:
                    self.held = True
                    line.send({"passed": self.passed})
            case {"passed": turns}:
                self.answers[index] = turns
                self.agree()
            case {"stop": stop}:
                self.release(stop)
            case {"failed": failure, "host": host}:
                text = f"{self.hosts.called(host)} failed: {failure['text']}"
                line.send({"heard": True})
                self.end(text, failure["code"], told=index, grace=GRACE)
            case {"end": text, "code": code}:
                self.end(text, code, grace=0.0 if code == AGAIN else GRACE)
            case {"done": _}:
                self.done.add(index)
            case {"over": _}:
                self.over.set()

    def hold(self, wish: dict) -> None:
        """Host 0: nobody begins another turn until all have answered."""
        self.wanted = wish
        with self.turn:
            self.held = True
            self.answers[0] = self.passed
        self.tell({"hold": True})

    def agree(self) -> None:
        if len(self.answers) == len(self.hosts.names):
            stop = {**self.wanted, "turn": max(self.answers.values()) + 1}
            self.tell({"stop": stop})
            self.release(stop)

    def release(self, stop: dict) -> None:
        with self.turn:
            self.stop, self.held = stop, False
            self.turn.notify_all()

    def look(self) -> None:
        """Who has not been heard of, and who does not get on."""
        now = time.monotonic()
        idle = {**self.idle, self.hosts.index: now - self.moved}
        stalled = 0 < self.stall_after < max(idle.values())
        # One that is silent while all wait is the one they wait for.
        silence = QUIET if stalled else self.silence
        for index, heard in self.heard.items():
            if now - heard > silence:
                self.gone(index, f"is silent since {now - heard:.0f} s")
        if stalled and self.hosts.index == 0 and not self.over.is_set():
            at = {0: self.step, **self.at}
            first, last = min(at.values()), max(at.values())
            slowest = [index for index in sorted(at) if at[index] == first]
            # Those that wait for it may stand at the same step.
            reading = {0: self.reads(), **self.reading}
            hungry = [index for index in slowest if reading[index]]
            named = ", ".join(map(self.hosts.called, (hungry or slowest)[:8]))
            cause = ", without a batch" if hungry else ""
            others = f", others at step {last}" if last > first else ""
            self.end(
                f"no step was finished for {self.stall_after:g} s (config.stall_after)"
                f": {named} at step {first}{cause}{others}. {START_AGAIN}",
                AGAIN,
            )

    def gone(self, index: int, how: str) -> None:
        self.end(
            f"{self.hosts.called(index)} {how}; it was last heard of at step "
            f"{self.at[index]}. {START_AGAIN}",
            AGAIN,
            lost=index,
        )

    def end(
        self,
        text: str,
        code: int,
        *,
        told: int | None = None,
        lost: int | None = None,
        grace: float = 0.0,
    ) -> None:
        """Tells the others, but the one who told it, and ends the process, unless it
        ends by itself with an error of its own, as a run on several hosts may do on all
        of them at once."""
        chief = self.hosts.index == 0
        if chief:
            for index, line in self.lines.items():
                if index not in (told, lost):
                    line.send({"end": text, "code": code})
        until = time.monotonic() + grace
        while not self.failure and time.monotonic() < until:
            time.sleep(0.05)
        if chief:
            self.let_go(lost)
        if not self.failure:
            self.last_words(text, code)
        self.over.set()

    def let_go(self, lost: int | None = None) -> None:
        """Host 0: until the others have ended, which closes their lines. Another: until
        host 0 has heard, for to end closes a line, and what was sent may be lost."""
        until = time.monotonic() + 2 * GRACE
        lines = [line for index, line in self.lines.items() if index != lost]
        while lines and (left := until - time.monotonic()) > 0:
            heard = [line.receive() for line in wait(lines, left)]
            if self.hosts.index and any(
                message.keys() & {"heard", "end", "failed"}
                for message in itertools.chain(*heard)
            ):
                return
            lines = [line for line in lines if not line.closed]


def assemble(
    hosts: Hosts | None,
    run: Run,
    workdir: Path,
    corpus: Corpus,
    held_out: Corpus | None,
) -> Peers:
    """The peers of a run, once they have met and agree in what they were told."""
    if hosts is None:
        return Peers()
    with excused(hosts):
        data = contents(run, corpus, held_out)
    about = {"config": dict(flatten(run.as_dict())), "data": data}
    lines = meet(hosts, workdir, about)
    return Peers(hosts, lines, stall_after=run.stall_after)


def contents(run: Run, corpus: Corpus, held_out: Corpus | None) -> dict[str, str]:
    """Hashes of all that a run reads, its stages and tasks included."""
    found, texts = {}, {"text": corpus, "held-out text": held_out}
    for leg in course_of(run).legs:
        path = leg.run.data
        if leg.run.rows == "labelled":
            try:
                found[f"labelled {path}"] = sha256(Path(path))[:16]
            except OSError as error:
                raise InputError(f"{path} cannot be read: {error.strerror}") from None
        elif path != run.data:
            texts[f"text {path}"] = open_corpus(path)
    for name, text in texts.items():
        if text is not None:
            found[name] = text.about["content"]
            found[f"tokenizer of the {name}"] = text.about["tokenizer"]["hash"]
            if "similar" in text.about:
                found[f"similar words of the {name}"] = text.about["similar"]["hash"]
    if run.init and Path(run.init).exists():  # a run that goes on does without it
        found["config.init"] = content_of(run.init)
    return found


def reach(hosts: Hosts, port: int) -> None:
    """Until the port is open: JAX, where it is not, ends the process without a word."""
    until = time.monotonic() + hosts.meet_within
    while True:
        try:
            socket.create_connection((hosts.names[0], port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise InputError(
                    f"{hosts.called(hosts.index)} met the others by port {hosts.port} "
                    f"of {hosts.called(0)}, but cannot reach port {port} there: "
                    f"{error}. Open it to all hosts"
                ) from None
            time.sleep(0.1)
