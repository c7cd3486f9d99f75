"""Measure a critic on one held-out rollout: by prompt, by predicted value, by rank, and against other baselines.

All functions take `values`, `returns` (Monte-Carlo) and `response_mask`, all (B,T), and `prompts` (B,), an integer for
each prompt. Everything is computed in float64 on the CPU; standard errors are over prompts. The order of the rows does
not matter. All raise ValueError for an empty mask or unequal shapes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vantage.algorithms.critic_slices import at_token, others_mean, parts_by_rank, rounding
from vantage.algorithms.groups import index_of_groups
from vantage.algorithms.masking import check_response_mask
from vantage.algorithms.uncertainty import Estimate, clustered_explained_variance, clustered_ratio


@dataclass(frozen=True)
class PromptParts:
    """Explained variance in two parts. Var(G) is the variance between prompts (of their means) plus the variance within
    prompts."""

    between: Estimate
    """Explained variance of the prompts' mean returns, weighted by tokens: whether the critic knows the good
    prompts."""
    within: Estimate | None
    """Explained variance of the differences from the prompt's mean return, over prompts with several responses: whether
    the critic knows which responses go well. None if each prompt has one response."""


@dataclass(frozen=True)
class PromptError:
    """The critic's error on one prompt."""

    prompt: int
    """The number of the prompt, as given."""
    num_responses: int
    value: float
    """Mean over tokens, like all numbers here."""
    returned: float
    squared_error: float
    share: float
    """Share of the squared error of all tokens; NaN if that error is 0."""


@dataclass(frozen=True)
class CalibrationBin:
    """Tokens with similar values: a calibrated critic's mean value is their mean return."""

    value: float
    returned: Estimate
    error: Estimate
    """Mean of V − G."""
    num_tokens: int


@dataclass(frozen=True)
class SquaredAdvantages:
    """Mean square over valid tokens of the advantage with each baseline, in the square of the unit of the returns.

    The smallest belongs to the best baseline for this rollout, as far as advantages matter. The policy's gradient
    weighs each advantage by ‖∇ log π‖ of its token, which can reverse the order (docs/critic_boundary).
    """

    critic: Estimate
    """Mean square of G − V."""
    batch_mean: Estimate
    """Mean square of G − (mean of G over all valid tokens)."""
    others_mean: Estimate | None
    """Mean square of G − (mean return of the other responses to the same prompt); None if a prompt has only one
    response."""
    ratio: Estimate | None
    """`critic` / `batch_mean`; None if all returns are equal. The mean minimises the divisor, so the uncertainty of the
    mean has no first-order effect."""


def prompt_parts(values: Tensor, returns: Tensor, response_mask: Tensor, prompts: Tensor) -> PromptParts:
    """Return explained variance between and within prompts."""
    mask = _checked(values, returns, response_mask)
    prompts = prompts.cpu()
    index, sizes = index_of_groups(prompts, mask.shape[0])
    means, rests = [], []
    for each in (values, returns):
        mean, rest = _split_by_prompt(each.detach().cpu().double(), mask, index)
        means.append(mean)
        rests.append(rest)
    several = (sizes > 1)[index]
    least, within = rounding(returns, response_mask) ** 2, None
    if bool(mask[several].any()):
        of_several = (each[several] for each in (*rests, mask, prompts))
        within = clustered_explained_variance(*of_several, least_variance=least)
    return PromptParts(
        clustered_explained_variance(means[0], means[1], mask, prompts, least_variance=least), within
    )


def prompt_errors(
    values: Tensor, returns: Tensor, response_mask: Tensor, prompts: Tensor
) -> list[PromptError]:
    """Return each prompt's error, in the order of the prompts' numbers."""
    mask = _checked(values, returns, response_mask)
    numbers = prompts.cpu().unique()
    predicted, found = (torch.where(mask, each.detach().cpu().double(), 0.0) for each in (values, returns))
    squares = (predicted - found).square().sum(dim=1)
    total, tokens = squares.sum().item(), mask.sum(dim=1)
    errors = []
    for number in numbers.tolist():
        rows = prompts.cpu() == number
        count = int(tokens[rows].sum())
        if count:
            square = squares[rows].sum().item()
            errors.append(
                PromptError(
                    prompt=number,
                    num_responses=int(rows.sum()),
                    value=predicted[rows].sum().item() / count,
                    returned=found[rows].sum().item() / count,
                    squared_error=square / count,
                    share=square / total if total > 0 else float("nan"),
                )
            )
    return errors


def calibration(
    values: Tensor, returns: Tensor, response_mask: Tensor, prompts: Tensor, *, num_bins: int = 10
) -> list[CalibrationBin]:
    """Compare values with returns in equal parts of the tokens, sorted by value; equal values are in one part."""
    mask = _checked(values, returns, response_mask)
    prompts = prompts.cpu()
    predicted, found = (torch.where(mask, each.detach().cpu().double(), 0.0) for each in (values, returns))
    bins = torch.full(tuple(mask.shape), -1)
    bins[mask] = parts_by_rank(predicted[mask], num_bins)
    curve = []
    for number in range(num_bins):
        of_bin = bins == number
        rows = of_bin.any(dim=1)
        if bool(rows.any()):
            counts = of_bin.sum(dim=1)[rows].double()
            of_values, of_returns = (
                torch.where(of_bin, each, 0.0).sum(dim=1)[rows] for each in (predicted, found)
            )
            curve.append(
                CalibrationBin(
                    value=of_values.sum().item() / counts.sum().item(),
                    returned=clustered_ratio(of_returns, counts, prompts[rows]),
                    error=clustered_ratio(of_values - of_returns, counts, prompts[rows]),
                    num_tokens=int(of_bin.sum()),
                )
            )
    return curve


def calibration_error(curve: list[CalibrationBin]) -> float:
    """Return the mean over tokens of their bin's |mean value − mean return|. It is positive even for pure noise."""
    total = sum(each.num_tokens for each in curve)
    return sum(each.num_tokens * abs(each.error.value) for each in curve) / total


def rank_correlation(
    values: Tensor, returns: Tensor, response_mask: Tensor, prompts: Tensor, *, at: float = 0.5
) -> Estimate | None:
    """Return how well the critic orders two responses to one prompt by their returns, at a part ``at`` of each
    response.

    (concordant − discordant pairs)/(pairs of different returns), Kendall's τ over the pairs that have an order; V and G
    are those of token ⌊at · L⌋, or of the last one for 1; equal values have no order and count as 0. None if no two
    responses to a prompt differ. The estimate's `num_rows` counts these pairs.
    """
    mask = _checked(values, returns, response_mask)
    lengths = mask.sum(dim=1)
    token = (at * lengths.double()).floor().long().minimum(lengths - 1)
    predicted, found = (at_token(each, mask, token) for each in (values, returns))
    prompts, least = prompts.cpu(), rounding(returns, response_mask)
    sums = []
    for number in prompts.unique().tolist():
        rows = ((prompts == number) & (lengths > 0)).nonzero()[:, 0]
        first, second = torch.combinations(rows).T
        difference = found[first] - found[second]
        order = torch.where(difference.abs() > least, difference.sign(), 0.0)
        agrees = order * (predicted[first] - predicted[second]).sign()
        sums.append((agrees.sum(), order.abs().sum()))
    agreeing, pairs = torch.tensor(sums, dtype=torch.float64).T
    some = pairs > 0
    if not bool(some.any()):
        return None
    of_prompts = clustered_ratio(agreeing[some], pairs[some], torch.arange(len(pairs))[some])
    return replace(of_prompts, num_rows=int(pairs.sum()))


def squared_advantages(
    values: Tensor, returns: Tensor, response_mask: Tensor, prompts: Tensor
) -> SquaredAdvantages:
    """Return the mean squared advantages with each baseline, on the same tokens."""
    mask = _checked(values, returns, response_mask)
    prompts, tokens = prompts.cpu(), mask.sum(dim=1).double()
    found, predicted = (each.detach().cpu().double() for each in (returns, values))
    others, is_known = others_mean(returns, mask, prompts)
    start = found[mask][0]  # so that equal returns differ from their mean by exactly 0
    mean = start + (found[mask] - start).mean()
    of_critic, of_mean, of_others = (
        torch.where(mask, found - baseline, 0.0).square().sum(dim=1)
        for baseline in (predicted, mean, others[:, None])
    )
    return SquaredAdvantages(
        critic=clustered_ratio(of_critic, tokens, prompts),
        batch_mean=clustered_ratio(of_mean, tokens, prompts),
        others_mean=clustered_ratio(of_others, tokens, prompts) if bool(is_known.all()) else None,
        ratio=clustered_ratio(of_critic, of_mean, prompts) if bool(of_mean.sum() > 0) else None,
    )


def _split_by_prompt(per_token: Tensor, mask: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over the tokens of each row's prompt, and the differences from it, both (B,T); equal numbers
    differ by exactly 0."""
    num_prompts = int(index.max()) + 1
    valid = torch.where(mask, per_token, 0.0)
    # The numbers are shifted by one of the prompt's own
    lowest = torch.full((num_prompts,), float("inf"), dtype=torch.float64)
    lowest = lowest.scatter_reduce(
        0, index, torch.where(mask, per_token, float("inf")).amin(dim=1), reduce="amin"
    )[index][:, None]
    shifted = torch.where(mask, valid - lowest, 0.0)
    sums, counts = (
        torch.zeros(num_prompts, dtype=torch.float64).index_add(0, index, each.sum(dim=1).double())
        for each in (shifted, mask)
    )
    mean = (sums / counts.clamp(min=1))[index][:, None]
    return torch.where(mask, lowest + mean, 0.0), torch.where(mask, shifted - mean, 0.0)


def _checked(values: Tensor, returns: Tensor, response_mask: Tensor) -> Tensor:
    check_response_mask(response_mask, values=values, returns=returns)
    if not bool(response_mask.any()):
        raise ValueError("response_mask has no True element; a diagnosis needs the whole set of responses")
    return response_mask.cpu()
