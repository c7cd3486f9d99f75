"""What lies in a stage's scratch folder: written by the stage, read by whoever watches it."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.pass_limits import FoundLimits
from vantage.storage.durable_files import replace_file, replace_file_unsynced

CHECKPOINTS = "checkpoints"
BATCHES = "batches"
JOURNAL = "journal.jsonl"
PROGRESS = "progress.json"
WATCHED = "watched.json"
FINISH = "finish.json"
DIVERGED_BATCH, DIVERGED_FACTS = "diverged.safetensors", "diverged.json"
_COMMITTED = "committed.json"
_FOUND = "found_limits.json"
FETCHED = "fetched"
"""The folder of a registered model, which whoever orders the run has fetched for the step that imports it."""

REPORTS = (PROGRESS, JOURNAL, _COMMITTED, WATCHED)
"""What those who watch an attempt read."""

RESUMED_FROM = (CHECKPOINTS, BATCHES, JOURNAL, _COMMITTED, _FOUND, FINISH)
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
    """Return (step, journal offset) of the newest checkpoint as last written here, (0, 0) before there is one."""
    try:
        committed = Committed.model_validate_json((scratch / _COMMITTED).read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        # Only shown, never relied on: the checkpoint itself is the truth.
        return 0, 0
    return committed.step, committed.journal_offset


class _Found(Frozen):
    """The limits that an attempt found, and what they were found on."""

    device: str
    limits: FoundLimits


def write_found(scratch: Path, limits: FoundLimits, *, device: str) -> None:
    """Remember what was found on a device, so that the next attempt there computes the same passes."""
    replace_file(scratch / _FOUND, _Found(device=device, limits=limits).model_dump_json().encode())


def read_found(scratch: Path, *, device: str | None = None) -> FoundLimits | None:
    """Return what an attempt found, on ``device`` (None: on any); None: nothing."""
    try:
        found = _Found.model_validate_json((scratch / _FOUND).read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):  # found anew, which costs a moment
        return None
    return found.limits if device in (None, found.device) else None


def forget_found(scratch: Path) -> None:
    """Find them anew, if at all."""
    with suppress(FileNotFoundError):
        (scratch / _FOUND).unlink()
