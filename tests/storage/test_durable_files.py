"""File operations: their order, and what stays when one fails."""

import os
import threading
from pathlib import Path

import pytest

from vantage.storage.durable_files import (
    free_path,
    locked,
    make_folder,
    move_folder,
    replace_file,
    replace_file_unsynced,
    write_file,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operations, in order, with what they were done to."""
    seen: list[str] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def watch_fsync(descriptor: int) -> None:
        seen.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        fsync(descriptor)

    def watch_replace(source: Path, target: Path) -> None:
        seen.append(f"replace {target.name}")
        replace(source, target)

    def watch_rename(source: Path, target: Path) -> None:
        seen.append(f"rename {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    monkeypatch.setattr(os, "rename", watch_rename)
    return seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


def test_a_file_is_replaced_content_first_then_name_then_folder(folder: Path, calls: list[str]) -> None:
    (folder / "ref").write_bytes(b"old")
    replace_file(folder / "ref", b"new")
    assert calls == ["sync ref.new", "replace ref", "sync folder"]
    assert (folder / "ref").read_bytes() == b"new"
    assert os.listdir(folder) == ["ref"]


def test_what_a_killed_writer_left_is_no_obstacle(folder: Path) -> None:
    (folder / "ref.new").write_bytes(b"a much longer torn content")
    replace_file(folder / "ref", b"new")
    assert (folder / "ref").read_bytes() == b"new"
    (folder / "ref.new").write_bytes(b"a much longer torn content")
    replace_file_unsynced(folder / "ref", b"newer")
    assert (folder / "ref").read_bytes() == b"newer"
    assert os.listdir(folder) == ["ref"]


def test_a_failed_sync_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "ref").write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(folder / "ref", b"new")
    assert (folder / "ref").read_bytes() == b"old"


def test_what_is_only_shown_does_not_wait_for_the_disk(folder: Path, calls: list[str]) -> None:
    replace_file_unsynced(folder / "progress", b"1")
    assert calls == ["replace progress"]


def test_a_new_file_is_never_written_over_another(folder: Path) -> None:
    write_file(folder / "manifest", b"1")
    with pytest.raises(FileExistsError):
        write_file(folder / "manifest", b"2")
    assert (folder / "manifest").read_bytes() == b"1"


def test_a_folder_is_moved_then_its_new_name_synced(folder: Path, calls: list[str]) -> None:
    (folder / "staged").mkdir()
    (folder / "objects" / "taken").mkdir(parents=True)
    (folder / "objects" / "taken" / "file").touch()
    move_folder(folder / "staged", folder / "objects" / "digest")
    assert calls == ["rename digest", "sync objects"]
    with pytest.raises(OSError, match="not empty"):
        move_folder(folder / "objects" / "digest", folder / "objects" / "taken")


def test_every_new_folders_name_is_synced(folder: Path, calls: list[str]) -> None:
    make_folder(folder / "a" / "b")
    assert (folder / "a" / "b").is_dir()
    assert calls == ["sync a", "sync folder"]
    calls.clear()
    make_folder(folder / "a" / "b")
    assert calls == ["sync a"], "whoever made it may have died before"


def test_a_lock_is_held_by_one_at_a_time_and_its_file_stays(folder: Path) -> None:
    inside, most = [], []

    def work() -> None:
        for _ in range(50):
            with locked(folder / "lock"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 400
    assert set(most) == {1}
    assert (folder / "lock").exists()


def test_a_free_path_is_the_first_that_is_not_taken_even_by_a_dead_link(folder: Path) -> None:
    (folder / "x.1").mkdir()
    (folder / "x.2").symlink_to("nowhere")
    (folder / "x.4").touch()
    assert free_path(folder, "x") == folder / "x.3"
