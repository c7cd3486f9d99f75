"""Measure where a critic explains the returns and where it does not, on one held-out rollout.

Explained variance over all tokens hides most of this. Most pooled tokens belong to long responses, and a critic that only
knows the outcome a few tokens before the end looks good on average. Everything is computed in float64 on the CPU;
standard errors are over prompts. The order of the rows does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.algorithms.groups import index_of_groups
from vantage.algorithms.masking import check_response_mask
from vantage.algorithms.uncertainty import Estimate, clustered_explained_variance, clustered_ratio

DOUBLING_BINS = 17
"""Number of bins of 1, 2-3, 4-7, 8-15 … tokens; the last bin, from 65,536 on, has no upper end."""
DIFFICULTIES = ("hardest", "middle", "easiest")
ROUNDING = 1e-4
"""Returns that differ by at most this share of the rollout's root mean square count as equal. A KL penalty between equal
policies is only rounding, and its explained variance would be an arbitrary number."""


@dataclass(frozen=True)
class Slice:
    """One part of the tokens, and how well a critic predicts their returns."""

    label: str
    explained_variance: Estimate
    """1 − Var(G − V)/Var(G) among these tokens; NaN if all their returns are equal, see `ROUNDING`."""
    bias: Estimate
    """Mean of V − G, in the unit of the returns."""
    num_tokens: int
    num_responses: int


def by_part(
    values: Tensor, returns: Tensor, response_mask: Tensor, prompts: Tensor, *, num_parts: int = 10
) -> list[Slice]:
    """Slice by equal parts of the response, from 1 on: token k of L, from 0 on, is in part 1 + ⌊k · num_parts / L⌋.

    See `_slices` for the tensors.
    """
    place, lengths = _places(response_mask)
    labels = [str(number) for number in range(1, num_parts + 1)]
    return _slices(values, returns, response_mask, prompts, place * num_parts // lengths, labels)


def by_tokens_left(values: Tensor, returns: Tensor, response_mask: Tensor, prompts: Tensor) -> list[Slice]:
    """Slice by the number of tokens from a token (inclusive) to the end: 1, 2-3, 4-7, 8-15 and so on."""
    place, lengths = _places(response_mask)
    return _doubling(values, returns, response_mask, prompts, lengths - place)


def by_length(values: Tensor, returns: Tensor, response_mask: Tensor, prompts: Tensor) -> list[Slice]:
    """Slice by the length of the response: 1, 2-3, 4-7, 8-15 tokens and so on."""
    _, lengths = _places(response_mask)
    return _doubling(values, returns, response_mask, prompts, lengths.expand(response_mask.shape))


def by_difficulty(values: Tensor, returns: Tensor, response_mask: Tensor, prompts: Tensor) -> list[Slice]:
    """Slice by thirds of the responses, sorted by the mean return of the other responses to the same prompt.

    A response's own return is left out of the order. Otherwise the unlucky responses would be in the first third, where
    even the best critic predicts too high a value. A response that is its prompt's only one is in no slice.
    """
    check_response_mask(response_mask, values=values, returns=returns)
    others, is_known = others_mean(returns, response_mask, prompts)
    known = others[is_known]
    step = rounding(returns, response_mask)
    third = torch.full((len(others),), -1)
    third[is_known] = parts_by_rank((known / step).round() if step else known, len(DIFFICULTIES))
    of_tokens = third[:, None].expand(response_mask.shape)
    return _slices(values, returns, response_mask, prompts, of_tokens, DIFFICULTIES)


def rounding(returns: Tensor, response_mask: Tensor) -> float:
    """Return the largest difference of returns that count as equal: `ROUNDING` · √(mean G²) over all valid tokens."""
    return ROUNDING * returns.detach()[response_mask].cpu().double().square().mean().sqrt().item()


def others_mean(returns: Tensor, response_mask: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean return (B,) at the first token of the other responses to each row's prompt, and whether there are
    any (B,).

    The mean is 0 if there are none. `returns`, `response_mask` (B,T); `prompts` (B,) integers, one for each prompt.
    """
    mask = response_mask.cpu()
    index, sizes = index_of_groups(prompts.cpu(), mask.shape[0])
    first = at_token(returns, mask, torch.zeros(len(mask), dtype=torch.long))
    sums = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, index, first)
    number = sizes[index] - 1
    return torch.where(number > 0, (sums[index] - first) / number.clamp(min=1), 0.0), number > 0


def parts_by_rank(numbers: Tensor, num_parts: int) -> Tensor:
    """Return the part (N,), from 0 to `num_parts` − 1, of each of `numbers` (N,) in sorted order.

    Equal numbers are in one part, that of the middle of their ranks: parts have equal sizes if all numbers differ.
    """
    ordered = numbers.sort().values
    below, up_to = (torch.searchsorted(ordered, numbers.contiguous(), right=right) for right in (False, True))
    # (below + up_to)/2 of N numbers are before the middle of these ranks; in whole numbers, which are exact
    return (below + up_to) * num_parts // (2 * max(len(numbers), 1))


def at_token(per_token: Tensor, response_mask: Tensor, numbers: Tensor) -> Tensor:
    """Return `per_token` (B,T) at the valid token of number `numbers` (B,) in each response, in float64; 0 if it has no
    such token."""
    mask = response_mask.cpu()
    is_it = mask & (_places(mask)[0] == numbers[:, None])
    return torch.where(is_it, per_token.detach().cpu().double(), 0.0).sum(dim=1)


def _doubling(
    values: Tensor, returns: Tensor, response_mask: Tensor, prompts: Tensor, counts: Tensor
) -> list[Slice]:
    """Return slices by a count (B,T) of 1 or more, in bins that double."""
    # The exponent is exact: m · 2^e with m in [½, 1)
    bins = (torch.frexp(counts.clamp(min=1).double()).exponent.long() - 1).clamp(max=DOUBLING_BINS - 1)
    last = DOUBLING_BINS - 1
    labels = ["1", *(f"{2**each}-{2 ** (each + 1) - 1}" for each in range(1, last)), f"{2**last}+"]
    return _slices(values, returns, response_mask, prompts, bins, labels)


def _slices(
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    prompts: Tensor,
    bins: Tensor,
    labels: Sequence[str],
) -> list[Slice]:
    """Return the slices that have a token, in the order of their bins; a token in a bin without a label is in no slice.

    `values`, `returns`, `response_mask`, `bins` (B,T), Monte-Carlo returns; `prompts` (B,) integers, one for each prompt.

    Raises ValueError for an empty mask or unequal shapes.
    """
    check_response_mask(response_mask, values=values, returns=returns)
    if not bool(response_mask.any()):
        raise ValueError("response_mask has no True element; a diagnosis needs the whole set of responses")
    mask, prompts = response_mask.cpu(), prompts.cpu()
    values, returns = values.detach().cpu(), returns.detach().cpu()
    error = torch.where(mask, values.double() - returns.double(), 0.0)
    least = rounding(returns, mask) ** 2
    found = []
    for number, label in enumerate(labels):
        of_bin = mask & (bins == number)
        rows = of_bin.any(dim=1)
        if bool(rows.any()):
            explained = clustered_explained_variance(
                values[rows], returns[rows], of_bin[rows], prompts[rows], least_variance=least
            )
            errors = torch.where(of_bin, error, 0.0).sum(dim=1)[rows]
            bias = clustered_ratio(errors, of_bin.sum(dim=1)[rows].double(), prompts[rows])
            found.append(Slice(label, explained, bias, int(of_bin.sum()), int(rows.sum())))
    return found


def _places(response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each valid token in its response (B,T), from 0, and the lengths (B,1), at least 1."""
    mask = response_mask.cpu()
    return mask.cumsum(dim=1) - 1, mask.sum(dim=1, keepdim=True).clamp(min=1)
