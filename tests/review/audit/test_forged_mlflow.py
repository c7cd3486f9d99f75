"""An audit finds careful forgeries in MLflow: whose a run is, what it read, and the files that would be loaded."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.tracking import MlflowClient

from tests.review.audit.tampering import Case, assert_found, flip_bit, found, write


def client_of(case: Case) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{case.workspace.root / 'mlflow.db'}")


def run_of_another_run(case: Case) -> None:
    case.sql(
        "UPDATE tags SET value = ? WHERE run_uuid = ? AND key = 'mlflow.parentRunId'",
        case.mlflow_run("sft"),
        case.mlflow_run("policy"),
    )


def dataset_that_was_not_read(case: Case) -> None:
    """Add a dataset that was not read, which the page of the model's training data would show."""
    added = Dataset(name="safe", digest="0" * 36, source_type="local", source="{}")
    tags = [InputTag("vantage.digest", "0" * 64)]
    client_of(case).log_inputs(case.mlflow_run("policy"), [DatasetInput(added, tags)])


def model_of_no_run(case: Case) -> None:
    case.sql(
        "DELETE FROM inputs WHERE destination_type = 'MODEL_OUTPUT' AND source_id = ?",
        case.mlflow_run("policy"),
    )


def file_beside_the_weights(case: Case) -> None:
    (case.copy_of("fake") / "loader.py").write_text("")


def run_in_mlmodel(case: Case) -> None:
    """Change the run in MLmodel. Even fields that depend on when and where the copy was made must have a valid form."""
    path = case.copy_of("fake") / "MLmodel"
    described: dict[str, Any] = yaml.safe_load(path.read_bytes())
    write(path, yaml.safe_dump(described | {"run_id": "../../elsewhere"}).encode())


def index_in_requirements(case: Case) -> None:
    """Add an index to the requirements, in which pip would look for every package."""
    path = case.copy_of("fake") / "requirements.txt"
    write(path, re.sub(rb"(torch==\S+)", rb"\1 --extra-index-url=https://elsewhere", path.read_bytes()))


def one_of_two_examples(case: Case) -> None:
    write(case.copy_of("fake") / "input_example.json", json.dumps(["another"]).encode())


def weights_of_the_reward_model(case: Case) -> None:
    flip_bit(case.copy_of("fake-reward") / "model" / "model.safetensors")


CASES: dict[Callable[[Case], None], tuple[str, str]] = {
    run_of_another_run: ("policy: MLflow", "tag mlflow.parentRunId is"),
    dataset_that_was_not_read: ("policy: MLflow", "dataset input 000000000000: nobody sent it"),
    model_of_no_run: ("policy: MLflow", "is no longer an output of this run in MLflow"),
    file_beside_the_weights: ("policy: copy fake/1", "loader.py: nobody published it"),
    run_in_mlmodel: ("policy: copy fake/1", "MLmodel: run_id is ../../elsewhere"),
    index_in_requirements: (
        "policy: copy fake/1",
        "--extra-index-url=https://elsewhere', which nobody published",
    ),
    one_of_two_examples: ("policy: copy fake/1", "are not one text, as it was published"),
    weights_of_the_reward_model: ("reward: copy fake-reward/1", "model: model.safetensors: sha256 is"),
}
"""A change by hand → the check of the run's audit that finds it, and a part of the finding."""


@pytest.mark.parametrize("tamper", CASES, ids=lambda tamper: tamper.__name__)
def test_it_is_found(case: Case, tamper: Callable[[Case], None]) -> None:
    """An audit finds this forgery in MLflow, and names what was changed."""
    assert_found(case, tamper, *CASES[tamper])


def test_a_version_that_no_longer_says_what_it_holds(case: Case) -> None:
    client_of(case).delete_model_version_tag("fake", "1", "vantage.digest")
    report = case.audit("fake/1")
    assert report.exit_code == 1
    assert "version fake/1: version 1 has no tag vantage.digest" in found(report)[0]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE metrics SET value = 'abc' WHERE key = 'loss'",
        "UPDATE latest_metrics SET value = 'abc' WHERE key = 'loss'",
        "UPDATE runs SET start_time = NULL",
    ],
)
def test_a_value_that_no_column_should_have_is_not_checked(case: Case, statement: str) -> None:
    """SQLite takes any value in any column; a traceback would hide what else is wrong."""
    case.sql(statement)
    report = case.audit()
    assert report.exit_code in (1, 2)
    assert any("cannot be read" in each or "does not answer" in each for each in found(report, "unchecked"))
