"""Treat losses and gradients that are not finite: the first ones cost their optimiser steps, later ones end the stage.

A stage's process has one ``Tolerance``, so any code that computes a loss or a gradient can report to it. Without one,
nothing is tolerated.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from vantage.models.sequences import Sequences
from vantage.storage.durable_files import replace_file_unsynced
from vantage.tasks.training.scratch import DIVERGED_BATCH, DIVERGED_FACTS
from vantage.tasks.training.writer import writes_files

METRIC = "nonfinite_steps"
"""Name of the curve that counts the omitted optimiser steps."""

log = logging.getLogger(__name__)


class TrainingDiverged(Exception):
    """A loss or gradient is not finite; it was noticed before it could change the weights."""


class Tolerance:
    """Number of steps of a stage's loop that may still have a loss or gradient that is not finite."""

    def __init__(self, scratch: Path, *, allowed: int) -> None:
        """
        Args:
            scratch: the stage's folder, to which the batch of a step that is not tolerated is written.
            allowed: number of steps of the loop that are tolerated.
        """
        self._scratch, self._allowed = scratch, allowed
        self.step = 0
        self._was_met = False
        self.left_out = 0
        """Optimiser steps left out in this step of the loop."""
        self.batch: Sequences | None = None

    def begin(self, step: int) -> None:
        """Begin a step of the loop."""
        self.step, self.left_out, self._was_met = step, 0, False

    def meet(self, what: str, value: float, remedy: str) -> None:
        """Tolerate a quantity that is not finite, or raise TrainingDiverged; all cases in one step of the loop count once."""
        if self._was_met:
            return
        if not self._allowed:
            kept = self._save(what, value)
            raise TrainingDiverged(f"{what} is {value} at step {self.step}; {remedy}{kept}")
        self._was_met, self._allowed = True, self._allowed - 1
        log.warning("%s is %s at step %d; its optimiser step is left out", what, value, self.step)

    def metrics(self) -> dict[str, float]:
        """Return the curve of omitted steps; empty if there were none."""
        return {METRIC: float(self.left_out)} if self.left_out else {}

    def _save(self, what: str, value: float) -> str:
        if self.batch is None or not writes_files():
            return ""
        path = self._scratch / DIVERGED_BATCH
        batch = {
            "input_ids": self.batch.input_ids,
            "attention_mask": self.batch.attention_mask,
            "response_ids": self.batch.response_ids,
            "response_mask": self.batch.response_mask,
        }
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in batch.items()}, path)
        facts = {"step": self.step, "quantity": what, "value": str(value), "batch": path.name}
        replace_file_unsynced(self._scratch / DIVERGED_FACTS, json.dumps(facts, indent=1).encode())
        return f"; its batch is in {path}"


_current: Tolerance | None = None


@contextmanager
def tolerating(tolerance: Tolerance) -> Iterator[None]:
    """Use ``tolerance`` for quantities that are not finite inside this block."""
    global _current
    before, _current = _current, tolerance
    try:
        yield
    finally:
        _current = before


def meet(what: str, value: float, *, remedy: str) -> None:
    """Report a quantity that is not finite.

    Raises:
        TrainingDiverged: no more steps are tolerated.
    """
    if _current is None:
        raise TrainingDiverged(f"{what} is {value}; {remedy}")
    _current.meet(what, value, remedy)


def leave_out_step() -> None:
    """Count an omitted optimiser step."""
    if _current is not None:
        _current.left_out += 1


def spoil_gradient(module: nn.Module) -> None:
    """Make the gradient not finite, so that no optimiser uses it: its loss was not finite."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(float("nan"))
            return


def remember(batch: Sequences) -> None:
    """Keep the batch until the next one, to be saved if a quantity computed from it is not finite."""
    if _current is not None:
        _current.batch = batch
