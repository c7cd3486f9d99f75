"""Store the records of a workspace's runs in a folder: ``runs/<id>/run.json``, with locks of the kernel."""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vantage.runs.record import RunRecord
from vantage.runs.run_records import APPROVALS, OUTBOX, REMEDY, REMOVABLE, parse_record
from vantage.runs.workspace import RUN_ID, RunError
from vantage.storage.durable_files import (
    expected,
    make_folder,
    remove_folder,
    remove_left_overs,
    replace_file,
    sync_folder,
    write_file,
)

if TYPE_CHECKING:
    from vantage.runs.workspace import Workspace

_LOCK_WAIT_SECONDS = 0.5
_CANCEL = "cancel"


@dataclass(frozen=True)
class FileLock:
    """A locked file; the kernel releases it when the process ends. Until then the workspace must stay where it is."""

    descriptor: int
    held: ExitStack

    def close(self) -> None:
        """Release it."""
        os.close(self.descriptor)
        self.held.close()


class FolderRecords:
    """``RunRecords`` in a folder."""

    def __init__(self, workspace: "Workspace") -> None:
        self._workspace = workspace

    def ids(self) -> list[str]:
        """Return the names of the runs' folders."""
        runs = self._workspace.runs
        return (
            [folder.name for folder in runs.iterdir() if RUN_ID.fullmatch(folder.name)]
            if runs.is_dir()
            else []
        )

    def read(self, run_id: str) -> RunRecord:
        """Return the run's ``run.json``. Raises RunError if it does not exist or cannot be read."""
        path = self._workspace.folder(run_id) / "run.json"
        try:
            data = _read_plain(path)
        except (FileNotFoundError, NotADirectoryError):
            if path.parent.is_dir():
                raise RunError(f"{path} is missing; {REMEDY}") from None
            raise RunError(
                f"there is no run {run_id} in {self._workspace.root}; `vantage status` lists the runs"
            ) from None
        except OSError as error:
            raise RunError(f"{path} cannot be read ({type(error).__name__}); {REMEDY}") from error
        return parse_record(data, run_id=run_id, where=str(path))

    def write(self, record: RunRecord) -> None:
        """Replace ``run.json``, durably."""
        path = self._workspace.folder(record.run_id) / "run.json"
        replace_file(path, record.model_dump_json(indent=1).encode())

    def create(self, record: RunRecord) -> None:
        """Make the run's folder; it is renamed when it is complete, so that no run without a record is read."""
        runs = self._workspace.runs
        half = runs / f".creating-{record.run_id}"
        half.mkdir()
        (half / "lock").touch()
        replace_file(half / "run.json", record.model_dump_json(indent=1).encode())
        half.rename(self._workspace.folder(record.run_id))
        for left_over in runs.glob(".creating-*"):
            shutil.rmtree(left_over, ignore_errors=True)

    def lock(self, run_id: str) -> FileLock | None:
        """Return the run's lock; waits briefly, since ``is_active`` in another process takes it for a moment."""
        path = self._workspace.folder(run_id) / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        give_up = time.monotonic() + _LOCK_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > give_up:
                    os.close(descriptor)
                    return None
                time.sleep(0.01)
            else:
                (self._workspace.folder(run_id) / _CANCEL).unlink(missing_ok=True)
                # Only the holder of the lock writes the record, so left-over files are from a killed holder.
                remove_left_overs(self._workspace.folder(run_id) / "run.json")
                held = ExitStack()
                held.enter_context(expected(self._workspace.root))
                return FileLock(descriptor, held)

    def is_active(self, run_id: str) -> bool:
        """Return whether the run's lock is held."""
        try:
            probe = os.open(self._workspace.folder(run_id) / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(probe)
        return False

    def ages(self) -> Mapping[str, float]:
        """Return the ages by the clock of the file system."""
        make_folder(self._workspace.runs)
        clock = self._workspace.runs / ".clock"
        clock.touch()
        now = clock.stat().st_mtime
        records = ((run_id, self._workspace.folder(run_id) / "run.json") for run_id in self.ids())
        return {run_id: now - path.stat().st_mtime for run_id, path in records if path.is_file()}

    def remove_files(self, run_id: str) -> None:
        """Remove the logs and the ledger's outbox of a run from its folder."""
        for name in REMOVABLE:
            remove_folder(self._workspace.folder(run_id) / name)

    def request_cancel(self, run_id: str) -> None:
        """Make a file in the run's folder."""
        (self._workspace.folder(run_id) / _CANCEL).touch()

    def is_cancel_requested(self, run_id: str) -> bool:
        """Return whether that file is there."""
        return (self._workspace.folder(run_id) / _CANCEL).exists()

    def add_answer(self, run_id: str, question_id: str, data: bytes) -> bool:
        """Make ``approvals/<question>.json`` in the run's folder, complete from the moment it exists."""
        folder = self._workspace.folder(run_id) / APPROVALS
        make_folder(folder)
        new = folder / f".{secrets.token_hex(8)}"
        write_file(new, data)
        try:
            os.link(new, folder / f"{question_id}.json")
        except FileExistsError:
            return False
        finally:
            new.unlink()
            sync_folder(folder)
        return True

    def read_answer(self, run_id: str, question_id: str) -> bytes | None:
        """Read the file of the answer."""
        return _bytes_of(self._workspace.folder(run_id) / APPROVALS / f"{question_id}.json")

    def read_log(self, run_id: str, step: str) -> bytes | None:
        """Return the step's log in the run's folder."""
        return _bytes_of(self._workspace.folder(run_id) / "logs" / f"{step}.log")

    def read_outbox(self, run_id: str) -> bytes | None:
        """Return the outbox in the run's folder."""
        return _bytes_of(self._workspace.folder(run_id) / OUTBOX)

    def read_ledger_file(self, run_id: str, name: str) -> bytes | None:
        """Return a file beside the outbox."""
        return _bytes_of(self._workspace.folder(run_id) / "ledger" / name)

    @contextmanager
    def creation_lock(self) -> Iterator[None]:
        """Hold a lock of the folder of all runs."""
        runs = self._workspace.runs
        try:
            make_folder(runs)
            lock = os.open(runs / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise RunError(
                f"workspace {self._workspace.root} cannot be written ({error.strerror}); name another with "
                "--workspace DIR"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _bytes_of(path: Path) -> bytes | None:
    try:
        return _read_plain(path)
    except FileNotFoundError:
        return None


def _read_plain(path: Path) -> bytes:
    """Return a file's bytes; a pipe, whose reader would wait for ever, is refused."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(f"{path} is no plain file; move it away")
    return path.read_bytes()
