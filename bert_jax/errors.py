"""Errors a person can act on: what is wrong, where, and what to do.

Every check in this package raises `InputError`; the command line prints its text
without a traceback and exits with status 1.
"""

import difflib
import sys
from collections.abc import Iterable
from typing import NoReturn


class InputError(ValueError):
    """Something the user gave (a path, a name, a file, a value) cannot be used."""


class InputWarning(UserWarning):
    """Something the user gave that may not mean what they think."""


class UnfinishedError(InputError):
    """Work that had to stop; what was done is kept, the same command goes on."""


def unknown(what: str, name: str, choices: Iterable[str]) -> str:
    """Text for an unknown name: the nearest valid ones first, then all of them."""
    choices = sorted(choices)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    listed = ", ".join(choices) if len(choices) <= 40 else f"{len(choices)} choices"
    return f"unknown {what} {name!r}.{hint} Valid: {listed}"


def fail(message: object) -> NoReturn:
    """Ends the process. In one write: `sys.exit(text)` takes two, and threads that log
    come between."""
    sys.stderr.write(f"error: {message}\n")
    sys.exit(1)
