"""An outbox on its way: kills after every write, and what MLflow refuses."""

from pathlib import Path

import pytest
from cutting import cut_after_every_write
from small_run import (
    JOURNAL_CURVE,
    RECIPE,
    client_of,
    refused,
    runs_of,
    sha,
    snapshot,
    tell_stage,
)

from tasks.ledger.journal import Entry
from tasks.ledger.run_ledger import Ledger


def test_a_kill_after_anything_was_written_leaves_one_entry_of_each(workspace: Path) -> None:
    """For every call that writes: the process ends right after it was served, and another sends the outbox."""
    run_id = "0001-tiny-aaaaaa"
    with Ledger("http://127.0.0.1:9", workspace, "tiny") as ledger:  # nobody listens there
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_stage(ledger, "model")
        tell_stage(ledger, "sft")
        ledger.finish_run("completed")
        assert not ledger.flush()
    expected, written = cut_after_every_write(workspace, run_id, lambda client: snapshot(client, run_id))
    assert {"create_run", "create_logged_model", "log_inputs", "log_outputs", "log_batch"} <= set(written)
    assert set(expected) == {"", "model", "sft", "model of model", "model of sft"}
    assert expected["sft"]["curves"]["loss"] == JOURNAL_CURVE


def test_a_record_that_mlflow_refuses_is_set_aside_and_the_rest_goes_on(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run("0001-tiny-aaaaaa", "tiny", RECIPE)
        ledger.open_stage("sft", kind="sft", stage_key=sha("k"), attempt=1, params={}, inputs={})
        ledger.send_metrics("sft", [Entry(step=0, time=1.0, metrics={"what?!*": 1.0})])
        ledger.finish_stage("sft", "failed", reason="out of memory")
        assert ledger.flush()
    (error,) = refused(workspace)
    assert "what?!*" in error
    assert "MLflow refused log_metrics" in caplog.text
    runs = runs_of(client_of(workspace), "0001-tiny-aaaaaa")
    assert runs["sft"].info.status == "FAILED"
    assert "out of memory" in runs["sft"].data.tags["mlflow.note.content"]
