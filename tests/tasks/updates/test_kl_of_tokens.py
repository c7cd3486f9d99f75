"""REINFORCE++ with a baseline and the KL of single tokens in the reward (arXiv 2501.03262) equals hand-worked values, an oracle and OpenRLHF."""

import json
from math import nan, sqrt
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.algorithms.kl_credit_cases import COUNT, KlCreditCase, kl_credit_case, shown
from tests.tasks.two_responses import close, learn
from vantage.models.sequences import collate
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.tasks.rewards.scoring import Scores
from vantage.tasks.rollout.rollouts import Sampled, Scored, build_rollout
from vantage.tasks.updates.estimates import estimate

RECORD = Path(__file__).parents[2] / "algorithms" / "kl_credit_by_openrlhf.json"
SWITCHES = {"preset": "reinforce_pp_baseline", "kl_loss_coef": 0.0, "kl_credit": "token"}


def advantages_of(case: KlCreditCase) -> Tensor:
    """Return the stage's advantages (B,T); padding holds NaN, so that nothing may depend on it."""
    switches = SWITCHES if case.kl_coef else {"preset": "reinforce_pp_baseline", "kl_loss_coef": 0.0}
    algorithm = Algorithm.model_validate(
        {**switches, "kl_coef": case.kl_coef, "samples_per_prompt": case.samples}
    )
    lengths = case.mask.sum(dim=1).tolist()
    padded = [each.masked_fill(~case.mask, nan) for each in (case.logprobs, case.ref_logprobs)]
    sampled = Sampled(
        prompts=[f"p{row // case.samples}" for row in range(len(lengths))],
        answers=[None] * len(lengths),
        responses=["a"] * len(lengths),
        sequences=collate([[1, 5]] * len(lengths), [[7] * each for each in lengths], pad_token_id=0),
        ended=torch.ones(len(lengths), dtype=torch.bool),
        sampler_logprobs=padded[0],
    )
    width = max(lengths)
    scores = Scores(total=case.scores, weighted_sum=case.scores, by_term={"main": case.scores})
    rollout = build_rollout(
        Scored(sampled, scores),
        *(each[:, :width] for each in padded),
        returns=algorithm,
        moments=None,
        kl_coef=case.kl_coef,
        max_length=width,
    )
    found = estimate(rollout, algorithm).advantages
    return torch.nn.functional.pad(found, (0, case.mask.shape[1] - width))


def by_the_formula(case: KlCreditCase) -> Tensor:
    """Return (A − mean)/std with A_t = R − mean of the group − β·Σ_{s ≥ t} (log π − log π_ref), in Python's own floats."""
    rows = []
    for row, score in enumerate(case.scores.tolist()):
        first = row // case.samples * case.samples
        group = case.scores.tolist()[first : first + case.samples]
        length = int(case.mask[row].sum())
        gaps = [
            p - q for p, q in zip(case.logprobs[row].tolist(), case.ref_logprobs[row].tolist(), strict=True)
        ]
        rows.append(
            [score - sum(group) / len(group) - case.kl_coef * sum(gaps[t:length]) for t in range(length)]
        )
    tokens = [value for each in rows for value in each]
    mean = sum(tokens) / len(tokens)
    std = sqrt(sum((value - mean) ** 2 for value in tokens) / len(tokens))
    found = torch.zeros_like(case.logprobs)
    for row, values in enumerate(rows):
        found[row, : len(values)] = torch.tensor([(value - mean) / std for value in values])
    return found


def test_two_responses_by_hand() -> None:
    """k1 = 0.2, −0.4 | 0.4, 0.2, −0.2 sums from each token on to −0.2, −0.4 | 0.4, 0, −0.2. Scores of 1 and 0 are ±0.5
    off their mean, and β = 0.1."""
    tokens = [0.5 + 0.02, 0.5 + 0.04, -0.5 - 0.04, -0.5 - 0.0, -0.5 + 0.02]
    mean = -0.092  # their sum is −0.46
    # Deviations 0.612, 0.632, −0.448, −0.408, −0.388; their squares sum to 1.29168
    std = sqrt(0.258336)
    learnt = learn(
        "reinforce_pp_baseline",
        scores=[1.0, 0.0],
        kl_coef=0.1,
        kl_loss_coef=0.0,
        kl_credit="token",
        samples_per_prompt=2,
    )
    assert learnt.advantages == close([(each - mean) / std for each in tokens])


@pytest.mark.slow
def test_a_thousand_rollouts_by_the_formula() -> None:
    for number in range(COUNT):
        case = kl_credit_case(number)
        found, expected = advantages_of(case), by_the_formula(case)
        assert torch.allclose(found[case.mask], expected[case.mask], rtol=1e-6, atol=1e-6), number
        assert not found[~case.mask].any()


@pytest.mark.slow
def test_a_thousand_rollouts_by_openrlhf() -> None:
    """OpenRLHF divides by √max(variance, 1e-8), and this by the standard deviation plus 1e-8."""
    record = json.loads(RECORD.read_text())
    assert len(record["advantages"]) == COUNT
    for number, recorded in enumerate(record["advantages"]):
        case = kl_credit_case(number)
        assert shown(advantages_of(case), case) == pytest.approx(recorded, rel=1e-6, abs=1e-6), number


def test_the_cases_have_kl_and_groups_of_every_size() -> None:
    cases = [kl_credit_case(number) for number in range(COUNT)]
    assert {case.samples for case in cases} == {2, 3, 4, 5}
    assert {case.kl_coef for case in cases} == {0.0, 0.01, 0.1, 1.0}
    assert sum(len(case.scores) > case.samples for case in cases) > COUNT // 2
