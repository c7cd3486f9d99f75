"""A reward is a weighted sum of its terms; a missing end of sequence changes it by the recipe's rule."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from vantage.models.heads import load_scalar, scores
from vantage.models.sequences import collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import MissingEos, Reward
from vantage.schemas.recipe.terms import LengthPenalty, ModelTerm, VerifierTerm
from vantage.tasks.rewards import length_penalties
from vantage.tasks.rewards.model_scores import ModelScores
from vantage.tasks.rewards.scoring import Scores, Summand, load_scorer, score
from vantage.tasks.rewards.term_scores import Responses, Source
from vantage.tasks.rollout.rollout_models import load_rollout_models
from vantage.tasks.training.networks import fixed_policy

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


@pytest.mark.parametrize("precision, dtype", [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_rewards_models_have_the_type_of_the_stage(
    precision: str, dtype: torch.dtype, pipeline: Any
) -> None:
    job = pipeline.job("policy", precision=precision)
    policy = fixed_policy(job, "init", CPU)
    models = load_rollout_models(job, job.work, policy, role="init", with_reference=False)
    assert models.scorer is not None
    [model] = [each.scores.model for each in models.scorer.terms if isinstance(each.scores, ModelScores)]
    assert {each.dtype for each in model.backbone.parameters()} == {dtype}


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


def test_every_part_of_scores_goes_where_its_row_goes() -> None:
    """Every number is another, so that none can be taken for that of another row, part or token."""
    scores = Scores(
        total=torch.tensor([1.0, 2.0, 3.0]),
        weighted_sum=torch.tensor([4.0, 5.0, 6.0]),
        by_term={"one": torch.tensor([7.0, 8.0, 9.0]), "two": torch.tensor([10.0, 11.0, 12.0])},
        graded=("two",),
        summands=(
            Summand(0.5, torch.tensor([13.0, 14.0, 15.0]), whiten=True),
            Summand(2.0, torch.tensor([16.0, 17.0, 18.0]), shapes=True),
        ),
        steps=torch.arange(20.0, 32.0).view(3, 4),
    )
    found = scores.select(torch.tensor([2, 0]), width=3)
    assert found.total.tolist() == [3.0, 1.0]
    assert found.weighted_sum.tolist() == [6.0, 4.0]
    assert {name: term.tolist() for name, term in found.by_term.items()} == {
        "one": [9.0, 7.0],
        "two": [12.0, 10.0],
    }
    assert [(each.weight, each.scores.tolist()) for each in found.summands] == [
        (0.5, [15.0, 13.0]),
        (2.0, [18.0, 16.0]),
    ]
    assert [(each.whiten, each.shapes) for each in found.summands] == [(True, False), (False, True)]
    assert found.steps is not None
    assert found.steps.tolist() == [[28.0, 29.0, 30.0], [20.0, 21.0, 22.0]]


SAMPLING_EIGHT_TOKENS = cast(
    Source, SimpleNamespace(job=SimpleNamespace(generation=SimpleNamespace(max_response_tokens=8)))
)


def of_lengths(lengths: list[int], prompts: list[str], answers: list[str | None]) -> Responses:
    """Return responses of so many tokens."""
    sequences = collate([[1]] * len(lengths), [[8] * length for length in lengths], pad_token_id=0)
    return Responses(sequences, prompts, [""] * len(lengths), answers, CPU, PassLimits(2))


def test_a_length_is_relative_to_responses_to_the_same_prompt_and_answer() -> None:
    """The prompt ``a`` has lengths 2, 6 and 4 with the answer 1, and 3 and 5 with 2; ``b`` has one."""
    given = of_lengths([2, 3, 6, 5, 4, 7], [*"aaaaab"], ["1", "2", "1", "2", "1", "1"])
    scores = length_penalties.load(LengthPenalty(length="relative"), SAMPLING_EIGHT_TOKENS)
    assert scores(given).tolist() == [0.5, 0.5, -0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (LengthPenalty(length="overlong", limit=10, buffer=0.4), [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]),
        (LengthPenalty(length="overlong", buffer=0.75), [0.0, 0.0, -1 / 6, -0.5, -4 / 6, -1.0]),
        (LengthPenalty(length="linear", limit=5), [-0.8, -1.2, -1.4, -1.8, -2.0, -2.6]),
        (LengthPenalty(length="linear"), [-0.5, -0.75, -0.875, -1.125, -1.25, -1.625]),
    ],
)
def test_limits_and_buffers_of_lengths_are_the_term_s_own(term: LengthPenalty, expected: list[float]) -> None:
    """The longest response that sampling allows has 8 tokens; these have 4, 6, 7, 9, 10 and 13."""
    scores = length_penalties.load(term, SAMPLING_EIGHT_TOKENS)
    given = of_lengths([4, 6, 7, 9, 10, 13], [*"abcdef"], [None] * 6)
    if term.length == "overlong" and term.limit is None:
        given = of_lengths([1, 2, 3, 5, 6, 8], [*"abcdef"], [None] * 6)
    assert scores(given).tolist() == pytest.approx(expected)
