"""Start programs at once: a process that has loaded their libraries forks them.

    python -m tests.support.forked_with_torch MODULE ARGUMENTS

does what ``python -m MODULE ARGUMENTS`` does, if MODULE has a function ``main``, and loads nothing itself; standard input is empty, and
the code at the end is 1. A program that loads torch and transformers, or Ray, first takes four CPU seconds, and the tests start a
hundred. This one sends its arguments, its environment and its output to the process that forks (``forks_with_torch``), and stands for
the program: each ends with the other.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

ADDRESS = "VANTAGE_TESTS_FORKS"
"""Variable with the path of the socket of the process that forks: in a folder of this run of the tests, and named after the run's
first process (tests/conftest.py)."""
ROOT = Path(__file__).parents[2]
SECONDS = 120.0
"""The longest that the process which forks may load its libraries."""


def address() -> Path:
    """Return that path; a socket is there after ``prepare``."""
    return Path(os.environ[ADDRESS])


def prepare() -> None:
    """Start the process that forks, one for all processes of a run of the tests. It ends with the run."""
    with address().with_suffix(".lock").open("w") as lock, address().with_suffix(".log").open("ab") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if address().exists():
            return
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forks_with_torch"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        deadline = time.monotonic() + SECONDS
        while not address().exists():
            assert process.poll() is None and time.monotonic() < deadline, (
                address().with_suffix(".log").read_text()
            )
            time.sleep(0.05)


def stand_for(module: str, arguments: Sequence[str]) -> NoReturn:
    """Have a call of the module's ``main`` forked, and end with it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(address()))
        asked = json.dumps(
            {
                "module": module,
                "arguments": arguments,
                "environment": dict(os.environ),
                "folder": os.getcwd(),
            }
        ).encode()
        socket.send_fds(connection, [len(asked).to_bytes(4, "big")], [1, 2])
        connection.sendall(asked)
        with suppress(ConnectionError):
            connection.recv(1)  # returns when the fork has ended
    sys.exit(f"{module} has ended")


if __name__ == "__main__":
    stand_for(sys.argv[1], sys.argv[2:])
