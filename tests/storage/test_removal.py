"""Artifacts that nobody needs are removed from both kinds of storage, beside processes that use it, whenever the remover is killed."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import obstore
import pytest

from tests.storage.places import BucketPlace, FolderPlace, Forker, Machine, Place
from tests.storage.stored import KEY, NEW, OLD, OTHER_PARTS, commit, content_of, produce, stage
from vantage.schemas.records.stage_key import stage_key
from vantage.storage.garbage import Garbage
from vantage.storage.leases import HeldLease
from vantage.storage.object_storage import ObjectStorage
from vantage.storage.removed import Cause, find_removed
from vantage.storage.storage import Storage, garbage_of
from vantage.storage.store import Lookup

pytestmark = pytest.mark.usefixtures("no_fsync")

OTHER = stage_key(OTHER_PARTS)
CAUSE = Cause(when="2026-01-02T03:04:05+00:00", why="nobody needs it", by="somebody on a machine")
REQUESTS = ("get", "list", "put", "delete", "copy", "head")
OPERATIONS = ("rename", "unlink", "rmdir", "open", "close", "scandir", "ftruncate")


def nothing() -> Collection[str]:
    return ()


def digests(garbage: Garbage) -> Collection[str]:
    return {ref.artifact.digest for ref in garbage.refs().values()}


def test_a_ref_that_is_not_needed_goes_then_its_object_and_attempts_go_on_counting(place: Place) -> None:
    kept, gone = produce(place.open(), OLD), produce(place.open(), NEW, parts=OTHER_PARTS)
    garbage = garbage_of(place.open(), CAUSE)
    assert set(garbage.refs()) == {KEY, OTHER}
    sizes = garbage.objects()
    assert set(sizes) == {kept.digest, gone.digest}
    assert sizes[gone.digest] == sum(len(place.read(path)) for path in place.paths(gone.uri))
    assert garbage.remove_refs([KEY, OTHER], needed=lambda: {KEY}) == [OTHER]
    assert not garbage.remove_object(kept.digest, needed=lambda: digests(garbage))
    assert garbage.remove_object(gone.digest, needed=lambda: digests(garbage))
    assert {path.split("/")[1] for path in place.paths("objects")} == {kept.digest}
    assert content_of(place.open()) == OLD
    assert place.open().lookup(OTHER) == Lookup(None)
    assert place.open().next_attempt(OTHER) == 2


def test_a_ref_that_has_changed_is_read_again(place: Place) -> None:
    artifact = produce(place.open(), OLD)
    garbage = garbage_of(place.open(), CAUSE)
    assert digests(garbage) == {artifact.digest}
    place.write(place.ref_path(KEY), b"garbage")
    assert digests(garbage) == set()
    assert produce(place.open(), OLD) == artifact
    assert digests(garbage) == {artifact.digest}


def test_what_somebody_works_on_stays(place: Place) -> None:
    produce(place.open(), OLD)
    worker = place.open()
    (worker.scratch_folder(KEY) / "journal.jsonl").write_text("x")
    garbage = garbage_of(worker, CAUSE)
    with place.open().exclusive(KEY, holder="run 7"):
        assert garbage.remove_refs([KEY], needed=nothing) == []
        for leftover in garbage.leftovers():
            assert not garbage.remove_leftover(leftover, needed=nothing)
    assert content_of(place.open()) == OLD
    assert (worker.scratch_folder(KEY) / "journal.jsonl").read_text() == "x"


def test_scratch_goes_only_if_its_key_is_not_needed_and_staging_when_nobody_works(place: Place) -> None:
    storage = place.open()
    stage(storage, OLD)
    with storage.keep_copy(KEY, ["journal.jsonl"]):
        (storage.scratch_folder(KEY) / "journal.jsonl").write_text("x")
    garbage = garbage_of(storage, CAUSE)
    scratch = [leftover for leftover in garbage.leftovers() if leftover.is_scratch]
    staging = [leftover for leftover in garbage.leftovers() if not leftover.is_scratch]
    assert {leftover.stage_key for leftover in (*scratch, *staging)} == {KEY}
    assert sum(leftover.num_bytes for leftover in staging) == len(OLD) + len("{}")
    assert not any(garbage.remove_leftover(leftover, needed=lambda: {KEY}) for leftover in scratch)
    assert storage.has_scratch(KEY)
    assert all(garbage.remove_leftover(leftover, needed=lambda: {KEY}) for leftover in staging)
    assert all(garbage.remove_leftover(leftover, needed=nothing) for leftover in scratch)
    assert not storage.has_scratch(KEY)
    assert list(garbage.leftovers()) == []


def test_what_was_set_aside_has_an_age_by_the_storages_own_clock(place: Place) -> None:
    produce(place.open(), OLD)
    place.write(place.ref_path(KEY), b"garbage")
    place.open().lookup(KEY)
    garbage = garbage_of(place.open(), CAUSE)
    (aside,) = garbage.leftovers()
    assert aside.age_seconds is not None
    assert -2 < aside.age_seconds < 60
    assert garbage.remove_leftover(aside, needed=nothing)
    assert place.paths("quarantine") == set()


def test_an_equal_object_that_is_committed_during_the_removal_is_whole(place: Place) -> None:
    artifact = produce(place.open(), OLD)
    garbage = garbage_of(place.open(), CAUSE)
    garbage.remove_refs([KEY], needed=nothing)
    writer = place.open()
    other = threading.Thread(target=lambda: produce(writer, OLD, parts=OTHER_PARTS))

    def needed() -> Collection[str]:
        other.start()
        time.sleep(0.5)  # it is committed, unless something prevents that
        return ()

    assert garbage.remove_object(artifact.digest, needed=needed)
    other.join()
    assert content_of(place.open(), OTHER) == OLD


def test_an_object_that_a_ref_points_to_again_stays(place: Place) -> None:
    artifact = produce(place.open(), OLD)
    garbage = garbage_of(place.open(), CAUSE)
    garbage.remove_refs([KEY], needed=nothing)
    assert digests(garbage) == set()
    produce(place.open(), OLD, parts=OTHER_PARTS)
    assert not garbage.remove_object(artifact.digest, needed=lambda: digests(garbage))
    assert content_of(place.open(), OTHER) == OLD


# In a bucket: leases can be lost


def test_a_lookup_takes_the_mark_off_and_the_ref_stays(bucket_place: BucketPlace) -> None:
    produce(bucket_place.open(), OLD)
    garbage = garbage_of(bucket_place.open(), CAUSE)

    def reader_begins() -> Collection[str]:
        assert content_of(bucket_place.open()) == OLD
        return ()

    assert garbage.remove_refs([KEY], needed=reader_begins) == []
    assert content_of(bucket_place.open()) == OLD
    assert garbage.remove_refs([KEY], needed=lambda: {KEY}) == []
    assert b'"unneeded":false' in bucket_place.read(f"keys/{KEY}.json"), "the mark is taken off again"


def test_a_remover_that_slept_until_its_lease_was_lost_removes_nothing(
    bucket_place: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldLease, "_run", lambda self: None)  # the holder of the lease sleeps
    artifact = produce(bucket_place.open(), OLD)
    sleeper = garbage_of(bucket_place.machine(lease_seconds=0.3).open(), CAUSE)
    sleeper.remove_refs([KEY], needed=nothing)
    writer = bucket_place.machine(lease_seconds=0.3).open()

    def sleep() -> Collection[str]:
        produce(writer, OLD, parts=OTHER_PARTS)
        return ()

    assert not sleeper.remove_object(artifact.digest, needed=sleep)
    assert content_of(bucket_place.open(), OTHER) == OLD


def test_a_writer_that_slept_until_its_object_was_removed_sends_it_again(
    bucket_place: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldLease, "_run", lambda self: None)  # the holder of the lease sleeps
    writer = bucket_place.machine(lease_seconds=0.3).open()
    garbage = garbage_of(bucket_place.machine(lease_seconds=0.3).open(), CAUSE)
    folder, attempt = stage(writer, OLD)
    swap, removed = ObjectStorage._swap_ref, []

    def sleep_and_swap(storage: ObjectStorage, ref: Any) -> None:
        while not removed:
            removed.extend([1] if garbage.remove_object(ref.artifact.digest, needed=nothing) else [])
        swap(storage, ref)

    monkeypatch.setattr(ObjectStorage, "_swap_ref", sleep_and_swap)
    commit(writer, folder, attempt)
    assert removed == [1]
    assert content_of(bucket_place.open()) == OLD


# Killed


def assert_recorded_if_gone(place: Place, digest: str) -> None:
    """Assert that the object is there, or that the record of it is whole."""
    storage = place.open()
    removal = find_removed(storage, digest)
    assert (removal is None) == storage.has_object(digest)
    if removal is not None:
        assert removal.files is not None
        assert removal.measured is not None
        assert [ref.artifact.stage_key for ref in removal.refs] == [OTHER]


def prepare(place: Place) -> str:
    """Store something that is needed, and something of every kind that is not, whose digest is returned."""
    storage = place.open()
    produce(storage, OLD)
    gone = produce(storage, NEW, parts=OTHER_PARTS)
    with storage.keep_copy(OTHER, ["journal.jsonl"]):
        (storage.scratch_folder(OTHER) / "journal.jsonl").write_text("x")
    return gone.digest


def remove_what_is_not_needed(storage: Storage, *, patience_seconds: float = 0.0) -> None:
    garbage = garbage_of(storage, CAUSE)
    for wait in (0.0, patience_seconds):
        time.sleep(wait)
        garbage.remove_refs(set(garbage.refs()) - {KEY}, needed=lambda: {KEY})
        for digest in set(garbage.objects()) - set(digests(garbage)):
            garbage.remove_object(digest, needed=lambda: digests(garbage))
        for leftover in garbage.leftovers():
            garbage.remove_leftover(leftover, needed=lambda: {KEY})


def remove_and_die(machine: Machine, number: int) -> None:
    storage = machine.open()
    count = itertools.count()

    def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def operate(*arguments: Any, **options: Any) -> Any:
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return operate

    is_folder = "://" not in machine.address
    module: Any = os if is_folder else obstore
    for name in OPERATIONS if is_folder else REQUESTS:
        setattr(module, name, dying(getattr(module, name)))
    remove_what_is_not_needed(storage)


@pytest.mark.parametrize("kind", ["folder", pytest.param("bucket", marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_loses_nothing_and_the_next_removes_the_rest(
    kind: str, tmp_path: Path, forker: Forker, request: pytest.FixtureRequest
) -> None:
    address = None if kind == "folder" else str(request.getfixturevalue("bucket"))
    for number in itertools.count(0, 2 if kind == "folder" else 5):
        folder = tmp_path / str(number)
        place: Place = (
            FolderPlace(folder)
            if address is None
            else BucketPlace(f"{address}/{number}", folder, lease_seconds=0.2)
        )
        gone = prepare(place)
        with forker.process(remove_and_die, place.machine(), number) as process:
            status = process.wait()
        assert status in (0, -signal.SIGKILL)
        assert content_of(place.open()) == OLD
        assert content_of(place.open(), OTHER) in (NEW, None), "whole, or not there"
        assert_recorded_if_gone(place, gone)
        remove_what_is_not_needed(place.open(), patience_seconds=0.0 if address is None else 0.4)
        assert content_of(place.open()) == OLD
        assert len({path.split("/")[1] for path in place.paths("objects")}) == 1
        assert place.open().lookup(OTHER) == Lookup(None)
        assert_recorded_if_gone(place, gone)
        assert not place.open().has_object(gone)
        assert place.paths("scratch") == set()
        if status == 0:
            break
    assert number > 10, "the operations were not seen"
