"""Ports for a run on several hosts, which are processes of this machine."""

import random
import socket


def free_ports() -> int:
    """The first of two that nobody listens on: the hosts meet by it, and JAX connects
    them by the other. Below those that a system gives to connections."""
    while True:
        port = random.randrange(20_000, 32_000, 2)
        try:
            for number in (port, port + 1):
                socket.create_server(("", number)).close()
        except OSError:
            continue
        return port
