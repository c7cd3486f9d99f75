"""The names of this installation's programs, so that printed commands work.

Programs of a virtual environment that is not activated are not on the search path: then their full path is used.
"""

import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

LOOPBACK = "127.0.0.1"


def program(name: str) -> str:
    """Return ``name`` if the search path finds this installation's program, else its full path, quoted for a shell."""
    own = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not own.is_file() or (found is not None and Path(found) == own):
        return name
    return shlex.quote(str(own))


def usable_port(usual: int) -> int:
    """Return a program's default port, or another port if something listens there already."""
    for port in (usual, 0):
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # a port that was closed a moment ago counts as free
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return usual


def own_command(*words: str) -> str:
    """Return the command ``vantage`` with these words, in one line for a shell."""
    return " ".join([program("vantage"), *map(shlex.quote, words)])


def run_command(source: str, overrides: Sequence[str], workspace: str, *more: str) -> str:
    """Return the command ``vantage run`` with a recipe, its overrides and then ``more``, in one line for a shell."""
    sets = [word for text in (*overrides, *more) for word in ("--set", text)]
    return own_command("run", source, *sets, "--workspace", workspace)
