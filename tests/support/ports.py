"""Choose ports for servers of tests, which no other process takes before the server does."""

import itertools
import os
import socket

FIRST, EACH = 22_000, 500
"""The first port of the first process of tests, and how many each has: below the ports that Linux hands out to clients."""

_tried = itertools.count(os.getpid())  # two test runs on one machine do not begin at the same port


def own_port() -> int:
    """Return a port on which nothing listens, another one at each call.

    The system would hand out a port that it may give to any client a moment later.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in itertools.islice(_tried, EACH):
        port = FIRST + EACH * (worker % 20) + number % EACH
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("all ports of this process of tests are taken")
