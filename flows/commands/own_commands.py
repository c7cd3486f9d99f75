"""How the programs of this installation are called, so that a command works as it is printed.

A virtual environment that is not activated has its programs on no search path: they are then named by their full path.
"""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def program(name: str) -> str:
    """``name`` where the search path leads to this installation's own, else its full path, quoted for a shell."""
    own = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not own.is_file() or (found is not None and Path(found) == own):
        return name
    return shlex.quote(str(own))


def python() -> str:
    """The interpreter that runs this, by its full path, quoted for a shell."""
    return shlex.quote(sys.executable)


def run_command(source: str, overrides: Sequence[str], workspace: Path, *more: str) -> str:
    """``vantage run`` of a recipe with its overrides, ``more`` laid over them, in one line for a shell."""
    sets = [word for text in (*overrides, *more) for word in ("--set", text)]
    words = ["run", source, *sets, "--workspace", str(workspace)]
    return " ".join([program("vantage"), *map(shlex.quote, words)])
