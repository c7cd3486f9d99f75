"""A reward model on test pairs has the numbers of its own stage, hand-worked groups by length, and the data's subgroups."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tasks.conftest import SHARES
from vantage.algorithms.uncertainty import Estimate
from vantage.models.heads import load_scalar, scores
from vantage.schemas.recipe.evaluations import RewardEvaluation
from vantage.schemas.recipe.inputs import Data
from vantage.schemas.recipe.work import PrepareData
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.metrics import estimated_metric_names, headline_metric_names
from vantage.tasks.data.examples import codec_of, read_completions
from vantage.tasks.data.rows import read_rows
from vantage.tasks.reward_evaluation import (
    ENOUGH_PROMPTS,
    SIDES,
    accuracy_by_subgroup,
    gaps_of_outcomes,
    length_differences,
    length_groups,
    worst_accuracy,
)
from vantage.tasks.stages import run_stage

WORK = RewardEvaluation(kind="reward_evaluation", reward_model="reward", data="pairs", microbatch_size=5)


def job_of(pipeline: Any, folder: Path, data: Path, work: Any = WORK) -> StageJob:
    job = pipeline.job("reward", folder=folder)
    inputs = {"reward_model": pipeline.folder("reward"), "data": data}
    return job.model_copy(update={"work": work, "inputs": inputs, "name": work.kind})


@pytest.fixture(scope="module")
def grouped(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the pipeline's pairs as a file whose column ``subgroup`` has three values, and none in some rows."""
    folder = tmp_path_factory.mktemp("grouped")
    rows = [
        row
        for split in ("train", "validation", "test")
        for row in read_rows(pipeline.folder("preferences"), split)
    ]
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            group = (None, 7, "höflich", "frei")[number % 4]
            written = {name: row[name] for name in ("prompt", "chosen", "rejected")}
            file.write(json.dumps(written | ({} if group is None else {"subgroup": group})) + "\n")
    data = Data(source=str(folder / "pairs.jsonl"))
    job = pipeline.job("preferences", folder=folder / "prepared", data=data)
    assert isinstance(job.work, PrepareData)
    assert job.work.shares == SHARES
    run_stage(job)
    return job.output


@pytest.fixture(scope="module")
def measured(
    pipeline: Any, grouped: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[StageJob, StageResult]:
    job = job_of(pipeline, tmp_path_factory.mktemp("measured"), grouped)
    return job, run_stage(job)


def test_it_measures_what_the_reward_model_s_own_stage_measured(pipeline: Any, tmp_path: Path) -> None:
    """The stage that trained it measured the same pairs before its scores were shifted, which no margin sees."""
    metrics = run_stage(job_of(pipeline, tmp_path, pipeline.folder("preferences"))).metrics
    own = pipeline.metrics("reward")
    for name in ("pair_accuracy", "score_gap", "preference_loss"):
        assert metrics[name] == pytest.approx(own[name], abs=1e-5)
    assert metrics["num_subgroups"] == 0
    assert metrics["worst_subgroup_accuracy"] is None


def test_everything_that_is_promised_is_reported(measured: tuple[StageJob, StageResult]) -> None:
    _, result = measured
    assert result.metrics.keys() == headline_metric_names("reward_evaluation")
    assert result.uncertainty.keys() == estimated_metric_names("reward_evaluation")


def test_subgroups_and_calibration_are_those_of_the_scores(measured: tuple[StageJob, StageResult]) -> None:
    """The test computes them row by row, one pair at a time, in plain Python."""
    job, result = measured
    pairs = read_completions(job.inputs["data"], "test", SIDES, codec_of(job, "reward_model"))
    model = load_scalar(job.inputs["reward_model"], role="reward")
    with torch.no_grad():
        margins = [
            (lambda s: (s[0] - s[1]).item())(scores(model, pairs.batch([index])))
            for index in range(len(pairs))
        ]
    names = pairs.subgroups or []
    assert set(names) == {None, "7", "höflich", "frei"}
    table = {each["subgroup"]: each for each in json.loads((job.output / "subgroups.json").read_text())}
    accuracies = {}
    for name in ("7", "höflich", "frei"):
        right = [margin > 0 for margin, each in zip(margins, names, strict=True) if each == name]
        accuracies[name] = sum(right) / len(right)
        assert table[name]["accuracy"] == pytest.approx(accuracies[name])
        assert table[name]["pairs"] == len(right)
        low, high = table[name]["interval"]
        assert low <= accuracies[name] <= high
    large = [accuracies[name] for name in table if table[name]["prompts"] >= 10]
    assert result.metrics["worst_subgroup_accuracy"] == (min(large) if large else None)
    assert result.metrics["num_subgroups"] == 3
    chances = [1 / (1 + math.exp(-margin)) for margin in margins]
    assert result.metrics["brier_score"] == pytest.approx(
        sum((1 - chance) ** 2 for chance in chances) / len(chances), abs=1e-6
    )
    bins = json.loads((job.output / "calibration.json").read_text())
    error = sum(
        each["weight"] * abs(each["accuracy"] - each["mean_confidence"]) for each in bins if each["weight"]
    )
    assert result.metrics["expected_calibration_error"] == pytest.approx(error / len(margins))
    lengths = [
        len(chosen) - len(rejected)
        for chosen, rejected in zip(pairs.response_ids["chosen"], pairs.response_ids["rejected"], strict=True)
    ]
    longer = [margin > 0 for margin, length in zip(margins, lengths, strict=True) if length > 0]
    expected = sum(longer) / len(longer) if longer else None
    assert result.metrics["pair_accuracy_chosen_longer"] == (expected and pytest.approx(expected))


def test_the_size_of_a_micro_batch_changes_nothing(
    pipeline: Any, grouped: Path, measured: tuple[StageJob, StageResult], tmp_path: Path
) -> None:
    whole = run_stage(job_of(pipeline, tmp_path, grouped, WORK.model_copy(update={"microbatch_size": None})))
    for name, value in measured[1].metrics.items():
        assert whole.metrics[name] == (value if value is None else pytest.approx(value, abs=1e-5)), name


def test_groups_by_length_by_hand() -> None:
    """Differences from −4 to 4 have the quartiles −2, 0 and 2. Equal differences stay together."""
    groups = length_groups(torch.tensor([4, -4, 0, 2, -2, 1, -1, 3, -3]))
    assert groups["chosen_longer"].nonzero().flatten().tolist() == [0, 3, 5, 7]
    assert groups["chosen_shorter"].nonzero().flatten().tolist() == [1, 4, 6, 8]
    quarters = [groups[f"length_quarter_{quarter}"].nonzero().flatten().tolist() for quarter in (1, 2, 3, 4)]
    assert quarters == [[1, 4, 8], [2, 6], [3, 5], [0, 7]]
    equal = length_groups(torch.zeros(5, dtype=torch.int64))
    assert [int(equal[f"length_quarter_{quarter}"].sum()) for quarter in (1, 2, 3, 4)] == [5, 0, 0, 0]


def test_a_difference_of_lengths_is_the_chosen_one_s_less_the_rejected_one_s() -> None:
    pairs: Any = SimpleNamespace(response_ids={"chosen": [[1, 2, 3], [1]], "rejected": [[1], [1, 2]]})
    assert length_differences(pairs).tolist() == [2, -1]


def test_a_subgroup_is_as_sure_as_its_prompts() -> None:
    """Four prompts of two equal pairs each, right in 1, 1, 1 and 0: the mean is 3/4 and its error √(3/16/3) = 1/4."""
    correct = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.float64)
    clusters = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 5])
    pairs: Any = SimpleNamespace(subgroups=["a"] * 8 + [None, "b"])
    found = accuracy_by_subgroup(pairs, correct, clusters)
    assert list(found) == ["a", "b"], "a pair without a subgroup is in none"
    assert (found["a"].value, found["a"].num_clusters, found["a"].num_rows) == (0.75, 4, 8)
    assert found["a"].standard_error == pytest.approx(0.25)


def test_the_worst_subgroup_has_enough_prompts_and_not_only_pairs() -> None:
    few = Estimate(0.1, 0.1, num_clusters=ENOUGH_PROMPTS - 1, num_rows=100)
    large = [Estimate(value, 0.1, num_clusters=ENOUGH_PROMPTS, num_rows=20) for value in (0.8, 0.6)]
    assert worst_accuracy({"few": few, "good": large[0], "bad": large[1]}) == 0.6
    assert worst_accuracy({"few": few}) is None


def test_a_pair_with_the_opposite_outcome_is_as_sure_and_wrong() -> None:
    """Two right pairs of confidence 0.9 have a gap of 0.1 each. With the second turned, the gap is (0.1 − 0.9)/2."""
    gaps = gaps_of_outcomes(torch.full((2,), math.log(9), dtype=torch.float64))
    weights = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1]], dtype=torch.float64)
    assert gaps(weights).sum(dim=1).tolist() == pytest.approx([0.1, -0.4])
