"""An audit of what nobody touched finds nothing wrong: after a reuse, a resume, a retry, in a copy, on a read-only disk."""

import shutil
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.review.audit.conftest import STAGES, run_once, write_recipe
from tests.review.audit.tampering import Case, found
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.flows.garbage_collection import collect
from vantage.review.audit import served
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.mlflow_copies import problems_of_folder
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace


def all_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return path → size and time of change of everything below a folder."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.slow
@pytest.mark.usefixtures("every_question")
def test_each_run_of_mlflow_is_asked_for_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()
    get_run = MlflowClient.get_run

    def counted(client: MlflowClient, run_id: str) -> Run:
        asked[run_id] += 1
        return get_run(client, run_id)

    monkeypatch.setattr(MlflowClient, "get_run", counted)
    assert case.audit().exit_code == 0
    assert set(asked.values()) == {1}
    assert len(asked) == 1 + len(case.record.stages), "the parent's and one for each step"


def test_a_copy_of_a_workspace_agrees_and_nothing_is_written(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    before = all_files(case.workspace.root)
    report = case.audit()
    assert (found(report), found(report, "unchecked"), report.exit_code) == ([], [], 0)
    notes = [each.partition(": ")[2] for each in found(report, "note")]
    moved = ("copy fake/1: the w", "copy fake-reward/1: the w", "copy fake-strict/1: the w")
    assert sum(each.startswith(moved) for each in notes) == len(moved)
    assert [each for each in notes if not each.startswith(moved)] == [
        "gate accuracy_gain: 0.100 >= 0.9: CLOSED"
    ]
    assert all_files(case.workspace.root) == before
    assert not list(empty.iterdir())
    assert {artifact.step for artifact in report.artifacts} == set(case.record.stages)
    policy = next(each for each in report.artifacts if each.step == "policy")
    assert {edge.role: edge.digest for edge in policy.parents} == {
        "init": case.digest("sft"),
        "reference": case.digest("sft"),
        "critic": case.digest("value"),
        "prompts": case.digest("prompts" if "prompts" in case.record.stages else "data.prompts"),
        "reward.main.0": case.digest("reward"),
    }
    subjects = {check.subject for check in policy.checks}
    assert subjects >= {
        "files",
        "ref",
        "run record",
        "outbox",
        "MLflow",
        "version fake/1",
        "copy fake/1",
        "alias fake@champion",
    }
    objects = case.workspace.store / "objects"
    in_store = sum(
        path.stat().st_size for path in objects.rglob("*") if path.is_file() and path.name != "manifest.json"
    )
    assert sum(each.num_bytes for each in report.artifacts) == in_store, "every byte, each once"


@pytest.mark.parametrize(
    "target", ["fake@champion", "fake/1", "models:/fake@champion", "fake", "latest/policy", "1/policy"]
)
def test_every_name_of_the_policy_leads_to_it(case: Case, target: str) -> None:
    report = case.audit(target)
    assert (found(report), report.exit_code) == ([], 0)
    steps = {artifact.step for artifact in report.artifacts}
    assert steps >= {"policy", "value", "reward", "sft", "model", "data.demonstrations", "data.prompts"}
    assert ("evaluation" in steps) == (not target.endswith("/policy")), "the gate that let the alias move"


def test_digests_folders_and_runs_of_mlflow_lead_to_their_artifact(
    case: Case, original: Path, tmp_path: Path
) -> None:
    digest = case.digest("reward")
    for target in (digest, digest[:8], str(case.object("reward")), case.mlflow_run("reward")):
        report = case.audit(target)
        assert (found(report), report.exit_code) == ([], 0), target
        assert report.artifacts[0].digest == digest
    elsewhere = shutil.copytree(case.object("reward"), tmp_path / "elsewhere")
    assert case.audit(str(elsewhere)).exit_code == 0
    assert case.audit(str(case.copy_of("fake-reward"))).exit_code == 0
    alone = Case(Workspace(tmp_path / "none"), case.record, original).audit(str(elsewhere))
    assert (alone.exit_code, found(alone)) == (2, [])
    assert "knows no artifact" in found(alone, "unchecked")[0]
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_second_run_that_reuses_all_agrees_and_so_does_the_first(
    case: Case, again: Callable[[Case], RunRecord]
) -> None:
    second = again(case)
    assert {stage.status for stage in second.stages.values()} == {"reused"}
    for run_id in (second.run_id, case.record.run_id):
        report = case.audit(run_id)
        assert (found(report), found(report, "unchecked"), report.exit_code) == ([], [], 0)
    assert len(report.runs) == 1
    assert case.audit("fake@champion").exit_code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("every_question")
def test_mlflow_is_asked_nothing_twice_and_each_copy_is_read_once(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's weights are read where MLflow loads them, and here too, since the workspace was moved."""
    asked: list[tuple[str, str, str]] = []
    read: list[Path] = []

    def recorded(name: str) -> Callable[..., object]:
        ask = getattr(MlflowClient, name)
        return lambda client, *args, **named: (
            asked.append((name, str(args), str(named))),
            ask(client, *args, **named),
        )[1]

    def reading(evidence: Evidence, folder: Path, *others: object) -> object:
        read.extend([folder] if folder.is_dir() else [])
        return problems_of_folder(evidence, folder, *others)  # type: ignore[arg-type]

    names = (
        "get_experiment",
        "get_experiment_by_name",
        "get_run",
        "search_runs",
        "get_metric_history",
        "get_logged_model",
        "search_model_versions",
        "get_model_version",
        "get_model_version_by_alias",
        "get_model_version_download_uri",
    )
    for name in names:
        monkeypatch.setattr(MlflowClient, name, recorded(name))
    monkeypatch.setattr(served, "problems_of_folder", reading)
    assert case.audit().exit_code == 0
    assert sorted(asked) == sorted(set(asked))
    assert len(asked) > len(names)
    copies = [case.copy_of(name) for name in ("fake", "fake-reward")]
    moved = [case.original / "workspace" / each.relative_to(case.workspace.root) for each in copies]
    assert sorted(read) == sorted([*copies, *moved])


def test_a_read_only_copy_can_be_audited(case: Case) -> None:
    """(To root every file can be written; that nothing is written is held above.)"""
    paths = [case.workspace.root, *case.workspace.root.rglob("*")]
    for path in paths:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o555)
    try:
        assert case.audit().exit_code == 0
    finally:
        for path in paths:
            path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)


@pytest.mark.slow
def test_a_resumed_and_a_retried_run_agree(case: Case, tmp_path: Path) -> None:
    """With another seed nothing is reused. One process ends before the value stage, and a second one loses its first
    attempt at the policy."""
    overrides = ("seed=18",)
    recipe = case.original / "fake.yaml"
    (case.workspace.root / "lose.txt").write_text("policy")
    run_once(case.workspace, recipe, *overrides, until="value")
    run_once(case.workspace, recipe, *overrides, in_process=False)
    resumed = read_runs(case.workspace)[0]
    assert resumed.stages["policy"].status == "resumable", resumed.stages["policy"]
    report = case.audit(resumed.run_id)
    assert found(report) == []
    run_once(case.workspace, recipe, *overrides)
    [resumed, *_] = read_runs(case.workspace)
    assert (resumed.status, resumed.stages["policy"].attempt) == ("completed", 2)
    report = case.audit(resumed.run_id)
    assert (found(report), found(report, "unchecked"), report.exit_code) == ([], [], 0)
    older = case.audit()
    assert found(older) == [], "its alias was moved on by a run, and not by hand"


def test_what_is_told_of_a_removed_run_and_of_a_silent_mlflow(
    case: Case, again: Callable[[Case], RunRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = again(case)
    collect(case.workspace, keep_last=1)
    report = case.audit(second.run_id)
    assert (found(report), report.exit_code) == ([], 2)
    assert any("removed the run" in each for each in found(report, "unchecked"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    silent = case.audit(second.run_id)
    assert (found(silent), silent.exit_code) == ([], 2)
    assert any("does not answer" in each for each in found(silent, "unchecked"))


def test_another_mlflow_was_never_sent_the_run(
    case: Case, ledger_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vantage.ledger.to_mlflow.server import Server

    Server(ledger_database, artifacts=case.workspace.root / "other").experiment("fake")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    report = case.audit()
    assert (found(report), report.exit_code) == ([], 2)
    assert any("was never sent run" in each for each in found(report, "unchecked"))


def test_a_run_that_mlflow_has_not_got_yet_is_not_wrong(
    tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow was away during a second run, whose records wait in its outbox."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    recipe = write_recipe(tmp_path)
    with orchestrated(case.workspace, recipe, stage_function=STAGES) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
        orchestrator.ledger.finish_run(orchestrator.run.outcome())
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    second = read_runs(case.workspace)[0]
    report = case.audit(second.run_id)
    assert (found(report), report.exit_code) == ([], 2)
