"""An audit derives the firings of guards in ref, ``run.json``, outbox, artifact and MLflow again from the curves."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.review.audit.tampering import (
    Case,
    Lines,
    assert_found,
    edit_json,
    edit_lines,
    found,
    sealed_again,
    write,
)
from tests.support.guarded_work import CLIPS
from tests.support.made_once import made_once
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.review.audit import guards
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace

RECIPE = """\
recipe: guarded
seed: 17
model: {source: "builtin:tiny"}
data:
  prompts: {source: "builtin:arithmetic/prompts"}
rewards:
  main: {terms: [{verifier: arithmetic}]}
stages:
  policy:
    kind: policy_optimization
    algorithm: grpo
    init: model
    reward: main
    prompts: prompts
    guards: [{metric: score_mean, above: 3.5, over: 2, action: finish}]
"""
OWN, DEFAULT = (
    "guard score_mean above 3.5, 2 reports in a row",
    "guard clip_fraction above 0.5, 3 reports in a row",
)


def run_in(folder: Path, *overrides: str, name: str = "workspace") -> Workspace:
    """Run the recipe: its own guard fires after step 5 and ends the stage, a default guard fires after step 3."""
    workspace = Workspace(folder / name)
    workspace.root.mkdir(parents=True)
    (workspace.root / CLIPS).touch()
    (folder / "guarded.yaml").write_text(RECIPE)
    with orchestrated(
        workspace,
        folder / "guarded.yaml",
        *overrides,
        in_process=True,
        stage_function="tests.support.guarded_work.run_stage",
    ) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.end()
        orchestrator.ledger.flush()
        orchestrator.ledger.close()
    return workspace


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that a guard ended early. Tests may only read it."""

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.delenv("MLFLOW_TRACKING_URI", raising=False)
            run_in(folder)

    return made_once(tmp_path_factory, "guarded", make)


@pytest.fixture
def case(guarded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Return a copy of its workspace."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copytree(guarded / "workspace", tmp_path / "copy", symlinks=True)
    [record] = read_runs(Workspace(tmp_path / "copy"))
    return Case(Workspace(tmp_path / "copy"), record, guarded)


def edit_firings(
    case: Case, change: Callable[[list[dict[str, Any]]], None], *, in_artifact: bool = False
) -> None:
    """Change the firings alike in the ref, ``run.json`` and the outbox."""
    edit_json(case.ref("policy"), lambda ref: change(ref["artifact"]["firings"]))
    edit_json(case.run_json, lambda run: change(run["stages"]["policy"]["firings"]))

    def told(lines: Lines) -> Lines:
        for line in lines:
            if line["operation"] == "finish_stage" and line["stage"] == "policy":
                change(line["artifact"]["firings"])
        return lines

    edit_lines(case.outbox, told)
    if in_artifact:
        folder = case.object("policy")
        edit_json(folder / "metrics.json", lambda measured: change(measured["firings"]))
        before, after = folder.name, sealed_again(folder)
        folder.rename(folder.with_name(after))
        for path in (case.ref("policy"), case.run_json, case.outbox):
            write(path, path.read_bytes().replace(before.encode(), after.encode()))


def of(metric: str, firings: list[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in firings if each["guard"]["metric"] == metric)


def values_changed(case: Case) -> None:
    edit_firings(case, lambda firings: of("clip_fraction", firings).update(values=[0.51, 0.51, 0.51]))


def step_changed(case: Case) -> None:
    edit_firings(case, lambda firings: of("clip_fraction", firings).update(step=5))


def default_removed(case: Case) -> None:
    edit_firings(case, lambda firings: firings.remove(of("clip_fraction", firings)))


def own_removed(case: Case) -> None:
    edit_firings(case, lambda firings: firings.remove(of("score_mean", firings)))


def own_removed_in_the_artifact_too(case: Case) -> None:
    def change(firings: list[dict[str, Any]]) -> None:
        firings.remove(of("score_mean", firings))

    edit_firings(case, change, in_artifact=True)


def own_said_to_be_a_default(case: Case) -> None:
    edit_firings(case, lambda firings: of("score_mean", firings).update(is_default=True))


def invented(case: Case) -> None:
    def change(firings: list[dict[str, Any]]) -> None:
        firings.append(of("clip_fraction", firings) | {"step": 4})

    edit_firings(case, change)


def invented_guard(case: Case) -> None:
    """Invent a guard whose curve is beyond its bound, but which no version of this code has."""

    def change(firings: list[dict[str, Any]]) -> None:
        guard = {"metric": "clip_fraction", "above": 0.7, "over": 3, "action": "warn"}
        firings.append(of("clip_fraction", firings) | {"guard": guard})

    edit_firings(case, change)


def removed_in_run_json(case: Case) -> None:
    edit_json(case.run_json, lambda run: run["stages"]["policy"].pop("firings"))


def removed_in_the_ref(case: Case) -> None:
    edit_json(case.ref("policy"), lambda ref: ref["artifact"].pop("firings"))


def removed_in_the_outbox(case: Case) -> None:
    def told(lines: Lines) -> Lines:
        next(each for each in lines if each["operation"] == "finish_stage" and each["stage"] == "policy")[
            "artifact"
        ].pop("firings")
        return lines

    edit_lines(case.outbox, told)


def curve_lowered(case: Case) -> None:
    """Lower the curve so that it no longer leaves the bound of the guard that ended the stage."""

    def told(lines: Lines) -> Lines:
        for line in lines:
            if line["operation"] == "log_metrics" and line["stage"] == "policy":
                for row in line["rows"]:
                    row[1] = 3.0 if row[0] == "score_mean" else row[1]
        return lines

    edit_lines(case.outbox, told)


def mark_removed(case: Case) -> None:
    edit_json(case.ref("policy"), lambda ref: ref["artifact"].pop("ended_early"))


def mark_of_another_step(case: Case) -> None:
    edit_json(case.ref("policy"), lambda ref: ref["artifact"]["ended_early"].update(step=8))


def mark_of_another_guard(case: Case) -> None:
    edit_json(case.ref("policy"), lambda ref: ref["artifact"]["ended_early"].update(reason="entropy"))


def guards_tag(case: Case) -> None:
    case.sql("UPDATE tags SET value = 'none' WHERE key = 'vantage.guards'")


def guards_tag_removed(case: Case) -> None:
    case.sql("DELETE FROM tags WHERE key = 'vantage.guards'")


def mark_tag_removed(case: Case) -> None:
    case.sql("DELETE FROM tags WHERE key = 'vantage.ended_early'")


CASES: dict[Callable[[Case], None], str] = {
    values_changed: f"the ref has another firing than the curves give: {DEFAULT}: fired after step 3 (0.51, 0.51, 0.51); "
    "nothing was changed; the values are 0.75, 0.75, 0.75",
    step_changed: f"run.json has a firing that neither recipe nor curves give: {DEFAULT}: fired after step 5",
    default_removed: f"the outbox lacks a firing that the curves give: {DEFAULT}",
    own_removed: f"the ref lacks a firing that the curves give: {OWN}",
    own_removed_in_the_artifact_too: f"metrics.json of the artifact lacks a firing that the curves give: {OWN}",
    own_said_to_be_a_default: "the recipe writes that guard",
    invented: f"the ref has a firing that neither recipe nor curves give: {DEFAULT}: fired after step 4",
    invented_guard: "run.json has a firing that neither recipe nor curves give: guard clip_fraction above 0.7",
    removed_in_run_json: f"run.json lacks a firing that the curves give: {OWN}",
    removed_in_the_ref: f"the ref lacks a firing that the curves give: {DEFAULT}",
    removed_in_the_outbox: f"the outbox lacks a firing that the curves give: {DEFAULT}",
    curve_lowered: f"metrics.json of the artifact has a firing that neither recipe nor curves give: {OWN}",
    mark_removed: f"the artifact is not marked as ended early, and {OWN}",
    mark_of_another_step: "finished at 8 of 12 by guard score_mean, and its curves end at step 6",
    mark_of_another_guard: "finished at 6 of 12 by guard entropy, and by its curves no such guard fired",
    guards_tag: "MLflow: tag vantage.guards is “none”",
    guards_tag_removed: "MLflow: tag vantage.guards is absent",
    mark_tag_removed: "MLflow: tag vantage.ended_early is absent",
}
"""Tampering → finding of the audit."""


@pytest.mark.slow
def test_what_nobody_touched_agrees(case: Case) -> None:
    firings = case.record.stages["policy"].firings
    assert [(each.guard.metric, each.step, each.is_default) for each in firings] == [
        ("clip_fraction", 3, True),
        ("score_mean", 5, False),
    ]
    report = case.audit()
    assert (found(report), found(report, "unchecked"), report.exit_code) == ([], [], 0)
    [policy] = [each for each in report.artifacts if each.step == "policy"]
    [check] = [each for each in policy.checks if each.subject == guards.SUBJECT]
    assert check.detail == "2 firings, derived again from 6 steps"


@pytest.mark.parametrize("tamper", CASES, ids=lambda tamper: tamper.__name__)
def test_it_is_found(case: Case, tamper: Callable[[Case], None]) -> None:
    """An audit finds this change of a guard's firing, and names where."""
    assert_found(case, tamper, "policy: ", CASES[tamper])


def test_a_default_firing_less_is_not_checked_where_another_version_made_the_artifact(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That version may have had other default guards. What it recorded is derived again all the same."""
    monkeypatch.setattr(guards, "code_digest", lambda module: "of a later version")
    assert case.audit().exit_code == 0
    default_removed(case)
    report = case.audit()
    unchecked = [each for each in found(report, "unchecked") if "policy: guards: " in each]
    assert len(unchecked) == 1
    assert f"the ref lacks a firing that a default guard of this version gives: {DEFAULT}" in unchecked[0]
    assert [each for each in found(report) if "policy: guards: " in each] == []


def test_what_another_version_is_said_to_have_seen_is_derived_again(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "code_digest", lambda module: "of a later version")
    values_changed(case)
    assert any("the values are 0.75, 0.75, 0.75" in each for each in found(case.audit()))


@pytest.mark.parametrize("lost", ["outbox", "curves"])
def test_without_curves_nothing_is_derived_and_that_is_reported(case: Case, lost: str) -> None:
    if lost == "outbox":
        case.outbox.unlink()
    else:
        lines = case.outbox.read_bytes().splitlines(keepends=True)
        kept = [each for each in lines if json.loads(each)["operation"] != "log_metrics"]
        write(case.outbox, b"".join(kept))
    report = case.audit()
    assert report.exit_code in (1, 2)
    assert any(
        "policy: guards: firings of guards cannot be derived again" in each
        for each in found(report, "unchecked")
    )


@pytest.mark.parametrize("tamper", [guards_tag, guards_tag_removed, mark_tag_removed])
def test_without_the_outbox_mlflow_is_compared_with_the_artifact(
    case: Case, tamper: Callable[[Case], None]
) -> None:
    case.outbox.unlink()
    untouched = case.audit()
    assert (found(untouched), untouched.exit_code) == ([], 2)
    assert_found(case, tamper, "policy: ", CASES[tamper])


def test_without_the_outbox_a_tag_that_nobody_sent_is_found(case: Case) -> None:
    case.outbox.unlink()
    removed_everywhere = {"firings", "ended_early"}
    edit_json(
        case.ref("policy"),
        lambda ref: [ref["artifact"].pop(name) for name in removed_everywhere],
    )
    assert any(
        "policy: MLflow: " in each
        and "tag vantage.guards is “guard clip_fraction" in each
        and "which nobody sent" in each
        for each in found(case.audit())
    )


def test_of_a_stage_that_a_guard_stopped_the_firing_is_derived_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    stop = "stages.policy.guards=[{metric: score_mean, above: 3.5, over: 2, action: stop}]"
    workspace = run_in(tmp_path, stop)
    [record] = read_runs(workspace)
    assert record.stages["policy"].status == "failed"
    case = Case(workspace, record, tmp_path)
    untouched = case.audit()
    assert (found(untouched), untouched.exit_code) == ([], 0)
    edit_json(case.run_json, lambda run: run["stages"]["policy"]["firings"].pop(0))
    said = found(case.audit(), "unchecked") + found(case.audit())
    assert any("guards of policy: run.json lacks a firing" in each and DEFAULT in each for each in said), said
    edit_json(case.run_json, lambda run: run["stages"]["policy"]["firings"][0].update(values=[9.0, 9.0]))
    assert any(
        f"guards of policy: run.json has another firing than the curves give: {OWN}" in each
        for each in found(case.audit())
    )


def test_guards_that_are_off_have_no_firings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    workspace = run_in(tmp_path, "stages.policy.guards=off")
    [record] = read_runs(workspace)
    assert record.stages["policy"].firings == ()
    case = Case(workspace, record, tmp_path)
    assert case.audit().exit_code == 0
    firing = {
        "guard": {"metric": "clip_fraction", "above": 0.5},
        "step": 3,
        "values": [0.75] * 3,
        "is_default": True,
    }
    edit_json(case.run_json, lambda run: run["stages"]["policy"].update(firings=[firing]))
    assert any(
        "run.json has a firing that neither recipe nor curves give" in each for each in found(case.audit())
    )
