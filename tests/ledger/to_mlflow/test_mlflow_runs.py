"""Entries of MLflow are found again: of a run that is taken over, of a dead run, and of one that was deleted by hand."""

from pathlib import Path

from tests.ledger.small_run import (
    JOURNAL,
    JOURNAL_CURVE,
    RECIPE,
    STAGES,
    client_of,
    curve,
    record_run,
    runs_of,
    sha,
    tell_reuse,
    tell_stage,
)
from vantage.ledger.run_ledger import Ledger


def test_a_run_that_is_taken_over_goes_on_in_the_same_entries(workspace: Path) -> None:
    """An attempt dies while sft runs, another after sft was committed; neither told its end."""
    run_id = "0001-tiny-aaaaaa"
    client = client_of(workspace)

    def die_in_sft(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_stage(ledger, "model")
        kind, inputs, made = STAGES["sft"]
        ledger.open_stage(
            "sft", kind=kind, stage_key=made.stage_key, attempt=1, params={"epochs": 2.0}, inputs=inputs
        )
        ledger.send_metrics("sft", JOURNAL[:3])

    def wait_before_sft(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)

    def go_on(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_reuse(ledger, "model")
        tell_stage(ledger, "sft", attempt=2)

    record_run(workspace, run_id, die_in_sft)
    first = runs_of(client, run_id)
    assert (first[""].info.status, first["sft"].info.status) == ("RUNNING", "RUNNING")

    record_run(workspace, run_id, wait_before_sft)
    taken = runs_of(client, run_id)
    assert (taken[""].info.status, taken["sft"].info.status) == ("RUNNING", "KILLED")

    record_run(workspace, run_id, go_on)
    last = runs_of(client, run_id)
    assert {stage: run.info.run_id for stage, run in last.items()} == {
        stage: run.info.run_id for stage, run in first.items()
    }
    assert last["sft"].info.status == "FINISHED"
    assert last["sft"].data.tags["vantage.attempt"] == "2"
    assert curve(client, last["sft"], "loss") == JOURNAL_CURVE
    assert last["model"].data.tags["vantage.status"] == "completed"
    assert "vantage.reused_from" not in last["model"].data.tags


def test_what_another_dead_run_left_running_can_be_closed(workspace: Path) -> None:
    def leave(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_stage(ledger, "model")
        ledger.open_stage("sft", kind="sft", stage_key=sha("k"), attempt=1, params={}, inputs={})

    def close(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        ledger.close_stale("0001-tiny-aaaaaa", reason="its machine was lost")

    record_run(workspace, "0001-tiny-aaaaaa", leave)
    record_run(workspace, "0002-tiny-bbbbbb", close)
    runs = runs_of(client_of(workspace), "0001-tiny-aaaaaa")
    assert {stage: run.info.status for stage, run in runs.items()} == {
        "": "KILLED",
        "model": "FINISHED",
        "sft": "KILLED",
    }
    assert runs["sft"].data.tags["vantage.interrupted"] == "its machine was lost"


def test_a_run_deleted_by_hand_does_not_hold_up_what_comes_after(workspace: Path) -> None:
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run("0001-tiny-aaaaaa", "tiny", RECIPE)
        ledger.open_stage("sft", kind="sft", stage_key=sha("k"), attempt=1, params={}, inputs={})
        assert ledger.flush()
        deleted = ledger.mlflow_run_id("sft")
        assert deleted is not None
        client_of(workspace).delete_run(deleted)
        ledger.send_metrics("sft", JOURNAL)
        ledger.finish_run("completed")
        assert ledger.flush()
    runs = runs_of(client_of(workspace), "0001-tiny-aaaaaa")
    assert (runs[""].info.status, curve(client_of(workspace), runs["sft"], "loss")) == (
        "FINISHED",
        JOURNAL_CURVE,
    )
