"""A reward is a weighted sum of its terms; a missing end of sequence changes it by the recipe's rule."""

from typing import Any

import pytest
import torch

from vantage.models.heads import load_scalar, scores
from vantage.models.sequences import collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import MissingEos, Reward
from vantage.schemas.recipe.terms import ModelTerm, VerifierTerm
from vantage.tasks.rewards.scoring import load_scorer, score

CPU = torch.device("cpu")
PROMPTS = ["3 a+4?", "3 a+4?", "5 a-1 b-1?"]
RESPONSES = ["a3+4=7 #7", "a3+4=8 #8", "#3"]


def scored(pipeline: Any, reward: Reward) -> Any:
    job = pipeline.job("policy").model_copy(update={"rewards": {"main": reward}})
    roles = {
        f"reward.main.{index}": pipeline.folder("reward")
        for index, term in enumerate(reward.terms)
        if isinstance(term, ModelTerm)
    }
    job = job.model_copy(update={"inputs": {**job.inputs, **roles}})
    scorer = load_scorer(job, "main", tokenizers_of=["init"], device=CPU)
    sequences = collate([[1, 5], [1, 6], [1, 7]], [[8, 9, 2], [9, 2], [8, 8, 8]], pad_token_id=0)
    ended = torch.tensor([True, True, False])
    return sequences, score(
        scorer,
        sequences,
        prompts=PROMPTS,
        responses=RESPONSES,
        answers=[None] * 3,
        ended=ended,
        limits=PassLimits(2),
    )


def test_a_verifier_gives_one_for_right_and_zero_for_wrong(pipeline: Any) -> None:
    _, result = scored(pipeline, Reward(terms=(VerifierTerm(verifier="arithmetic", weight=2.0),)))
    assert result.total.tolist() == [2.0, 0.0, 2.0]
    assert result.by_term["arithmetic"].tolist() == [1.0, 0.0, 1.0]


def test_terms_are_added_with_their_weights(pipeline: Any) -> None:
    terms = (ModelTerm(model="reward", weight=0.5), VerifierTerm(verifier="arithmetic", weight=3.0))
    sequences, result = scored(pipeline, Reward(terms=terms))
    model = load_scalar(pipeline.folder("reward"))
    with torch.no_grad():
        expected = 0.5 * scores(model, sequences) + 3.0 * torch.tensor([1.0, 0.0, 1.0])
    torch.testing.assert_close(result.total, expected)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(MissingEos(subtract=0.75), [1.0, 0.0, 0.25]), (MissingEos(replace=-1.0), [1.0, 0.0, -1.0])],
)
def test_a_missing_end_is_paid_for(pipeline: Any, rule: MissingEos, expected: list[float]) -> None:
    _, result = scored(pipeline, Reward(terms=(VerifierTerm(verifier="arithmetic"),), missing_eos=rule))
    assert result.total.tolist() == expected
