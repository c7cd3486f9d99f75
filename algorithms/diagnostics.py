"""Measure how well a critic predicts returns, and how far a trainer's log-probabilities are from its sampler's.

Both are measured on a whole set at once: an average of micro-batch results would be another, wrong quantity. Returns
are Monte-Carlo returns, never A + V with λ < 1, which contains the critic's own predictions. Everything is computed
in float64 on the CPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.algorithms.masking import check_response_mask


@dataclass(frozen=True)
class ValueDiagnostics:
    """Explained variance, and errors that it hides. Floats; in the unit of the returns, or its square.

    `bias` is the mean of V − G, to which explained variance is blind. `constant_mse` is the MSE of predicting one
    constant. Pooled tokens over-weight long responses, so `explained_variance_by_position` has one entry for each
    equal part of the response, from its first tokens to its last. An undefined quantity is NaN.
    """

    explained_variance: float
    return_variance: float
    bias: float
    mse: float
    constant_mse: float
    explained_variance_by_position: tuple[float, ...]
    num_tokens: int


@dataclass(frozen=True)
class SamplerGap:
    """Δ = trainer's − sampler's log-probability of each sampled token, over all valid tokens. Floats, in nats.

    `mean` is the mean of |Δ|, `worst` the largest |Δ|. `k3` is the mean of e^(−Δ) − 1 + Δ, which estimates
    KL(trainer‖sampler) from the trainer's samples. These are the sampler's, so it equals that KL only to second
    order in Δ, ½·mean of Δ². All are 0 only if every Δ is 0; NaN or infinite if a log-probability is.
    """

    mean: float
    k3: float
    worst: float


def sampler_gap(logprobs: Tensor, sampler_logprobs: Tensor, response_mask: Tensor) -> SamplerGap:
    """Return how far the trainer's `logprobs` (B,T) of the sampled tokens are from the sampler's own (B,T), in nats.

    They are compared token by token, since the mean ratio shows nothing: under the sampler its expectation is 1 for any
    trainer.

    Raises ValueError for an empty mask or unequal shapes.
    """
    trained, sampled = _valid_tokens(response_mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    delta = trained - sampled
    return SamplerGap(
        mean=delta.abs().mean().item(),
        k3=(torch.expm1(-delta) + delta).mean().item(),
        worst=delta.abs().max().item(),
    )


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> float:
    """Return 1 − Var(G − V) / Var(G) over all valid tokens; `values`, `returns` (B,T).

    It is 1 for a perfect critic, 0 for any constant, below 0 for worse than a constant; a constant bias does not
    change it. NaN (undefined) if Var(G) = 0 or a valid entry is not finite, so that a gate `measured >=
    threshold` stays closed.

    Raises ValueError for an empty mask or unequal shapes.
    """
    return _explained_variance(*_valid_tokens(response_mask, values=values, returns=returns))


def switched_weight(
    explained: float, *, threshold: float, hysteresis: float = 0.0, was_used: bool = True
) -> float:
    """Return 1 if a critic of this explained variance is used, else 0: EVPO, arXiv 2604.19485, with hysteresis (ours).

    A critic is used above `threshold`; one that was not used before, only above `threshold + hysteresis`. NaN, the
    explained variance of returns that do not vary, gives 0.
    """
    return float(explained > (threshold if was_used else threshold + hysteresis))


def blended_weight(explained: float) -> float:
    """Return the explained variance clamped to [0, 1] as the weight of a critic's values (ours). NaN gives 0."""
    return min(1.0, max(0.0, explained)) if explained == explained else 0.0


def value_diagnostics(
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    num_positions: int = 5,
    constant: float | None = None,
) -> ValueDiagnostics:
    """Return explained variance with Var(G), bias, MSE, the constant predictor's MSE, and explained variance by
    relative position.

    `values`, `returns` (B,T). Token k of a response of L tokens belongs to part ⌊k · num_positions / L⌋.
    `constant` is the constant predictor's value, for example the mean return of the training prompts; None takes
    the mean of these returns, the best constant, whose MSE is Var(G).

    Raises ValueError for an empty mask, unequal shapes, or num_positions below 1.
    """
    if num_positions < 1:
        raise ValueError(f"num_positions={num_positions} is below 1; it counts the equal parts of a response")
    valid_values, valid_returns = _valid_tokens(response_mask, values=values, returns=returns)
    error = valid_values - valid_returns
    guess = valid_returns.mean() if constant is None else constant
    rank = response_mask.cumsum(dim=1) - 1
    lengths = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    part = (rank * num_positions // lengths)[response_mask].cpu()
    return ValueDiagnostics(
        explained_variance=_explained_variance(valid_values, valid_returns),
        return_variance=_variance(valid_returns),
        bias=error.mean().item(),
        mse=error.square().mean().item(),
        constant_mse=(valid_returns - guess).square().mean().item(),
        explained_variance_by_position=tuple(
            _explained_variance(valid_values[part == index], valid_returns[part == index])
            for index in range(num_positions)
        ),
        num_tokens=valid_returns.numel(),
    )


def _valid_tokens(response_mask: Tensor, **per_token: Tensor) -> list[Tensor]:
    check_response_mask(response_mask, **per_token)
    if not bool(response_mask.any()):
        raise ValueError("response_mask has no True element; a diagnosis needs the whole set of responses")
    return [tensor.detach()[response_mask].cpu().to(torch.float64) for tensor in per_token.values()]


def _explained_variance(values: Tensor, returns: Tensor) -> float:
    return_variance = _variance(returns)
    return 1 - _variance(returns - values) / return_variance if return_variance > 0 else float("nan")


def _variance(samples: Tensor) -> float:
    """Return the population variance: exactly 0 for equal samples (hence the shift), NaN for none."""
    return torch.var(samples - samples[:1], correction=0).item() if samples.numel() else float("nan")
