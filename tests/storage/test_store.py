"""The store reuses artifacts, finds damage, fences and excludes."""

import hashlib
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage.stored import KEY, NEW, OLD, OTHER_PARTS, PARTS, child, content_of, produce
from vantage.schemas.records.stage_key import stage_key
from vantage.storage import store as store_module
from vantage.storage.durable_files import move_folder
from vantage.storage.key_locks import Locked
from vantage.storage.sealed_folders import (
    MANIFEST,
    find_problems,
)
from vantage.storage.store import Fenced, Store

pytestmark = pytest.mark.usefixtures("no_fsync")

# Commit, find, reuse


def test_a_committed_artifact_is_found_with_all_that_was_recorded(store: Store) -> None:
    assert store.lookup(KEY) == store_module.Lookup(None)
    artifact = produce(store, OLD)

    ref = Store(store.root).lookup(KEY).ref
    assert ref is not None
    assert ref.artifact == artifact
    assert (ref.run_id, ref.attempt, ref.key_parts, ref.provenance) == (
        "run-1",
        1,
        PARTS,
        {"torch": "2.13.0"},
    )
    assert artifact.uri == f"objects/{artifact.digest}"
    assert store.folder(artifact) == store.root / artifact.uri
    assert sorted(os.listdir(store.folder(artifact))) == [
        MANIFEST,
        "metrics.json",
        "tokenizer",
        "weights.bin",
    ]
    assert hashlib.sha256((store.folder(artifact) / MANIFEST).read_bytes()).hexdigest() == artifact.digest
    assert list(ref.artifact.metrics.items()) == [("loss", 0.1), ("accuracy", None)], "in the stage's order"
    assert store.stage_keys() == [KEY]
    assert os.listdir(store.root / "staging") == []


def test_scratch_outlives_attempts_until_it_is_discarded(store: Store) -> None:
    (store.scratch_folder(KEY) / "journal.jsonl").write_text("x")
    produce(store, OLD)
    assert (store.scratch_folder(KEY) / "journal.jsonl").read_text() == "x"
    (store.root / "scratch" / f"{KEY}.removed-0").mkdir()  # a discard that was killed
    store.discard_scratch(KEY)
    assert os.listdir(store.root / "scratch") == []
    store.discard_scratch(KEY)
    assert list(store.scratch_folder(KEY).iterdir()) == []


# Damage


def _flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "weights.bin").read_bytes())
    data[3] ^= 4
    (folder / "weights.bin").chmod(0o644)
    (folder / "weights.bin").write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (_flip_a_bit, "weights.bin: sha256 is"),
    "truncated": (lambda folder: os.truncate(folder / "weights.bin", 2), "weights.bin: has 2 bytes"),
    "missing": (lambda folder: (folder / "weights.bin").unlink(), "weights.bin: is missing"),
    "extra": (lambda folder: (folder / "more.bin").touch(), "more.bin: is not in the manifest"),
    "link": (
        lambda folder: (folder / "config.json").symlink_to("weights.bin"),
        "config.json: is a symbolic link",
    ),
    "unlisted": (lambda folder: (folder / MANIFEST).unlink(), "manifest.json"),
    "gone": (shutil.rmtree, "the folder is missing"),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_object_is_told_quarantined_and_made_again(
    store: Store, damage: Callable[[Path], object], message: str
) -> None:
    artifact = produce(store, OLD)
    folder = store.folder(artifact)
    damage(folder)

    assert message in "\n".join(store.inspect(KEY).damage)
    assert folder.exists() == (message != "the folder is missing"), "inspect changes nothing"
    found = store.lookup(KEY)
    assert found.ref is None
    assert message in "\n".join(found.damage)
    assert all(line.startswith(f"objects/{artifact.digest}: ") for line in found.damage)
    assert not folder.exists()
    quarantined = list((store.root / "quarantine").iterdir())
    assert [path.name for path in quarantined] == (
        [] if message == "the folder is missing" else [f"{artifact.digest}.1"]
    )

    assert produce(store, OLD) == artifact
    assert content_of(store) == OLD


def test_what_was_found_intact_is_read_again_only_after_a_change(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = produce(store, OLD)
    read: list[str] = []

    def find_and_count(folder: Path, *, digest: str) -> list[str]:
        read.append(digest)
        return find_problems(folder, digest=digest)

    monkeypatch.setattr("vantage.storage.verified_folders.find_problems", find_and_count)
    for _ in range(3):
        assert store.verify(artifact) == []
    assert len(read) == 1
    assert Store(store.root).verify(artifact) == []
    assert len(read) == 2, "another object, as another process has, reads for itself"

    path = store.folder(artifact) / "weights.bin"
    times = path.stat()
    time.sleep(0.02)  # more than the grain of a file system's clock
    _flip_a_bit(store.folder(artifact))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for count in (3, 4):
        assert any("sha256 is" in problem for problem in store.verify(artifact)), "damage is never remembered"
        assert len(read) == count


def test_a_commit_does_not_adopt_a_damaged_equal(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    artifact = produce(store, OLD)
    _flip_a_bit(store.folder(artifact))
    produce(store, OLD, parts=OTHER_PARTS)
    assert content_of(store, stage_key(OTHER_PARTS)) == OLD
    assert content_of(store) == OLD, "the first stage's ref is whole again too"
    assert "is damaged and not used" in caplog.text


# Fencing


def test_attempts_go_on_counting_when_the_counter_is_lost(store: Store) -> None:
    produce(store, OLD)
    produce(store, NEW)
    shutil.rmtree(store.root / "locks")
    assert Store(store.root).next_attempt(KEY) == 3


def test_an_attempt_that_is_superseded_after_its_object_is_in_place_is_fenced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move_and_be_superseded(source: Path, target: Path) -> None:
        move_folder(source, target)
        store.next_attempt(KEY)

    monkeypatch.setattr(store_module, "move_folder", move_and_be_superseded)
    with pytest.raises(Fenced, match="was superseded by attempt 2"):
        produce(store, OLD)
    assert content_of(store) is None


def test_an_attempt_that_is_superseded_while_it_clears_leaves_its_successors_folder(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_newest = store._require_newest

    def pass_and_be_superseded(key: str, attempt: int) -> None:
        require_newest(key, attempt)
        monkeypatch.undo()
        (store.staging_folder(KEY, store.next_attempt(KEY)) / "weights.bin").touch()

    first = store.next_attempt(KEY)
    monkeypatch.setattr(store, "_require_newest", pass_and_be_superseded)
    store.staging_folder(KEY, first)
    assert (store.root / "staging" / f"{KEY}.2" / "weights.bin").exists()


# Exclusion


def test_only_one_holds_a_stage_key_and_the_others_are_told_who(store: Store) -> None:
    told: list[str] = []
    with store.exclusive(KEY, holder="run-7"):
        with (
            pytest.raises(
                Locked, match=r"has been held by run-7 \(process \d+ on .*\) for more than 0\.15 s"
            ),
            store.exclusive(KEY, holder="run-8", on_wait=told.append, timeout=0.15),
        ):
            pass
        with store.exclusive(stage_key(OTHER_PARTS), holder="run-8", timeout=0):
            pass
    assert len(told) == 1
    assert told[0].startswith(f"run-7 (process {os.getpid()} on ")
    with store.exclusive(KEY, holder="run-8", timeout=0):
        pass


def test_the_hold_ends_when_the_work_raises(store: Store) -> None:
    with pytest.raises(RuntimeError, match="stage failed"), store.exclusive(KEY, holder="run-7"):
        raise RuntimeError("stage failed")
    with store.exclusive(KEY, holder="run-8", timeout=0):
        pass


def test_the_hold_ends_when_its_holder_is_killed(store: Store) -> None:
    held, told = multiprocessing.Pipe(duplex=False)

    def hold_for_ever() -> str:
        with store.exclusive(KEY, holder="run-7"):
            told.send(True)
            signal.pause()
        return ""

    with child(hold_for_ever) as (process, _):
        assert held.poll(10)
        with pytest.raises(Locked), store.exclusive(KEY, holder="run-8", timeout=0):
            pass
        os.kill(process, signal.SIGKILL)
        with store.exclusive(KEY, holder="run-8", timeout=10):
            pass
