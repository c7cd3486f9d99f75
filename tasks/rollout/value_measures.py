"""Measure a critic's values of held-out responses."""

from torch import Tensor

from vantage.algorithms.diagnostics import ValueDiagnostics, value_diagnostics
from vantage.models.heads import ScalarModel
from vantage.tasks.rollout.returns import Returned
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import rollout_values
from vantage.tasks.training import progress
from vantage.tasks.training.measured import defined

POSITIONS = 4
"""Number of equal parts of the response in which explained variance is also measured."""


def diagnose(critic: ScalarModel, held_out: Returned, models: RolloutModels) -> ValueDiagnostics:
    """Return explained variance and related diagnostics, over the whole held-out set at once."""
    predicted, mask = predict(critic, held_out, models), held_out.rollout.sequences.response_mask
    return value_diagnostics(predicted, held_out.returns, mask, num_positions=POSITIONS)


def predict(critic: ScalarModel, held_out: Returned, models: RolloutModels) -> Tensor:
    """Return values (B,T) of the held-out responses' prefixes."""
    with progress.within("validation"):
        return rollout_values(critic, held_out.rollout.sequences, models)


def headline_metrics(measured: ValueDiagnostics) -> dict[str, float | None]:
    """Return the diagnostics under the names that gates and the ledger use; None for an undefined one."""
    by_position = {
        f"explained_variance_position_{number}": defined(part)
        for number, part in enumerate(measured.explained_variance_by_position, start=1)
    }
    return {
        "explained_variance": defined(measured.explained_variance),
        "return_variance": measured.return_variance,
        "value_bias": measured.bias,
        "value_mse": measured.mse,
        "constant_mse": measured.constant_mse,
        **by_position,
    }
