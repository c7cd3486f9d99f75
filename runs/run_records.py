"""The interface of the records of runs: ``run.json`` of each run, and the locks of those that execute them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from pydantic import ValidationError

from vantage.runs.record import RunRecord
from vantage.runs.workspace import RunError

REMEDY = "move the folder away: what its stages made stays in the store, and the same command reuses it"


REMOVABLE = ("ledger", "logs")
"""Folders of a run that are removed with the run; its record stays."""


OUTBOX = "ledger/outbox.jsonl"
"""Path in a run's folder (``vantage.ledger.outbox``)."""


APPROVALS = "approvals"
"""Folder of a run with the answers of people; it stays when the run is removed."""


class RunLock(Protocol):
    """The lock of a run that this process executes."""

    def close(self) -> None:
        """Release it."""


class RunRecords(Protocol):
    """The records and locks of a workspace's runs: ``FolderRecords``, ``BucketRecords``."""

    def ids(self) -> list[str]:
        """Return the ids of all runs, readable or not, in no order."""

    def read(self, run_id: str) -> RunRecord:
        """Return one run's record. Raises RunError if it does not exist or cannot be read."""

    def write(self, record: RunRecord) -> None:
        """Replace the record of a run whose lock this process holds."""

    def create(self, record: RunRecord) -> None:
        """Add a run; the caller holds ``creation_lock``."""

    def lock(self, run_id: str) -> RunLock | None:
        """Return the lock of a run; None if another process holds it."""

    def is_active(self, run_id: str) -> bool:
        """Return whether a process executes the run."""

    def ages(self) -> Mapping[str, float]:
        """Run id → seconds since its record was last written, by the storage's clock."""

    def remove_files(self, run_id: str) -> None:
        """Remove the logs and the ledger's outbox of a run whose lock this process holds."""

    def request_cancel(self, run_id: str) -> None:
        """Ask the process that executes the run, wherever it is, to save and stop."""

    def is_cancel_requested(self, run_id: str) -> bool:
        """Return whether a cancellation was requested since the run was last locked."""

    def add_answer(self, run_id: str, question_id: str, data: bytes) -> bool:
        """Store the answer to a question, whichever process executes the run; False: there is another answer, which
        stays."""

    def read_answer(self, run_id: str, question_id: str) -> bytes | None:
        """Return the answer to a question; None: there is none yet."""

    def read_log(self, run_id: str, step: str) -> bytes | None:
        """Return a step's output where the run's own process computed it; None: there is none."""

    def read_outbox(self, run_id: str) -> bytes | None:
        """Return the run's outbox, one operation per line; None if it was removed."""

    def read_ledger_file(self, run_id: str, name: str) -> bytes | None:
        """Read another file beside the outbox: ``sent.json``, ``refused.jsonl``; None if it is missing."""

    def creation_lock(self) -> AbstractContextManager[object]:
        """Let one process at a time find or create a run."""


def parse_record(data: bytes, *, run_id: str, where: str) -> RunRecord:
    """Return the content of a ``run.json``. Raises RunError if it cannot be read or belongs to another run."""
    try:
        record = RunRecord.model_validate_json(data)
    except ValidationError as error:
        raise RunError(f"{where} cannot be read ({type(error).__name__}); {REMEDY}") from error
    if record.run_id != run_id:
        raise RunError(f"{where} is that of run {record.run_id}; {REMEDY}")
    return record
