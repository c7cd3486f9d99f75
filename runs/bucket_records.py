"""Store the records of a workspace's runs in a bucket, so that any machine can execute, resume and show them.

runs/<id>/run.json          the record, replaced by conditional writes alone
runs/<id>/machine           the machine that last executed the run
runs/<id>/approvals/…       the answers of people, each written once
runs/<id>/files/…           copy of the run's folder on that machine: the ledger's outbox, logs
runs/leases/<id>.json       who executes the run (``vantage.storage.leases``); ``creation.json``: who finds or creates one
"""

import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import ObjectStore as Remote

from vantage.runs.record import RunRecord
from vantage.runs.run_records import APPROVALS, OUTBOX, REMOVABLE, parse_record
from vantage.runs.workspace import RUN_ID, RunError
from vantage.storage.durable_files import locked, make_folder, replace_file
from vantage.storage.leases import RemoteLeases
from vantage.storage.records import BucketNotFound, Conflict, Version, read_record, replace_record
from vantage.storage.scratch_copy import ScratchCopy

if TYPE_CHECKING:
    from vantage.runs.workspace import Workspace

_CANCEL = "cancel"
_CLOCK = "leases/clock"
"""Path of a file that is written to read the time of the bucket's own clock."""
SILENT_LEASES = 2.0
"""A process is shown as dead if it has not renewed its lease for this many times the lease's length."""


class BucketLock:
    """The lock of a run: its lease, and the thread that keeps the copy of its folder."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held

    def close(self) -> None:
        """Send what has changed, and give the lease back."""
        self._held.close()


class BucketRecords:
    """``RunRecords`` in a bucket."""

    def __init__(self, remote: Remote, workspace: "Workspace", leases: RemoteLeases | None = None) -> None:
        """Open the records in a bucket; ``remote`` begins at the workspace's ``runs/``."""
        self._remote = remote
        self._workspace = workspace
        self._leases = leases or RemoteLeases(remote)
        self._versions: dict[str, Version | None] = {}

    def ids(self) -> list[str]:
        """Return the runs' prefixes."""
        prefixes = obstore.list_with_delimiter(self._remote)["common_prefixes"]
        names = [str(prefix).rstrip("/").rpartition("/")[2] for prefix in prefixes]
        return [name for name in names if RUN_ID.fullmatch(name)]

    def read(self, run_id: str) -> RunRecord:
        """Return the run's ``run.json``. Raises RunError if it does not exist or cannot be read."""
        self._workspace.folder(run_id)  # this refuses a text that is no run id
        data, _ = read_record(self._remote, f"{run_id}/run.json")
        if data is None:
            raise RunError(
                f"there is no run {run_id} in {self._workspace.address}; `vantage status` lists the runs"
            )
        return parse_record(data, run_id=run_id, where=f"{self._workspace.address}/runs/{run_id}/run.json")

    def write(self, record: RunRecord) -> None:
        """Replace ``run.json`` as this process wrote it last, or found it when it took the lock.

        Raises:
            RunError: another process has taken the run over.
        """
        path, data = f"{record.run_id}/run.json", _encoded(record)
        try:
            version = replace_record(self._remote, path, data, self._versions.get(record.run_id))
        except Conflict:
            present, version_there = read_record(self._remote, path)
            if present != data or version_there is None:  # equal data is our own write, whose answer was lost
                raise RunError(
                    f"run {record.run_id} was taken over by another process; `vantage status` shows how far it is"
                ) from None
            version = version_there
        self._versions[record.run_id] = version

    def create(self, record: RunRecord) -> None:
        """Add the run; its first record is its beginning, so nothing half-made is ever read."""
        self._versions[record.run_id] = None
        self.write(record)

    def lock(self, run_id: str) -> BucketLock | None:
        """Return the run's lease; None: another process holds it. Waits for a holder's next heartbeat, or until its
        lease has run out."""
        lease = self._leases.try_hold(f"leases/{run_id}.json", holder=_holder())
        if lease is None:
            return None
        with ExitStack() as held:
            held.callback(lease.close)
            with suppress(NotFoundError, FileNotFoundError):
                obstore.delete(self._remote, f"{run_id}/{_CANCEL}")
            _, self._versions[run_id] = read_record(self._remote, f"{run_id}/run.json")
            folder = self._workspace.folder(run_id)
            copy = ScratchCopy(self._remote, f"{run_id}/files", folder)
            self._take_over(run_id, folder, copy)
            held.enter_context(copy.kept_up(REMOVABLE))
            return BucketLock(held.pop_all())
        return None

    def is_active(self, run_id: str) -> bool:
        """Return whether a process executes the run; waits for its next heartbeat, unless the last one is long ago.

        The answer uses the bucket's clock alone, which is enough for display; ``lock`` itself times the lease's
        silence.
        """
        lease = f"leases/{run_id}.json"
        with suppress(BaseError, OSError):  # the bucket is read-only, or there is no lease
            now = self._now()
            if (now - self._written(lease)).total_seconds() > SILENT_LEASES * self._leases.seconds:
                return False
        return self._leases.is_held(lease)

    def ages(self) -> Mapping[str, float]:
        """Return the ages by the clock of the bucket."""
        now = self._now()
        return {run_id: (now - self._written(f"{run_id}/run.json")).total_seconds() for run_id in self.ids()}

    def _now(self) -> datetime:
        """Read the bucket's own clock."""
        obstore.put(self._remote, _CLOCK, b"")
        return self._written(_CLOCK)

    def _written(self, path: str) -> datetime:
        """Return the time when an object was written, by the bucket's own clock."""
        return obstore.head(self._remote, path)["last_modified"]

    def remove_files(self, run_id: str) -> None:
        """Remove the logs and the ledger's outbox of a run, here and in the bucket."""
        for name in REMOVABLE:
            shutil.rmtree(self._workspace.folder(run_id) / name, ignore_errors=True)
            ScratchCopy(self._remote, f"{run_id}/files/{name}", self._workspace.folder(run_id)).remove()

    def request_cancel(self, run_id: str) -> None:
        """Make a file beside the run's record."""
        obstore.put(self._remote, f"{run_id}/{_CANCEL}", b"")

    def is_cancel_requested(self, run_id: str) -> bool:
        """Return whether the file of ``request_cancel`` is there."""
        return read_record(self._remote, f"{run_id}/{_CANCEL}")[0] is not None

    def add_answer(self, run_id: str, question_id: str, data: bytes) -> bool:
        """Create the object ``approvals/<question>.json`` beside the run's record."""
        path = f"{run_id}/{APPROVALS}/{question_id}.json"
        try:
            replace_record(self._remote, path, data, None)
        except Conflict:
            return read_record(self._remote, path)[0] == data  # our own write, whose answer was lost
        return True

    def read_answer(self, run_id: str, question_id: str) -> bytes | None:
        """Read the object of the answer."""
        return read_record(self._remote, f"{run_id}/{APPROVALS}/{question_id}.json")[0]

    def read_log(self, run_id: str, step: str) -> bytes | None:
        """Return the copy of the step's log."""
        return read_record(self._remote, f"{run_id}/files/logs/{step}.log")[0]

    def read_outbox(self, run_id: str) -> bytes | None:
        """Return the copy of the outbox."""
        return read_record(self._remote, f"{run_id}/files/{OUTBOX}")[0]

    def read_ledger_file(self, run_id: str, name: str) -> bytes | None:
        """Return the copy of a file beside the outbox."""
        return read_record(self._remote, f"{run_id}/files/ledger/{name}")[0]

    @contextmanager
    def creation_lock(self) -> Iterator[None]:
        """Hold a lease of the workspace."""
        with ExitStack() as held:
            try:
                held.enter_context(self._leases.hold("leases/creation.json", holder=_holder()))
            except BucketNotFound as error:
                raise RunError(
                    f"workspace {self._workspace.address}: {error}; create the bucket first"
                ) from error
            yield

    def _take_over(self, run_id: str, folder: Path, copy: ScratchCopy) -> None:
        """Get the run's folder: this machine's own folder if it executed the run last, else a copy."""
        last, version = read_record(self._remote, f"{run_id}/machine")
        this = self._machine()
        if last != this:
            shutil.rmtree(folder, ignore_errors=True)
            make_folder(folder.parent)
            copy.fetch()
            replace_record(self._remote, f"{run_id}/machine", this, version)
        make_folder(folder)

    def _machine(self) -> bytes:
        """Return the random name of this machine's folder for the workspace."""
        root = self._workspace.root
        make_folder(root)
        with locked(root / ".machine.lock"):
            path = root / "machine"
            if not path.is_file():
                replace_file(path, secrets.token_hex(8).encode())
            return path.read_bytes()


def _holder() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _encoded(record: RunRecord) -> bytes:
    return record.model_dump_json(indent=1).encode()
