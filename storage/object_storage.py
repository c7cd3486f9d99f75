"""Storage in a bucket (S3, Google Cloud Storage, Azure), for attempts on several machines.

    objects/<digest>/…          an artifact's files; ``manifest.json`` is written last, so an object with one is
    complete
    keys/<stage key>.json       number of the newest attempt, and the ref: one record, replaced by conditional writes alone
    leases/<stage key>.json     who works on the stage key (``vantage.storage.leases``)
    scratch/<stage key>/…       checkpoints and journal of an attempt that has not ended (``vantage.storage.scratch_copy``)
    removed/<digest>/…          record of an artifact that was removed (``vantage.storage.removed``)
    quarantine/…                damaged records and manifests, kept for inspection

Each machine has a cache: a folder with the objects that it has fetched and verified, and its own scratch and staging
folders. No computation reads the bucket itself.

The attempt's number and the ref are one record. So a writer that was suspended, and goes on after its successor began,
finds another version of the record and cannot commit.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from obstore.store import ObjectStore as Remote

from vantage.schemas.records.artifacts import Artifact
from vantage.storage.bucket_garbage import BucketGarbage, object_lease
from vantage.storage.digests import checked_digest
from vantage.storage.durable_files import make_folder, remove_folder, replace_file_unsynced
from vantage.storage.key_records import KeyRecords, key_path
from vantage.storage.leases import RemoteLeases
from vantage.storage.measured_file import METRICS_FILE, Sealed, contradictions, read_sealed
from vantage.storage.object_cache import ObjectCache
from vantage.storage.records import Conflict, read_record
from vantage.storage.refs import DamagedObject, DamagedRef, Lookup, Ref, check_ref, seal_as
from vantage.storage.remote_objects import RemoteObjects
from vantage.storage.removed import Cause
from vantage.storage.scratch_copy import ScratchCopy
from vantage.storage.sealed_folders import MANIFEST, read_manifest, read_sealed_file
from vantage.storage.store import Fenced

_log = logging.getLogger(__name__)


class ObjectStorage:
    """A ``Storage`` in a bucket, with a cache on this machine."""

    def __init__(
        self,
        remote: Remote,
        cache: Path,
        *,
        objects: ObjectCache | None = None,
        address: str = "",
        lease_seconds: float | None = None,
    ) -> None:
        """Hold a storage in a bucket. ``remote`` begins at ``address``.

        Args:
            cache: scratch and staging folders of this machine; processes may share it.
            objects: copies of objects, on the same disk; None: below ``cache``, without a bound.
            address: address for ``vantage.storage.storage.open_storage``, on any machine that reaches the bucket.
            lease_seconds: seconds that the holder of a stage key may be silent; None:
                ``vantage.storage.leases.LEASE_SECONDS``.
        """
        self.address = address
        self.remote = remote
        self._remote = remote
        self._objects = RemoteObjects(remote)
        self._keys = KeyRecords(remote)
        self._leases = RemoteLeases(remote, seconds=lease_seconds)
        self._cache = cache.absolute()
        self._copies = objects or ObjectCache(self._cache, max_bytes=2**63)
        for name in ("staging", "scratch"):
            make_folder(self._cache / name)

    # Objects

    def local_folder(self, digest: str) -> Path | None:
        """Return the object's folder in this machine's cache, if it is there; nothing is fetched or checked."""
        return self._copies.find(checked_digest(digest))

    def has_object(self, digest: str) -> bool:
        """Return whether there is a complete object of this digest; its files are not checked."""
        return MANIFEST in self._objects.sizes(checked_digest(digest))

    def sealed(self, digest: str) -> Sealed:
        """Return metrics of an object, from its own files; only small files are fetched.

        Raises:
            ValueError, OSError: it is missing, or does not match the digest.
        """
        with TemporaryDirectory(dir=self._cache / "staging") as folder:
            self._objects.fetch_files(checked_digest(digest), (MANIFEST, METRICS_FILE), Path(folder))
            return read_sealed(Path(folder), digest=digest)

    def read_file(self, digest: str, path: str) -> bytes | None:
        """Return a small file of an object, checked against the manifest; only these two files are fetched. None: there
        is none.

        Raises:
            ValueError, OSError: it is missing, or does not match the digest.
        """
        with TemporaryDirectory(dir=self._cache / "staging") as folder:
            self._objects.fetch_files(checked_digest(digest), (MANIFEST,), Path(folder))
            if path not in read_manifest(Path(folder), digest=digest):
                return None
            self._objects.fetch_files(digest, (path,), Path(folder))
            return read_sealed_file(Path(folder), path, digest=digest)

    def verify(self, artifact: Artifact) -> list[str]:
        """Return problems of the artifact's files in the bucket, all of which are fetched; empty: intact."""
        with TemporaryDirectory(dir=self._cache / "staging") as folder:
            return self._objects.fetch(checked_digest(artifact.digest), Path(folder) / "object")

    def check_sizes(self, artifact: Artifact) -> list[str]:
        """Return problems of the artifact's files in the bucket that names and sizes show."""
        with TemporaryDirectory(dir=self._cache / "staging") as folder:
            try:
                self._objects.fetch_files(artifact.digest, (MANIFEST,), Path(folder))
                records = read_manifest(Path(folder), digest=artifact.digest)
            except ValueError as error:
                return [str(error)]
        there = self._objects.sizes(artifact.digest)
        sizes = {path: record["size"] for path, record in records.items()}
        return [
            f"{path} has {there.get(path, 'no')} bytes in place of {size}"
            for path, size in sizes.items()
            if there.get(path) != size
        ]

    def folder(self, artifact: Artifact) -> Path:
        """Return a local folder with the artifact's files, fetched and verified; it stays as long as this instance
        exists.

        Raises:
            DamagedObject: the object is missing or damaged; it counts as missing from then on, so its stage runs again.
        """
        try:
            return self._copies.keep(*self._copy_of(artifact.digest))
        except DamagedObject:
            self._objects.quarantine_manifest(artifact.digest)
            raise

    # Refs

    def find(self, stage_key: str) -> Ref | None:
        """Return the ref of a stage key, or None; the artifact's files are not checked.

        Raises:
            DamagedRef: the record cannot be read, or belongs to another stage key.
        """
        ref = self._keys.read_for_use(stage_key).ref
        return None if ref is None else check_ref(ref, stage_key=stage_key, where=key_path(stage_key))

    def inspect(self, stage_key: str) -> Lookup:
        """Return the state of a stage key without fetching its artifact; nothing is changed."""
        try:
            ref = self.find(stage_key)
        except DamagedRef as error:
            return Lookup(None, (str(error),))
        if ref is None:
            return Lookup(None)
        damage = tuple(f"{ref.artifact.uri}: {problem}" for problem in self.check_sizes(ref.artifact))
        return Lookup(None if damage else ref, damage)

    def lookup(self, stage_key: str) -> Lookup:
        """Find, fetch and verify; a damaged artifact is moved to ``quarantine/``, so that the stage can run again.

        If only the bucket's files were damaged, they are replaced by this machine's intact copy.
        """
        try:
            ref = self.find(stage_key)
        except DamagedRef as error:
            self._keys.quarantine_ref(stage_key)
            return Lookup(None, (str(error),))
        if ref is None:
            return Lookup(None)
        try:
            with self._copies.using(*self._copy_of(ref.artifact.digest)) as folder:
                differing = contradictions(ref.artifact, read_sealed(folder, digest=ref.artifact.digest))
                if not differing and not self.has_object(ref.artifact.digest):
                    self._mend(folder, ref)
        except ValueError as error:
            self._objects.quarantine_manifest(ref.artifact.digest)
            return Lookup(None, (str(error),))
        if differing:
            self._keys.quarantine_ref(stage_key)
            return Lookup(None, tuple(f"{key_path(stage_key)}: {each}" for each in differing))
        return Lookup(ref)

    def commit(
        self,
        folder: Path,
        *,
        stage_key: str,
        attempt: int,
        run_id: str,
        description: Mapping[str, Any],
        key_parts: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> Artifact:
        """Make the files of ``staging_folder`` an artifact, and point the stage key to it.

        Seal → upload the files, then the manifest → replace the key's record, if no newer attempt has started. It can
        be repeated after a crash at any point.

        Raises:
            Fenced: a newer attempt has started, or this one has already committed other content.
            ValueError: folder, key or description is invalid (``UnsafePath``: a file is).
        """
        if folder.absolute() != self._staging_path(stage_key, attempt):
            raise ValueError(
                f"folder={folder} is not this attempt's; use staging_folder({stage_key[:12]}…, {attempt})"
            )
        self._require_newest(stage_key, attempt)
        ref = seal_as(
            folder,
            stage_key=stage_key,
            attempt=attempt,
            run_id=run_id,
            description=description,
            key_parts=key_parts,
            provenance=provenance,
        )
        self._commit_object(folder, ref)
        self._copies.adopt(folder, ref.artifact.digest)
        return ref.artifact

    # Leases

    def exclusive(
        self,
        stage_key: str,
        *,
        holder: str,
        on_wait: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> AbstractContextManager[object]:
        """Hold exclusive access to the key, among all machines; see ``RemoteLeases.hold``."""
        path = f"leases/{checked_digest(stage_key)}.json"
        return self._leases.hold(path, holder=holder, on_wait=on_wait, timeout=timeout)

    def holder_of(self, stage_key: str) -> str | None:
        """Return the holder of the key's lease, after its next heartbeat."""
        return self._leases.living_holder(f"leases/{checked_digest(stage_key)}.json")

    def next_attempt(self, stage_key: str) -> int:
        """Count a new attempt, from 1, and exclude every earlier one for good."""
        while True:
            try:
                record, version = self._keys.read(stage_key)
            except DamagedRef:
                self._keys.quarantine_ref(stage_key)
                continue
            number = record.newest_attempt + 1
            try:
                self._keys.write(
                    stage_key,
                    record.model_copy(update={"newest_attempt": number, "unneeded": False}),
                    version,
                )
            except Conflict:
                continue
            return number

    # Scratch

    def staging_folder(self, stage_key: str, attempt: int) -> Path:
        """Return an empty local folder for the attempt's files.

        Raises:
            Fenced: a newer attempt has begun.
        """
        self._require_newest(stage_key, attempt)
        for left in (self._cache / "staging").glob(f"{stage_key}.*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = self._staging_path(stage_key, attempt)
        make_folder(folder)
        return folder

    def scratch_folder(self, stage_key: str) -> Path:
        """Return the local scratch folder, or another machine's copy there if it is further; the caller holds the
        key."""
        folder, copy = self._scratch(stage_key), self._copy(stage_key)
        if not folder.is_dir():
            copy.fetch()
        elif copy.is_ahead():
            shutil.rmtree(folder)
            copy.fetch()
        make_folder(folder)
        return folder

    def has_scratch(self, stage_key: str) -> bool:
        """Return whether an attempt has left files on this machine, or in the bucket."""
        return self._scratch(stage_key).is_dir() or self._copy(stage_key).exists()

    def keep_copy(self, stage_key: str, names: Sequence[str]) -> AbstractContextManager[None]:
        """Keep a copy of these files of the scratch folder in the bucket, while the block runs."""
        return self._copy(stage_key).kept_up(names)

    def reports(self, stage_key: str, names: Collection[str]) -> Path:
        """Return a local folder with the newest of these files of the scratch folder, from the bucket."""
        folder = self._cache / "reports" / checked_digest(stage_key)
        make_folder(folder)
        for name in names:
            data, _ = read_record(self._remote, f"scratch/{stage_key}/{name}")
            if data is not None:
                replace_file_unsynced(folder / name, data)
        return folder

    def discard_scratch(self, stage_key: str) -> None:
        """Remove the scratch folder of a stage key here and in the bucket."""
        self.discard_local_scratch(stage_key)
        self._copy(stage_key).remove()

    def discard_local_scratch(self, stage_key: str) -> None:
        """Remove the scratch folder of a stage key here; the copy in the bucket stays."""
        remove_folder(self._scratch(stage_key))

    def garbage(self, cause: Cause) -> BucketGarbage:
        """Return the removable content; ``cause`` is written into the records of removed artifacts."""
        return BucketGarbage(self._remote, self._keys, self._leases, self._cache, cause)

    # Implementation

    def _copy_of(self, digest: str) -> tuple[str, Callable[[Path], list[str]], Callable[[], int]]:
        """Return the arguments of a copy: digest, function that fetches it, and size."""
        checked_digest(digest)
        return (
            digest,
            lambda folder: self._objects.fetch(digest, folder),
            lambda: sum(self._objects.sizes(digest).values()),
        )

    def _staging_path(self, stage_key: str, attempt: int) -> Path:
        return self._cache / "staging" / f"{checked_digest(stage_key)}.{attempt}"

    def _scratch(self, stage_key: str) -> Path:
        return self._cache / "scratch" / checked_digest(stage_key)

    def _copy(self, stage_key: str) -> ScratchCopy:
        return ScratchCopy(self._remote, f"scratch/{checked_digest(stage_key)}", self._scratch(stage_key))

    def _commit_object(self, folder: Path, ref: Ref) -> None:
        """Upload the object and point the ref to it, while nobody removes an equal one."""
        lease = object_lease(ref.artifact.digest)
        while True:
            with self._leases.hold(lease, holder=f"run {ref.run_id}") as held:
                self._objects.upload(folder, ref.artifact.digest)
                self._swap_ref(ref)
                if held.is_still_ours():
                    return

    def _mend(self, folder: Path, ref: Ref) -> None:
        """Upload files that other machines found damaged, from an intact copy; nobody removes the object meanwhile."""
        lease = object_lease(ref.artifact.digest)
        with self._leases.hold(lease, holder=f"run {ref.run_id}"):
            self._objects.upload(folder, ref.artifact.digest)
        _log.warning("%s was damaged in the bucket and is mended from this machine's copy", ref.artifact.uri)

    def _swap_ref(self, ref: Ref) -> None:
        """Point the stage key to the object, unless a newer attempt has started (compare-and-swap)."""
        stage_key = ref.artifact.stage_key
        while True:
            self._require_newest(stage_key, ref.attempt)
            record, version = self._keys.read(stage_key)
            if record.ref is not None and record.ref.attempt >= ref.attempt:
                if record.ref.artifact.digest != ref.artifact.digest:
                    raise Fenced(
                        f"attempt {ref.attempt} of stage key {stage_key[:12]} has already committed "
                        f"{record.ref.artifact.digest[:12]}; {ref.artifact.digest[:12]} is not committed"
                    )
                return
            if record.newest_attempt != ref.attempt:
                continue
            try:
                self._keys.write(
                    stage_key, record.model_copy(update={"ref": ref, "unneeded": False}), version
                )
            except Conflict:
                continue
            return

    def _require_newest(self, stage_key: str, attempt: int) -> None:
        record, _ = self._keys.read(stage_key)
        if attempt > record.newest_attempt or attempt < 1:
            raise ValueError(
                f"attempt={attempt} of stage key {stage_key[:12]} was never begun; use next_attempt"
            )
        if attempt < record.newest_attempt:
            raise Fenced(
                f"attempt {attempt} of stage key {stage_key[:12]} was superseded by attempt "
                f"{record.newest_attempt}; its result is not committed"
            )
