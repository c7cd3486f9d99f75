"""A store in a folder."""

import os
from pathlib import Path

import pytest

from storage.store import Store


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: what a power loss leaves is worked out from the order of the calls."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")
