"""A guard that fires in a run appears in run.json, the console, the ledger, the report, messages, the plan and the audit."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.guarded_work import ASKED
from tests.support.orchestrated import Witness, attempt_all, events, orchestrated
from vantage.cli.main import app
from vantage.flows.finishing import finish_stage
from vantage.ledger.model_card import card_sections
from vantage.ledger.replay import read_replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.run_claims import record_checks
from vantage.review.reports.gather import gather_report
from vantage.runs.planning import plan
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import RunError, Workspace

FINISH = "stages.policy.guards={metric: score_mean, above: 3.5, over: 2, action: finish}"
WARN = "stages.policy.guards={metric: score_mean, above: 3.5, over: 2}"
STOP = "stages.policy.guards={metric: score_mean, above: 3.5, over: 2, action: stop}"
FIRED = "guard score_mean above 3.5, 2 reports in a row: fired after step 5 (4, 5)"


def go_through(workspace: Workspace, recipe: Path, *overrides: str) -> tuple[RunRecord, list[str]]:
    """Run to the end."""
    with orchestrated(
        workspace, recipe, *overrides, in_process=True, stage_function="tests.support.guarded_work.run_stage"
    ) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.end()
        assert isinstance(orchestrator.watcher, Witness)
    return read_runs(workspace)[0], orchestrator.watcher.lines


def test_what_a_guard_ended_is_marked_everywhere(workspace: Workspace, recipe_file: Path) -> None:
    record, _ = go_through(workspace, recipe_file, FINISH)
    stage = record.stages["policy"]
    assert stage.status == "completed"
    assert stage.warnings[:2] == (
        "finished at 6 of 12 by guard score_mean",
        f"{FIRED}; the stage was finished early",
    )
    [firing] = stage.firings
    assert (firing.step, firing.values, firing.is_default) == (5, (4.0, 5.0), False)
    assert stage.stage_key is not None
    ref = workspace.storage.find(stage.stage_key)
    assert ref is not None
    assert str(ref.artifact.ended_early) == "finished at 6 of 12 by guard score_mean"
    assert workspace.storage.sealed(ref.artifact.digest).measured.firings == (firing,)

    data = workspace.records.read_outbox(record.run_id)
    assert data is not None
    entry = read_replay(data, run_id=record.run_id).entry
    assert "policy: finished at 6 of 12 by guard score_mean" in "\n".join(
        card_sections(entry, "policy", {})["Limits"]
    )

    [curves] = [each for each in gather_report(workspace, record).curves if each.step == "policy"]
    assert curves.curves[0].metric == "score_mean"
    assert curves.curves[0].fired == (5,)

    shown = CliRunner().invoke(app, ["status", record.run_id, "--workspace", workspace.address])
    assert "finished at 6 of 12 by guard score_mean" in " ".join(shown.stdout.split())
    checks = record_checks(Evidence(workspace), record.run_id, "policy", ref.artifact.digest, ref)
    assert [check for check in checks if check.outcome != "ok"] == []


@pytest.mark.slow
def test_a_guards_end_is_what_the_recipe_asks_for_so_another_run_takes_it_and_says_so(
    workspace: Workspace, recipe_file: Path
) -> None:
    first, _ = go_through(workspace, recipe_file, FINISH)
    steps = plan(first.recipe, workspace.storage, read_runs(workspace))
    [planned] = [step for step in steps if step.name == "policy"]
    assert planned.action == "reuse"
    assert "finished at 6 of 12 by guard score_mean" in planned.reasons
    second, _ = go_through(workspace, recipe_file, FINISH)
    assert second.run_id != first.run_id
    assert second.stages["policy"].status == "reused"
    assert second.stages["policy"].warnings == first.stages["policy"].warnings
    assert events(workspace).count("policy started 1") == 1


@pytest.mark.slow
def test_a_warning_changes_no_status(workspace: Workspace, recipe_file: Path) -> None:
    record, _ = go_through(workspace, recipe_file, WARN)
    assert record.status == "completed"
    assert record.stages["policy"].warnings[0] == f"{FIRED}; nothing was changed"


def test_a_stage_that_a_guard_stops_fails_with_the_evidence_and_is_not_tried_again(
    workspace: Workspace, recipe_file: Path
) -> None:
    for attempt in (1, 2):
        record, lines = go_through(workspace, recipe_file, STOP)
        stage = record.stages["policy"]
        assert (stage.status, stage.exit_code, stage.attempt) == ("failed", 78, attempt)
        assert stage.reason is not None
        assert stage.reason.startswith(
            f"{FIRED}; the stage was stopped; look at the curve; change the recipe, or that guard in it"
        )
        assert [str(each.step) for each in stage.firings] == ["5"]
        assert record.stages["evaluation"].status == "blocked"
        assert lines.count("policy failed") == 1
    [curves] = [each for each in gather_report(workspace, record).curves if each.step == "policy"]
    assert curves.curves[0].fired == (5,)


def test_what_a_person_ended_is_that_runs_alone(workspace: Workspace, recipe_file: Path) -> None:
    workspace.root.mkdir(parents=True, exist_ok=True)
    (workspace.root / ASKED).write_text("2")
    first, _ = go_through(workspace, recipe_file)
    assert first.stages["policy"].warnings[0] == "finished at 4 of 12 by hand (good enough)"
    (workspace.root / ASKED).unlink()

    steps = plan(first.recipe, workspace.storage, read_runs(workspace))
    [planned] = [step for step in steps if step.name == "policy"]
    assert planned.action == "run"
    assert planned.reasons == (
        f"run {first.run_id} finished at 4 of 12 by hand (good enough); this run trains to the end",
    )
    second, _ = go_through(workspace, recipe_file)
    assert second.stages["policy"].metrics["score"] == 12.0
    assert second.stages["policy"].warnings == ()
    third, _ = go_through(workspace, recipe_file)
    assert third.stages["policy"].status == "reused"
    assert third.stages["policy"].digest == second.stages["policy"].digest
    for record, code in ((first, 2), (second, 0), (third, 0)):
        audit = CliRunner().invoke(
            app, ["audit", f"{record.run_id}/policy", "--workspace", workspace.address]
        )
        assert audit.exit_code == code, audit.output
        assert ("has made it again with other bits" in audit.output) is (code == 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("polici", "has no stage 'polici'; did you mean 'policy'?"),
        ("evaluation", "stage evaluation has kind evaluation, which has no steps to leave out"),
        ("policy", "is completed, so there is nothing to finish"),
    ],
)
def test_what_cannot_be_finished_is_refused(
    workspace: Workspace, recipe_file: Path, step: str, said: str
) -> None:
    record, _ = go_through(workspace, recipe_file)
    with pytest.raises(RunError, match=said.replace("?", r"\?")):
        finish_stage(workspace, record, step, reason="")
    shown = CliRunner().invoke(
        app, ["finish", record.run_id, step, "--workspace", workspace.address], env={"COLUMNS": "300"}
    )
    assert shown.exit_code == 65
    assert said in shown.output
