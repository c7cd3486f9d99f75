"""Compare a policy's responses with those of the policy that its stage started from, to the same prompts."""

from dataclasses import replace

import torch
from torch import Tensor

from vantage.algorithms.length_control import length_controlled_win_rate
from vantage.algorithms.swapped_verdicts import SwappedVerdicts
from vantage.algorithms.wins import wins_of
from vantage.tasks.rollout.prompted_judge import PromptedJudge, encoded_questions, judge_texts
from vantage.tasks.rollout.rollouts import Sampled
from vantage.tasks.training.stage_state import FirstResponses

WIN_RATE, LENGTH_CONTROLLED = "watch_win_rate", "watch_length_controlled_win_rate"
ORDER_DISAGREEMENT = "watch_order_disagreement"


def first_responses(sampled: Sampled) -> FirstResponses:
    """Return the facts to keep about the responses of a stage's first policy."""
    return FirstResponses(texts=tuple(sampled.responses), lengths=tuple(sampled.sequences.lengths.tolist()))


def with_scores(first: FirstResponses, scores: Tensor) -> FirstResponses:
    """Return the first responses with a judge's scores (B,) of them."""
    return replace(first, scores=tuple(scores.tolist()))


def are_equal(sampled: Sampled, first: FirstResponses) -> Tensor:
    """Return whether each response (B,) equals the first policy's. Such a pair is a tie, although two batches round
    differently."""
    now = first_responses(sampled)
    ours, theirs = (zip(each.texts, each.lengths, strict=True) for each in (now, first))
    return torch.tensor([one == other for one, other in zip(ours, theirs, strict=True)])


def verdicts_of_model(judge: PromptedJudge, sampled: Sampled, first: FirstResponses) -> SwappedVerdicts:
    """Return the judge's verdicts on the responses beside the first ones; equal responses are ties without a question.

    Raises:
        UnusableJudge: a question with its answer is longer than the model reads.
    """
    same = are_equal(sampled, first)
    rows = [row for row, is_same in enumerate(same.tolist()) if not is_same]
    wins, disagree = torch.full(same.shape, 0.5, dtype=torch.float64), torch.zeros_like(same)
    if not rows:  # the first measurement has only equal pairs: check the length of all before training
        encoded_questions(judge, sampled.prompts, first.texts, first.texts)
    else:
        prompts, ours, theirs = (
            [texts[row] for row in rows] for texts in (sampled.prompts, sampled.responses, first.texts)
        )
        verdicts = judge_texts(judge, prompts, ours, theirs)
        wins[rows], disagree[rows] = verdicts.wins, verdicts.disagree
    return SwappedVerdicts(wins=wins, disagree=disagree)


def order_disagreement(
    verdicts: SwappedVerdicts, sampled: Sampled, first: FirstResponses
) -> dict[str, float]:
    """Return the share of pairs of different responses that the judge decides by their order; empty if all pairs are
    equal."""
    differ = ~are_equal(sampled, first)
    return {ORDER_DISAGREEMENT: verdicts.disagree[differ].double().mean().item()} if differ.any() else {}


def wins_by_score(scores: Tensor, sampled: Sampled, first: FirstResponses) -> Tensor:
    """Return (B,), float64: 1 where a response scores (B,) higher than the first one, 0 where lower, ½ where equal."""
    before = torch.tensor(first.scores, dtype=torch.float64)
    difference = scores.double() - before
    return wins_of(difference.masked_fill(are_equal(sampled, first), 0.0))


def win_rates(wins: Tensor, sampled: Sampled, first: FirstResponses) -> dict[str, float]:
    """Return the win rate, and the win rate at equal lengths, without undefined ones."""
    differences = sampled.sequences.lengths.cpu() - torch.tensor(first.lengths)
    controlled = length_controlled_win_rate(wins, differences, torch.ones(1, len(wins)))
    found = {WIN_RATE: wins.mean().item(), LENGTH_CONTROLLED: controlled.item()}
    return {name: value for name, value in found.items() if value == value}
