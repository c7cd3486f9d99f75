"""Make storages of both kinds, and processes that use them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.places import BucketPlace, FolderPlace, Forker, Place
from vantage.storage.store import Store


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: what a power loss leaves is worked out from the order of the calls."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def bucket_place(bucket: str, tmp_path: Path) -> BucketPlace:
    return BucketPlace(bucket, tmp_path / "machines")


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return a storage of each kind in turn."""
    if request.param == "folder":
        return FolderPlace(tmp_path / "store")
    found: BucketPlace = request.getfixturevalue("bucket_place")
    return found


@pytest.fixture(scope="session")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Yield a starter of processes that can be killed."""
    forker = Forker(tmp_path_factory.mktemp("results"))
    yield forker
    forker.close()
