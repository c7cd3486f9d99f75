"""Responses are compared with those of the stage's first policy: wins, ties and win rates equal hand-worked ones and another optimiser's."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit

from vantage.algorithms.swapped_verdicts import swapped_verdicts
from vantage.models.sequences import collate
from vantage.tasks.rollout import against_init
from vantage.tasks.rollout.against_init import (
    first_responses,
    order_disagreement,
    verdicts_of_model,
    win_rates,
    wins_by_score,
    with_scores,
)
from vantage.tasks.rollout.rollouts import Sampled


def sampled(texts: list[str], lengths: list[int]) -> Sampled:
    count = len(texts)
    sequences = collate([[1]] * count, [[5] * length for length in lengths], pad_token_id=0)
    return Sampled(
        prompts=[f"prompt {k}" for k in range(count)],
        answers=[None] * count,
        responses=texts,
        sequences=sequences,
        ended=torch.ones(count, dtype=torch.bool),
        sampler_logprobs=torch.zeros(sequences.response_ids.shape),
    )


def test_a_model_is_asked_about_the_pairs_that_differ_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def prefers_longer_and_what_stands_first(
        _: Any, prompts: list[str], ours: list[str], theirs: list[str]
    ) -> Any:
        asked.append((prompts, ours, theirs))
        difference = torch.tensor(
            [float(len(a) - len(b)) for a, b in zip(ours, theirs, strict=True)], dtype=torch.float64
        )
        return swapped_verdicts(candidate_first=difference + 1.5, baseline_first=-difference + 1.5)

    monkeypatch.setattr(against_init, "judge_texts", prefers_longer_and_what_stands_first)
    first = first_responses(sampled(["aa", "bb", "cc", "dd"], [2, 2, 2, 2]))
    now = sampled(["aaaa", "bb", "c", ""], [4, 2, 1, 1])
    # by 2 longer: both orders prefer it; the same: not asked; by 1 shorter: both orders prefer the first one; by 2: it loses
    verdicts = verdicts_of_model(None, now, first)  # type: ignore[arg-type]
    assert verdicts.wins.tolist() == [1.0, 0.5, 0.5, 0.0]
    assert verdicts.disagree.tolist() == [False, False, True, False]
    # one of the three that differ
    assert order_disagreement(verdicts, now, first) == {"watch_order_disagreement": pytest.approx(1 / 3)}
    prompts = ["prompt 0", "prompt 2", "prompt 3"]
    assert asked == [(prompts, ["aaaa", "c", ""], ["aa", "cc", "dd"])]


def test_a_reward_prefers_the_higher_score_and_ties_equal_responses() -> None:
    before = sampled(["a", "b", "c", "d"], [1, 1, 1, 1])
    first = with_scores(first_responses(before), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    now = sampled(["x", "y", "z", "d"], [1, 1, 1, 1])
    scores = torch.tensor(
        [0.2, 0.1, 0.3, 0.4 + 1e-7], dtype=torch.float64
    )  # the last is the same response again
    assert wins_by_score(scores, now, first).tolist() == [1.0, 0.0, 0.5, 0.5]


def test_a_text_that_was_cut_off_is_another_response() -> None:
    first = first_responses(sampled(["a", "b"], [2, 2]))
    assert against_init.are_equal(sampled(["a", "b"], [2, 3]), first).tolist() == [True, False]


@pytest.mark.parametrize("seed", range(3))
def test_the_rate_at_equal_lengths_is_that_of_another_optimiser(seed: int) -> None:
    """The rate of Dubois et al. is σ(θ), where the model σ(θ + φ·tanh(d/s)) is fitted with φ²/2 added to the loss. Here
    scipy's Nelder-Mead finds θ.
    """
    chance = np.random.default_rng(seed)
    lengths, before = chance.integers(1, 9, 12), chance.integers(1, 9, 12)
    differences = (lengths - before).astype(float)
    wins = np.where(chance.random(12) < expit(differences / 3), 1.0, 0.5)
    wins[:3] = 0.0

    def loss(given: Any) -> float:
        p = expit(given[0] + given[1] * np.tanh(differences / differences.std(ddof=1)))
        return float(-(wins * np.log(p) + (1 - wins) * np.log(1 - p)).sum() + given[1] ** 2 / 2)

    theta = minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-14}).x[0]
    now = sampled([""] * 12, lengths.tolist())
    first = first_responses(sampled([""] * 12, before.tolist()))
    found = win_rates(torch.tensor(wins), now, first)
    assert found["watch_win_rate"] == pytest.approx(wins.mean())
    assert found["watch_length_controlled_win_rate"] == pytest.approx(expit(theta), abs=1e-6)
    assert found["watch_length_controlled_win_rate"] != pytest.approx(wins.mean(), abs=1e-3)
