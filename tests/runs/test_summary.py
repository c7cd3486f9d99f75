"""The end of a run names what was compared, where models lie, and how to ask the policy."""

import shlex
from pathlib import Path

import pytest

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.runs.record import RunRecord, StageRecord
from vantage.runs.run import read_runs
from vantage.runs.summary import (
    commands_for_policy,
    comparison,
    headline_metrics,
    headline_of,
    model_folders,
    printed_intervals,
    samples_heading,
)
from vantage.runs.workspace import Workspace
from vantage.schemas.records.uncertainty import Uncertainty

pytestmark = pytest.mark.usefixtures("unsent")

EVALUATED: dict[str, float | None] = {
    "accuracy": 0.9112,
    "baseline_accuracy": 0.6,
    "accuracy_gain": 0.3112,
    "accuracy_gain_standard_error": 0.0123,
    "greedy_accuracy": 0.9961,
    "baseline_greedy_accuracy": 1.0,
}


KNOWN = {
    "accuracy": Uncertainty(n=256, rows=256, standard_error=0.0178),
    "accuracy_gain": Uncertainty(n=256, rows=256, standard_error=0.0308, differing=0.3404),
    "greedy_accuracy": Uncertainty(n=256, rows=256, standard_error=0.0039),
    "baseline_greedy_accuracy": Uncertainty(n=256, rows=256, standard_error=0.0),
}


def test_each_number_has_its_interval() -> None:
    """Wilson's intervals of 233, 255 and 256 of 256 are 0.870 to 0.940, 0.978 to 0.999 and 0.985 to 1. The baseline's
    accuracy has no interval, since its uncertainty is not known."""
    intervals = printed_intervals(EVALUATED, KNOWN, ())
    assert set(intervals) == set(KNOWN)
    low, high = intervals["accuracy_gain"]
    stage = StageRecord(status="completed", metrics=EVALUATED, intervals=intervals)
    assert comparison(stage) == (
        f"accuracy 0.911 [0.870, 0.940] against 0.600 (+0.311 [{low:.2f}, {high:.2f}]); "
        "greedy 0.996 [0.978, 0.999] against 1.000 [0.985, 1.000]"
    )
    gated = StageRecord(metrics={"pair_accuracy": 0.75}, intervals={"pair_accuracy": (0.5, 0.9)})
    assert headline_of(gated) == "pair_accuracy 0.75 [0.50, 0.90]"
    all_right = gated.model_copy(
        update={"metrics": {"pair_accuracy": 1.0}, "intervals": {"pair_accuracy": (0.974, 1.0)}}
    )
    assert headline_of(all_right) == "pair_accuracy 1.000 [0.974, 1.000]"


def test_an_evaluation_shows_both_models_and_their_difference() -> None:
    """The evaluation was recorded by an earlier version, without intervals."""
    told = "accuracy 0.911 against 0.600 (+0.311); greedy 0.996 against 1.000"
    stage = StageRecord(status="completed", metrics=EVALUATED)
    assert comparison(stage) == headline_of(stage) == told
    assert "intervals" not in stage.model_dump()
    by_score: dict[str, float | None] = {
        name.replace("accuracy", "score"): value for name, value in EVALUATED.items()
    }
    assert comparison(StageRecord(metrics=by_score)) == told.replace("accuracy", "score")
    assert comparison(StageRecord(metrics={"loss": 1.0})) == ""
    asked = StageRecord(metrics={"win_rate": 0.54, "tied_pairs": 0.3, "order_disagreement": 0.21})
    assert comparison(asked) == headline_of(asked) == "win rate 0.540 (orders disagree 0.210)"
    beside = {"win_rate": 0.9, "preference_win_rate": 0.54, "order_disagreement": None}
    both = StageRecord(metrics={**stage.metrics, **beside})
    assert comparison(both) == f"{told}  win rate 0.540 (orders disagree undefined)"
    by_two = StageRecord(metrics={**by_score, **EVALUATED})
    assert comparison(by_two) == f"{told}  {told.replace('accuracy', 'score')}"


@pytest.fixture
def record(workspace: Workspace, recipe_file: Path) -> RunRecord:
    """Return a run of fake stages that has ended."""
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
    return read_runs(workspace)[0]


def test_every_trained_model_has_a_folder_that_is_there(record: RunRecord, workspace: Workspace) -> None:
    folders = model_folders(record, workspace.storage)
    assert list(folders) == ["sft", "reward", "value", "policy"]
    assert all((folder / "manifest.json").is_file() for folder in folders.values())


def test_the_policy_is_asked_and_exported_where_there_is_one(record: RunRecord) -> None:
    with_prompt = StageRecord(samples=({"prompt": "it's 1+1?"},))
    told = record.model_copy(update={"stages": {**record.stages, "evaluation": with_prompt}})
    ask, export = commands_for_policy(told, "my runs").values()
    assert shlex.split(ask)[1:] == ["sample", record.run_id, "it's 1+1?", "--workspace", "my runs"]
    assert shlex.split(export)[1:] == ["export", record.run_id, "FOLDER", "--workspace", "my runs"]
    nothing = dict.fromkeys(record.stages, StageRecord())
    assert commands_for_policy(record.model_copy(update={"stages": nothing}), "my runs") == {}


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["two\nlines", "-1+2?", "long " * 20])
def test_a_prompt_that_is_no_short_line_is_left_out_of_the_command(record: RunRecord, prompt: str) -> None:
    with_prompt = StageRecord(samples=({"prompt": prompt},))
    told = record.model_copy(update={"stages": {**record.stages, "evaluation": with_prompt}})
    assert shlex.split(commands_for_policy(told, "w")["ask"])[1:] == [
        "sample",
        record.run_id,
        "--workspace",
        "w",
    ]


def test_samples_say_whose_they_are(record: RunRecord) -> None:
    assert samples_heading(record, "evaluation").startswith(
        "evaluation: sft (baseline) and policy (candidate)"
    )


def test_a_measure_that_is_zero_is_a_headline_and_a_split_without_rows_is_none() -> None:
    metrics = {"train_rows": 0.0, "test_nll": 0.0, "test_rows": 12.0, "other": 1.0}
    assert headline_metrics(metrics, ()) == ["test_nll", "test_rows"]
    assert headline_metrics({"mean": None, "test_rows": 0.0}, ()) == ["mean"]
