"""Ctrl-C and SIGTERM as a wish: the work ends where it can be gone on with."""

import signal
import threading


class Interrupt:
    """Sets `signal`, which the work looks at between two steps.

    A second one ends the process at once, as it would without us. Python would raise
    in the middle of whatever runs, a half-done import or a callback that loses it.
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
        self.signal = number
        signal.signal(number, self.before[number])

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
