"""The newest checkpoint that can be trusted is found, also after a kill."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.storage.power_loss import WATCHED, Disk, written
from vantage.tasks.training.checkpoint_folders import (
    Checkpoint,
    commit,
    committed,
    latest,
    saving_folder,
)


def save(folder: Path, step: int, *, keep: int = 2, content: str | None = None) -> Checkpoint:
    (saving_folder(folder) / "state.json").write_text(str(step) if content is None else content)
    return commit(folder, step=step, keep=keep)


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    for step in (0, 9, 10, 100_000_000):
        save(tmp_path, step)
    assert committed(tmp_path) == [
        Checkpoint(10, 0, tmp_path / "checkpoint-00000010"),
        Checkpoint(100_000_000, 0, tmp_path / "checkpoint-100000000"),
    ]
    assert latest(tmp_path) == committed(tmp_path)[-1]


def test_a_step_that_is_saved_again_is_the_newest(tmp_path: Path) -> None:
    for content in ("first", "second", "third"):
        save(tmp_path, 5, content=content)
    newest = latest(tmp_path)
    assert newest == Checkpoint(5, 2, tmp_path / "checkpoint-00000005.2")
    assert (newest.folder / "state.json").read_text() == "third"
    assert len(committed(tmp_path)) == 2


def test_steps_only_grow_and_something_is_kept(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(ValueError, match="step=4 is before the newest checkpoint's step 5; steps only grow"):
        save(tmp_path, 4)
    with pytest.raises(ValueError, match="keep=0 would remove the checkpoint just saved; keep at least 1"):
        save(tmp_path, 6, keep=0)
    assert [checkpoint.step for checkpoint in committed(tmp_path)] == [5]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: os.truncate(folder / "state.json", 0), "has 0 bytes, must have 1"),
        (lambda folder: (folder / "state.json").unlink(), "state.json: is missing"),
        (lambda folder: (folder / "more").touch(), "more: is not in the manifest"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
        (lambda folder: (folder / "link").symlink_to("state.json"), "link: is a symbolic link"),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_is_used(
    tmp_path: Path, damage: Callable[[Path], object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, newest = save(tmp_path, 1), save(tmp_path, 2)
    damage(newest.folder)
    assert latest(tmp_path) == before
    assert message in caplog.text
    assert (tmp_path / "damaged-checkpoint-00000002.1").is_dir()
    # the step is done again, and saved under its own name
    assert save(tmp_path, 2) == newest
    assert latest(tmp_path) == newest


def test_where_every_checkpoint_is_damaged_there_is_none(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step).folder / "manifest.json").unlink()
    assert latest(tmp_path) is None
    assert committed(tmp_path) == []


@pytest.mark.slow
def test_a_kill_before_any_operation_of_a_save_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    save(tmp_path / "before", 1)
    save(tmp_path / "before", 2)
    steps = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", folder)
        child = os.fork()
        if child == 0:
            _save_and_die(folder, 3, before_operation=number)
        was_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])

        found = latest(folder)
        assert found is not None
        assert (found.folder / "state.json").read_text() == str(found.step)
        assert not list(folder.glob("damaged-*"))
        steps.append(found.step)
        save(folder, 4)
        assert [checkpoint.step for checkpoint in committed(folder)][-1] == 4
        assert len(committed(folder)) == 2
        assert not (folder / "saving").exists()
        if not was_killed:
            break
    assert len(steps) > 12
    assert steps == sorted(steps)
    assert set(steps) == {2, 3}


def test_a_full_disk_at_any_write_leaves_the_last_good_checkpoint_and_a_later_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "before", 1)
    save(tmp_path / "before", 2)
    real = os.fsync
    for number in itertools.count():
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", folder)
        calls = itertools.count()

        def full(descriptor: int, calls: Iterator[int] = calls, number: int = number) -> None:
            if next(calls) >= number:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        refused = False
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            try:
                save(folder, 3)
            except OSError as error:
                refused = error.errno == errno.ENOSPC
        found = latest(folder)
        assert found is not None
        assert (found.folder / "state.json").read_text() == str(found.step)
        assert found.step == 3 or refused
        assert save(folder, 4) == latest(folder)
        if not refused:
            break
    assert number > 3


def test_power_loss_after_any_operation_of_a_save_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    save(folder, 2)
    disk = Disk(folder)
    with monkeypatch.context() as recording:
        for name in WATCHED:
            recording.setattr(os, name, disk.watching(name, getattr(os, name)))
        save(folder, 3)

    steps: list[set[int]] = []
    for number, moment in enumerate(disk.moments):
        steps.append(set())
        trees = {repr(tree): tree for tree in moment.survivors()}
        for variant, tree in enumerate(trees.values()):
            left = written(tree, tmp_path / f"left-{number}-{variant}")
            found = latest(left)
            assert found is not None, (number, variant)
            assert (found.folder / "state.json").read_text() == str(found.step)
            steps[-1].add(found.step)
            assert save(left, 4) == latest(left), "going on works"
    assert set.union(*steps) == {2, 3}
    assert steps[-1] == {3}, "what was saved is never forgotten"


def _save_and_die(folder: Path, step: int, *, before_operation: int) -> None:
    """Save, and be killed before the operation of that number if it comes to that. Does not return."""
    count = itertools.count()

    def dying(operation: Callable[..., object]) -> Callable[..., object]:
        def operate(*args: object, **kwargs: object) -> object:
            if next(count) == before_operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return operate

    for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "chmod", "open", "close"):
        setattr(os, name, dying(getattr(os, name)))
    try:
        save(folder, step)
    finally:
        os._exit(0)


def test_asking_for_checkpoints_loads_no_tensor_library() -> None:
    modules = "vantage.tasks.training.checkpoint_folders, vantage.storage.store, vantage.ledger.journal, vantage.storage.sealed_folders, vantage.schemas.records.stage_key"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
