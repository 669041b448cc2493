"""Where the time from the call of `train` to the end of the first step goes."""

import gc
import time

SHORT = 0.05  # seconds: parts below are not told


class StartUp:
    """A clock that is told, after each part of a start, which one it was.

    Until it is over Python looks for garbage less often: imports and traces make
    objects by the million that stay, and to go through them again every 700 is a
    quarter of a start.
    """

    def __init__(self):
        self.began = self.last = time.perf_counter()
        self.parts: dict[str, float] = {}  # seconds of each

    def __enter__(self) -> "StartUp":
        self.usual = gc.get_threshold()
        gc.set_threshold(100_000)
        return self

    def __exit__(self, *_) -> None:
        gc.set_threshold(*self.usual)

    def done(self, part: str) -> None:
        """What was done since the last part. The first time counts: later steps do
        the same again."""
        if part not in self.parts:
            now = time.perf_counter()
            self.parts[part], self.last = now - self.last, now

    def over(self) -> str:
        """Ends it; what is to be said of it."""
        self.__exit__()
        told = (
            f"{part} {seconds:.1f}"
            for part, seconds in self.parts.items()
            if seconds >= SHORT
        )
        return f"{self.last - self.began:.1f} s: {', '.join(told)}"
