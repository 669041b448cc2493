"""Ctrl-C and SIGTERM as a wish: the work ends where it can be gone on with."""

import signal
import threading

AGAIN = 75  # EX_TEMPFAIL of sysexits.h: start me again, I go on from where I was


def exit_code(number: int) -> int:
    """Of a process that saved and ended for a signal. After Ctrl-C that of a shell:
    whoever pressed it does not want it started again."""
    return 130 if number == signal.SIGINT else AGAIN


class Interrupt:
    """Sets `signal`, which the work looks at between two steps.

    A second Ctrl-C ends the work at once, as it would without us; a second SIGTERM
    does not: where a machine goes down every process gets one, and a launcher that gets
    its own passes it on. Python would raise in the middle of whatever runs, a half-done
    import or a callback that loses it.
    """

    def __enter__(self) -> "Interrupt":
        self.signal = None
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            self.before = {
                number: signal.signal(number, self.note)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def note(self, number, _) -> None:
        self.signal = self.signal or number
        if number == signal.SIGINT:
            signal.signal(number, self.before[number])

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
