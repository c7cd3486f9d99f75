"""Dynamic sampling (DAPO, arXiv 2503.14476 §3.2): groups without a learning signal are replaced by others."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vantage.algorithms.rounding import is_rounding
from vantage.models.sequences import join
from vantage.schemas.conversations import Message
from vantage.tasks.rewards.scoring import Scores, Summand
from vantage.tasks.rollout.rollouts import Sampled, Scored, padded


@dataclass(frozen=True)
class Filled:
    """A full rollout, and the sampling that it took to fill it."""

    scored: Scored
    rounds: int
    """Number of rollouts that were sampled."""
    uniform_share: float
    """Share of all sampled groups whose responses have one score."""


def uniform_groups(scores: Tensor, *, samples_per_prompt: int) -> Tensor:
    """Return which groups (B / K,) have a single score, up to rounding: their scores prefer no response.

    ``scores`` (B,), those of a group adjacent, before any shaping: a length penalty would make equal answers differ.
    """
    groups = scores.view(-1, samples_per_prompt)
    return is_rounding(groups.amax(dim=1) - groups.amin(dim=1), groups.abs().amax(dim=1), scores.dtype)


def groups_without_contrast(scores: Scores, *, samples_per_prompt: int, each: bool) -> Tensor:
    """Return which groups (B / K,) prefer no response: by their weighted sum, or with ``each`` by none of its parts."""
    if not each:
        return uniform_groups(scores.weighted_sum, samples_per_prompt=samples_per_prompt)
    by_part = [
        uniform_groups(part.scores, samples_per_prompt=samples_per_prompt)
        for part in scores.summands
        if part.weight and not part.shapes
    ]
    if not by_part:
        return uniform_groups(scores.weighted_sum, samples_per_prompt=samples_per_prompt)
    return torch.stack(by_part).all(dim=0)


def fill(
    draw: Callable[[int], Scored],
    *,
    samples_per_prompt: int,
    max_rounds: int,
    pad_token_id: int,
    each: bool = False,
) -> Filled:
    """Sample until there is a whole rollout of groups that are not uniform, ``max_rounds`` times at most.

    If groups are still missing then, uniform groups fill up the rollout, so that it always has the same size.

    Args:
        draw: returns a whole rollout of new prompts for the number of a round; the rows of a group are adjacent.
        each: whether a group is uniform only if each of its scores is, and not their sum alone.
    """
    parts: list[Scored] = []
    mixed: list[tuple[int, int]] = []
    uniform: list[tuple[int, int]] = []
    wanted = 0
    while not parts or (len(mixed) < wanted and len(parts) < max_rounds):
        number = len(parts)
        parts.append(draw(number))
        is_uniform = groups_without_contrast(
            parts[-1].scores, samples_per_prompt=samples_per_prompt, each=each
        ).tolist()
        wanted = len(is_uniform)
        for group, same in enumerate(is_uniform):
            (uniform if same else mixed).append((number, group))
    taken = sorted((mixed + uniform)[:wanted])
    chosen = []
    for number, part in enumerate(parts):
        rows = [
            group * samples_per_prompt + sample
            for of, group in taken
            if of == number
            for sample in range(samples_per_prompt)
        ]
        if rows:
            chosen.append(part.select(rows))
    return Filled(
        scored=join_scored(chosen, pad_token_id=pad_token_id),
        rounds=len(parts),
        uniform_share=len(uniform) / (len(uniform) + len(mixed)),
    )


def join_scored(parts: list[Scored], *, pad_token_id: int) -> Scored:
    """Return several batches of scored responses as one."""
    if len(parts) == 1:
        return parts[0]
    sampled = [part.sampled for part in parts]
    scores = [part.scores for part in parts]
    return Scored(
        sampled=Sampled(
            prompts=[prompt for each in sampled for prompt in each.prompts],
            answers=[answer for each in sampled for answer in each.answers],
            responses=[response for each in sampled for response in each.responses],
            sequences=join([each.sequences for each in sampled], pad_token_id=pad_token_id),
            ended=torch.cat([each.ended for each in sampled]),
            sampler_logprobs=padded(row for each in sampled for row in each.sampler_logprobs),
            conversations=_joined_conversations(sampled),
        ),
        scores=Scores(
            total=torch.cat([each.total for each in scores]),
            weighted_sum=torch.cat([each.weighted_sum for each in scores]),
            by_term={name: torch.cat([each.by_term[name] for each in scores]) for name in scores[0].by_term},
            graded=scores[0].graded,
            steps=_joined_steps(scores),
            summands=_joined_summands(scores),
        ),
    )


def _joined_conversations(sampled: list[Sampled]) -> list[list[Message] | None] | None:
    """Return the turns of several batches' prompts; None if no batch has them."""
    if all(each.conversations is None for each in sampled):
        return None
    return [turns for each in sampled for turns in each.conversations or [None] * len(each.prompts)]


def _joined_steps(scores: list[Scores]) -> Tensor | None:
    """Return the rewards of steps (B,T) of several batches; None without steps."""
    steps = [each.steps for each in scores if each.steps is not None]
    return padded(row for each in steps for row in each) if len(steps) == len(scores) else None


def _joined_summands(scores: list[Scores]) -> tuple[Summand, ...]:
    """Return the parts of the sum of several batches; empty if one batch has collected responses, which have no
    parts."""
    if not all(each.summands for each in scores):
        return ()
    return tuple(
        replace(parts[0], scores=torch.cat([part.scores for part in parts]))
        for parts in zip(*(each.summands for each in scores), strict=True)
    )
