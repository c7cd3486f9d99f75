"""A terminal that goes away is a request to stop; a run that was started under ``nohup`` goes on without it."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fixtures import ROOT
from tests.support.fork_server import WITH_PREFECT
from tests.support.orchestrated import events, pace
from tests.support.real_runs import wait_for
from vantage.attempts.stopping import stop_signals, stopping
from vantage.flows.sweeps.sweep import _signals_to
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace


@pytest.fixture
def hangup() -> Iterator[Callable[[signal.Handlers], None]]:
    """Set what this process does on SIGHUP."""
    before = signal.getsignal(signal.SIGHUP)

    def set_handler(handler: signal.Handlers) -> None:
        signal.signal(signal.SIGHUP, handler)

    yield set_handler
    signal.signal(signal.SIGHUP, before)


async def asked_by(number: int, asked: list[str], *, times: int = 1) -> None:
    with stopping(lambda: asked.append("stop")):
        for _ in range(times):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.1)


def test_a_hangup_asks_once_to_stop_and_a_second_one_ends_nothing(
    hangup: Callable[[signal.Handlers], None],
) -> None:
    hangup(signal.SIG_DFL)
    asked: list[str] = []
    asyncio.run(asked_by(signal.SIGHUP, asked, times=2))
    assert asked == ["stop"]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "the end of the run is written in peace"


def test_without_a_hangup_its_handler_is_what_it_was(hangup: Callable[[signal.Handlers], None]) -> None:
    hangup(signal.SIG_DFL)
    asked: list[str] = []
    asyncio.run(asked_by(signal.SIGTERM, asked))
    assert asked == ["stop"]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_under_nohup_a_hangup_asks_nothing(hangup: Callable[[signal.Handlers], None]) -> None:
    hangup(signal.SIG_IGN)
    asked: list[str] = []
    asyncio.run(asked_by(signal.SIGHUP, asked))
    assert asked == []
    assert signal.SIGHUP not in stop_signals()


def test_a_sweep_is_asked_too(hangup: Callable[[signal.Handlers], None]) -> None:
    hangup(signal.SIG_DFL)
    asked: list[str] = []
    with _signals_to(lambda: asked.append("stop")):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
    assert asked == ["stop"]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def on_a_terminal(
    command: list[str], popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command on a terminal of its own; returns it and the terminal's other end."""
    ours, theirs = pty.openpty()
    process = popen(
        [sys.executable, "-c", "import fcntl, os, signal, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
         "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # the tests themselves may run under nohup
         "os.execvpe(sys.argv[1], sys.argv[1:], os.environ)", *command],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    return process, ours


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url")
def test_when_the_terminal_goes_away_the_stage_saves_and_the_run_can_go_on(
    workspace: Workspace, recipe_file: Path
) -> None:
    pace(workspace, 8.0)
    process, terminal = on_a_terminal(
        [
            sys.executable,
            "-m",
            "tests.support.fake_vantage",
            "run",
            str(recipe_file),
            "--workspace",
            str(workspace.root),
        ],
        WITH_PREFECT.popen,
    )
    os.set_blocking(terminal, False)
    try:
        wait_for(lambda: _read(terminal) and any(line.startswith("sft") for line in events(workspace)))
        time.sleep(1.0)
        os.close(terminal)  # the kernel sends SIGHUP, and every further write fails
        assert process.wait(180) == 75
    finally:
        process.kill()
        process.wait()
    [record] = read_runs(workspace)
    assert record.status == "resumable"
    assert record.stages["sft"].status == "resumable"
    assert record.stages["data.prompts"].status == "completed"


def _read(terminal: int) -> bool:
    """Take what was printed, so that the writer does not wait; returns True."""
    try:
        while os.read(terminal, 65536):
            pass
    except BlockingIOError:
        pass
    return True


GONE = """
import asyncio, os, signal, sys, time
from vantage.attempts.stopping import stopping

async def main():
    asked = []
    with stopping(lambda: asked.append("stop")):
        print("ready", flush=True)
        while not asked:
            await asyncio.sleep(0.05)
    time.sleep(0.5)
    print("saved", flush=True)  # to a terminal that has gone
    sys.stderr.write("saved")
    open(sys.argv[1], "w").write(" ".join(asked))

asyncio.run(main())
"""


def test_what_is_printed_after_the_terminal_has_gone_ends_nothing(tmp_path: Path) -> None:
    process, terminal = on_a_terminal([sys.executable, "-c", GONE, str(tmp_path / "asked")])
    try:
        assert b"ready" in os.read(terminal, 100)
        os.close(terminal)
        assert process.wait(180) == 0
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "asked").read_text() == "stop"


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url")
def test_a_detached_run_outlives_its_terminal_and_ends_when_it_is_cancelled(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace(workspace, 4.0)
    faked = (
        "import vantage.cli.detached as detached, subprocess, sys; real = subprocess.Popen\n"
        "detached.subprocess = type(sys)('subprocess'); vars(detached.subprocess).update(vars(subprocess))\n"
        "detached.subprocess.Popen = lambda command, **options: real(\n"
        "    [command[0], '-m', 'tests.support.fake_vantage', *command[3:]], **options)\n"
        "from vantage.cli.main import main; main()"
    )
    command = [sys.executable, "-c", faked, "run", str(recipe_file), "--workspace", str(workspace.root)]
    process, terminal = on_a_terminal([*command, "--detach"], WITH_PREFECT.popen)
    try:
        assert process.wait(180) == 0
        said = os.read(terminal, 65536).decode()
    finally:
        os.close(terminal)
        process.kill()
    [record] = read_runs(workspace)
    assert f"run {record.run_id} has begun" in said
    log = workspace.folder(record.run_id) / "console.log"
    wait_for(lambda: any(line.startswith("sft") for line in events(workspace)))
    assert "sft" in log.read_text()
    cancelled = WITH_PREFECT.run(
        [sys.executable, "-m", "vantage", "cancel", record.run_id, "--workspace", str(workspace.root)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert cancelled.returncode == 0, cancelled.stderr
    wait_for(lambda: read_runs(workspace)[0].status == "resumable", 180)
    assert read_runs(workspace)[0].stages["sft"].status == "resumable"
