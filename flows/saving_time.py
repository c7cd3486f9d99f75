"""Warn of stages whose checkpoint takes longer to write than an attempt has after it was asked to stop."""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vantage.estimates.checkpoint_size import checkpoint_bytes, most_checkpoint_bytes
from vantage.runs.planning import PlannedStep
from vantage.schemas.recipe.inputs import Model
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.stage import Training

SLOW_DISK = 50e6
"""Bytes per second. No measurement is needed if even such a slow disk takes a checkpoint within the grace period."""
_MEASURED = 256 * 2**20
"""Most bytes that are written to measure a disk."""
_MEASURED_SECONDS = 1.0
_PIECE = 8 * 2**20
_TO_COMPUTE = ("run", "resume", "wait")
"""Actions of a plan after which a stage computes, perhaps after others."""


def saving_warnings(
    recipe: ResolvedRecipe,
    steps: Sequence[PlannedStep],
    *,
    folder: Path,
    rate: Callable[[Path], float | None],
) -> list[str]:
    """Return a warning for each stage to compute that cannot save its state within its grace period.

    Args:
        folder: folder on the disk that takes the checkpoints; the disk is measured only if a checkpoint is large.
        rate: returns the bytes per second that the folder's disk takes; None: it cannot be measured.
    """
    found, measured = [], None
    if _most(recipe.model) <= SLOW_DISK * min(
        (stage.resources.grace_seconds for stage in recipe.stages.values()), default=0.0
    ):
        return []
    for step in steps:
        work = recipe.stages.get(step.name)
        if step.action not in _TO_COMPUTE or not isinstance(work, Training):
            continue
        grace, size = work.resources.grace_seconds, _size(recipe, step.name)
        if size <= SLOW_DISK * grace:
            continue
        measured = measured or rate(folder)
        if measured is None or size <= measured * grace:
            continue
        seconds = size / measured
        where = (
            "this workspace's disk" if step.pool is None else f"this machine's disk, not on pool {step.pool}"
        )
        found.append(
            f"stages.{step.name}: a checkpoint has about {size / 1e9:,.0f} GB, which takes {seconds:,.0f} s at the "
            f"{measured / 1e9:.2f} GB/s measured on {where}, and a stop leaves {grace:g} s: steps since the last complete "
            f"checkpoint would be computed again; set stages.{step.name}.resources.grace_seconds above {seconds:,.0f}, or a "
            "smaller checkpoint_every"
        )
    return found


def _most(model: Model) -> int:
    """Return the most bytes of any stage's checkpoint; 0 if they cannot be estimated."""
    try:
        return most_checkpoint_bytes(model)
    except ValueError:  # the model is not on this machine
        return 0


def _size(recipe: ResolvedRecipe, name: str) -> int:
    """Return the bytes of the stage's checkpoint; 0 if they cannot be estimated."""
    try:
        return checkpoint_bytes(recipe, name)
    except ValueError:  # the model is not on this machine
        return 0


def write_rate(folder: Path) -> float | None:
    """Return the bytes per second that the folder's disk takes, with hashing as for a checkpoint; None: nothing can be
    written.

    At most 256 MiB are written, for about a second, to a file that is removed.
    """
    while not folder.exists():
        folder = folder.parent
    piece, written = os.urandom(_PIECE), 0
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.monotonic()
            while written < _MEASURED and time.monotonic() - began < _MEASURED_SECONDS:
                written += file.write(piece)
                hashlib.sha256(piece)
            file.flush()
            os.fsync(file.fileno())
            return written / (time.monotonic() - began)
    except OSError:
        return None
