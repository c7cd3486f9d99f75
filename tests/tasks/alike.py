"""Compare metrics and weights of two computations that differ by rounding."""

from collections.abc import Mapping

import pytest
import torch

from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.stages import run_stage
from vantage.tasks.training import optimization

Metrics = Mapping[str, float | None]


def assert_alike(measured: Metrics, expected: Metrics, *, rel: float, abs: float) -> None:
    """Assert that the same metrics are undefined, which pytest.approx cannot compare, and that the others are equal up
    to rounding.
    """
    undefined, others = ({name for name, each in of.items() if each is None} for of in (measured, expected))
    assert undefined == others
    numbers, sought = (
        {name: each for name, each in of.items() if each is not None} for of in (measured, expected)
    )
    assert numbers == pytest.approx(sought, rel=rel, abs=abs, nan_ok=True)


ADAM_EPS = 1e-5
"""AdamW's ε where weights are compared: far above the rounding of a gradient, and near the gradients themselves.

Sums over rows are rounded in another order, and AdamW divides a gradient by its own size: with an ε of 1e-8 the step of
a weight whose gradient is nearly 0 is anything up to the learning rate."""
LARGEST_DIFFERENCE = 5e-3
"""Largest difference of any weight, as a share of the largest change of one by training."""
MEAN_DIFFERENCE = 1e-5


def run_to_compare(job: StageJob) -> StageResult:
    """Run a stage in this process with ``ADAM_EPS``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimization, "EPS", ADAM_EPS)
        return run_stage(job)


def assert_alike_weights(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, learning_rate: float
) -> None:
    """Assert that the tensors are the same, as close as sums over rows in another order leave what AdamW moves in about
    two steps.
    """
    assert found.keys() == expected.keys()
    differences = torch.cat([(found[each] - expected[each]).abs().flatten() for each in expected])
    print(
        float(differences.max() / (2 * learning_rate)),
        float(differences.mean() / (2 * learning_rate)),
    )
    assert differences.max() <= LARGEST_DIFFERENCE * 2 * learning_rate, differences.max()
    assert differences.mean() <= MEAN_DIFFERENCE * 2 * learning_rate, differences.mean()
