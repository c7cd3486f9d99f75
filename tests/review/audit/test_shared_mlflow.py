"""Several workspaces share one MLflow: what another workspace's run has changed is not checked here, and a forgery is found."""

import json
import shutil
from pathlib import Path

import pytest

from tests.review.audit.conftest import run_once, write_recipe
from tests.review.audit.tampering import Case, edit_lines, found
from vantage.ledger.expected.answer_tags import ALIAS
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace

TAG = f"{ALIAS}champion"


def run_elsewhere(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Case:
    """Run the recipe in a workspace of its own, with data at another path, and the MLflow of the case."""
    folder.mkdir()
    with monkeypatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{case.workspace.root / 'mlflow.db'}")
        run_once(Workspace(folder / "workspace"), write_recipe(folder), *overrides)
    [record] = read_runs(Workspace(folder / "workspace"))
    return Case(Workspace(folder / "workspace"), record, case.original)


def change_mover(case: Case, run_id: object) -> None:
    """Name another run as the one that moved the alias, in MLflow alone."""
    chosen = "SELECT value FROM registered_model_tags WHERE name = 'fake' AND key = ?"
    value = json.loads(case.select(chosen, TAG)) | {"run_id": run_id}
    case.sql(
        "UPDATE registered_model_tags SET value = ? WHERE name = 'fake' AND key = ?", json.dumps(value), TAG
    )


@pytest.mark.parametrize("overrides", [(), ("seed=18",)], ids=["the same weights", "other weights"])
def test_runs_of_two_workspaces_contradict_nobody(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    other = run_elsewhere(case, tmp_path / "elsewhere", monkeypatch, *overrides)
    report = case.audit()
    assert found(report) == []
    assert report.exit_code == 2
    assert all(other.record.run_id in each and "audit it" in each for each in found(report, "unchecked"))
    assert any("alias fake@champion" in each for each in found(report, "unchecked"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{case.workspace.root / 'mlflow.db'}")
    report = other.audit()
    assert (report.exit_code, found(report), found(report, "unchecked")) == (0, [], [])


@pytest.mark.parametrize("mover", ["0009-fake-abcdef", "a' OR '1' = '1", "\ud800", "", ["0001"]], ids=ascii)
def test_a_mover_whom_mlflow_does_not_have_either_is_wrong(case: Case, mover: object) -> None:
    change_mover(case, mover)
    report = case.audit()
    assert report.exit_code == 1
    assert any("alias fake@champion" in each and "and the outbox" in each for each in found(report))


def test_a_card_that_no_run_elsewhere_wrote_is_wrong(case: Case) -> None:
    case.sql("UPDATE model_versions SET description = replace(description, 'policy', 'another')")
    assert any("card of version fake/1" in each for each in found(case.audit()))


@pytest.mark.slow
def test_the_same_file_at_another_path_agrees(case: Case, tmp_path: Path) -> None:
    """MLflow has one row for the file's bytes, with the address that was sent first."""
    (tmp_path / "moved").mkdir()
    shutil.copy(case.original / "demonstrations.jsonl", tmp_path / "moved")
    shutil.copy(case.original / "fake.yaml", tmp_path / "moved")
    run_once(case.workspace, tmp_path / "moved" / "fake.yaml")
    for record in read_runs(case.workspace):
        report = Case(case.workspace, record, case.original).audit()
        assert (report.exit_code, found(report)) == (0, [])


def test_a_source_that_no_run_has_sent_is_wrong(case: Case) -> None:
    case.sql(
        "UPDATE datasets SET dataset_source = replace(dataset_source, 'demonstrations.jsonl', 'other.jsonl') "
        "WHERE name = 'source of demonstrations'"
    )
    assert any("data.demonstrations: MLflow: dataset input" in each for each in found(case.audit()))


class TestTheSourceOfADataStep:
    def remove_link(self, case: Case) -> None:
        case.sql(
            "DELETE FROM inputs WHERE destination_type = 'RUN' AND destination_id = ?",
            case.mlflow_run("data.demonstrations"),
        )

    def test_a_link_that_was_removed_is_missed(self, case: Case) -> None:
        self.remove_link(case)
        assert any(
            "data.demonstrations: MLflow: dataset input" in each and "is missing" in each
            for each in found(case.audit())
        )

    def test_of_a_run_by_an_earlier_version_it_may_be_absent(self, case: Case) -> None:
        """The outbox of an earlier version has no sha256 of the lines before each line."""

        def without_sums(lines: list[dict[str, object]]) -> list[dict[str, object]]:
            return [
                {name: value for name, value in each.items() if name != "sha256_before"} for each in lines
            ]

        self.remove_link(case)
        edit_lines(case.outbox, without_sums)
        assert not any("is missing" in each for each in found(case.audit()))
