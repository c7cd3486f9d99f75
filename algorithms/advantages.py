"""Advantages and returns: how much better a token was than expected, and how much reward followed it.

No function here passes a gradient: advantages and returns are targets.
"""

import torch
from torch import Tensor

from vantage.algorithms.groups import index_of_groups
from vantage.algorithms.masking import check_response_mask, check_shape, keep
from vantage.algorithms.rounding import is_rounding

WHITENING_EPSILON = 1e-8
"""Added to the standard deviation, in the advantages' own unit."""

GROUP_EPSILON = 1e-6
"""Added to a group's standard deviation, in the scores' own unit."""


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    final_values: Tensor | None = None,
) -> Tensor:
    """Return generalised advantage estimation, arXiv 1506.02438 eq. 11-16, over response tokens only.

        δ_t = r_t + γ·V_{t+1} − V_t        A_t = δ_t + γ·λ·A_{t+1}

    `rewards`, `values` (B,T); V_t is the value at the position whose logits chose token t, so it has seen the
    tokens before t. `lam` is a float or one value per row (B,). → advantages (B,T) in float32 or better,
    detached, 0 outside the mask.

    The value after a row's last valid token is 0, or `final_values` (B,) for truncated responses (with 0 for
    finished ones). Masked positions inside a response are skipped: A and V are carried across, as if the gap
    were deleted. A masked position may hold anything in `values`. In `rewards` it may hold NaN, infinity or 0
    (no reward was put there); any other finite number is refused, since that reward would be lost.

    Raises ValueError for a reward outside the mask, unequal shapes, or γ or λ outside [0, 1].
    """
    check_response_mask(response_mask, rewards=rewards, values=values)
    _check_no_reward_outside(rewards, response_mask)
    _check_unit_interval("gamma", gamma)
    _check_unit_interval("lam", lam)
    rewards, values = keep(rewards.detach(), response_mask), keep(values.detach(), response_mask)
    zeros = torch.zeros_like(rewards + values)
    decay = gamma * _one_per_row("lam", lam, zeros)
    after_last = _one_per_row("final_values", 0.0 if final_values is None else final_values, zeros)
    # Time-major, so that the numbers of one step are contiguous; masked positions are skipped by δ = 0 and a decay of
    # 1.
    rewards, values, valid = (each.t().contiguous() for each in (rewards, values, response_mask))
    deltas = torch.where(valid, rewards + gamma * _next_values(values, valid, after_last) - values, 0.0)
    decays = torch.where(valid, decay, 1.0)
    advantages = torch.empty_like(deltas)
    advantage = torch.zeros_like(after_last)
    for t in reversed(range(len(deltas))):
        advantage = torch.mul(decays[t], advantage, out=advantages[t]).add_(deltas[t])
    return keep(advantages.t().contiguous(), response_mask)


def _next_values(values: Tensor, valid: Tensor, after_last: Tensor) -> Tensor:
    """Return (T,B): the value at the next valid position of each row, or `after_last` (B,) if there is none."""
    found = torch.empty_like(values, dtype=after_last.dtype)
    following = after_last
    for t in reversed(range(len(values))):
        found[t] = following
        following = torch.where(valid[t], values[t], following)
    return found


def truncated_gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    horizon: int,
    final_values: Tensor | None = None,
) -> Tensor:
    """Return GAE whose sum stops after `horizon` response tokens, with V there: PPO, arXiv 1707.06347 eq. 11.

        A_t = Σ_{k < horizon} (γ·λ)^k · δ_{t+k}        δ_t = r_t + γ·V_{t+1} − V_t

    The paper cuts a trajectory into segments of T steps; here the window moves with t. Near the end of a response
    the sum stops with the response, so a `horizon` of its length or more gives `gae`. A `horizon` of 1 gives δ.
    Everything else is as for `gae`; the sum is in float64.

    Raises ValueError as `gae`, and for a horizon below 1.
    """
    if horizon < 1:
        raise ValueError(f"horizon={horizon} is below 1; it counts the steps that are summed")
    exact_rewards, exact_values = rewards.to(torch.float64), values.to(torch.float64)
    whole = gae(exact_rewards, exact_values, response_mask, gamma=gamma, lam=lam, final_values=final_values)
    # GAE's A_t also contains the sum from t + horizon on, (γλ)^horizon times, which is subtracted here. Gaps do not
    # count as steps, so the advantages are first computed without gaps, with a 0 after the last.
    width = response_mask.shape[1]
    rank = response_mask.cumsum(dim=1) - 1
    row = whole.new_zeros(whole.shape[0], width + 1)
    row = row.scatter(1, rank.where(response_mask, width), whole)
    beyond = row.gather(1, (rank + horizon).clamp(0, width))
    decay = (gamma * _one_per_row("lam", lam, whole)) ** horizon
    dtype = torch.promote_types(_widened(rewards), values.dtype)
    return keep(whole - decay[:, None] * beyond, response_mask).to(dtype)


def n_step_advantages(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    num_steps: int,
    final_values: Tensor | None = None,
) -> Tensor:
    """Return the n-step return minus the value, A_t = Σ_{k<n} γ^k·r_{t+k} + γ^n·V_{t+n} − V_t: PPO, arXiv 1707.06347
    eq. 10.

    Where fewer than n tokens are left, the return contains their rewards and the value after the last token. The result
    is `truncated_gae` at λ = 1, since the values in between cancel; shapes and errors are the same.
    """
    return truncated_gae(
        rewards,
        values,
        response_mask,
        gamma=gamma,
        lam=1.0,
        horizon=num_steps,
        final_values=final_values,
    )


def returns_to_go(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Tensor:
    """Return discounted reward from each token on, G_t = r_t + γ·G_{t+1}, over response tokens only.

    `rewards` (B,T) → returns (B,T) in float32 or better, detached, 0 outside the mask. They are the
    advantages of REINFORCE and REINFORCE++ (arXiv 2501.03262). Masked positions and errors are as for `gae`,
    of which this is the case V = 0, λ = 1.
    """
    check_response_mask(response_mask, rewards=rewards)
    return gae(rewards, torch.zeros_like(rewards), response_mask, gamma=gamma, lam=1.0)


def above_mean_return(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Tensor:
    """Return `returns_to_go` minus their mean over the batch's valid tokens: EVPO, arXiv 2604.19485, without its
    critic.

    The mean is the best constant baseline: its explained variance is 0, and the variance of the advantages is Var(G).
    Shapes and
    errors are as for `returns_to_go`; an empty mask gives zeros.
    """
    returns = returns_to_go(rewards, response_mask, gamma=gamma)
    return keep(returns - mean_return(returns, response_mask), response_mask)


def mean_return(returns: Tensor, response_mask: Tensor) -> Tensor:
    """Return the mean of `returns` (B,T) over all valid tokens, a scalar in the dtype of `returns`; 0 for an empty mask."""
    valid = returns[response_mask].to(torch.float64)
    return (valid.sum() / max(1, valid.numel())).to(returns.dtype)


def blended_values(values: Tensor, mean: Tensor, *, weight: float) -> Tensor:
    """Return m + k·(V − m): values (any shape) moved towards the mean return `mean`; `weight` k = 1 leaves them
    unchanged.

    Raises ValueError for a weight outside [0, 1].
    """
    _check_unit_interval("weight", weight)
    return values if weight == 1 else mean + weight * (values - mean)


def monte_carlo_returns(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Tensor:
    """Return `returns_to_go`, under its name as the critic's target, by which explained variance is measured."""
    return returns_to_go(rewards, response_mask, gamma=gamma)


def length_adaptive_lambda(lengths: Tensor, *, alpha: float) -> Tensor:
    """Return λ = 1 − 1/(alpha · length), clamped to [0, 1]: VAPO, arXiv 2504.05118 eq. 4-5.

    `lengths` (B,) in response tokens → λ (B,). With it, Σ_t λ^t ≈ alpha · length. The paper's alpha is 0.05,
    which leaves λ = 0 up to 20 tokens: short responses need a larger one. Length 0 gives 0.

    Raises ValueError for an alpha that is not positive or a negative length.
    """
    if not alpha > 0:
        raise ValueError(f"alpha={alpha} is not positive; the paper uses 0.05, short responses need about 1")
    if bool((lengths < 0).any()):
        raise ValueError(f"lengths has {int(lengths.min())}; a length is a number of response tokens, ≥ 0")
    return (1 - 1 / (alpha * lengths)).clamp(min=0.0, max=1.0)


def whiten(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Return (A − mean) / (std + 1e-8) over all valid tokens of the batch; std is the population's (ddof 0).

    `advantages` (B,T) → (B,T) in float32 or better, detached, 0 outside the mask. Call it on the whole batch,
    before any split into micro-batches. Advantages that are equal up to rounding give 0.

    Raises ValueError for an empty mask or unequal shapes.
    """
    check_response_mask(response_mask, advantages=advantages)
    valid = keep(advantages.detach(), response_mask)[response_mask]
    if valid.numel() == 0:
        raise ValueError("response_mask has no True element; whiten the advantages of the whole batch")
    # std_mean runs Welford's recursion, which is exact for equal advantages; a plain sum would leave rounding
    # noise in the mean, and the division would amplify it.
    std, mean = torch.std_mean(valid, correction=0)
    whitened = (valid - mean) / (std + WHITENING_EPSILON)
    whitened = whitened.masked_fill(is_rounding(std, valid.abs().max(), valid.dtype), 0.0)
    return whitened.new_zeros(response_mask.shape).masked_scatter(response_mask, whitened)


def leave_one_out(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Return A_i = R_i − mean of the group's other K − 1 scores = K/(K − 1) · (R_i − mean): RLOO, arXiv 2402.14740.

    `scores` (B,) of whole responses; `group_ids` (B,) the prompt of each, integers of any value in any order,
    groups of any size → advantages (B,) in float32 or better, detached. A group of one gets 0: there is
    nothing to compare it with.

    Raises ValueError for unequal shapes, TypeError for ids that are not integers.
    """
    deviations, index, sizes = _deviations(scores, group_ids)
    others = (sizes - 1).clamp(min=1)[index]
    return (deviations * sizes[index] / others).to(_widened(scores))


def group_mean_baseline(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Return A_i = R_i − mean of its group, without a division: Dr. GRPO, arXiv 2503.20783; REINFORCE++-baseline.

    Shapes, types, groups of one and errors are as for `leave_one_out`.
    """
    return _deviations(scores, group_ids)[0].to(_widened(scores))


def group_normalised(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Return A_i = (R_i − mean) / (std + 1e-6) within its group, std with ddof 1: GRPO, arXiv 2402.03300 §4.1.2.

    Shapes, types and errors are as for `leave_one_out`. A group of one and a group of scores that are equal up to
    rounding get exactly 0. The paper leaves ddof and ε open; these values are those of its widely used implementations.
    """
    return _exactly_normalised(scores, group_ids).to(_widened(scores))


def each_group_normalised(scores: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Return Σ_k w_k · (R_ik − mean) / (std + 1e-6), each score k normalised within its group: GDPO, arXiv 2601.05242 §3.

    `scores` (B,K), `weights` (K,) → (B,). A score that is equal in a whole group, up to rounding, adds nothing there.

    Raises ValueError for unequal shapes, and as `group_normalised`.
    """
    check_shape("weights", weights, (scores.shape[1],) if scores.dim() == 2 else (0,))
    normalised = torch.stack([_exactly_normalised(each, group_ids) for each in scores.unbind(1)], dim=1)
    return (normalised @ weights.to(normalised)).to(_widened(scores))


def whiten_by_sample(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Return (A − mean) / √(variance + 1e-8) over all valid tokens, with the sample's variance (ddof 1): GDPO's last step.

    The paper normalises over responses; this is over tokens, as in its widely used implementation. Shapes and errors
    are
    as for `whiten`; a single valid token gives 0.
    """
    check_response_mask(response_mask, advantages=advantages)
    valid = keep(advantages.detach(), response_mask)[response_mask]
    if valid.numel() == 0:
        raise ValueError("response_mask has no True element; whiten the advantages of the whole batch")
    variance, mean = torch.var_mean(valid, correction=min(1, valid.numel() - 1))
    whitened = (valid - mean) * torch.rsqrt(variance + WHITENING_EPSILON)
    return whitened.new_zeros(response_mask.shape).masked_scatter(response_mask, whitened)


def greedy_baseline(scores: Tensor, greedy_scores: Tensor) -> Tensor:
    """Return A_i = R_i − the score of the greedy response to the same prompt: ReMax, arXiv 2310.10505.

    Both (B,) → (B,) in float32 or better, detached. Raises ValueError for unequal shapes.
    """
    _check_one_per_response(scores)
    check_shape("greedy_scores", greedy_scores, tuple(scores.shape))
    return scores.detach().to(_widened(scores)) - greedy_scores.detach().to(_widened(greedy_scores))


def over_tokens(sequence_advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Return the advantage (B,) of a whole response on each of its tokens: (B,T), detached, 0 outside the mask.

    Raises ValueError for unequal shapes.
    """
    check_response_mask(response_mask)
    check_shape("sequence_advantages", sequence_advantages, tuple(response_mask.shape[:1]))
    return keep(sequence_advantages.detach().unsqueeze(1).expand(response_mask.shape), response_mask)


def _exactly_normalised(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Return the result of `group_normalised` in float64; rounding is judged by the scores' own type."""
    deviations, index, sizes = _deviations(scores, group_ids)
    variance = _sum_by_group(deviations.square(), index, sizes) / (sizes - 1).clamp(min=1)
    largest = torch.zeros_like(variance).scatter_reduce(0, index, scores.detach().to(variance).abs(), "amax")
    equal = is_rounding(variance.sqrt(), largest, _widened(scores))[index]
    normalised = deviations / (variance.sqrt() + GROUP_EPSILON)[index]
    return normalised.masked_fill(equal, 0.0)


def _deviations(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return R_i − mean of its group (B,) in float64, with the groups' index (B,) and sizes (G,)."""
    _check_one_per_response(scores)
    index, sizes = index_of_groups(group_ids, scores.shape[0])
    exact = scores.detach().to(torch.float64)
    # Relative to the group's lowest score, equal scores are exactly 0, and so is their mean: without this
    # shift, rounding in the mean would leave a remainder, and a division by std + ε would amplify it.
    lowest = exact.new_full(sizes.shape, torch.inf).scatter_reduce(0, index, exact, "amin")
    above_lowest = exact - lowest[index]
    means = _sum_by_group(above_lowest, index, sizes) / sizes
    return above_lowest - means[index], index, sizes


def _sum_by_group(per_row: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    return per_row.new_zeros(sizes.shape).index_add(0, index, per_row)


def _widened(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _check_one_per_response(scores: Tensor) -> None:
    if scores.dim() != 1:
        raise ValueError(f"scores has shape {tuple(scores.shape)}; it must be (B,), one score per response")


def _check_no_reward_outside(rewards: Tensor, response_mask: Tensor) -> None:
    lost = ~response_mask & torch.isfinite(rewards) & (rewards != 0)
    if bool(lost.any()):
        row, position = lost.nonzero()[0].tolist()
        raise ValueError(
            f"rewards[{row}, {position}] = {float(rewards[row, position])} lies outside response_mask "
            "and would be lost; put the score at the last valid token (shape_rewards does)"
        )


def _one_per_row(name: str, value: float | Tensor, per_token: Tensor) -> Tensor:
    """Return a float or (B,) tensor as a (B,) tensor of the dtype and device of `per_token` (B,T)."""
    rows = per_token.shape[:1]
    if isinstance(value, Tensor) and value.dim() > 0:
        check_shape(name, value, rows)
        return value.detach().to(per_token)
    return per_token.new_full(rows, float(value))


def _check_unit_interval(name: str, value: float | Tensor) -> None:
    inside = (value >= 0) & (value <= 1) if isinstance(value, Tensor) else 0 <= value <= 1
    if not (bool(inside.all()) if isinstance(inside, Tensor) else inside):
        raise ValueError(f"{name}={value} is outside [0, 1]")
