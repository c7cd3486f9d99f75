"""Make folders that all processes of a test run share: the first test to ask for one makes it, and the others wait for it."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder of this name, made by one process; tests may only read it.

    Args:
        make: fills the empty folder. If it raises, the next test that asks tries again.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each process of xdist has a folder of its own in it
    folder, finished = base / name, base / f"{name}.finished"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            if folder.exists():
                folder.rename(factory.mktemp(f"{name}-failed") / name)
            folder.mkdir()
            make(folder)
            finished.touch()
    return folder
