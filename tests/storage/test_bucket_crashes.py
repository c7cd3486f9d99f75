"""A kill, a lost answer or a failed request, at each request in turn, leaves a bucket that can be used."""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError

from tests.storage.places import BucketPlace, Forker, Machine
from tests.storage.stored import KEY, NEW, OLD, commit, content_of, produce, stage
from vantage.storage.object_storage import ObjectStorage
from vantage.storage.sealed_folders import MANIFEST, find_problems, seal
from vantage.storage.storage import Storage

pytestmark = pytest.mark.usefixtures("no_fsync")

REQUESTS = ("get", "list", "put", "delete", "copy")


class Requests:
    """Counts the requests of this process, and does something at one of them.

    The lease's own thread is not counted: when it beats depends on the machine's load, and a beat that fails fails no commit.
    """

    def __init__(self, number: int, *, after: bool, act: Callable[[], None]) -> None:
        self._number, self._after, self._act = number, after, act
        self._count = itertools.count()
        self._lock = threading.Lock()

    def watching(self, request: Callable[..., Any]) -> Callable[..., Any]:
        def send(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread().name == "lease":
                return request(*arguments, **options)
            with self._lock:
                is_it = next(self._count) == self._number
            if is_it and not self._after:
                self._act()
            try:
                return request(*arguments, **options)
            finally:
                if is_it and self._after:
                    self._act()

        return send


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work_and_die(work: Callable[[Storage], None], machine: Machine, number: int) -> None:
    """Do the work in a process of its own, until the request of that number."""
    requests = Requests(number, after=False, act=die)
    storage = machine.open()
    for name in REQUESTS:
        setattr(obstore, name, requests.watching(getattr(obstore, name)))
    work(storage)


def killed_at_each_request(
    bucket: str,
    tmp_path: Path,
    forker: Forker,
    work: Callable[[Storage], None],
    prepare: Callable[[Storage], None],
) -> Iterator[BucketPlace]:
    """Yield the bucket after the work was killed before each of its requests, which is after the one before; the last
    is whole.
    """
    for number in itertools.count():
        place = BucketPlace(f"{bucket}/{number}", tmp_path / str(number), lease_seconds=0.5)
        prepare(place.open())
        machine = place.machine()
        with forker.process(work_and_die, work, machine, number) as process:
            status = process.wait()
        assert status in (0, -signal.SIGKILL)
        yield place
        if status == 0:
            return


def produce_old(storage: Storage) -> None:
    produce(storage, OLD)


def produce_new(storage: Storage) -> None:
    produce(storage, NEW)


@pytest.mark.slow
def test_a_kill_at_any_request_of_a_commit_leaves_the_old_or_the_new(
    bucket: str, tmp_path: Path, forker: Forker
) -> None:
    seen: list[bytes] = []
    for place in killed_at_each_request(bucket, tmp_path, forker, produce_new, produce_old):
        content = content_of(place.open())
        assert content in (OLD, NEW)
        seen.append(content or b"")
        again = produce(place.open(), NEW)  # the retry, on another machine
        assert content_of(place.open()) == NEW
        digests = {path.split("/")[1] for path in place.paths("objects")}
        assert again.digest in digests
        assert len(digests) == 2
        assert place.paths("quarantine") == set()
    assert len(seen) > 14, "the commit's requests were not seen"
    assert seen == sorted(seen, key=[OLD, NEW].index), "once new, always new"
    assert set(seen) == {OLD, NEW}


def damaged(storage: Storage) -> None:
    artifact = produce(storage, OLD)
    assert isinstance(storage, ObjectStorage)
    obstore.put(storage._remote, f"{artifact.uri}/weights.bin", b"0ld weights")


def look_up(storage: Storage) -> None:
    storage.lookup(KEY)


@pytest.mark.slow
def test_a_kill_while_a_damaged_object_is_set_aside_loses_nothing(
    bucket: str, tmp_path: Path, forker: Forker
) -> None:
    places = list(killed_at_each_request(bucket, tmp_path, forker, look_up, damaged))
    for place in places:
        assert place.open().lookup(KEY).ref is None, "what is damaged is never used"
        produce(place.open(), OLD)
        assert content_of(place.open()) == OLD
    assert len(places) > 5


def hold(storage: Storage) -> None:
    with storage.exclusive(KEY, holder="run a"):
        pass


@pytest.mark.slow
def test_a_kill_at_any_request_of_a_lease_keeps_the_next_no_longer_than_the_lease(
    bucket: str, tmp_path: Path, forker: Forker
) -> None:
    places = list(killed_at_each_request(bucket, tmp_path, forker, hold, hold))
    for place in places:
        with place.open().exclusive(KEY, holder="run b", timeout=5):
            pass
    assert len(places) >= 3


NAMES = ("checkpoints", "journal.jsonl")


def checkpoint(storage: Storage, step: int) -> None:
    scratch = storage.scratch_folder(KEY)
    folder = scratch / "checkpoints" / f"checkpoint-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "tensors.safetensors").write_bytes(b"tensors of %d" % step)
    (folder / "state.json").write_text(f"{step}")
    seal(folder)
    with (scratch / "journal.jsonl").open("a") as file:
        file.write(f"{step}\n")


def save_4(storage: Storage) -> None:
    checkpoint(storage, 4)
    with storage.keep_copy(KEY, NAMES):
        pass


def go_on_to_8(storage: Storage) -> None:
    storage.next_attempt(KEY)
    checkpoint(storage, 8)
    with storage.keep_copy(KEY, NAMES):
        pass


@pytest.mark.slow
def test_a_kill_at_any_request_of_a_checkpoints_copy_leaves_a_whole_one(
    bucket: str, tmp_path: Path, forker: Forker
) -> None:
    steps: list[int] = []
    for place in killed_at_each_request(bucket, tmp_path, forker, go_on_to_8, save_4):
        scratch = place.open().scratch_folder(KEY)
        whole = sorted((scratch / "checkpoints").iterdir())
        assert all(find_problems(folder) == [] for folder in whole)
        newest = int((whole[-1] / "state.json").read_text())
        assert newest in (4, 8)
        assert f"{newest}\n" in (scratch / "journal.jsonl").read_text(), "the journal reaches as far"
        steps.append(newest)
    assert steps == sorted(steps)
    assert set(steps) == {4, 8}


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["not sent", "answer lost"])
def test_a_request_that_fails_leaves_the_old_or_the_new_and_a_later_try_works(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    def fail() -> None:
        raise GenericError("the server does not answer")

    for number in itertools.count():
        place = BucketPlace(f"{bucket}/{number}", tmp_path / str(number), lease_seconds=0.5)
        produce(place.open(), OLD)
        writer = place.open()
        folder, attempt = stage(writer, NEW)
        requests = Requests(number, after=after, act=fail)
        failed = False
        with monkeypatch.context() as patched:
            for name in REQUESTS:
                patched.setattr(obstore, name, requests.watching(getattr(obstore, name)))
            try:
                commit(writer, folder, attempt)
            except GenericError:
                failed = True
        assert content_of(place.open()) in ((OLD, NEW) if failed else (NEW,))
        if not failed:
            break
        if folder.is_dir():  # the same attempt tries again with what it computed
            (folder / MANIFEST).unlink(missing_ok=True)
            commit(writer, folder, attempt)
            assert content_of(place.open()) == NEW
    assert number > 8


# Resumed uploads


def stage_files(storage: Storage) -> tuple[Path, int]:
    """Stage three files, one of which is sent in several parts."""
    folder, attempt = stage(storage, bytes(range(256)) * (9 * 2**12))
    (folder / "weights-2.bin").write_bytes(b"second" * 1000)
    return folder, attempt


def commit_files(storage: Storage) -> None:
    commit(storage, *stage_files(storage))


def sent_by(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the files of objects that a commit sends."""
    sent: list[str] = []
    put = obstore.put

    def noted(remote: Any, path: str, *arguments: Any, **options: Any) -> Any:
        if path.startswith("objects/"):
            sent.append(path.split("/", 2)[-1])
        return put(remote, path, *arguments, **options)

    folder, attempt = stage_files(storage)
    with monkeypatch.context() as patched:
        patched.setattr(obstore, "put", noted)
        commit(storage, folder, attempt)
    return sorted(sent)


@pytest.mark.slow
def test_what_a_killed_upload_has_sent_is_not_sent_again(
    bucket: str, tmp_path: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = sent_by(BucketPlace(f"{bucket}/whole", tmp_path / "whole").open(), monkeypatch)
    assert everything == [
        MANIFEST,
        "metrics.json",
        "tokenizer/tokenizer.json",
        "weights-2.bin",
        "weights.bin",
    ]
    there: list[int] = []
    for turn in range(5):  # files are sent side by side, so how many are there at a request is chance
        for number in itertools.count(8):  # the requests before are not the upload's
            name = f"{turn}-{number}"
            place = BucketPlace(f"{bucket}/{name}", tmp_path / name, lease_seconds=0.5)
            with forker.process(work_and_die, commit_files, place.machine(), number) as process:
                status = process.wait()
            before = {path.split("/", 2)[-1] for path in place.paths("objects")}
            there.append(len(before))
            assert before.isdisjoint(sent_by(place.open(), monkeypatch))
            assert content_of(place.open()) is not None
            if status == 0:
                break
        if len(set(there)) > 3:
            break
    assert len(set(there)) > 3, "it was killed with some of the files there"


def test_a_large_file_goes_up_in_parts_and_comes_down_whole(bucket_place: BucketPlace) -> None:
    storage = bucket_place.open()
    artifact = commit(storage, *stage_files(storage))
    e_tag = obstore.head(bucket_place.remote, f"{artifact.uri}/weights.bin")["e_tag"]
    assert str(e_tag).strip('"').endswith("-2"), "9 MiB in parts of 8"
    assert content_of(bucket_place.open()) == bytes(range(256)) * (9 * 2**12)


def test_a_file_of_the_right_size_but_other_bytes_is_sent_again(
    bucket_place: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = bucket_place.open()
    artifact = commit(writer, *stage_files(writer))
    bucket_place.remove(f"{artifact.uri}/{MANIFEST}")
    bucket_place.write(f"{artifact.uri}/weights-2.bin", b"sec0nd" * 1000)
    assert sent_by(bucket_place.open(), monkeypatch) == [MANIFEST, "weights-2.bin"]
    assert content_of(bucket_place.open()) is not None
