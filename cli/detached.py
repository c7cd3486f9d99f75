"""``vantage run --detach``: start a run in its own session, which no terminal ends, and return when it has begun."""

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vantage.attempts.identity.child_python import python_environment
from vantage.runs.workspace import RUN_ID, Workspace
from vantage.storage.durable_files import free_path, make_folder

CONSOLE_LOG = "console.log"
"""File in the run's folder with the output of the run."""
_BEGUN = re.compile(rf"· run ({RUN_ID.pattern})")
"""The heading of the plan, which a run prints first."""
_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class Detached:
    """A run that goes on without this process, or that was refused."""

    run_id: str | None
    """Id of the run; None: the process ended before there was a run."""
    pid: int
    log: Path
    exit_code: int | None
    """Exit code of the process; None: the process is running."""


def start_detached(arguments: Sequence[str], workspace: Workspace) -> Detached:
    """Start ``vantage run`` with these arguments, and wait until the run has begun or the process has ended."""
    make_folder(workspace.runs)
    log = workspace.runs / f".{secrets.token_hex(8)}.{CONSOLE_LOG}"
    with log.open("xb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vantage", "run", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **python_environment()},
        )
    while True:
        exit_code = process.poll()
        if found := _BEGUN.search(log.read_text(errors="replace")):
            folder = workspace.folder(found[1])
            make_folder(folder)
            return Detached(found[1], process.pid, _moved(log, folder / CONSOLE_LOG), exit_code)
        if exit_code is not None:
            return Detached(None, process.pid, log, exit_code)
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _moved(log: Path, target: Path) -> Path:
    """Move the log into the run's folder, beside those of earlier starts of the run; returns its place."""
    target = free_path(target.parent, target.name) if target.exists() else target
    log.rename(target)
    return target
