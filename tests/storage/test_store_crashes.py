"""A kill, a full disk or a power loss in the middle of a commit leaves a store that can be used."""

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.power_loss import WATCHED, Disk, written
from tests.storage.stored import KEY, NEW, OLD, OTHER_PARTS, child, commit, content_of, produce, stage
from vantage.schemas.records.stage_key import stage_key
from vantage.storage.attempt_counter import read_count
from vantage.storage.store import (
    Store,
)

pytestmark = pytest.mark.usefixtures("no_fsync")

OPERATIONS = ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "chmod", "ftruncate", "open", "close")


@pytest.mark.slow
def test_a_kill_before_any_operation_of_a_commit_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    produce(Store(tmp_path / "before"), OLD)
    seen: list[bytes] = []
    for number in itertools.count():
        root = tmp_path / f"killed-{number}"
        shutil.copytree(tmp_path / "before", root)
        was_killed = _produce_and_die(root, before_operation=number)

        reader = Store(root)
        content = content_of(reader)
        assert content in (OLD, NEW)
        seen.append(content or b"")
        again = produce(reader, NEW)  # the retry
        assert content_of(reader) == NEW
        assert again.digest in os.listdir(root / "objects")
        assert len(os.listdir(root / "objects")) == 2
        assert os.listdir(root / "staging") == []
        assert os.listdir(root / "quarantine") == []
        if not was_killed:
            break
    assert number > 30, "the commit's operations were not seen"
    assert seen == sorted(seen, key=[OLD, NEW].index), "once new, always new"
    assert {OLD, NEW} == set(seen[:-1])


def test_a_kill_in_the_middle_of_writing_a_file_leaves_the_old(tmp_path: Path) -> None:
    def torn(path: Path, data: bytes, **options: Any) -> None:
        path.write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    from vantage.storage import durable_files, sealed_folders

    for module in (durable_files, sealed_folders):  # a ref or the counter; the manifest
        root = tmp_path / module.__name__
        produce(Store(root), OLD)

        def write_and_die(module: Any = module, root: Path = root) -> str:
            folder, attempt = stage(Store(root), NEW)
            module.write_file = torn
            commit(Store(root), folder, attempt)
            return "survived"

        with child(write_and_die) as (process, _):
            assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
        assert content_of(Store(root)) == OLD
        produce(Store(root), NEW)
        assert content_of(Store(root)) == NEW


def test_a_full_disk_at_any_write_leaves_the_old_and_a_later_try_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(Store(tmp_path / "before"), OLD)
    real = os.fsync
    for number in itertools.count():
        root = tmp_path / f"full-{number}"
        shutil.copytree(tmp_path / "before", root)
        store = Store(root)
        calls = itertools.count()

        def full(descriptor: int, calls: Iterator[int] = calls, number: int = number) -> None:
            if next(calls) >= number:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        failures: list[int | None] = []
        try:
            produce(store, NEW)
        except OSError as error:
            failures.append(error.errno)
        monkeypatch.setattr(os, "fsync", real)
        assert failures in ([], [errno.ENOSPC])
        assert content_of(store) in (OLD, NEW)
        produce(store, NEW)
        assert content_of(store) == NEW
        if not failures:
            break
    assert number > 8


@pytest.mark.slow
@pytest.mark.parametrize("adopts", [False, True], ids=["moves", "adopts"])
def test_power_loss_after_any_operation_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adopts: bool
) -> None:
    root = tmp_path / "store"
    produce(Store(root), OLD)
    equal = produce(Store(root), NEW, parts=OTHER_PARTS) if adopts else None
    disk = Disk(root)
    if equal is not None:  # whoever made the equal object died before its name was on the disk
        (root / "refs" / f"{stage_key(OTHER_PARTS)}.json").unlink()
        disk.forget(root / equal.uri)
    with monkeypatch.context() as recording:
        for name in WATCHED:
            recording.setattr(os, name, disk.watching(name, getattr(os, name)))
        store = Store(root)
        folder, attempt = stage(store, NEW)
        begun = len(disk.moments)
        commit(store, folder, attempt)

    different = 0
    for number, moment in enumerate(disk.moments):
        # what is staged decides nothing, so one variant of it is enough
        trees = {repr({**tree, "staging": None}): tree for tree in moment.survivors()}
        different += len(trees)
        for variant, tree in enumerate(trees.values()):
            left = Store(written(tree, tmp_path / f"left-{number}-{variant}"))
            assert content_of(left) in (OLD, NEW), (number, variant)
            if number >= begun - 1:
                counted = read_count(left.root / "locks" / f"{KEY}.attempt")
                assert counted == attempt, "a number that was handed out is never forgotten"
            if number == len(disk.moments) - 1:
                assert content_of(left) == NEW, "what was committed is never forgotten"
            if variant == 0:  # the variant in which most is lost
                produce(left, NEW)
                assert content_of(left) == NEW
            shutil.rmtree(left.root)
    assert different > len(disk.moments) > 20


def _produce_and_die(root: Path, *, before_operation: int) -> bool:
    """Produce NEW in a child that is killed before the operation of that number. Returns whether it was killed."""

    def work() -> str:
        count = itertools.count()

        def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
            def operate(*args: Any, **kwargs: Any) -> Any:
                if next(count) == before_operation:
                    os.kill(os.getpid(), signal.SIGKILL)
                return operation(*args, **kwargs)

            return operate

        store = Store(root)
        for name in OPERATIONS:
            setattr(os, name, dying(getattr(os, name)))
        produce(store, NEW)
        os._exit(0)

    with child(work) as (process, _):
        return os.WIFSIGNALED(os.waitpid(process, 0)[1])
