"""The training state that a finished stage leaves beside its artifact, from which a longer stage goes on.

It is the stage's last checkpoint, with the curves instead of an offset in the journal. So it does not depend on clocks
or machines, and equal stages leave equal states. No tensor library is needed to write it.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from vantage.ledger.journal import Entry, Journal, read
from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.metric_names import OF_MACHINE
from vantage.storage.durable_files import write_file
from vantage.tasks.training.checkpoint_folders import STATE, TENSORS, Checkpoint, latest
from vantage.tasks.training.scratch import CHECKPOINTS, JOURNAL, read_committed

CURVES = "curves.jsonl"


def write_kept_state(scratch: Path, folder: Path) -> int | None:
    """Write the training state in ``scratch`` of a stage that did all its steps into an empty folder; return its steps.

    Returns None, and writes nothing, for a stage that stopped before: a longer stage would have stopped there too.
    """
    found, (step, _) = latest(scratch / CHECKPOINTS), read_committed(scratch)
    if found is None or found.step != step:  # the last checkpoint was damaged
        return None
    description = json.loads((found.folder / STATE).read_bytes())
    moving = description["state"]
    if moving["stopped"]:
        return None
    shutil.copyfile(found.folder / TENSORS, folder / TENSORS)
    curves = Journal(folder / CURVES)
    for entry in read(scratch / JOURNAL, end_offset=moving["journal_offset"]):
        steady = {name: value for name, value in entry.metrics.items() if name not in OF_MACHINE}
        curves.append(entry.step, steady, time=0.0)
    curves.close()
    kept = {**description, "state": {**moving, "journal_offset": 0}}
    write_file(folder / STATE, canonical_json(kept).encode())
    return found.step


def kept_checkpoint(folder: Path) -> Checkpoint:
    """Return the kept state as a checkpoint."""
    step: int = json.loads((folder / STATE).read_bytes())["step"]
    return Checkpoint(step, 0, folder)


def kept_curves(folder: Path) -> Iterator[Entry]:
    """Yield the metrics of each step up to the end of the shorter stage; their times are not known."""
    return read(folder / CURVES)
