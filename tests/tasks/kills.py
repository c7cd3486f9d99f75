"""A stage that is killed in a step, and run again: what the tests of several stages do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.job import StageJob, StageResult
from tasks.attempt import Attempt
from tasks.ledger.journal import read
from tasks.scratch import JOURNAL


class Killed(BaseException):
    """Stands for a kill: nothing is saved on the way out."""


def same_bytes_after_a_kill(
    run: Callable[[StageJob], StageResult],
    job_in: Callable[[Path], StageJob],
    folder: Path,
    *,
    step: int,
    contents: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Assert that the stage, killed in ``step`` and run again, ends with the result and bytes of one that never was."""
    whole = job_in(folder / "whole")
    expected = run(whole)
    finish = Attempt.finish_step

    def dying(self: Attempt, *args: Any, **kwargs: Any) -> None:
        if self.step == step:
            raise Killed
        finish(self, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Attempt, "finish_step", dying)
        run(job_in(folder / "cut"))
    cut = job_in(folder / "cut")
    assert run(cut) == expected
    assert contents(cut.output) == contents(whole.output)
    steps = [entry.step for entry in read(cut.scratch / JOURNAL)]
    assert steps == list(range(1, len(steps) + 1))
