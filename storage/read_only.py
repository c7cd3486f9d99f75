"""Read a store without changing it: for audits, also of copies on read-only disks. Nothing is created, cached or repaired.

Every byte in the folder or the bucket itself is hashed, never that of a copy that was verified before.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol, TypeVar

from pydantic import ValidationError

from vantage.storage.digests import checked_digest, is_digest
from vantage.storage.hashed_files import Chunks, FileToHash, HashClock, chunks_of, hash_all
from vantage.storage.measured_file import METRICS_FILE, Sealed, read_sealed
from vantage.storage.refs import DamagedRef, Ref, check_ref
from vantage.storage.sealed_folders import MANIFEST, find_problems, read_manifest, read_sealed_file
from vantage.storage.storage import Readable

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Remote

_READERS = 8
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Hashed:
    """An object whose files were all read."""

    problems: tuple[str, ...]
    """Problems, one line each; empty: the object matches its digest."""
    num_files: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class Listed:
    """Problems of an object that can be seen from names and sizes, and its files that can be hashed."""

    problems: tuple[str, ...]
    files: Mapping[str, str]
    """Path → sha256 in the manifest, for the files that exist with the right size."""
    to_hash: tuple[FileToHash, ...]
    """The files of the artifact, ready to be hashed."""


class ReadOnlyStore(Readable, Protocol):
    """The part of a store that an audit reads."""

    def stage_keys(self) -> list[str]:
        """Return every stage key that has a record, sorted."""

    def digests(self) -> list[str]:
        """Return every object's digest, sorted."""

    def ref(self, stage_key: str) -> Ref | None:
        """Return the ref of a stage key. Raises DamagedRef if it cannot be read, or belongs to another key."""

    def listed(self, digest: str) -> Listed:
        """Compare an object's names and sizes with its manifest."""

    def sealed(self, digest: str) -> Sealed:
        """Return the metrics of an object. Raises ValueError or OSError if it is missing or does not match the digest."""

    def read_file(self, digest: str, path: str) -> bytes | None:
        """Return a small file of an object; None: the object has no file of that name. Raises ValueError or OSError as
        above."""


def hash_objects(store: ReadOnlyStore, digests: Iterable[str], clock: HashClock) -> dict[str, Hashed]:
    """Return digest → the result of reading every byte of the object; all files of all objects are hashed in parallel."""
    listed = {digest: store.listed(digest) for digest in dict.fromkeys(digests)}
    return hash_listed(listed, clock)


def hash_listed(listed: Mapping[str, Listed], clock: HashClock) -> dict[str, Hashed]:
    """Return name → the result of reading every byte of the folder."""
    shas = iter(hash_all([file for each in listed.values() for file in each.to_hash], clock))
    found = {}
    for name, each in listed.items():
        problems = list(each.problems)
        for path, expected in each.files.items():
            sha = next(shas)
            if isinstance(sha, OSError):
                problems.append(f"{path}: cannot be read: {sha}")
            elif sha != expected:
                problems.append(f"{path}: sha256 is {sha}, must be {expected}")
        found[name] = Hashed(tuple(problems), len(each.to_hash), sum(file.size for file in each.to_hash))
    return found


def is_pipe(path: Path) -> bool:
    """Return whether the path is a pipe: reading it would wait for a writer for ever."""
    return path.is_fifo()


def list_folder(folder: Path, *, digest: str | None) -> Listed:
    """Compare the names and sizes in a sealed folder with its manifest; ``digest`` None: the manifest is not
    checked."""
    if is_pipe(folder / MANIFEST):
        return Listed((f"{MANIFEST}: is not a plain file",), {}, ())
    problems = find_problems(folder, digest=digest, read=False)
    try:
        records = read_manifest(folder, digest=digest)
    except (ValueError, OSError):
        return Listed(tuple(problems), {}, ())  # the problems contain the reason
    files, to_hash = {}, []
    for path, record in records.items():
        file = folder / path
        if not any(each.startswith(f"{path}: ") for each in problems):
            files[path] = str(record["sha256"])
            to_hash.append(FileToHash(path, record["size"], _opening(file)))
    return Listed(tuple(problems), files, tuple(to_hash))


def open_read_only(address: str) -> ReadOnlyStore:
    """Return the store at a folder's path or a bucket's address."""
    if "://" not in address:
        return FolderReader(Path(address))
    from vantage.storage.bucket import open_bucket

    return BucketReader(open_bucket(address))


class FolderReader:
    """``ReadOnlyStore`` of a folder."""

    def __init__(self, root: Path) -> None:
        self._root, self._objects, self._refs = root, root / "objects", root / "refs"

    @property
    def remote(self) -> "Remote":
        from obstore.store import LocalStore  # takes a moment to load

        return LocalStore(self._root)

    def stage_keys(self) -> list[str]:
        return sorted(path.stem for path in self._refs.glob("*.json") if is_digest(path.stem))

    def digests(self) -> list[str]:
        return sorted(path.name for path in self._objects.glob("*") if is_digest(path.name))

    def ref(self, stage_key: str) -> Ref | None:
        path = self._refs / f"{checked_digest(stage_key)}.json"
        try:
            if is_pipe(path):
                raise ValueError("no plain file")
            ref = Ref.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            raise DamagedRef(f"refs/{path.name}: cannot be read as a ref") from error
        return check_ref(ref, stage_key=stage_key, where=f"refs/{path.name}")

    def has_object(self, digest: str) -> bool:
        return self.folder(digest).is_dir()

    def listed(self, digest: str) -> Listed:
        return list_folder(self.folder(digest), digest=digest)

    def sealed(self, digest: str) -> Sealed:
        return read_sealed(self._readable(digest, METRICS_FILE), digest=digest)

    def read_file(self, digest: str, path: str) -> bytes | None:
        return read_sealed_file(self._readable(digest, path), path, digest=digest)

    def _readable(self, digest: str, path: str) -> Path:
        """Return the object's folder. Raises ValueError if its manifest or this file is a pipe, which would block the
        reader."""
        folder = self.folder(digest)
        for name in (MANIFEST, path):
            if is_pipe(folder / name):
                raise ValueError(f"{name}: is not a plain file")
        return folder

    def folder(self, digest: str) -> Path:
        """Return the path of an object, which need not exist."""
        return self._objects / checked_digest(digest)


class BucketReader:
    """``ReadOnlyStore`` of a bucket; files are hashed during their download, and not kept."""

    def __init__(self, remote: "Remote") -> None:
        from vantage.storage.remote_objects import RemoteObjects

        self._remote = remote
        self._objects = RemoteObjects(remote)

    @property
    def remote(self) -> "Remote":
        return self._remote

    def stage_keys(self) -> list[str]:
        import obstore

        listed = obstore.list(self._remote, "keys/")
        names = (Path(str(each["path"])).stem for batch in listed for each in batch)
        return sorted(name for name in names if is_digest(name))

    def digests(self) -> list[str]:
        import obstore

        prefixes = obstore.list_with_delimiter(self._remote, "objects/")["common_prefixes"]
        names = (str(prefix).rstrip("/").rpartition("/")[2] for prefix in prefixes)
        return sorted(name for name in names if is_digest(name))

    def ref(self, stage_key: str) -> Ref | None:
        from vantage.storage.key_records import KeyRecord, key_path
        from vantage.storage.records import read_record

        path = key_path(stage_key)
        data, _ = read_record(self._remote, path)
        if data is None:
            return None
        try:
            ref = KeyRecord.model_validate_json(data).ref
        except ValidationError as error:
            raise DamagedRef(f"{path}: cannot be read as the record of a stage key") from error
        return None if ref is None else check_ref(ref, stage_key=stage_key, where=path)

    def has_object(self, digest: str) -> bool:
        return MANIFEST in self._objects.sizes(checked_digest(digest))

    def listed(self, digest: str) -> Listed:
        try:
            records = self._with_files(digest, (), lambda folder: read_manifest(folder, digest=digest))
        except (ValueError, OSError) as error:
            return Listed((str(error),), {}, ())
        there = self._objects.sizes(digest)
        problems = [f"{path}: is missing" for path in sorted(records.keys() - there.keys())]
        unlisted = sorted(there.keys() - records.keys() - {MANIFEST})
        problems += [f"{path}: is not in the manifest" for path in unlisted]
        files, to_hash = {}, []
        for path in sorted(records.keys() & there.keys()):
            size = records[path]["size"]
            if there[path] == size:
                files[path] = str(records[path]["sha256"])
                to_hash.append(FileToHash(path, size, self._opening(digest, path)))
            else:
                problems.append(f"{path}: has {there[path]} bytes, must have {size}")
        return Listed(tuple(problems), files, tuple(to_hash))

    def sealed(self, digest: str) -> Sealed:
        return self._with_files(digest, (METRICS_FILE,), lambda folder: read_sealed(folder, digest=digest))

    def read_file(self, digest: str, path: str) -> bytes | None:
        there = self._with_files(digest, (), lambda folder: path in read_manifest(folder, digest=digest))
        if not there:
            return None
        return self._with_files(digest, (path,), lambda folder: read_sealed_file(folder, path, digest=digest))

    def _with_files(self, digest: str, paths: Iterable[str], read: Callable[[Path], _Read]) -> _Read:
        """Return the result of ``read`` on a temporary folder with the manifest and these files."""
        with TemporaryDirectory(prefix="vantage-audit-") as temporary:
            self._objects.fetch_files(checked_digest(digest), (MANIFEST, *paths), Path(temporary))
            return read(Path(temporary))

    def _opening(self, digest: str, path: str) -> Callable[[], Chunks]:
        def chunks() -> Chunks:
            import obstore
            from obstore.exceptions import BaseError

            try:
                for part in obstore.get(self._remote, f"objects/{digest}/{path}").stream():
                    yield memoryview(part)
            except BaseError as error:
                raise OSError((str(error).splitlines() or [type(error).__name__])[0]) from error

        return chunks


def read_refs(store: ReadOnlyStore) -> dict[str, Ref]:
    """Return stage key → ref, for every ref that can be read."""

    def read(stage_key: str) -> Ref | None:
        try:
            return store.ref(stage_key)
        except DamagedRef:
            return None

    keys = store.stage_keys()
    with ThreadPoolExecutor(_READERS) as readers:  # a bucket takes a while for each answer
        found = zip(keys, readers.map(read, keys), strict=True)
        return {key: ref for key, ref in found if ref is not None}


def _opening(path: Path) -> Callable[[], Chunks]:
    return lambda: chunks_of(path)
