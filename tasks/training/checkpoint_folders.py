"""Find a stage's checkpoints, and the newest one that is intact. No tensor library is loaded.

<folder>/checkpoint-00000050/      sealed: tensors.safetensors, state.json, manifest.json
<folder>/checkpoint-00000050.1/    step 50 saved again (later wins)
<folder>/damaged-…/                failed its check; kept for a person to look at
"""

import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from vantage.storage.durable_files import free_path, make_folder, move_folder
from vantage.storage.sealed_folders import find_problems, seal

_NAME = re.compile(r"checkpoint-(\d{8,})(?:\.(\d+))?")
SAVING = "saving"
TENSORS = "tensors.safetensors"
STATE = "state.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A committed checkpoint."""

    step: int
    revision: int
    """Number of times that the same step was saved before."""
    folder: Path


def committed(folder: Path) -> list[Checkpoint]:
    """Return all checkpoints by name, oldest first; nothing is read."""
    if not folder.is_dir():
        return []
    named = ((_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir())
    return sorted(Checkpoint(int(name[1]), int(name[2] or 0), entry) for name, entry in named if name)


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint whose files all match its manifest, or None.

    A damaged checkpoint is renamed to ``damaged-…``, with a warning that describes the fault, and the one before it is
    used.
    """
    for checkpoint in reversed(committed(folder)):
        problems = find_problems(checkpoint.folder)
        if not problems:
            return checkpoint
        aside = free_path(folder, f"damaged-{checkpoint.folder.name}")
        os.rename(checkpoint.folder, aside)
        _log.warning(
            "%s is damaged and not used (kept as %s): %s", checkpoint.folder, aside.name, "; ".join(problems)
        )
    return None


def saving_folder(folder: Path) -> Path:
    """Return an empty folder to write the next checkpoint's files to."""
    new = folder / SAVING
    if new.is_dir() and not new.is_symlink():
        shutil.rmtree(new)
    else:
        new.unlink(missing_ok=True)
    make_folder(new)
    return new


def commit(folder: Path, *, step: int, keep: int) -> Checkpoint:
    """Make the content of ``saving_folder`` the newest checkpoint, then remove all but the newest ``keep``.

    Raises:
        ValueError: there is a checkpoint of a later step, or ``keep`` is less than 1.
    """
    before = committed(folder)
    if keep < 1:
        raise ValueError(f"keep={keep} would remove the checkpoint just saved; keep at least 1")
    if step < 0 or (before and before[-1].step > step):
        newest = before[-1].step if before else 0
        raise ValueError(f"step={step} is before the newest checkpoint's step {newest}; steps only grow")
    revision = before[-1].revision + 1 if before and before[-1].step == step else 0
    target = folder / (f"checkpoint-{step:08d}" + (f".{revision}" if revision else ""))
    seal(folder / SAVING)
    move_folder(folder / SAVING, target)
    for old in before[: len(before) + 1 - keep]:
        shutil.rmtree(old.folder)
    return Checkpoint(step, revision, target)
