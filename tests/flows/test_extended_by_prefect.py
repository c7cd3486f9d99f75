"""Stages are extended in real child processes under a real Prefect server, and in a bucket on another machine."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flows.test_extended_run import KEPT, LONGER, WORK, gate, planned_policy, recipe_file, ref_of
from tests.support.extended_work import KILLED, REALLY
from tests.support.orchestrated import attempt_all, events, orchestrated
from tests.support.real_runs import prefect_shows, run_recipe
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.extensions import state_key

__all__ = ["recipe_file"]

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("prefect_url")
def test_a_gate_extends_its_stage_in_prefects_flow_although_its_process_is_killed(
    workspace: Workspace, recipe_file: Path
) -> None:
    """The process of the second part dies in its second step, and the same run attempts that part again."""
    workspace.root.mkdir(parents=True)
    (workspace.root / KILLED).write_text("5")
    (workspace.root / REALLY).touch()
    record, printed = run_recipe(workspace, recipe_file, *KEPT, gate(7.5), stage_function=WORK)
    stage = record.stages["policy"]
    assert (record.status, stage.metrics["test_score"]) == ("completed", 8.0), printed
    assert [each.length for each in stage.shorter] == [4.0, 6.0]
    assert (
        f"policy: gate test_score 4.000 >= 7.5: CLOSED; extends {record.run_id}/policy: 4 → 6 iterations"
        in printed
    )
    assert events(workspace).count("policy started 2") == 1
    _, task_runs = prefect_shows(record.prefect_flow_run_ids[0])
    assert {name: state for name, state in task_runs.items() if name.startswith("policy")} == {
        "policy · attempt 1": "GateClosed",
        "policy · 6 iterations · attempt 1": "Resumable",
        "policy · 6 iterations · attempt 2": "GateClosed",
        "policy · 8 iterations · attempt 1": "Completed",
    }

    again, printed = run_recipe(workspace, recipe_file, *KEPT, gate(7.5), stage_function=WORK)
    assert again.stages["policy"].status == "reused", printed
    assert again.stages["policy"].shorter == stage.shorter


def test_another_machine_extends_what_one_has_left_in_a_bucket(
    bucket: str,
    tmp_path: Path,
    ledger_database: str,
    recipe_file: Path,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)

    def machine(name: str) -> Workspace:
        monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / name))
        return Workspace.at(bucket)

    go_on: Callable[..., None] = lambda at, *overrides: run_in(at, recipe_file, *overrides)  # noqa: E731
    go_on(machine("first"), *KEPT)
    there = machine("second")
    [shorter] = read_runs(there)
    planned = planned_policy(there, recipe_file, LONGER)
    assert planned.reasons == (f"extends {shorter.run_id}/policy: 4 → 6 iterations",)
    go_on(there, *LONGER)
    longer = read_runs(there)[0]
    assert [each.run_id for each in longer.stages["policy"].shorter] == [shorter.run_id]
    go_on(workspace, *LONGER)
    assert longer.stages["policy"].digest == read_runs(workspace)[0].stages["policy"].digest
    key = state_key(ref_of(there, longer).artifact.stage_key)
    assert there.storage.find(key) is not None


def run_in(workspace: Workspace, recipe: Path, *overrides: str) -> None:
    """Run a recipe to its end, its stages in this process."""
    with orchestrated(
        workspace, recipe, *overrides, in_process=True, stage_function=WORK, makes_report=False
    ) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.end()
