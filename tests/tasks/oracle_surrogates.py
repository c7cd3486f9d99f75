"""Compute the surrogates of policy optimisation from the papers, one response at a time, without any code of ours."""

import torch
from torch import Tensor

from vantage.schemas.recipe.algorithm import Algorithm


def bounds(a: Algorithm) -> tuple[float, float]:
    """Return the bounds between which the ratio is clipped."""
    low = 0.0 if a.clip_range_low is None else 1 - a.clip_range_low
    return low, float("inf") if a.clip_range_high is None else 1 + a.clip_range_high


def of_response(new: Tensor, old: Tensor, advantages: Tensor, a: Algorithm) -> Tensor:
    """Return the loss of each token of a response."""
    if not a.importance_ratio:
        return -new * advantages
    low, high = bounds(a)
    ratio = (new - old).exp()
    if a.ratio_mask:
        inside = (ratio > low) & (ratio < high)
        weight = ratio if a.ratio_mask_gradient else ratio.detach()
        return -weight * inside * advantages * new
    if a.ratio_level == "sequence":  # the response's ratio as a constant, times that of each token
        ratio = (new - old).detach().mean().exp() * (new - new.detach()).exp()
    if a.surrogate == "clipped_weight":
        return -ratio.detach().clamp(low, high) * advantages * new
    if a.surrogate == "soft_gate":
        tau = torch.where(advantages > 0, a.soft_gate_positive, a.soft_gate_negative).double()
        return -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * advantages
    if a.surrogate == "geometric_mean":
        advantage = advantages[0].item()
        assert (advantages == advantage).all()
        sign = 1.0 if advantage > 0 else -1.0
        logs = torch.minimum(sign * ratio.log(), sign * ratio.clamp(low, high).log()) * sign
        return (-advantage * logs.mean().exp()).expand(len(new))
    gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if a.dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, a.dual_clip * advantages), gain)
    return -gain


@torch.no_grad()
def selected(
    new: list[Tensor],
    old: list[Tensor],
    advantages: list[Tensor],
    learns: list[bool],
    a: Algorithm,
    draw: torch.Generator,
) -> list[Tensor]:
    """Return the tokens of each response that the covariance selects, among those that are learnt from."""
    places = [(row, t) for row, x in enumerate(new) for t in range(len(x)) if learns[row]]
    found = [torch.zeros_like(x, dtype=torch.bool) for x in new]
    if not places:
        return found
    logprobs = [new[row][t].item() for row, t in places]
    gains = [advantages[row][t].item() for row, t in places]
    centre, mean = sum(logprobs) / len(places), sum(gains) / len(places)
    covariances = [(p - centre) * (A - mean) for p, A in zip(logprobs, gains, strict=True)]
    number = max(int(a.covariance_share * len(places)), 1)
    if a.covariance == "kl":
        order = sorted(range(len(places)), key=lambda i: -covariances[i])
    else:
        low, high = bounds(a)
        candidates = []
        for i, (row, t) in enumerate(places):
            ratio = (new[row][t] - old[row][t]).exp().item()
            is_clipped = ratio > high if gains[i] > 0 else ratio < low
            if a.covariance_low < covariances[i] < a.covariance_high and not is_clipped:
                candidates.append(i)
        order = [candidates[i] for i in torch.randperm(len(candidates), generator=draw).tolist()]
    for i in order[:number]:
        row, t = places[i]
        found[row][t] = True
    return found
