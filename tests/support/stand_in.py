"""Replace a program that somebody else starts by its command, and that is forked (``fork_server``):

    python -m tests.support.stand_in MODULE ARGUMENTS

behaves as a process that calls the module's ``main``, and loads nothing itself. It is for programs that Ray's nodes or the product start
by a command, where no function of the tests can be called. This one sends its arguments, environment, folder and files to ``WITH_TORCH``; it ends with
the fork and its exit code, and the fork ends with it.
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

ADDRESS = "VANTAGE_TESTS_FORKS"
"""Variable with the path of the socket at which ``WITH_TORCH`` of this process of the tests can be asked (tests/conftest.py)."""


def stand_for(module: str, arguments: Sequence[str]) -> NoReturn:
    """Have a call of the module's ``main`` forked, and end with it."""
    asked = {
        "command": command_of(module, *arguments),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "umask": -1,
        "session": False,
        "group": 0,  # Ray's nodes kill the groups of their workers
    }
    code = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, suppress(ConnectionError):
        connection.connect(os.environ[ADDRESS])
        socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
        connection.recv(64)  # its process id
        code = connection.recv(1)
    sys.exit(code[0] if code else f"{module} was killed")


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command that calls the module's ``main``."""
    return [sys.executable, "-c", f"from {module} import main; main()", *arguments]


if __name__ == "__main__":
    stand_for(sys.argv[1], sys.argv[2:])
