"""Kill a stage in a step, and run it again, for the tests of several stages."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.alike import assert_alike
from vantage.ledger.journal import read
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.training.stage_state import State


class Killed(BaseException):
    """Stands for a kill: nothing is saved on the way out."""


@contextmanager
def killed_in(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the attempt die in the middle of a step, after its update and before anything is written."""
    with raising_in(step, Killed(), monkeypatch):
        yield


@contextmanager
def raising_in(step: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the attempt end with the error in the middle of a step, after its update and before anything is written."""
    finish = Attempt.finish_step

    def raising(
        self: Attempt[State], metrics: Mapping[str, float], *, num_tokens: int, headline: str
    ) -> None:
        if self.step == step:
            raise error
        finish(self, metrics, num_tokens=num_tokens, headline=headline)

    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(Attempt, "finish_step", raising)
        yield


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
    with killed_in(step, monkeypatch):
        run(job_in(folder / "cut"))
    cut = job_in(folder / "cut")
    assert run(cut) == expected
    assert contents(cut.output) == contents(whole.output)
    steps = [entry.step for entry in read(cut.scratch / JOURNAL)]
    assert steps == list(range(1, len(steps) + 1))


def same_weights_in_half_the_micro_batch(
    run: Callable[[StageJob], StageResult],
    job_in: Callable[..., StageJob],
    folder: Path,
    *,
    microbatch_size: int | None,
    half: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Assert that memory running out in the fourth step costs no more than rounding where half the micro-batch goes on.

    Args:
        job_in: from a folder and ``microbatch_size`` to the job, whose checkpoints are two steps apart.
    """
    whole = job_in(folder / "whole", microbatch_size=microbatch_size)
    expected = run(whole)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with raising_in(3, full, monkeypatch):
        run(job_in(folder / "cut", microbatch_size=microbatch_size))
    cut = job_in(folder / "cut", microbatch_size=half)
    result = run(cut)

    steps = [entry.step for entry in read(cut.scratch / JOURNAL)]
    assert steps == list(range(1, len(steps) + 1))
    assert_alike(result.metrics, expected.metrics, rel=1e-3, abs=1e-4)
    files = sorted(path.name for path in whole.output.glob("*.safetensors"))
    assert files
    for name in files:
        there, here = load_file(whole.output / name), load_file(cut.output / name)
        for tensor, values in there.items():
            torch.testing.assert_close(
                here[tensor], values, atol=2e-6, rtol=1e-4, msg=partial("{}: {}".format, tensor)
            )
