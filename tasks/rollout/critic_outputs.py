"""Read more from a critic than its values: the disagreement of an ensemble, the distribution of quantiles."""

import torch
from torch import Tensor

from vantage.algorithms.critic_heads import (
    calibration_bounds,
    disagreement_of_heads,
    quantile_calibration_error,
    shares_up_to,
)
from vantage.models.heads import ScalarModel, outputs
from vantage.models.sequences import Sequences
from vantage.tasks.rollout.returns import Returned
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import per_token
from vantage.tasks.training import progress
from vantage.tasks.training.measured import defined
from vantage.tasks.training.optimization import autocast


def values_and_disagreement(
    critic: ScalarModel, sequences: Sequences, models: RolloutModels
) -> tuple[Tensor, Tensor]:
    """Return the values (B,T) of an ensemble, and their standard deviation (B,T) over its heads, from one pass."""

    def compute(micro: Sequences) -> dict[str, Tensor]:
        with autocast(models.precision, micro.input_ids.device):
            found = outputs(critic, micro)
        return {"values": found.mean(dim=-1), "disagreement": disagreement_of_heads(found)}

    gathered = per_token(compute, sequences, limits=models.limits, computes="computing values")
    return gathered["values"], gathered["disagreement"]


def form_metrics(critic: ScalarModel, held_out: Returned, models: RolloutModels) -> dict[str, float | None]:
    """Return the metrics that only a critic with several outputs has, on held-out responses; empty for one value."""
    sequences = held_out.rollout.sequences
    mask = sequences.response_mask
    with progress.within("validation"):
        if critic.form.ensemble is not None:
            _, disagreement = values_and_disagreement(critic, sequences, models)
            return {"critic_disagreement": disagreement[mask].double().mean().item()}
        if critic.form.quantiles is not None:
            bounds = calibration_bounds(held_out.returns, mask)
            shares = _shares(critic, sequences, models, bounds)
            return {
                "quantile_calibration_error": defined(
                    quantile_calibration_error(shares, held_out.returns, mask, bounds)
                )
            }
    return {}


def _shares(critic: ScalarModel, sequences: Sequences, models: RolloutModels, bounds: Tensor) -> Tensor:
    """Return the shares (B,T,M) of the quantiles up to each bound. Only M numbers per token are gathered."""

    def compute(micro: Sequences) -> dict[str, Tensor]:
        with autocast(models.precision, micro.input_ids.device):
            found = shares_up_to(outputs(critic, micro), bounds)
        return {str(number): each for number, each in enumerate(found.unbind(dim=-1))}

    if not len(bounds):
        return torch.zeros((*sequences.response_mask.shape, 0), device=sequences.response_mask.device)
    gathered = per_token(compute, sequences, limits=models.limits, computes="computing values")
    return torch.stack(list(gathered.values()), dim=-1)
