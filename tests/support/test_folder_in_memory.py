"""Temporary files of tests are in memory only where nobody chose another folder and where there is room."""

import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from tests.support import folder_in_memory as subject

Room = namedtuple("Room", ["free", "available", "flags"])
ENOUGH = Room(subject.LEAST_FREE, subject.LEAST_AVAILABLE, 0)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return a patch that restores the folder of temporary files; no ``TMPDIR`` is set."""
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    return monkeypatch


def with_room(patch: pytest.MonkeyPatch, room: Room) -> None:
    """Let any folder and this machine have so much room."""
    patch.setattr(subject.shutil, "disk_usage", lambda folder: room)
    patch.setattr(subject.psutil, "virtual_memory", lambda: room)
    patch.setattr(subject.os, "statvfs", lambda folder: namedtuple("Flags", "f_flag")(room.flags))


def test_with_room_they_are_in_the_folder_also_of_children(
    chosen: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_room(chosen, ENOUGH)
    assert subject.use_folder_in_memory(tmp_path)
    assert tempfile.gettempdir() == str(tmp_path) == subject.os.environ["TMPDIR"]
    chosen.delenv("TMPDIR")


@pytest.mark.parametrize(
    "room",
    [
        ENOUGH._replace(free=subject.LEAST_FREE - 1),
        ENOUGH._replace(available=subject.LEAST_AVAILABLE - 1),
        ENOUGH._replace(flags=subject.os.ST_NOEXEC),
    ],
)
def test_without_room_or_programs_nothing_changes(
    room: Room, chosen: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_room(chosen, room)
    before = tempfile.gettempdir()
    assert not subject.use_folder_in_memory(tmp_path)
    assert tempfile.gettempdir() == before and "TMPDIR" not in subject.os.environ


def test_a_folder_that_somebody_chose_stays(chosen: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_room(chosen, ENOUGH)
    chosen.setenv("TMPDIR", "/chosen")
    assert not subject.use_folder_in_memory(tmp_path)
    assert subject.os.environ["TMPDIR"] == "/chosen"


def test_a_machine_without_such_a_folder_keeps_its_own(chosen: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_room(chosen, ENOUGH)
    assert not subject.use_folder_in_memory(tmp_path / "missing")
