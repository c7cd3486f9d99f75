"""Find and remove what is no longer needed in a bucket (``vantage.storage.garbage``).

A lease can be lost while its holder sleeps, so a lease alone protects nothing here:

- a ref is marked first. Then the runs are read, and then the ref is removed from exactly the record that was marked, by
a conditional write. A lookup that finds the mark removes the mark, and then that write is refused.
- an object is removed in one request, right after a heartbeat of its lease has succeeded. A process that commits an
equal object holds that lease from before the upload until the ref is written, and uploads again if it lost the lease
meanwhile.

A removed artifact leaves a record (``vantage.storage.removed``), written before its files are removed. If the artifact then
stays after all, the record has no effect: readers look for the object first.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import obstore
from obstore.exceptions import NotFoundError
from obstore.store import ObjectStore as Remote

from vantage.storage.digests import checked_digest, is_digest
from vantage.storage.durable_files import remove_folder
from vantage.storage.garbage import HOLDER, Leftover, Needed, batches, bytes_in
from vantage.storage.key_locks import Locked
from vantage.storage.key_records import KeyRecord, KeyRecords
from vantage.storage.leases import RemoteLeases
from vantage.storage.measured_file import METRICS_FILE
from vantage.storage.records import Conflict, Version
from vantage.storage.refs import DamagedRef, Ref, check_ref, uri_of
from vantage.storage.remote_objects import RemoteObjects
from vantage.storage.removed import CAUSE_FILE, REMOVED_FOLDER, Cause, ref_bytes, ref_name, what_stays
from vantage.storage.sealed_folders import MANIFEST

_READS = 16
"""Number of records that are read at once."""
_SILENT_SECONDS = 3600.0
"""Seconds after which an attempt without an outcome and new messages counts as lost; attempts send a heartbeat every
few seconds."""
_CLOCK = "leases/clock"
"""Path of a file; writing it shows the time of the storage's own clock."""


class BucketGarbage:
    """The removable content of a bucket, and of this machine's working folders for it."""

    def __init__(
        self, remote: Remote, keys: KeyRecords, leases: RemoteLeases, cache: Path, cause: Cause
    ) -> None:
        """Find garbage in a bucket. ``cache`` has this machine's scratch and staging folders; ``cause`` is written into
        the records of removed artifacts."""
        self._remote = remote
        self._cause = cause
        self._keys = keys
        self._leases = leases
        self._cache = cache
        self._read: dict[str, tuple[object, Ref | None]] = {}
        """Stage key → etag of its record when it was last read, and the ref."""

    @property
    def patience_seconds(self) -> float:
        """Seconds after which the lease of a dead holder can be taken over."""
        return self._leases.seconds

    def refs(self) -> Mapping[str, Ref]:
        """Return stage key → ref; records that have not changed since the last call are not read again."""
        listed = {Path(str(each["path"])).stem: each["e_tag"] for each in self._listed("keys/")}
        new = [
            key for key, tag in listed.items() if is_digest(key) and self._read.get(key, (None,))[0] != tag
        ]
        with ThreadPoolExecutor(_READS) as threads:
            found = dict(zip(new, threads.map(self._find, new), strict=True))
        self._read = {
            key: (tag, found[key]) if key in found else self._read[key]
            for key, tag in listed.items()
            if key in found or key in self._read
        }
        return {key: ref for key, (_, ref) in self._read.items() if ref is not None}

    def objects(self) -> Mapping[str, int]:
        return {digest: size for digest, size in self._sizes("objects/").items() if is_digest(digest)}

    def leftovers(self) -> Collection[Leftover]:
        now = self._now()
        return [
            *self._scratch_copies(),
            *self._messages(now),
            *self._folders_here(),
            *self._quarantined(now),
        ]

    def remove_refs(self, stage_keys: Collection[str], *, needed: Needed) -> list[str]:
        gone: list[str] = []
        for batch in batches(stage_keys):
            with ExitStack() as held:
                marked = {}
                for key in batch:
                    if self._hold(held, f"leases/{key}.json") and (mark := self._mark(key)) is not None:
                        marked[key] = mark
                kept = needed() if marked else ()
                for key, (record, version) in marked.items():
                    is_kept = key in kept
                    ref = record.ref if is_kept else None
                    if record.ref is not None and not is_kept:
                        self._keep_ref(record.ref)
                    with suppress(Conflict):  # another process uses the ref after all
                        self._keys.write(
                            key, record.model_copy(update={"unneeded": False, "ref": ref}), version
                        )
                        gone += [] if is_kept else [key]
        return gone

    def remove_object(self, digest: str, *, needed: Needed) -> bool:
        try:
            with self._leases.hold(object_lease(digest), holder=HOLDER, timeout=0.0) as held:
                if digest in needed():
                    return False
                paths = [str(each["path"]) for each in self._listed(f"{uri_of(digest)}/")]
                self._keep_object(digest)
                return self._delete(paths, only_if=held.is_still_ours)
        except Locked:
            return False

    def remove_leftover(self, leftover: Leftover, *, needed: Needed) -> bool:
        with ExitStack() as held:
            if leftover.stage_key is not None:
                if not self._hold(held, f"leases/{leftover.stage_key}.json"):
                    return False
                if leftover.is_scratch and leftover.stage_key in needed():
                    return False
                if leftover.is_committed and not self._is_committed(leftover.stage_key):
                    return False
            if Path(leftover.name).is_absolute():
                remove_folder(Path(leftover.name))
                return True
            paths = [str(each["path"]) for each in self._listed(leftover.name)]
            return self._delete(paths, only_if=lambda: True)

    def records(self) -> Mapping[str, int]:
        sizes = self._sizes(f"{REMOVED_FOLDER}/")
        return {digest: size for digest, size in sizes.items() if is_digest(digest)}

    def _keep_ref(self, ref: Ref) -> None:
        """Record a ref that is about to be removed."""
        path = f"{REMOVED_FOLDER}/{checked_digest(ref.artifact.digest)}/{ref_name(ref.artifact.stage_key)}"
        obstore.put(self._remote, path, ref_bytes(ref))

    def _keep_object(self, digest: str) -> None:
        """Record an object that is about to be removed; an object without manifest and ref was not an artifact."""
        prefix = f"{REMOVED_FOLDER}/{digest}/"
        with TemporaryDirectory() as folder:
            for name in (MANIFEST, METRICS_FILE):
                with suppress(ValueError):  # the object was damaged already
                    RemoteObjects(self._remote).fetch_files(digest, (name,), Path(folder))
            kept = what_stays(Path(folder), digest)
        if not kept and not self._listed(prefix):
            return
        for name, data in {**kept, CAUSE_FILE: self._cause.model_dump_json().encode()}.items():
            obstore.put(self._remote, prefix + name, data)

    def _is_committed(self, key: str) -> bool:
        """Return whether the newest attempt at the key has committed; after damage a newer one may be under way."""
        try:
            record, _ = self._keys.read(key)
        except DamagedRef:
            return False
        return record.ref is not None and record.ref.attempt == record.newest_attempt

    def _mark(self, key: str) -> tuple[KeyRecord, Version] | None:
        """Mark the ref of a key as unneeded; returns the record with the mark, and its version."""
        try:
            record, version = self._keys.read(key)
            if record.ref is None:
                return None
            record = record.model_copy(update={"unneeded": True})
            return record, self._keys.write(key, record, version)
        except (DamagedRef, Conflict):
            return None

    def _delete(self, paths: list[str], *, only_if: Callable[[], bool]) -> bool:
        """Remove paths in as few requests as possible, a thousand paths in each."""
        for start in range(0, len(paths), 1000):
            if not only_if():
                return False
            with suppress(NotFoundError, FileNotFoundError):
                obstore.delete(self._remote, paths[start : start + 1000])
        return True

    def _hold(self, held: ExitStack, path: str) -> bool:
        try:
            held.enter_context(self._leases.hold(path, holder=HOLDER, timeout=0.0))
        except Locked:
            return False
        return True

    def _find(self, key: str) -> Ref | None:
        try:
            ref = self._keys.read(key)[0].ref
            return None if ref is None else check_ref(ref, stage_key=key, where=key)
        except DamagedRef:  # a lookup sets it aside; no object is reached through it
            return None

    def _scratch_copies(self) -> Iterator[Leftover]:
        for key, size in self._sizes("scratch/").items():
            if is_digest(key):
                yield Leftover(f"scratch/{key}/", size, stage_key=key, is_scratch=True)

    def _messages(self, now: datetime) -> Iterator[Leftover]:
        """Yield messages of attempts, except for keys with a running attempt, which may not hold its key yet."""
        of_key: dict[str, list[Any]] = defaultdict(list)
        for each in self._listed("messages/"):
            of_key[str(each["path"]).partition("messages/")[2].partition("/")[0]].append(each)
        for key, messages in of_key.items():
            paths = [PurePosixPath(str(each["path"])) for each in messages]
            ended = {path.parent for path in paths if path.name == "outcome.json"}
            is_over = (
                path.parent in ended or (now - each["last_modified"]).total_seconds() > _SILENT_SECONDS
                for path, each in zip(paths, messages, strict=True)
            )
            if is_digest(key) and all(is_over):
                size = sum(each["size"] for each in messages)
                yield Leftover(f"messages/{key}/", size, stage_key=key, is_scratch=True)

    def _folders_here(self) -> Iterator[Leftover]:
        """Yield working folders of this machine; those of other machines are removed by a call there."""
        for kind in ("scratch", "staging", "reports"):
            for path in sorted((self._cache / kind).glob("*")):
                key = path.name.partition(".")[0]
                if is_digest(key):
                    is_scratch = kind != "staging" and path.name == key
                    yield Leftover(
                        str(path),
                        bytes_in(path),
                        stage_key=key,
                        is_scratch=is_scratch,
                        is_committed=is_scratch and kind == "scratch" and self._is_committed(key),
                    )

    def _now(self) -> datetime:
        """Return the time on the storage's own clock."""
        obstore.put(self._remote, _CLOCK, b"")
        return obstore.head(self._remote, _CLOCK)["last_modified"]

    def _quarantined(self, now: datetime) -> Iterator[Leftover]:
        for each in self._listed("quarantine/"):
            age = (now - each["last_modified"]).total_seconds()
            yield Leftover(str(each["path"]), each["size"], age_seconds=age)

    def _sizes(self, prefix: str) -> dict[str, int]:
        """Return the first part of each path below the prefix → bytes of all files below it."""
        sizes: dict[str, int] = {}
        for each in self._listed(prefix):
            name = str(each["path"]).partition(prefix)[2].partition("/")[0]
            sizes[name] = sizes.get(name, 0) + each["size"]
        return sizes

    def _listed(self, prefix: str) -> Iterable[Any]:
        if not prefix.endswith("/"):
            return [obstore.head(self._remote, prefix)]
        return [each for batch in obstore.list(self._remote, prefix) for each in batch]


def object_lease(digest: str) -> str:
    """Return the path of the lease under which an object is committed or removed."""
    return f"leases/object-{digest}.json"
