"""Signals as a wish: what a second one does, and that all is as it was afterwards."""

import signal

import pytest

from bert_jax.interrupt import Interrupt, exit_code


def test_sigterm_may_come_twice():
    """A machine that goes down sends it to all processes, and launchers pass it on."""
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as interrupt:
        assert interrupt.signal is None
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            assert interrupt.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert exit_code(interrupt.signal) == 75


@pytest.fixture
def python_handles_ctrl_c():
    """Not so in tests that a shell runs in the background: it lets them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_ctrl_c_twice_is_meant():
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert exit_code(interrupt.signal) == 130
