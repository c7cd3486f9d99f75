"""Files in a stage's scratch folder beside its curves: the guards' observations, and a person's request to finish."""

from pathlib import Path

from vantage.schemas.frozen import Frozen
from vantage.schemas.records.firings import Watched
from vantage.storage.durable_files import replace_file_unsynced
from vantage.tasks.training.scratch import FINISH, WATCHED


class FinishRequest(Frozen):
    """A person's request to end a stage with its present result."""

    run_id: str
    """The run that the person meant: another run with the same stage does all steps."""
    reason: str


def write_watched(scratch: Path, watched: Watched) -> None:
    """Write the guards' observations for observers of the stage."""
    replace_file_unsynced(scratch / WATCHED, watched.model_dump_json().encode())


def read_watched(scratch: Path) -> Watched:
    """Return the guards' observations in an attempt; empty if they were not written, or incompletely."""
    try:
        return Watched.model_validate_json((scratch / WATCHED).read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return Watched()


def ask_to_finish(scratch: Path, *, run_id: str, reason: str) -> None:
    """Ask the run's stage that works in this folder to end with its present result."""
    asked = FinishRequest(run_id=run_id, reason=reason)
    replace_file_unsynced(scratch / FINISH, asked.model_dump_json().encode())


def asked_to_finish(scratch: Path, *, run_id: str) -> str | None:
    """Return the reason why a person asked this run's stage to finish; None: nobody did, or it was another run's."""
    try:
        asked = FinishRequest.model_validate_json((scratch / FINISH).read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return None
    return asked.reason if asked.run_id == run_id else None
