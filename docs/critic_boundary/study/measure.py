"""Make all measurements of one seed."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from docs.critic_boundary.study.arms import (
    EARLY_TOKENS,
    MEAN,
    NOISES,
    ONE,
    OTHERS,
    WHITE_EARLY,
    Arm,
    ArmMaker,
    Tokens,
)
from docs.critic_boundary.study.critics import (
    FRESH,
    NUM_ROLLOUTS,
    ORACLE,
    PRETRAINED,
    REWARD_MODEL,
    Oracle,
    along_greedy,
    fit_oracle,
    fresh_critic,
    predict,
    pretrain,
    training_rollouts,
)
from docs.critic_boundary.study.gradients import (
    all_gradients,
    last_block_gradients,
    last_block_scores,
    squared_norms,
)
from docs.critic_boundary.study.setting import Responses, Setting
from docs.critic_boundary.study.variance import gradient_moments, judge_baseline
from vantage.algorithms.advantages import leave_one_out, mean_return, over_tokens
from vantage.models.heads import ScalarModel
from vantage.tasks.training.seeds import generator

NUM_PROMPTS, SAMPLES = 16, 4
"""Of one rollout: 64 responses."""
NUM_MEASURED = 40
"""Rollouts over which the variance of the gradient is taken, each of prompts of its own."""
NUM_WHOLE = 8
"""The first of them, in which the gradient of all parameters is taken too."""
WHOLE = (ONE, OTHERS, REWARD_MODEL, PRETRAINED, ORACLE, NOISES[0])
"""Basic baselines of which it is taken, beside the return."""
TOKENS_LEFT = (0, 10, 20, 40, 60, 80, 200)
"""Edges of the parts by tokens left before the reward."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """The tokens of all rollouts, and gradients of the return and of each basic baseline."""

    tokens: Tokens
    gradients: Tensor
    """(R,1+J,P), of the last block; the return's first."""
    whole: Tensor
    """(r,2+J',P'), of all parameters in the first r rollouts: the return, `WHOLE`, the batch mean."""
    parts: list[tuple[Tensor, Tensor]]
    """For each part by tokens left, the sum over rollouts of the products of its gradients (1+J,1+J), and their mean (1+J,P)."""


def measure(setting: Setting) -> Row:
    """Measure one seed: what its tokens are like, every arm, and some arms by tokens left."""
    rollouts = training_rollouts(setting)
    oracle = fit_oracle(setting, rollouts)
    critics = dict(pretrain(setting, rollouts)) | {FRESH: fresh_critic(setting)}
    measured = collect(setting, critics, oracle)
    tokens = measured.tokens
    arms = list(ArmMaker(tokens, [*critics, ORACLE]).all())
    return {
        "seed": setting.seed,
        "tokens": described(tokens),
        "arms": [judged(measured, arm) for arm in arms],
        "parts": [each for arm in arms if is_shown_by_part(arm) for each in by_part(measured, arm, arms[0])],
    }


def collect(setting: Setting, critics: dict[str, ScalarModel], oracle: Oracle) -> Measured:
    """Return rollouts at fixed weights with the gradients of all basic baselines."""
    found: list[Tokens] = []
    gradients, whole = [], []
    sums: list[tuple[Tensor, Tensor]] = []
    first = NUM_ROLLOUTS * setting.pretraining.batch_size
    temperature = setting.recipe.generation.temperature
    for number in range(NUM_MEASURED):
        start = first + number * NUM_PROMPTS
        indices = setting.order[start : start + NUM_PROMPTS]
        responses = setting.respond(indices, stream="study measured", number=number, count=SAMPLES)
        agrees, path_left = along_greedy(setting, responses, indices, count=SAMPLES)
        basic = {
            **{name: predict(critic, responses.sequences) for name, critic in critics.items()},
            ORACLE: oracle.values(agrees, path_left, responses.mask),
            **fixed_baselines(responses),
            **noises(setting, responses, number),
        }
        scores = last_block_scores(setting.policy, responses.sequences, temperature=temperature)
        tokens = tokens_of(responses, basic, squared_norms(scores), number)
        found.append(tokens)
        coefficients = torch.cat([tokens.returns[None], tokens.baselines.T]) / len(tokens.returns)
        in_parts = []
        for low, high in pairwise(TOKENS_LEFT):
            here = (tokens.left >= low) & (tokens.left < high)
            in_parts.append(last_block_gradients([score.at(here) for score in scores], coefficients[:, here]))
        gradients.append(torch.stack(in_parts).sum(dim=0))
        sums = add_parts(sums, in_parts)
        if number < NUM_WHOLE:
            rows = [0, *(1 + tokens.names.index(name) for name in (*WHOLE, MEAN))]
            # the gradient of the batch mean is a multiple of that of ones, so it needs no pass
            some = all_gradients(
                setting.policy, responses.sequences, coefficients[rows[:-1]], temperature=temperature
            )
            mean = tokens.column(MEAN)[0] * some[1 + WHOLE.index(ONE)]
            whole.append(torch.cat([some, mean[None]]))
    return Measured(
        Tokens(
            names=found[0].names,
            **{
                name: torch.cat([getattr(each, name) for each in found])
                for name in ("baselines", "returns", "rollout", "left", "weights")
            },
        ),
        torch.stack(gradients),
        torch.stack(whole),
        [(products, total / NUM_MEASURED) for products, total in sums],
    )


def add_parts(sums: list[tuple[Tensor, Tensor]], in_parts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Add the products (1+J,1+J) and gradients (1+J,P) of each part to those of the rollouts before."""
    new = [((part.double() @ part.double().T), part) for part in in_parts]
    if not sums:
        return new
    return [(a + c, b + d) for (a, b), (c, d) in zip(sums, new, strict=True)]


def fixed_baselines(responses: Responses) -> dict[str, Tensor]:
    """Return the baselines (B,T) that need no critic."""
    mask, returns = responses.mask, responses.returns
    groups = torch.arange(len(mask)) // SAMPLES
    ones = mask.to(torch.float32)
    return {
        ONE: ones,
        MEAN: mean_return(returns, mask) * ones,
        OTHERS: over_tokens(responses.scores - leave_one_out(responses.scores, groups), mask),
    }


def noises(setting: Setting, responses: Responses, number: int) -> dict[str, Tensor]:
    """Return standard normal noise (B,T) of each kind, from the seed alone."""
    source = generator(setting.seed, "study noise", number)
    mask = responses.mask
    white = torch.randn(mask.shape, generator=source).masked_fill(~mask, 0.0)
    by_response = torch.randn(len(mask), generator=source)
    by_prompt = torch.randn(NUM_PROMPTS, generator=source).repeat_interleave(SAMPLES)
    left = mask.flip(1).cumsum(dim=1).flip(1) - 1
    drawn = (white, over_tokens(by_response, mask), over_tokens(by_prompt, mask))
    return {**dict(zip(NOISES, drawn, strict=True)), WHITE_EARLY: white.where(left >= EARLY_TOKENS, 0.0)}


def tokens_of(responses: Responses, basic: dict[str, Tensor], weights: Tensor, number: int) -> Tokens:
    """Return the response tokens of one rollout, by rows and then along each response."""
    mask = responses.mask
    left = mask.flip(1).cumsum(dim=1).flip(1) - 1
    return Tokens(
        names=list(basic),
        baselines=torch.stack([basic[name][mask] for name in basic], dim=1),
        returns=responses.returns[mask],
        rollout=torch.full((int(mask.sum()),), number),
        left=left[mask],
        weights=weights,
    )


def described(tokens: Tokens) -> Row:
    """Return what the rollouts are like, and how unevenly ‖∇ log π‖² is spread over their tokens."""
    weights, returns = tokens.weights.double(), tokens.returns.double()
    heaviest = weights.sort(descending=True).values[: max(1, len(weights) // 100)]
    return {
        "num_tokens": len(returns),
        "return_mean": returns.mean().item(),
        "return_variance": returns.var(correction=0).item(),
        "weighted_return_mean": ((weights * returns).sum() / weights.sum()).item(),
        "share_of_heaviest_percent": (heaviest.sum() / weights.sum()).item(),
    }


def judged(measured: Measured, arm: Arm) -> Row:
    """Measure one arm: how well its baseline knows the return, and the moments of its gradient over the rollouts."""
    tokens = measured.tokens
    above_mean = tokens.returns - tokens.column(MEAN)
    advantages = tokens.advantages(arm.weights)
    found = judge_baseline(advantages, tokens.returns, above_mean, tokens.weights)
    moments = gradient_moments(combined(measured.gradients, arm.weights))
    row = {"family": arm.family, "critic": arm.critic, "x": arm.x, **asdict(found), **asdict(moments)}
    rows = [tokens.names.index(name) for name in (*WHOLE, MEAN)]
    weights = arm.weights[:NUM_WHOLE]
    if torch.equal(weights[:, rows].abs().sum(dim=1), weights.abs().sum(dim=1)):
        row["whole"] = asdict(gradient_moments(combined(measured.whole, weights[:, rows])))
        # the gradient of the last block on the same rollouts, for comparison
        row["part_of_whole"] = asdict(gradient_moments(combined(measured.gradients[:NUM_WHOLE], weights)))
    return row


def combined(gradients: Tensor, weights: Tensor) -> Tensor:
    """Return the gradients (R,P) of return less baseline, from those (R,1+J,P) of the return and the basic ones;
    weights (R,J).
    """
    signed = torch.cat([torch.ones(len(weights), 1), -weights], dim=1)
    return torch.einsum("rj,rjp->rp", signed, gradients)


def is_shown_by_part(arm: Arm) -> bool:
    """Return whether the arm is a critic as it is, the other responses' mean, or a critic that is noisy early."""
    return arm.family in ("critic", WHITE_EARLY) or arm.critic in (MEAN, OTHERS)


def by_part(measured: Measured, arm: Arm, batch_mean: Arm) -> Iterator[Row]:
    """Yield one arm's measures in each part by tokens left; the part's share of the gradient's variance is that of the
    batch mean.
    """
    tokens = measured.tokens
    advantages = tokens.advantages(arm.weights)
    above_mean = tokens.returns - tokens.column(MEAN)
    traces = [part_trace(products, mean, batch_mean.weights[0]) for products, mean in measured.parts]
    for (low, high), (products, mean), below in zip(
        pairwise(TOKENS_LEFT), measured.parts, traces, strict=True
    ):
        here = (tokens.left >= low) & (tokens.left < high)
        found = judge_baseline(advantages[here], tokens.returns[here], above_mean[here], tokens.weights[here])
        yield {
            "family": arm.family,
            "critic": arm.critic,
            "tokens_left": low,
            **asdict(found),
            "variance_ratio": part_trace(products, mean, arm.weights[0]) / below,
            "variance_share": below / sum(traces),
        }


def part_trace(products: Tensor, mean: Tensor, weights: Tensor) -> float:
    """Trace of the covariance of a part's gradient, of weights (J,) that are the same in every rollout."""
    signed = torch.cat([torch.ones(1), -weights]).double()
    squared = signed @ products @ signed
    of_mean = (signed @ mean.double()).square().sum()
    return ((squared - NUM_MEASURED * of_mean) / (NUM_MEASURED - 1)).item()
