"""Run Python programs whose packages are those of a copy of the tree, forked from the process that has loaded torch."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import prepared_process


def run(
    tree: Path, arguments: tuple[str, ...], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Do what ``python ARGUMENTS`` does in the copy, with this environment; only libraries are loaded already."""
    asked = json.dumps({"tree": str(tree), "arguments": arguments, "environment": dict(environment)})
    return prepared_process.run(__name__, asked)


def main() -> None:
    """Forget our packages, and run the program with the copy's."""
    asked = json.loads(sys.argv[1])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["tree"])
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vantage", "tests")]:
        del sys.modules[name]
    sys.path[:] = [asked["tree"], *(path for path in sys.path if Path(path) != prepared_process.ROOT)]
    importlib.invalidate_caches()
    first, *others = asked["arguments"]
    code = others[0] if first == "-c" else Path(first).read_text()
    sys.argv = [first, *(others[1:] if first == "-c" else others)]
    exec(compile(code, first, "exec"), {"__name__": "__main__"})
