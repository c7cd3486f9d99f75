"""The probe of a worker's container answers whether the worker still asks for work."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vantage.flows.pools import alive


def probe(file: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != alive.ALIVE_FILE}
    if file is not None:
        environment[alive.ALIVE_FILE] = str(file)
    command = [sys.executable, "-m", "vantage.flows.pools.alive"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


def test_a_worker_that_asks_is_alive_and_one_that_has_not_asked_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "alive"
    monkeypatch.setenv(alive.ALIVE_FILE, str(file))
    before = probe(file)
    assert (before.returncode, before.stderr) == (
        1,
        f"the worker has not asked its pool for work yet ({file})\n",
    )
    alive.mark_alive()
    asked = probe(file)
    assert (asked.returncode, asked.stderr) == (0, "")
    long_ago = time.monotonic_ns() - 700 * 10**9
    if long_ago > 0:
        os.utime(file, ns=(long_ago, long_ago))
        assert "has not asked its pool for work for 70" in probe(file).stderr
    future = time.monotonic_ns() + 10**15  # before the machine started anew
    os.utime(file, ns=(future, future))
    assert probe(file).returncode == 1
    soon = time.monotonic_ns() + 100 * 10**9  # less ahead than a worker may be silent
    os.utime(file, ns=(soon, soon))
    assert alive.silent_seconds(file) is None


def test_without_a_file_nothing_is_marked_and_the_probe_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(alive.ALIVE_FILE, raising=False)
    alive.mark_alive()
    assert (
        probe(None).stderr == f"{alive.ALIVE_FILE} is not set; the worker and this probe need the same path\n"
    )
    monkeypatch.setenv(alive.ALIVE_FILE, str(tmp_path / "none" / "alive"))
    alive.mark_alive()  # a file that cannot be made ends no worker
