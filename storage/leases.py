"""Leases on object storage: who works on something, as long as they say so.

A lease is a record with a counter that its holder raises. Whoever waits watches the counter and times it on their own
monotonic clock: no clocks of two machines are ever compared. A counter that stands still for ``LEASE_SECONDS`` belongs to
a holder that is dead, or cut off; the waiter takes the lease over. A holder that was only slow finds out at its next beat,
and its commit is refused, because the new holder has counted a new attempt.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from obstore.exceptions import BaseError
from obstore.store import ObjectStore as Remote
from pydantic import ValidationError

from vantage.schemas.frozen import Frozen
from vantage.storage.records import Conflict, Version, read_record, replace_record
from vantage.storage.store import Locked

LEASE_SECONDS = 30.0
"""How long a holder may be silent before another takes the lease over."""
_BEATS_PER_LEASE = 6

_log = logging.getLogger(__name__)


class Lease(Frozen):
    """The record of a lease."""

    holder: str | None
    """None: given back."""
    token: str
    """Of one holding; two by the same holder have different ones."""
    beat: int = 0
    seconds: float = LEASE_SECONDS
    """How long the holder may be silent; its own word, so that machines need not agree."""


class RemoteLeases:
    """The leases of one storage, as this process sees them."""

    def __init__(self, remote: Remote, *, seconds: float | None = None) -> None:
        """Hold leases in a bucket. ``seconds``: how long a holder may be silent; None: ``LEASE_SECONDS``."""
        self._remote = remote
        self.seconds = LEASE_SECONDS if seconds is None else seconds
        self._watched: dict[str, tuple[Version | None, float]] = {}
        """Path → the version last seen and since when, by this process's monotonic clock."""

    @contextmanager
    def hold(
        self,
        path: str,
        *,
        holder: str,
        on_wait: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> Iterator["HeldLease"]:
        """Hold the lease at ``path`` and keep it alive.

        Args:
            path: of the lease's record.
            holder: who this is; told to those who wait.
            on_wait: called with the present holder when it is first waited for, and when it changes.
            timeout: seconds to wait; None: for ever. Waiting goes on where an earlier call left off.

        Raises:
            Locked: the timeout has passed.
        """
        lease = Lease(holder=holder, token=secrets.token_hex(8), seconds=self.seconds)
        version = self._acquire(path, lease, on_wait=on_wait, timeout=timeout)
        held = HeldLease(self._remote, path, lease, version, seconds=self.seconds / _BEATS_PER_LEASE)
        try:
            yield held
        finally:
            held.close()

    def try_hold(self, path: str, *, holder: str) -> "HeldLease | None":
        """Hold the lease at ``path`` if nobody does, and keep it alive until it is closed; None: its holder lives.

        Waits until the holder has beaten, or has been silent for as long as a lease lasts.
        """
        lease = Lease(holder=holder, token=secrets.token_hex(8), seconds=self.seconds)
        while not self.is_held(path):
            _, version = self._read(path)
            with suppress(Conflict):
                taken = replace_record(self._remote, path, _encoded(lease), version)
                self._watched.pop(path, None)
                return HeldLease(self._remote, path, lease, taken, seconds=self.seconds / _BEATS_PER_LEASE)
        return None

    def is_held(self, path: str) -> bool:
        """Return whether somebody holds the lease and lives; waits for the next beat, or for a lease's silence."""
        first: Version | None = None
        while True:
            present, version = self._read(path)
            if present is None or present.holder is None or self._is_silent(path, present, version):
                return False
            if first is not None and version != first:
                return True
            first = version
            time.sleep(min(0.5, self.seconds / 10))

    def living_holder(self, path: str) -> str | None:
        """Return who holds the lease and lives; waits as ``is_held`` does where somebody is named."""
        present, _ = self._read(path)
        if present is None or present.holder is None or not self.is_held(path):
            return None
        return present.holder

    def _acquire(
        self, path: str, lease: Lease, *, on_wait: Callable[[str], None] | None, timeout: float | None
    ) -> Version:
        deadline = None if timeout is None else time.monotonic() + timeout
        told = None
        while True:
            present, version = self._read(path)
            if present is None or present.holder is None or self._is_silent(path, present, version):
                with suppress(Conflict):
                    taken = replace_record(self._remote, path, _encoded(lease), version)
                    self._watched.pop(path, None)
                    return taken
                continue
            if on_wait is not None and present.holder != told:
                told = present.holder
                on_wait(told)
            if deadline is not None and time.monotonic() >= deadline:
                raise Locked(
                    f"{path} has been held by {present.holder} for more than {timeout:g} s; wait for it, or stop it"
                )
            time.sleep(min(0.5, self.seconds / 10))

    def _read(self, path: str) -> tuple[Lease | None, Version | None]:
        """Return the lease; None where there is none or where it cannot be read, which is nobody's."""
        data, version = read_record(self._remote, path)
        if data is None:
            return None, None
        try:
            return Lease.model_validate_json(data), version
        except ValidationError:
            _log.warning("%s cannot be read as a lease; it is taken over", path)
            return None, version

    def _is_silent(self, path: str, lease: Lease, version: Version | None) -> bool:
        """Return whether this process has seen the same beat for as long as the lease lasts."""
        seen, since = self._watched.get(path, (None, 0.0))
        if seen != version:
            self._watched[path] = (version, time.monotonic())
            return False
        return time.monotonic() - since >= lease.seconds


class HeldLease:
    """A lease that this process holds: a thread keeps it alive until it is closed, which gives it back."""

    def __init__(self, remote: Remote, path: str, lease: Lease, version: Version, *, seconds: float) -> None:
        self._remote = remote
        self._path = path
        self._lease = lease
        self._version: Version | None = version
        """None: the lease is lost."""
        self._seconds = seconds
        self._writing = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the lease back; a storage that does not answer leaves it to its silence."""
        self._stopped.set()
        self._thread.join()
        self._write(self._lease.model_copy(update={"holder": None}))

    def is_still_ours(self) -> bool:
        """Return whether nobody has taken the lease over: a beat that has just succeeded."""
        before = self._lease.beat
        self._write(self._lease.model_copy(update={"beat": before + 1}))
        return self._version is not None and self._lease.beat > before

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds) and self._version is not None:
            self._write(self._lease.model_copy(update={"beat": self._lease.beat + 1}))

    def _write(self, lease: Lease) -> None:
        with self._writing:
            if self._version is None:
                return
            try:
                try:
                    self._version = replace_record(self._remote, self._path, _encoded(lease), self._version)
                    self._lease = lease
                except Conflict:
                    self._version = self._version_if_ours()
            except (BaseError, OSError) as error:  # the network: tried again with the next beat
                _log.warning("%s: the lease could not be renewed: %s", self._path, error)

    def _version_if_ours(self) -> Version | None:
        """Return an answer may be lost after a write that took effect: the record then has our own token."""
        data, version = read_record(self._remote, self._path)
        if data is not None and Lease.model_validate_json(data).token == self._lease.token:
            return version
        _log.warning("%s was taken over by another; this attempt will not be committed", self._path)
        return None


def _encoded(lease: Lease) -> bytes:
    return lease.model_dump_json().encode()
