"""Run servers in the background; a variable in their environment identifies them.

A file with a process id would be stale after a ``kill -9`` or a reboot, and would miss the children of a server that
died. A variable is inherited by every process of a server and ends with it.
"""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "VANTAGE_SERVER"
OF_THE_CALLER = ("PATH", "HOME", "LANG", "TMPDIR", "TZ")
"""Variables that a server inherits from the shell that starts it. They are no settings, since shells differ."""
SEEN_SECONDS = 5.0
"""Time after which a new process must show its environment."""
STOP_SECONDS = 10.0
"""Seconds for a server to end after SIGTERM; then it gets SIGKILL."""


@dataclass(frozen=True)
class Server:
    """A server in the background: all its processes have the same mark in their environment."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    """The server's working folder."""
    log: Path

    @property
    def mark(self) -> str:
        """Mark: folder and name, then a digest of the command and of the environment without the variables of the
        caller's shell."""
        own = {name: value for name, value in self.environment.items() if name not in OF_THE_CALLER}
        started_with = json.dumps([list(self.command), own], sort_keys=True)
        return f"{_mark_of(self.folder, self.name)}{hashlib.sha256(started_with.encode()).hexdigest()[:16]}"

    def runs(self) -> bool:
        """Return whether the server's main process runs, with this command and these settings."""
        return any(
            _mark(process) == self.mark and _leads_session(process)
            for process in processes_of(self.folder, self.name)
        )

    def start(self) -> None:
        """Start the server in its own session; remaining processes of an earlier start are stopped first."""
        stop(self.folder, self.name)
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "ab") as output:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self.environment, MARK: self.mark},
                cwd=self.folder,
                umask=0o077,
                start_new_session=True,  # neither Ctrl-C nor the end of the terminal reaches it
            )
        # Linux shows the environment of a new process a moment after the process has begun
        deadline = time.monotonic() + SEEN_SECONDS
        while process.poll() is None and not self.runs() and time.monotonic() < deadline:
            time.sleep(0.01)


def processes_of(folder: Path, name: str) -> list[psutil.Process]:
    """Return the living processes of a server. A zombie has no environment, so it is left out."""
    return [each for each in psutil.process_iter() if (_mark(each) or "").startswith(_mark_of(folder, name))]


def stop(folder: Path, name: str) -> bool:
    """Stop all processes of a server; returns whether there were any."""
    found = bool(processes_of(folder, name))
    for kill in (False, True):
        for process in processes_of(folder, name):
            _signal(process, kill=kill)
        deadline = time.monotonic() + STOP_SECONDS
        while processes_of(folder, name) and time.monotonic() < deadline:
            time.sleep(0.1)
    return found


def _signal(process: psutil.Process, *, kill: bool) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill() if kill else process.terminate()


def _leads_session(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:
        return False


def _mark_of(folder: Path, name: str) -> str:
    return f"{folder} {name} "


def _mark(process: psutil.Process) -> str | None:
    try:
        mark: str | None = process.environ().get(MARK)
    except (psutil.Error, OSError):  # it belongs to another user, or has ended
        return None
    return mark


def last_lines(log: Path, number: int = 3) -> str:
    """Return the end of a log; empty if there is none."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-number:])
