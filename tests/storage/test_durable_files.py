"""File operations have a durable order, and the right files stay when one fails."""

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vantage.attempts.launchers.disk_faults import is_disk_fault
from vantage.storage import durable_files
from vantage.storage.durable_files import (
    FolderGone,
    expected,
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
    """Return the names of the operations, in order, with what they were done to."""
    seen: list[str] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def watch_fsync(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        named = re.sub(r"^[.](.+)[.][0-9a-f]{16}[.]new$", r"new \1", name)
        seen.append(f"sync {named}")
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
    assert calls == ["sync new ref", "replace ref", "sync folder"]
    assert (folder / "ref").read_bytes() == b"new"
    assert os.listdir(folder) == ["ref"]


def test_what_a_killed_writer_left_is_no_obstacle_and_is_removed_an_hour_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    for write in (replace_file, replace_file_unsynced):
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                write(folder / "ref", b"a much longer content")
    left = sorted(os.listdir(folder))
    assert len(left) == 2
    replace_file_unsynced(folder / "ref", b"new")
    assert (folder / "ref").read_bytes() == b"new"
    assert sorted({*os.listdir(folder)} - {"ref"}) == left, "they may be a living writer's"
    (folder / ".ref2.0123456789abcdef.new").touch()
    for name in (*left, ".ref2.0123456789abcdef.new"):
        os.utime(folder / name, (1, 1))
    replace_file(folder / "ref", b"newer")
    assert (folder / "ref").read_bytes() == b"newer"
    assert sorted(os.listdir(folder)) == [".ref2.0123456789abcdef.new", "ref"], "of this name alone"


def replace_often(path: Path, write: Callable[[Path, bytes], None], number: int) -> None:
    for count in range(500):
        write(path, f"{number} {count} ".encode() * 100)
    os._exit(
        0
    )  # not through the exits that Prefect registers in the process that forked: they fail in a child


@pytest.mark.slow
@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("write", [replace_file, replace_file_unsynced])
def test_processes_that_replace_one_file_disturb_neither_each_other_nor_readers(
    folder: Path, write: Callable[[Path, bytes], None]
) -> None:
    """Three processes write and one reads, and the reader each time sees the whole content of one of them."""
    path = folder / "journal.jsonl"
    path.write_bytes(b"0 0 " * 100)
    forked = multiprocessing.get_context("fork")
    writers = [forked.Process(target=replace_often, args=(path, write, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        content = path.read_bytes()
        assert content == content[: len(content) // 100] * 100
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert os.listdir(folder) == ["journal.jsonl"]


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


@pytest.mark.parametrize("place", ["gone", "another folder"])
def test_nothing_is_made_where_an_expected_folder_was(folder: Path, tmp_path: Path, place: str) -> None:
    """Somebody renames the folder while it is in use, and a library may make an empty one in its place."""
    (folder / "runs").mkdir()
    with expected(folder), expected(folder):
        replace_file(folder / "runs" / "run.json", b"1")
        folder.rename(tmp_path / "moved")
        if place == "another folder":
            (folder / "runs").mkdir(parents=True)
        with pytest.raises(
            FolderGone, match="was moved or removed while it was in use; move it back"
        ) as gone:
            make_folder(folder / "logs")
        assert is_disk_fault(gone.value)
        assert not (folder / "logs").exists()
        if place == "gone":
            with pytest.raises(FolderGone):
                replace_file(folder / "runs" / "run.json", b"2")
            assert not folder.exists()
        make_folder(tmp_path / "elsewhere")
    make_folder(folder / "logs")  # nobody expects it any longer


class SlowCounts(dict[Any, int]):
    """Lets other threads run between the reading of a number and its change."""

    def __getitem__(self, key: object) -> int:
        found = super().__getitem__(key)
        time.sleep(0.001)
        return found

    def get(self, key: object, default: Any = None) -> Any:
        found = super().get(key, default)
        time.sleep(0.001)
        return found


def test_stages_side_by_side_expect_one_folder_each_until_its_own_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost count would end a stage with KeyError, and leave the other without protection."""
    monkeypatch.setattr(durable_files, "_expected", SlowCounts())
    ended: list[bool] = []

    def work() -> None:
        for _ in range(15):
            with expected(folder):
                time.sleep(0.001)
        ended.append(True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [True] * 4
    assert dict(durable_files._expected) == {}


@pytest.mark.parametrize(
    "name", ["n" * 255, "é" * 127, "a[b]*" * 51], ids=["letters", "two bytes each", "patterns"]
)
def test_a_file_with_the_longest_name_is_replaced_and_what_a_kill_left_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_file(folder / name, b"old")
    [left] = folder.iterdir()
    os.utime(left, (1, 1))
    replace_file(folder / name, b"new")
    replace_file_unsynced(folder / name, b"newer")
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_bytes() == b"newer"
