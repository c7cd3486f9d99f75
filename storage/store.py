"""The artifact store: immutable objects named by their content, found by stage key.

    objects/<digest>/          an artifact's files and ``manifest.json``, whose sha256 is the digest
    refs/<stage key>.json      the object of a stage key, with its inputs and provenance
    staging/<key>.<attempt>/   files of an attempt before they are committed
    scratch/<stage key>/       shared by attempts: in-stage checkpoints, metric journal, progress
    locks/                     locks of stage keys; the number of the newest attempt
    removed/<digest>/          record of an artifact that was removed (``vantage.storage.removed``)
    quarantine/                damaged objects and refs, kept for inspection

How a stage uses it::

    with store.exclusive(key, holder=run_id):
        found = store.lookup(key)
        if found.ref is None:
            attempt = store.next_attempt(key)
            folder = store.staging_folder(key, attempt)
            ...                                    # a child process fills the folder
            artifact = store.commit(folder, stage_key=key, attempt=attempt, ...)

A reader sees the old artifact or the new one, never a part of it, whenever a process is killed. Nothing here reads a
wall clock.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vantage.schemas.records.artifacts import Artifact
from vantage.storage.attempt_counter import increment_count, read_count
from vantage.storage.digests import checked_digest
from vantage.storage.durable_files import (
    expected,
    free_path,
    locked,
    make_folder,
    move_folder,
    remove_folder,
    replace_file,
    sync_folder,
)
from vantage.storage.key_locks import hold_lock, holder_of_lock
from vantage.storage.measured_file import Sealed, contradictions, read_sealed
from vantage.storage.refs import (
    DamagedRef,
    Lookup,
    Ref,
    check_ref,
    seal_as,
)
from vantage.storage.sealed_folders import find_problems, read_sealed_file
from vantage.storage.verified_folders import VerifiedFolders

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Remote

_log = logging.getLogger(__name__)


class Fenced(RuntimeError):
    """An attempt tried to write after a newer one had started."""


class Store:
    """The store in a folder of a local file system, or one with POSIX locks."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._objects, self._refs, self._staging, self._locks, self._quarantine, self._scratch = (
            self.root / name for name in ("objects", "refs", "staging", "locks", "quarantine", "scratch")
        )
        for folder in (
            self._objects,
            self._refs,
            self._staging,
            self._locks,
            self._quarantine,
            self._scratch,
        ):
            make_folder(folder)
        self._verified = VerifiedFolders()

    @property
    def address(self) -> str:
        """Return the address for ``vantage.storage.storage.open_storage``."""
        return str(self.root)

    @property
    def remote(self) -> "Remote":
        """The store's folder as object storage."""
        from obstore.store import LocalStore  # takes a moment to load, and most runs have no use for it

        return LocalStore(self.root)

    # Reading

    def local_folder(self, digest: str) -> Path | None:
        """Return the object's folder if there is one; its files are not checked."""
        return self._object_path(digest) if self.has_object(digest) else None

    def has_object(self, digest: str) -> bool:
        """Return whether there is an object of this digest; its files are not checked."""
        return self._object_path(digest).is_dir()

    def find(self, stage_key: str) -> Ref | None:
        """Return the ref of a stage key, or None; the artifact's files are not checked.

        Raises:
            DamagedRef: the ref cannot be read, or belongs to another stage key.
        """
        path = self._ref_path(stage_key)
        try:
            ref = Ref.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, IsADirectoryError) as error:
            raise DamagedRef(f"{path}: cannot be read as a ref") from error
        return check_ref(ref, stage_key=stage_key, where=str(path))

    def verify(self, artifact: Artifact) -> list[str]:
        """Return problems of the artifact's files (set of files, sizes, sha256, links); empty: intact.

        See ``VerifiedFolders``: a folder that was intact and has not changed is not read again.
        """
        return self._verified.problems(self._object_path(artifact.digest), digest=artifact.digest)

    def check_sizes(self, artifact: Artifact) -> list[str]:
        """Return problems of the artifact's files that can be seen from names and sizes; only the manifest is read."""
        return find_problems(self._object_path(artifact.digest), digest=artifact.digest, read=False)

    def inspect(self, stage_key: str) -> Lookup:
        """Return the result of ``lookup``, without changing anything."""
        try:
            ref = self.find(stage_key)
        except DamagedRef as error:
            return Lookup(None, (str(error),))
        if ref is None:
            return Lookup(None)
        damage = [f"{ref.artifact.uri}: {problem}" for problem in self.verify(ref.artifact)]
        damage = damage or [f"refs/{stage_key}.json: {said}" for said in self._contradictions(ref.artifact)]
        return Lookup(None if damage else ref, tuple(damage))

    def lookup(self, stage_key: str) -> Lookup:
        """Find and verify; damaged objects and refs move to ``quarantine/``, so that the stage can run again."""
        found = self.inspect(stage_key)
        if not found.damage:
            return found
        with locked(self.swap_lock(stage_key)):
            try:
                ref = self.find(stage_key)
            except DamagedRef:
                self._quarantine_ref(stage_key)
                return found
            if ref is not None and not self.verify(ref.artifact) and self._contradictions(ref.artifact):
                self._quarantine_ref(stage_key)
                return found
        if ref is not None and os.path.lexists(self._object_path(ref.artifact.digest)):
            with self.object_lock(ref.artifact.digest):
                problems = self.verify(ref.artifact)
                if problems:  # else another process has written an intact one
                    self._quarantine_object(ref.artifact.digest, problems)
        return found

    def sealed(self, digest: str) -> Sealed:
        """Return metrics of an object, read from its own files.

        Raises:
            ValueError, OSError: it is missing, or does not match the digest.
        """
        return read_sealed(self._object_path(digest), digest=digest)

    def read_file(self, digest: str, path: str) -> bytes | None:
        """Return a small file of an object; see ``Objects.read_file``."""
        return read_sealed_file(self._object_path(digest), path, digest=digest)

    def folder(self, artifact: Artifact) -> Path:
        """Return the folder with the artifact's files."""
        return self._object_path(artifact.digest)

    def stage_keys(self) -> list[str]:
        """Return every stage key that has a ref, sorted."""
        return sorted(path.stem for path in self._refs.glob("*.json"))

    # Working on a stage key

    @contextmanager
    def exclusive(
        self,
        stage_key: str,
        *,
        holder: str,
        on_wait: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> Iterator[None]:
        """Hold exclusive access to a stage key, among threads and processes.

        The kernel releases the lock when the process ends. A forked child shares the lock: start children with exec,
        or before.

        Args:
            stage_key: the key.
            holder: name of the caller (a run's id), shown to those who wait.
            on_wait: called with the current holder at the start of the wait, and whenever the holder changes.
            timeout: seconds to wait; None: no limit.

        Raises:
            Locked: the timeout has passed.
            FolderGone: the block would make a file although the store was moved away or removed.
        """
        path = self._lock_path(stage_key, "lock")
        what = f"stage key {stage_key[:12]}"
        with (
            hold_lock(path, what, holder=holder, on_wait=on_wait, timeout=timeout),
            expected(self.root),  # the root exists by now, since the lock's file lies in it
        ):
            yield

    def holder_of(self, stage_key: str) -> str | None:
        """Return the holder of the key's lock; nothing is written, and the lock is tried for a moment."""
        return holder_of_lock(self._lock_path(stage_key, "lock"))

    def next_attempt(self, stage_key: str) -> int:
        """Return the number of a new attempt, from 1; earlier attempts can no longer commit."""
        with locked(self.swap_lock(stage_key)):
            return increment_count(self._lock_path(stage_key, "attempt"), seen=self._attempt_seen(stage_key))

    def staging_folder(self, stage_key: str, attempt: int) -> Path:
        """Return an empty folder for the attempt's files; files of earlier attempts are removed.

        Raises:
            Fenced: a newer attempt has started.
        """
        self._require_newest(stage_key, attempt)
        for left, its_attempt in self._staged(stage_key):
            if its_attempt <= attempt:
                remove_folder(left)
        folder = self._staging_path(stage_key, attempt)
        make_folder(folder)
        return folder

    def scratch_folder(self, stage_key: str) -> Path:
        """Return the folder that all attempts at a stage key share (checkpoints, journal, progress)."""
        folder = self._scratch / checked_digest(stage_key)
        make_folder(folder)
        return folder

    def has_scratch(self, stage_key: str) -> bool:
        """Return whether the scratch folder of the key exists."""
        return (self._scratch / checked_digest(stage_key)).is_dir()

    def keep_copy(self, stage_key: str, names: Sequence[str]) -> AbstractContextManager[None]:
        """Do nothing: every process that reaches the store reaches its scratch folders."""
        return nullcontext()

    def reports(self, stage_key: str, names: Collection[str]) -> Path:
        """Return the scratch folder: every process that reaches the store reads it there."""
        return self._scratch / checked_digest(stage_key)

    def discard_scratch(self, stage_key: str) -> None:
        """Remove the scratch folder, after the artifact is committed and its journal is in the ledger."""
        remove_folder(self._scratch / checked_digest(stage_key))

    def discard_local_scratch(self, stage_key: str) -> None:
        """Keep everything: all machines read the journal in this one folder."""

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

        Add ``metrics.json`` → seal and sync the files → move the folder to ``objects/<digest>``, or use an equal
        existing object → replace the ref, under a lock, if no newer attempt has started. It can be repeated after a
        crash.

        Args:
            folder: returned by ``staging_folder``.
            stage_key: must be the sha256 of ``key_parts``.
            attempt: returned by ``next_attempt``.
            run_id: the run that produced the files.
            description: the artifact's fields except those that the store sets: ``kind``, ``parents``, ``metrics``,
                ``uncertainty`` and, by kind, ``content`` or ``tokenizer_digest``.
            key_parts: the value whose hash is the stage key.
            provenance: recorded in the ref; JSON.

        Raises:
            Fenced: a newer attempt has started, or this one has already committed other content.
            ValueError: folder, key or description is invalid (``UnsafePath``: a file is).
        """
        if folder.absolute() != self._staging_path(stage_key, attempt):
            raise ValueError(
                f"folder={folder} is not this attempt's; use staging_folder({stage_key[:12]}…, {attempt})"
            )
        self._require_newest(stage_key, attempt)
        try:
            ref = seal_as(
                folder,
                stage_key=stage_key,
                attempt=attempt,
                run_id=run_id,
                description=description,
                key_parts=key_parts,
                provenance=provenance,
            )
            self._require_newest(stage_key, attempt)
            with self.object_lock(ref.artifact.digest):  # it is not removed before the ref points to it
                self._place_object(folder, ref.artifact.digest)
                return self._swap_ref(ref).artifact
        except FileNotFoundError:
            self._require_newest(stage_key, attempt)  # a newer attempt removes the folders of older ones
            raise

    # Implementation

    def _place_object(self, folder: Path, digest: str) -> None:
        """Move a sealed folder to its object path, or remove it if an intact equal object exists; hold its lock."""
        target = self._object_path(digest)
        if os.path.lexists(target):
            problems = find_problems(target, digest=digest)
            if not problems:
                remove_folder(folder)
                sync_folder(self._objects)  # the process that moved it here may have died before this
                return
            self._quarantine_object(digest, problems)
        move_folder(folder, target)

    def _swap_ref(self, ref: Ref) -> Ref:
        """Replace the ref of the stage key, unless a newer attempt has started (compare-and-swap)."""
        stage_key = ref.artifact.stage_key
        with locked(self.swap_lock(stage_key)):
            self._require_newest(stage_key, ref.attempt)
            try:
                present = self.find(stage_key)
            except DamagedRef:
                present = None
            if present is not None and present.attempt >= ref.attempt:
                if present.artifact.digest != ref.artifact.digest:
                    raise Fenced(
                        f"attempt {ref.attempt} of stage key {stage_key[:12]} has already committed "
                        f"{present.artifact.digest[:12]}; {ref.artifact.digest[:12]} is not committed"
                    )
                sync_folder(self._refs)
                return present
            # Not sorted: the first metrics are the ones to show.
            content = json.dumps(ref.model_dump(mode="json"), separators=(",", ":"), allow_nan=False)
            replace_file(self._ref_path(stage_key), content.encode())
            return ref

    def _quarantine_object(self, digest: str, problems: list[str]) -> None:
        """Move a damaged object to quarantine; the caller holds its lock and has just verified it."""
        aside = free_path(self._quarantine, digest)
        os.rename(self._object_path(digest), aside)
        sync_folder(self._objects)
        _log.warning("object %s is damaged and not used (kept as %s): %s", digest, aside, "; ".join(problems))

    def _quarantine_ref(self, stage_key: str) -> None:
        """Move an invalid ref to quarantine; the caller holds its lock."""
        os.rename(self._ref_path(stage_key), free_path(self._quarantine, f"ref-{stage_key}"))

    def _contradictions(self, artifact: Artifact) -> list[str]:
        """Return differences between a ref and the artifact's own, intact files."""
        try:
            return contradictions(artifact, self.sealed(artifact.digest))
        except (ValueError, OSError) as error:
            return [str(error)]

    def _attempt_seen(self, stage_key: str) -> int:
        """Return the newest attempt in the ref or in staging; 0: none."""
        try:
            ref = self.find(stage_key)
        except DamagedRef:
            ref = None
        staged = (attempt for _, attempt in self._staged(stage_key))
        return max(0 if ref is None else ref.attempt, max(staged, default=0))

    def _staged(self, stage_key: str) -> list[tuple[Path, int]]:
        """Return the staging folders of the stage key's attempts, each with the attempt's number."""
        named = ((path, path.name.split(".")[1]) for path in self._staging.glob(f"{stage_key}.*"))
        return [(path, int(number)) for path, number in named if re.fullmatch(r"[0-9]{1,18}", number)]

    def _require_newest(self, stage_key: str, attempt: int) -> None:
        newest = read_count(self._lock_path(stage_key, "attempt"))
        if (
            newest is None
        ):  # unreadable; a newer attempt would have a folder, and the next attempt rewrites the file
            newest = max(attempt, self._attempt_seen(stage_key))
        if attempt > newest or attempt < 1:
            raise ValueError(
                f"attempt={attempt} of stage key {stage_key[:12]} was never begun; use next_attempt"
            )
        if attempt < newest:
            raise Fenced(
                f"attempt {attempt} of stage key {stage_key[:12]} was superseded by attempt {newest}; "
                "its result is not committed"
            )

    def _object_path(self, digest: str) -> Path:
        return self._objects / checked_digest(digest)

    def _ref_path(self, stage_key: str) -> Path:
        return self._refs / f"{checked_digest(stage_key)}.json"

    def _staging_path(self, stage_key: str, attempt: int) -> Path:
        return self._staging / f"{checked_digest(stage_key)}.{attempt}"

    def _lock_path(self, stage_key: str, suffix: str) -> Path:
        return self._locks / f"{checked_digest(stage_key)}.{suffix}"

    def swap_lock(self, stage_key: str) -> Path:
        """Return the lock under which a ref changes."""
        return self._lock_path(stage_key, "swap")

    def object_lock(self, digest: str) -> AbstractContextManager[None]:
        """Hold the lock of an object: inside the block no other process commits, sets aside or removes an equal
        object."""
        return locked(self._locks / f"object-{checked_digest(digest)}")
