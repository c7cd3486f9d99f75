"""The judge of an evaluation or a preference collection is a verifier, a reward or a model, and gets what each needs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vantage.models.heads import load_scalar, scores
from vantage.models.sequences import collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import (
    Judge,
    MissingEos,
    Reward,
)
from vantage.schemas.recipe.terms import ModelTerm
from vantage.tasks.rewards.scoring import Scorer, Term
from vantage.tasks.rewards.term_scores import Responses
from vantage.tasks.rollout.judging import RewardJudge, judge_within, load_judge
from vantage.tasks.rollout.rollouts import Sampled

CPU = torch.device("cpu")
SAMPLED = Sampled(
    prompts=["3 a+4?", "3 a+4?", "5 a-1 b-1?"],
    answers=["yes", None, "no"],
    responses=["a3+4=7 #7", "a3+4=8 #8", "#3"],
    sequences=collate([[1, 5], [1, 6], [1, 7]], [[8, 9, 2], [9, 2], [8, 8, 8]], pad_token_id=0),
    ended=torch.tensor([True, True, False]),
    sampler_logprobs=torch.zeros(3, 3),
)


def judged(job: Any, judge: Judge) -> torch.Tensor:
    return load_judge(job, judge, policies=["candidate"], device=CPU, limits=PassLimits(2))(SAMPLED)


@pytest.mark.slow
def test_a_verifier_says_one_or_zero(pipeline: Any) -> None:
    judgements = judged(pipeline.job("evaluation"), Judge(verifier="arithmetic"))
    assert judgements.dtype == torch.float32
    assert judgements.tolist() == [1.0, 0.0, 1.0]


def test_an_own_verifier_is_given_the_answers(pipeline: Any, tmp_path: Path) -> None:
    (tmp_path / "verifier.py").write_text("def verify(prompt, response, answer): return answer == 'yes'\n")
    (tmp_path / "verifier.json").write_text('{"source": "verifier.py"}')
    job = pipeline.job("evaluation")
    job = job.model_copy(update={"inputs": {**job.inputs, "judge": tmp_path}})
    assert judged(job, Judge(verifier="mine")).tolist() == [1.0, 0.0, 0.0]


def test_a_reward_says_its_scores_with_its_rule_for_missing_ends(pipeline: Any) -> None:
    job = pipeline.job("evaluation")
    reward = Reward(terms=(ModelTerm(model="reward", weight=2.0),), missing_eos=MissingEos(subtract=0.5))
    inputs = {**job.inputs, "reward.main.0": pipeline.folder("reward")}
    job = job.model_copy(update={"inputs": inputs, "rewards": {"main": reward}})
    with torch.no_grad():
        raw = scores(load_scalar(pipeline.folder("reward")), SAMPLED.sequences)
    torch.testing.assert_close(judged(job, Judge(reward="main")), 2.0 * raw - torch.tensor([0.0, 0.0, 0.5]))


def test_a_reward_is_told_everything_about_the_responses() -> None:
    seen: list[Responses] = []

    def scored(given: Responses) -> torch.Tensor:
        seen.append(given)
        return torch.tensor([1.0, 2.0, 4.0])

    talk = [{"role": "user", "content": "3 a+4?"}]
    sampled = replace(SAMPLED, conversations=[talk, None, None])
    scorer = Scorer((Term("mine", 0.5, scored),), MissingEos(replace=-3.0))
    assert RewardJudge(scorer, PassLimits(2))(sampled).tolist() == [0.5, 1.0, -3.0]
    [given] = seen
    assert given.turns == [talk, "3 a+4?", "5 a-1 b-1?"]
    assert (given.prompts, given.responses) == (SAMPLED.prompts, SAMPLED.responses)
    assert given.answers == ["yes", None, "no"]
    assert given.ended.tolist() == [True, True, False]
    assert given.sequences is SAMPLED.sequences and given.limits == PassLimits(2)


def test_a_judge_with_models_gets_other_limits_and_a_verifier_stays_as_it_is(pipeline: Any) -> None:
    verifier = load_judge(
        pipeline.job("evaluation"),
        Judge(verifier="arithmetic"),
        policies=["candidate"],
        device=CPU,
        limits=PassLimits(2),
    )
    assert judge_within(verifier, PassLimits(tokens=7)) is verifier
    reward = RewardJudge(Scorer((Term("mine", 0.5, lambda given: torch.zeros(3)),), None), PassLimits(2))
    assert judge_within(reward, PassLimits(tokens=7)) == replace(reward, limits=PassLimits(tokens=7))
