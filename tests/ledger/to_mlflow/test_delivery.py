"""An outbox arrives whole, through kills after every write and through what MLflow refuses."""

from pathlib import Path

import pytest

from tests.ledger.cutting import cut_after_every_write
from tests.ledger.small_run import (
    JOURNAL_CURVE,
    RECIPE,
    STAGES,
    client_of,
    curve,
    record_run,
    refused,
    runs_of,
    sha,
    snapshot,
    tell_stage,
)
from vantage.ledger.journal import Entry
from vantage.ledger.operations import (
    LogMetrics,
    OpenRun,
    OpenStage,
    to_json,
)
from vantage.ledger.outbox import Outbox
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.to_mlflow.delivery import Delivery
from vantage.ledger.to_mlflow.server import Server


@pytest.mark.slow
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


def test_what_another_process_has_sent_meanwhile_is_found_and_not_made_again(workspace: Path) -> None:
    """A second run starts beside the first, and finds operations to send in the first one's outbox."""
    run_id = "0001-tiny-aaaaaa"
    server = Server(f"sqlite:///{workspace / 'mlflow.db'}", artifacts=workspace / "mlartifacts")
    outbox = Outbox(workspace / "runs" / run_id / "ledger")
    opening = OpenRun(time=1, run_id=run_id, experiment="tiny", name="tiny", recipe=RECIPE)
    outbox.append(to_json(opening))
    ours = Delivery(server, outbox)
    ours.send()
    stage = OpenStage(time=2, stage="sft", kind="sft", stage_key=sha("k"), attempt=1, params={}, inputs={})
    outbox.append(to_json(stage))
    Delivery(server, Outbox(outbox.folder)).send()
    outbox.append(to_json(LogMetrics(stage="sft", rows=(("loss", 1.0, 3, 0),))))
    ours.send()
    runs = runs_of(server.client, run_id)  # asserts that each stage has one
    assert curve(server.client, runs["sft"], "loss") == [(0, 3, 1.0)]


def test_an_outbox_of_another_run_that_cannot_be_sent_holds_nothing_else_up(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Outbox(workspace / "runs" / "0000-tiny-ffffff" / "ledger")
    opening = OpenRun(time=1, run_id="0000-tiny-ffffff", experiment="tiny", name="tiny", recipe={})
    other.append(to_json(opening))
    (other.folder / "sending.lock").mkdir()  # replaces a folder of another user
    record_run(workspace, "0001-tiny-aaaaaa")
    assert "0000-tiny-ffffff/ledger cannot be sent" in caplog.text
    assert set(runs_of(client_of(workspace), "0001-tiny-aaaaaa")) == {"", *STAGES}
