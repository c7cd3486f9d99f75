"""Several reward models give one score, from each model's own scores, also in a policy stage."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vantage.ledger.journal import read
from vantage.models.heads import load_scalar, scores
from vantage.models.sequences import collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import Ensemble, MissingEos, Reward
from vantage.schemas.recipe.terms import ModelTerm, VerifierTerm
from vantage.schemas.records.job import StageJob
from vantage.tasks.rewards.scoring import load_scorer, score
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL

CPU = torch.device("cpu")
MODELS = (ModelTerm(model="reward"), ModelTerm(model="second"), ModelTerm(model="third"))


@pytest.fixture(scope="module")
def members(pipeline: Any) -> list[Path]:
    """Return three reward models of different seeds."""
    folders = [pipeline.folder("reward")]
    for seed in (6, 7):
        job = pipeline.job("reward").model_copy(update={"seed": seed})
        run_stage(job)
        folders.append(job.output)
    return folders


def job_of(pipeline: Any, members: list[Path], reward: Reward, **changes: Any) -> StageJob:
    """Return the policy stage with this reward, whose models come first."""
    job: StageJob = pipeline.job("policy", **changes)
    roles = {f"reward.main.{index}": folder for index, folder in enumerate(members)}
    digests = {role: f"{index:064x}" for index, role in enumerate(roles)}
    update = {
        "rewards": {"main": reward},
        "inputs": {**job.inputs, **roles},
        "digests": {**job.digests, **digests},
    }
    return job.model_copy(update=update)


@pytest.mark.parametrize("combine", ["mean", "min", "mean_minus_std"])
def test_the_score_is_that_of_the_models_together(pipeline: Any, members: list[Path], combine: Any) -> None:
    """The score equals one in float64 from each model's own scores, plus the verifier's term and the rule for a missing
    EOS.
    """
    reward = Reward(
        terms=(*MODELS, VerifierTerm(verifier="arithmetic", weight=3.0)),
        ensemble=Ensemble(combine=combine, weight=2.0, **({"k": 0.7} if combine == "mean_minus_std" else {})),
        missing_eos=MissingEos(subtract=5.0),
    )
    scorer = load_scorer(job_of(pipeline, members, reward), "main", tokenizers_of=["init"], device=CPU)
    sequences = collate([[1, 5], [1, 6], [1, 7]], [[8, 9, 2], [9, 2], [8, 8, 8]], pad_token_id=0)
    found = score(
        scorer,
        sequences,
        prompts=["3 a+4?", "3 a+4?", "5 a-1 b-1?"],
        responses=["a3+4=7 #7", "a3+4=8 #8", "#3"],
        answers=[None] * 3,
        ended=torch.tensor([True, True, False]),
        limits=PassLimits(2),
    )
    with torch.no_grad():
        each = torch.stack([scores(load_scalar(folder), sequences) for folder in members]).double()
    assert len(set(each[:, 0].tolist())) == 3
    mean = each.sum(dim=0) / 3
    deviation = ((each - mean).square().sum(dim=0) / 3).sqrt()
    one = {"mean": mean, "min": each.amin(dim=0), "mean_minus_std": mean - 0.7 * deviation}[combine]
    expected = 2.0 * one + 3.0 * torch.tensor([1.0, 0.0, 1.0]) - 5.0 * torch.tensor([0.0, 0.0, 1.0])
    torch.testing.assert_close(found.total.double(), expected, atol=1e-6, rtol=1e-6)
    assert found.by_term.keys() == {"reward", "second", "third", "arithmetic"}


@pytest.mark.slow
def test_a_policy_learns_from_the_ensemble_and_reports_its_disagreement(
    pipeline: Any, members: list[Path]
) -> None:
    """Three times the same model is that model, and never disagrees."""
    alone = job_of(pipeline, members[:1], Reward(terms=MODELS[:1]), iterations=2)
    thrice = job_of(
        pipeline, members[:1] * 3, Reward(terms=MODELS, ensemble=Ensemble(combine="min")), iterations=2
    )
    differing = job_of(
        pipeline, members, Reward(terms=MODELS, ensemble=Ensemble(combine="min")), iterations=2
    )
    results = [run_stage(job) for job in (alone, thrice, differing)]
    assert results[1].metrics == results[0].metrics
    curves = [[entry.metrics for entry in read(job.scratch / JOURNAL)] for job in (alone, thrice, differing)]
    assert all("reward_disagreement" not in metrics for metrics in curves[0])
    assert [metrics["reward_disagreement"] for metrics in curves[1]] == [0.0, 0.0]
    assert all(metrics["reward_disagreement"] > 0 for metrics in curves[2])
    assert all(
        metrics["score_mean"]
        <= min(metrics[f"score_mean_{name}"] for name in ("reward", "second", "third")) + 1e-6
        for metrics in curves[2]
    )


@pytest.mark.parametrize(
    ("terms", "ensemble", "said"),
    [
        (
            MODELS[:1],
            {"combine": "min"},
            "an ensemble combines two reward models or more, and terms have 1; add models",
        ),
        (
            (MODELS[0], ModelTerm(model="second", weight=0.5)),
            {"combine": "min"},
            "the models of an ensemble count equally, and second has weight=0.5",
        ),
        (
            MODELS,
            {"combine": "min", "k": 2.0},
            "k=2 is read by combine: mean_minus_std alone, and combine is min",
        ),
    ],
)
def test_what_is_no_ensemble_is_refused(terms: Any, ensemble: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Reward(terms=terms, ensemble=ensemble)


def test_a_reward_without_an_ensemble_is_as_it_was() -> None:
    assert "ensemble" not in Reward(terms=MODELS).model_dump(mode="json")
