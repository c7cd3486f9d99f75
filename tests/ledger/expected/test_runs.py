"""The pure function gives for recorded outboxes what MLflow contained after they were sent."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from tests.ledger.record_golden import SCENARIOS
from tests.ledger.recorded_contents import read_golden
from tests.ledger.told_operations import FINISH_STAGE, OPEN_RUN, OPEN_STAGE
from vantage.ledger.expected.runs import ExpectedRun, expected_runs, row_of
from vantage.ledger.operations import LogMetrics, OpenRun, to_json
from vantage.ledger.replay import Replay, read_replay

OF_THE_SERVER = (
    "mlflow.parentRunId",
    "mlflow.runName",
    "mlflow.source.name",
    "mlflow.source.type",
    "mlflow.loggedArtifacts",
    "vantage.model",
    "vantage.reused_from",
    "vantage.published",
    "vantage.interrupted",
)
"""Tags that name other entries of the server, or say how the run was written."""
MADE_FROM_FILES = {"samples.json", "samples.html"}
"""Files whose content is an artifact's, not an operation's."""
RUNS = [(name, run_id) for name in SCENARIOS for run_id in read_golden(name)["outboxes"]]


def replay_of(outbox: list[dict[str, Any]], run_id: str) -> Replay:
    return read_replay(b"".join(json.dumps(line).encode() + b"\n" for line in outbox), run_id=run_id)


def recorded_runs(golden: Mapping[str, Any], run_id: str) -> dict[str | None, Any]:
    """Return stage → what MLflow contained of its run; None → of the parent run."""
    return {
        place.removeprefix(f"{run_id}/") or None: run
        for place, run in golden["mlflow"]["runs"].items()
        if place.startswith(f"{run_id}/")
    }


@pytest.mark.parametrize("name, run_id", RUNS)
def test_mlflow_contained_what_the_operations_say(name: str, run_id: str) -> None:
    golden = read_golden(name)
    expected = expected_runs(replay_of(golden["outboxes"][run_id], run_id).lines)
    recorded = recorded_runs(golden, run_id)
    assert expected.keys() == recorded.keys()
    for stage, run in recorded.items():
        assert_shows(expected[stage], run)
        model = golden["mlflow"]["models"].get(f"{run_id}/{stage}")
        if model is None:
            assert stage is None or expected[stage].model is None or "vantage.reused_from" in run["tags"]
            continue
        fields = expected[stage].model
        assert fields is not None
        assert (fields.name, fields.kind, fields.params) == (model["name"], model["kind"], model["params"])
        assert fields.tags == {
            tag: value for tag, value in model["tags"].items() if not tag.startswith("mlflow.")
        }


def assert_shows(expected: ExpectedRun, run: Mapping[str, Any]) -> None:
    """Compare one of MLflow's runs, as recorded, with everything that was expected of it."""
    tags = {
        name: value
        for name, value in run["tags"].items()
        if name not in OF_THE_SERVER and not (name.startswith("vantage.parent.") and name.endswith(".run"))
    }
    rows = {
        row_of(name, float(value), time, step)
        for name, points in run["metrics"].items()
        for step, time, value in points
    }
    assert tags == expected.tags
    assert rows == expected.rows | expected.system_rows
    assert run["params"] == expected.params
    assert (run["status"], run["started"], run["ended"]) == (
        expected.status,
        expected.started,
        expected.ended,
    )
    assert run["tags"].get("vantage.interrupted") == expected.interrupted
    assert set(run["files"]) - MADE_FROM_FILES == expected.files
    datasets = {each["tags"]["vantage.digest"]: each for each in run["datasets"]}
    assert {
        digest: {name: value for name, value in each["tags"].items() if name != "vantage.role"}
        for digest, each in datasets.items()
    } == expected.datasets
    for digest, each in datasets.items():
        fields = {name: each[name] for name in ("name", "digest", "source", "profile")}
        assert fields in expected.dataset_fields[digest]


def test_numbers_that_are_not_finite_are_those_that_mlflow_gives_back() -> None:
    name, time, step, value = row_of("loss", float("nan"), 1, 2)
    assert (name, time, step) == ("loss", 1, 2)
    assert math.isnan(value)
    assert row_of("loss", math.nan, 1, 2) == (name, time, step, value), "two of them are equal"
    assert row_of("kl", float("-inf"), 1, 2) == ("kl", 1, 2, -1.7976931348623157e308)


def test_a_metric_of_the_artifact_comes_after_the_curve_of_its_name() -> None:
    made = FINISH_STAGE.artifact
    assert made is not None
    artifact = made.model_copy(update={"metrics": {"loss": 0.25, "test_nll": 0.5}})
    finished = FINISH_STAGE.model_copy(update={"artifact": artifact})
    curve = LogMetrics(stage="sft", rows=(("loss", 1.0, 5, 3), ("loss", 0.5, 6, 4)))
    operations = (OPEN_RUN, OPEN_STAGE, curve, finished)
    expected = expected_runs(replay_of([to_json(each) for each in operations], OPEN_RUN.run_id).lines)
    steps = {(name, step, value) for name, _, step, value in expected["sft"].rows}
    assert steps == {("loss", 3, 1.0), ("loss", 4, 0.5), ("loss", 5, 0.25), ("test_nll", 0, 0.5)}


def test_a_run_that_only_began_is_running() -> None:
    run_id = "0001-tiny-aaaaaa"
    opening = OpenRun(time=1, run_id=run_id, experiment="tiny", name="tiny", recipe={"seed": 17})
    rows = LogMetrics(stage="sft", rows=(("loss", 1.0, 5, 0), ("loss", 0.5, 4, 1)))
    expected = expected_runs(replay_of([to_json(opening), to_json(rows)], run_id).lines)
    assert expected == {
        None: ExpectedRun(
            tags={"vantage.run_id": run_id, "vantage.recipe": "tiny", "vantage.status": "running"},
            params={"seed": "17"},
            started=1,
        ),
        "sft": ExpectedRun(
            tags={"vantage.run_id": run_id, "vantage.stage": "sft"},
            rows={("loss", 5, 0, 1.0), ("loss", 4, 1, 0.5)},
            started=4,
        ),
    }
