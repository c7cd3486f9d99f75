"""Hold leases on object storage: a holder renews its lease for as long as it works.

A lease is a record with a counter that its holder raises. A process that waits watches the counter, and measures its time
on its own monotonic clock: no clocks of two machines are ever compared. If the counter does not change for
``LEASE_SECONDS``, the holder is dead or cut off, and the waiter takes the lease over. A holder that was only slow
learns of this at its next heartbeat, and its commit is refused, because the new holder has counted a new attempt.
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
from vantage.storage.key_locks import Locked
from vantage.storage.records import Conflict, Version, read_record, replace_record

LEASE_SECONDS = 30.0
"""Seconds that a holder may be silent before another process takes the lease over."""
_BEATS_PER_LEASE = 6

_log = logging.getLogger(__name__)


class Lease(Frozen):
    """The record of a lease."""

    holder: str | None
    """Name of the holder; None: the lease was given back."""
    token: str
    """Random token of this lease; two leases of the same holder have different tokens."""
    beat: int = 0
    seconds: float = LEASE_SECONDS
    """Seconds that the holder may be silent. The holder writes this itself, so that machines need not agree."""


class RemoteLeases:
    """The leases of one storage, as this process sees them."""

    def __init__(self, remote: Remote, *, seconds: float | None = None) -> None:
        """Hold leases in a bucket. ``seconds``: how long a holder may be silent; None: ``LEASE_SECONDS``."""
        self._remote = remote
        self.seconds = LEASE_SECONDS if seconds is None else seconds
        self._watched: dict[str, tuple[Version | None, float]] = {}
        """Path → the version last seen, and the time since which it was seen, by this process's monotonic clock."""

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
            path: path of the lease's record.
            holder: name of this process, shown to those who wait.
            on_wait: called with the present holder when waiting begins, and when the holder changes.
            timeout: seconds to wait; None: no limit. Waiting continues where an earlier call ended.

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
        """Hold the lease at ``path`` unless a living process holds it, and renew it until it is closed; None: its holder lives.

        Waits for the holder's next heartbeat, or until it has been silent for the time of its lease.
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
        """Return whether a living process holds the lease; waits for the next heartbeat, or for the time of the lease."""
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
        """Return the living holder of the lease; waits like ``is_held`` if the record names a holder."""
        present, _ = self._read(path)
        if present is None or present.holder is None or not self.is_held(path):
            return None
        return present.holder

    def _acquire(
        self, path: str, lease: Lease, *, on_wait: Callable[[str], None] | None, timeout: float | None
    ) -> Version:
        deadline = None if timeout is None else time.monotonic() + timeout
        reported = None
        while True:
            present, version = self._read(path)
            if present is None or present.holder is None or self._is_silent(path, present, version):
                with suppress(Conflict):
                    taken = replace_record(self._remote, path, _encoded(lease), version)
                    self._watched.pop(path, None)
                    return taken
                continue
            if on_wait is not None and present.holder != reported:
                reported = present.holder
                on_wait(reported)
            if deadline is not None and time.monotonic() >= deadline:
                raise Locked(
                    f"{path} has been held by {present.holder} for more than {timeout:g} s; wait for it, or stop it"
                )
            time.sleep(min(0.5, self.seconds / 10))

    def _read(self, path: str) -> tuple[Lease | None, Version | None]:
        """Return the lease; None if there is none or it cannot be read; then nobody holds it."""
        data, version = read_record(self._remote, path)
        if data is None:
            return None, None
        try:
            return Lease.model_validate_json(data), version
        except ValidationError:
            _log.warning("%s cannot be read as a lease; it is taken over", path)
            return None, version

    def _is_silent(self, path: str, lease: Lease, version: Version | None) -> bool:
        """Return whether this process has seen no new heartbeat for the duration of the lease."""
        seen, since = self._watched.get(path, (None, 0.0))
        if seen != version:
            self._watched[path] = (version, time.monotonic())
            return False
        return time.monotonic() - since >= lease.seconds


class HeldLease:
    """A lease that this process holds; a thread renews it until ``close`` gives it back."""

    def __init__(self, remote: Remote, path: str, lease: Lease, version: Version, *, seconds: float) -> None:
        self._remote = remote
        self._path = path
        self._lease = lease
        self._version: Version | None = version
        """Version of the lease's record as written last; None: the lease is lost."""
        self._seconds = seconds
        self._writing = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the lease back; if the storage does not answer, the lease expires."""
        self._stopped.set()
        self._thread.join()
        self._write(self._lease.model_copy(update={"holder": None}))

    def is_still_ours(self) -> bool:
        """Return whether the lease is still ours; a heartbeat must succeed first."""
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
            except (BaseError, OSError) as error:  # a network failure: the next heartbeat tries again
                _log.warning("%s: the lease could not be renewed: %s", self._path, error)

    def _version_if_ours(self) -> Version | None:
        """Return the version if the record has our token: the answer to a write that took effect may have been lost."""
        data, version = read_record(self._remote, self._path)
        if data is None:
            _log.warning("%s was removed by another; this attempt will not be committed", self._path)
            return None
        try:
            if Lease.model_validate_json(data).token == self._lease.token:
                return version
        except ValidationError:  # a waiting process takes such a lease over
            _log.warning("%s cannot be read as a lease; this attempt will not be committed", self._path)
            return None
        _log.warning("%s was taken over by another; this attempt will not be committed", self._path)
        return None


def _encoded(lease: Lease) -> bytes:
    return lease.model_dump_json().encode()
