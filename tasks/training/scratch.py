"""What lies in a stage's scratch folder: written by the stage, read by whoever watches it."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from schemas.frozen import Frozen
from storage.durable_files import replace_file_unsynced

CHECKPOINTS = "checkpoints"
BATCHES = "batches"
JOURNAL = "journal.jsonl"
PROGRESS = "progress.json"
_COMMITTED = "committed.json"
FETCHED = "fetched"
"""The folder of a registered model, which whoever orders the run has fetched for the step that imports it."""

REPORTS = (PROGRESS, JOURNAL, _COMMITTED)
"""What those who watch an attempt read."""

RESUMED_FROM = (CHECKPOINTS, BATCHES, JOURNAL, _COMMITTED)
"""What the next attempt goes on from, on whichever machine."""

_Count = Annotated[int, Field(ge=0, le=2**62, strict=True)]


class Committed(Frozen):
    """Up to where a stage's checkpoints go."""

    step: _Count
    journal_offset: _Count


def write_committed(scratch: Path, *, step: int, journal_offset: int) -> None:
    """Say up to where the journal is final, after a checkpoint of ``step`` was committed."""
    committed = Committed(step=step, journal_offset=journal_offset)
    replace_file_unsynced(scratch / _COMMITTED, committed.model_dump_json().encode())


def read_committed(scratch: Path) -> tuple[int, int]:
    """(step, journal offset) of the newest checkpoint as last written here, (0, 0) before there is one."""
    try:
        committed = Committed.model_validate_json((scratch / _COMMITTED).read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        # Only shown, never relied on: the checkpoint itself is the truth.
        return 0, 0
    return committed.step, committed.journal_offset
