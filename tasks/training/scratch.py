"""Files in a stage's scratch folder: the stage writes them, and its observers read them."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import is_unset
from vantage.schemas.recipe.pass_limits import FoundLimits
from vantage.storage.durable_files import replace_file, replace_file_unsynced

CHECKPOINTS = "checkpoints"
BATCHES = "batches"
JOURNAL = "journal.jsonl"
PROGRESS = "progress.json"
WATCHED = "watched.json"
FINISH = "finish.json"
ANSWERS = "answers.jsonl"
"""Answers of judges and reward servers."""
BEGUN_ANSWERS = "begun_answers.jsonl"
"""Answers of judges and reward servers whose scores nobody has read yet."""
DIVERGED_BATCH, DIVERGED_FACTS = "diverged.safetensors", "diverged.json"
_COMMITTED = "committed.json"
_FOUND = "found_limits.json"
FETCHED = "fetched"
"""Folder of a registered model, which the run's own process fetches for the step that imports it."""

REPORTS = (PROGRESS, JOURNAL, _COMMITTED, WATCHED)
"""Files that observers of an attempt read."""

RESUMED_FROM = (CHECKPOINTS, BATCHES, JOURNAL, _COMMITTED, _FOUND, FINISH, BEGUN_ANSWERS, ANSWERS)
"""Files from which the next attempt resumes, on any machine, in the order in which they are copied. An answer that is
read moves from the last file but one to the last, and must be in one of both."""

_Count = Annotated[int, Field(ge=0, le=2**62, strict=True)]


class Committed(Frozen):
    """Position up to which a stage's checkpoints are committed."""

    step: _Count
    journal_offset: _Count


def write_committed(scratch: Path, *, step: int, journal_offset: int) -> None:
    """Record the offset up to which the journal is final, after a checkpoint of ``step`` was committed."""
    committed = Committed(step=step, journal_offset=journal_offset)
    replace_file_unsynced(scratch / _COMMITTED, committed.model_dump_json().encode())


def read_committed(scratch: Path) -> tuple[int, int]:
    """Return (step, journal offset) of the newest checkpoint as last written here; (0, 0) before the first one."""
    try:
        committed = Committed.model_validate_json((scratch / _COMMITTED).read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        # This value is only for display; the checkpoint itself decides.
        return 0, 0
    return committed.step, committed.journal_offset


class _Found(Frozen):
    """Limits that an attempt found, and the device on which it found them."""

    device: str
    limits: FoundLimits
    others: dict[str, FoundLimits] = Field(default_factory=dict, exclude_if=is_unset)
    """Role of another model that the stage samples from → its limits."""


def write_found(scratch: Path, limits: FoundLimits, *, device: str, other: str | None = None) -> None:
    """Remember limits for a device, so that the next attempt on it computes the same passes.

    Args:
        other: role of a model whose limits are added to those of the stage's first model; None: the first model.
    """
    found = _Found(device=device, limits=limits)
    if other is not None:
        first = _read(scratch)
        assert first is not None, "the first model's limits are found before those of others"
        found = first.model_copy(update={"others": {**first.others, other: limits}})
    replace_file(scratch / _FOUND, found.model_dump_json().encode())


def read_found(scratch: Path, *, device: str | None = None, other: str | None = None) -> FoundLimits | None:
    """Return the limits that an attempt found, on ``device`` (None: any); None: there are none.

    Args:
        other: role of a further model that the stage measured; None: the first model.
    """
    found = _read(scratch)
    if found is None or device not in (None, found.device):
        return None
    return found.limits if other is None else found.others.get(other)


def describe_found(scratch: Path) -> str | None:
    """Return the limits that an attempt found, in words; None: it found none."""
    found = _read(scratch)
    if found is None:
        return None
    others = [
        f"; {role}: {limits.described_sampling}"
        for role, limits in found.others.items()
        if limits.sampled_tokens is not None
    ]
    return "".join([found.limits.described, *others])


def _read(scratch: Path) -> _Found | None:
    try:
        return _Found.model_validate_json((scratch / _FOUND).read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):  # the limits will be found again at once
        return None


def forget_found(scratch: Path) -> None:
    """Remove the limits; the next attempt finds them again, if at all."""
    with suppress(FileNotFoundError):
        (scratch / _FOUND).unlink()
