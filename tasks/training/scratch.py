"""What lies in a stage's scratch folder: written by the stage, read by whoever watches it."""

import json
from pathlib import Path

from tasks.storage.durable_files import show_file

CHECKPOINTS = "checkpoints"
JOURNAL = "journal.jsonl"
PROGRESS = "progress.json"
_COMMITTED = "committed.json"


def write_committed(scratch: Path, *, step: int, journal_offset: int) -> None:
    """Say up to where the journal is final, after a checkpoint of ``step`` was committed."""
    text = json.dumps({"step": step, "journal_offset": journal_offset})
    show_file(scratch / _COMMITTED, text.encode())


def read_committed(scratch: Path) -> tuple[int, int]:
    """(step, journal offset) of the newest checkpoint as last told, (0, 0) before there is one."""
    try:
        committed = json.loads((scratch / _COMMITTED).read_bytes())
        return int(committed["step"]), int(committed["journal_offset"])
    except (FileNotFoundError, ValueError, KeyError):
        # It is only told, never relied on: the checkpoint itself is the truth.
        return 0, 0
