"""The copies of objects on a machine are bounded, shared by its processes, and whole whenever one is killed."""

import fcntl
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.storage.places import BucketPlace, Forker
from tests.storage.stored import commit, produce, stage
from vantage.storage.bucket import open_bucket
from vantage.storage.object_cache import ObjectCache, max_bytes_from
from vantage.storage.object_storage import ObjectStorage
from vantage.storage.sealed_folders import find_problems, seal

pytestmark = pytest.mark.usefixtures("no_fsync")

SIZE = 10_000


def content(folder: Path, name: str) -> str:
    """Fill a folder with an object of about ``SIZE`` bytes, and return its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.bin").write_bytes(name.encode() * (SIZE // len(name)))
    return seal(folder)


def digest_of(folder: Path, name: str) -> str:
    return content(folder / name, name)


class Source:
    """What is fetched from; remembers what was."""

    def __init__(self, folder: Path, *, max_bytes: int = 3 * SIZE + 2000) -> None:
        self.cache = ObjectCache(folder / "cache", max_bytes=max_bytes)
        self._folder = folder
        self.log = folder / "fetched.txt"

    def fetch(self, name: str, *, seconds: float = 0.0) -> Path:
        def fetch(folder: Path) -> list[str]:
            with self.log.open("a") as file:
                file.write(f"{name}\n")
            time.sleep(seconds)
            content(folder, name)
            return []

        digest = digest_of(self._folder / "plain" / str(os.getpid()) / str(time.monotonic_ns()), name)
        with self.cache.using(digest, fetch, lambda: SIZE) as found:
            assert find_problems(found, digest=digest) == []
        return found

    def keep(self, name: str) -> Path:
        digest = self.fetch(name).name
        return self.cache.keep(digest, lambda folder: ["not fetched again"], lambda: SIZE)

    def here(self) -> list[str]:
        """Return the names of the copies that are here."""
        paths = sorted((self.cache.root / "objects").iterdir())
        return sorted((path / "weights.bin").read_bytes()[:1].decode() for path in paths)

    def fetched(self) -> str:
        return "".join(self.log.read_text().split())


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


def test_those_unused_for_longest_make_room(source: Source) -> None:
    """Copies that were unused for longest are removed first."""
    for name in "abc":
        source.fetch(name)
        time.sleep(0.01)  # more than the grain of a file system's clock
    source.fetch("a")
    time.sleep(0.01)
    source.fetch("d")
    assert source.here() == ["a", "c", "d"]
    assert source.fetched() == "abcd"
    source.fetch("b")
    assert source.here() == ["a", "b", "d"]
    assert sum(file.stat().st_size for file in source.cache.root.rglob("*.bin")) <= 3 * SIZE + 2000


def test_what_is_kept_or_larger_than_the_bound_stays(tmp_path: Path) -> None:
    source = Source(tmp_path, max_bytes=SIZE // 2)
    kept = source.keep("a")
    source.fetch("b")
    assert source.here() == ["a", "b"], "b is used although it does not fit"
    source.fetch("c")
    assert source.here() == ["a", "c"]
    assert kept.is_dir()


def keep_for_ever(folder: Path, held: Path) -> None:
    source = Source(folder)
    source.keep("a")
    held.touch()
    signal.pause()


def test_what_another_process_uses_stays_until_that_process_is_gone(
    source: Source, tmp_path: Path, forker: Forker
) -> None:
    held = tmp_path / "held"
    with forker.process(keep_for_ever, tmp_path, held) as other:
        while not held.exists():
            time.sleep(0.01)
        for name in "bcde":
            source.fetch(name)
            time.sleep(0.01)
        assert source.here() == ["a", "d", "e"]
        other.kill()
        other.wait()
    source.fetch("f")
    assert source.here() == ["d", "e", "f"]


def fetch_slowly(folder: Path) -> None:
    Source(folder).fetch("a", seconds=0.3)


def test_two_processes_fetch_an_object_once(source: Source, tmp_path: Path, forker: Forker) -> None:
    with (
        forker.process(fetch_slowly, tmp_path) as one,
        forker.process(fetch_slowly, tmp_path) as other,
    ):
        assert one.wait() == other.wait() == 0
    assert source.fetched() == "a"


OPERATIONS = ("rename", "unlink", "rmdir", "open", "close", "mkdir", "scandir")


def evict_and_die(folder: Path, number: int) -> None:
    source = Source(folder)
    count = itertools.count()

    def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def operate(*arguments: Any, **options: Any) -> Any:
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return operate

    for name in OPERATIONS:
        setattr(os, name, dying(getattr(os, name)))
    source.fetch("z")


def test_a_kill_at_any_operation_of_a_fetch_that_evicts_leaves_nothing_half(
    tmp_path: Path, forker: Forker
) -> None:
    for number in itertools.count(0, 3):
        folder = tmp_path / str(number)
        source = Source(folder)
        for name in "abc":
            source.fetch(name)
        with forker.process(evict_and_die, folder, number) as process:
            status = process.wait()
        assert status in (0, -signal.SIGKILL)
        for path in (source.cache.root / "objects").iterdir():
            assert find_problems(path, digest=path.name) == []
        source.fetch("y")
        assert len(source.here()) == 3, "within the bound again"
        for left in ("fetching", "removing"):
            assert list((source.cache.root / left).iterdir()) == []
        if status == 0:
            break
    assert number > 20, "the operations were not seen"


def test_what_is_being_fetched_by_another_is_not_cleared_away(source: Source) -> None:
    digest = "ab" * 32
    (source.cache.root / "fetching" / f"{digest}-1234").mkdir()
    lock = os.open(source.cache.root / "locks" / f"fetch-{digest}", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    source.cache.make_room()
    assert (source.cache.root / "fetching" / f"{digest}-1234").is_dir()
    os.close(lock)
    source.cache.make_room()
    assert list((source.cache.root / "fetching").iterdir()) == []


@pytest.mark.slow
def test_a_storages_copies_are_bounded_and_fetched_again_when_they_are_needed(
    bucket_place: BucketPlace, tmp_path: Path
) -> None:
    contents = [bytes([65 + number]) * SIZE for number in range(4)]
    artifacts = [
        produce(bucket_place.open(), content, parts={"seed": number})
        for number, content in enumerate(contents)
    ]

    def opened() -> ObjectStorage:
        objects = ObjectCache(tmp_path / "cache", max_bytes=2 * SIZE + 5000)
        return ObjectStorage(open_bucket(bucket_place.address), tmp_path / "cache" / "own", objects=objects)

    for _ in range(2):
        for artifact, content in zip(artifacts, contents, strict=True):
            storage = opened()
            assert (storage.folder(artifact) / "weights.bin").read_bytes() == content
            del storage
            assert len(list((tmp_path / "cache" / "objects").iterdir())) <= 2
    storage = opened()
    kept = [storage.folder(artifact) for artifact in artifacts]
    assert all(folder.is_dir() for folder in kept), "an attempt's inputs stay, whatever they weigh"
    commit(storage, *stage(storage, b"made here"))
    assert all(folder.is_dir() for folder in kept)


def test_the_bound_is_a_number_of_gigabytes() -> None:
    assert max_bytes_from({}) == 100_000_000_000
    assert max_bytes_from({"VANTAGE_CACHE_GB": "0.5"}) == 500_000_000


@pytest.mark.parametrize("text", ["0", "-1", "much", "inf", "nan"])
def test_a_bound_that_is_no_positive_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"VANTAGE_CACHE_GB='{text}' is no positive number of gigabytes"):
        max_bytes_from({"VANTAGE_CACHE_GB": text})
