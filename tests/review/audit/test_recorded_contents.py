"""The audit of MLflow's entries agrees with golden files, whose contents the writer under test did not write."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from tests.ledger.record_golden import SCENARIOS
from tests.ledger.recorded_contents import EXPERIMENT, read_golden, restore
from vantage.ledger.to_mlflow.server import Server
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.mlflow_claims import mlflow_check
from vantage.review.audit.versions import version_checks
from vantage.runs.workspace import Workspace
from vantage.schemas.records.audit import Check

FIRST, SECOND = "0001-tiny-aaaaaa", "0002-tiny-bbbbbb"
Golden = dict[str, Any]


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database with MLflow's tables and nothing in them."""
    folder = tmp_path_factory.mktemp("empty")
    Server(f"sqlite:///{folder / 'mlflow.db'}", artifacts=folder / "mlartifacts")
    return folder / "mlflow.db"


@pytest.fixture
def restored(
    empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Golden], Evidence]:
    """Return a function that restores a golden file's outboxes into a workspace, and its contents of MLflow by MLflow's
    own client.
    """
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def evidence_of(golden: Golden) -> Evidence:
        shutil.copy(empty_database, tmp_path / "mlflow.db")
        client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
        restore(golden["mlflow"], client, artifacts=tmp_path / "mlartifacts")
        experiment = client.get_experiment_by_name(EXPERIMENT)
        assert experiment is not None
        destination = f"{experiment.experiment_id} {EXPERIMENT} {experiment.creation_time}"
        for run_id, operations in golden["outboxes"].items():
            folder = tmp_path / "runs" / run_id / "ledger"
            folder.mkdir(parents=True)
            outbox = b"".join(json.dumps(each).encode() + b"\n" for each in operations)
            (folder / "outbox.jsonl").write_bytes(outbox)
            (folder / "sent.json").write_text(json.dumps({destination: len(outbox)}))
        return Evidence(Workspace(tmp_path))

    return evidence_of


@contextmanager
def all_checks(evidence: Evidence, golden: Golden) -> Iterator[dict[str, Check]]:
    """Yield ``RUN/STAGE`` → the check of MLflow's run of it."""
    with evidence:
        places = (place.split("/", 1) for place in golden["mlflow"]["runs"])
        yield {f"{run_id}/{stage}": mlflow_check(evidence, run_id, stage or None) for run_id, stage in places}


@pytest.mark.parametrize("name", SCENARIOS)
def test_recorded_contents_agree(name: str, restored: Callable[[Golden], Evidence]) -> None:
    """The audit finds no difference in contents that were recorded from MLflow."""
    golden = read_golden(name)
    with all_checks(restored(golden), golden) as checks:
        assert {
            place: (check.outcome, check.detail) for place, check in checks.items() if check.outcome != "ok"
        } == {}
        assert len(checks) == len(golden["mlflow"]["runs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_runs_of_a_version_that_recorded_no_verdict_agree(
    name: str, restored: Callable[[Golden], Evidence]
) -> None:
    golden = read_golden(name)
    for operations in golden["outboxes"].values():
        for operation in operations:
            operation.pop("conclusion", None)
    for place, run in golden["mlflow"]["runs"].items():
        run["tags"].pop("vantage.conclusion", None)
        if place.endswith("/"):
            run["tags"].pop("vantage.published", None)
    with all_checks(restored(golden), golden) as checks:
        assert {check.outcome for check in checks.values()} == {"ok"}


def verdict_on_the_run(runs: Golden, models: Golden) -> None:
    runs[f"{FIRST}/"]["tags"]["vantage.conclusion"] = "better: accuracy +0.900 (0.89 to 0.91)"


def tag_of_a_digest(runs: Golden, models: Golden) -> None:
    runs[f"{FIRST}/sft"]["tags"]["vantage.digest"] = "0" * 64


def tag_of_another_status(runs: Golden, models: Golden) -> None:
    runs[f"{FIRST}/"]["tags"]["vantage.status"] = "failed"


def tag_of_energy_removed(runs: Golden, models: Golden) -> None:
    del runs[f"{FIRST}/sft"]["tags"]["vantage.energy.gpu_joules"]


def tag_of_a_gate_added(runs: Golden, models: Golden) -> None:
    runs[f"{FIRST}/evaluation"]["tags"]["vantage.gate.accuracy"] = "accuracy 0.500 >= 0.1: passed"


def param_of_the_recipe(runs: Golden, models: Golden) -> None:
    runs[f"{FIRST}/"]["params"]["seed"] = "18"


def value_of_a_curve(runs: Golden, models: Golden) -> None:
    runs[f"{FIRST}/sft"]["metrics"]["loss"][2][2] = 0.25


def headline_metric_removed(runs: Golden, models: Golden) -> None:
    del runs[f"{FIRST}/evaluation"]["metrics"]["accuracy"]


def metric_of_the_parent_added(runs: Golden, models: Golden) -> None:
    runs[f"{FIRST}/"]["metrics"]["sft.accuracy"] = [[0, 1_700_000_100_000, 0.9]]


def context_of_a_dataset(runs: Golden, models: Golden) -> None:
    runs[f"{FIRST}/sft"]["datasets"][0]["tags"]["mlflow.data.context"] = "evaluation"


def parent_of_a_model(runs: Golden, models: Golden) -> None:
    models[f"{FIRST}/sft"]["params"]["parent.init"] = "another 000000000000"


CHANGES: dict[Callable[[Golden, Golden], None], tuple[str, str]] = {
    tag_of_a_digest: ("sft", "tag vantage.digest is “0000"),
    verdict_on_the_run: ("", "tag vantage.conclusion is “better: accuracy +0.900"),
    tag_of_another_status: ("", "tag vantage.status is “failed”, and was sent as “completed”"),
    tag_of_energy_removed: (
        "sft",
        "tag vantage.energy.gpu_joules is absent, and was sent as “1234.6”",
    ),
    tag_of_a_gate_added: ("evaluation", "tag vantage.gate.accuracy is “accuracy 0.500 >= 0.1: passed”"),
    param_of_the_recipe: ("", "param seed is “18”, and was sent as “17”"),
    value_of_a_curve: ("sft", "metric loss at step 2 is 0.25, and was sent as 0.6666666666666666"),
    headline_metric_removed: ("evaluation", "metric accuracy at step 0 is missing, and was sent as 0.5"),
    metric_of_the_parent_added: ("", "metric sft.accuracy at step 0 is 0.9, which nobody sent"),
    context_of_a_dataset: ("sft", "mlflow.data.context is “evaluation”, and was sent as “training”"),
    parent_of_a_model: ("sft", "params.parent.init is “another 000000000000”, and was sent as “model"),
}
"""Change of the file ``trained`` → the stage whose check is wrong, and what it says."""


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_golden_file_fails_the_audit(
    change: Callable[[Golden, Golden], None], restored: Callable[[Golden], Evidence]
) -> None:
    golden, (stage, said) = read_golden("trained"), CHANGES[change]
    change(golden["mlflow"]["runs"], golden["mlflow"]["models"])
    with all_checks(restored(golden), golden) as checks:
        check = checks[f"{FIRST}/{stage}"]
        assert (check.outcome, said in check.detail) == ("wrong", True), check.detail


def test_a_version_shows_the_gates_that_the_golden_file_has(restored: Callable[[Golden], Evidence]) -> None:
    golden = read_golden("reused")
    with restored(golden) as evidence:
        [version] = evidence.server.versions("tiny")
        check = next(version_checks(evidence, version))
        assert (check.outcome, check.detail) == ("ok", f"published by run {SECOND}")


def test_a_changed_gate_of_a_version_fails_the_audit(restored: Callable[[Golden], Evidence]) -> None:
    golden = read_golden("reused")
    tags = golden["mlflow"]["registered"]["tiny"]["versions"]["1"]["tags"]
    assert tags["vantage.gate.policy.test_nll"] == "test_nll 0.400 <= 0.1: CLOSED"
    tags["vantage.gate.policy.test_nll"] = "test_nll 0.400 <= 9: passed"
    with restored(golden) as evidence:
        [version] = evidence.server.versions("tiny")
        check = next(version_checks(evidence, version))
        assert check.outcome == "wrong"
        assert "tag vantage.gate.policy.test_nll is “test_nll 0.400 <= 9: passed”" in check.detail
