"""MLflow is asked rarely: each call is a request to a server, or some transactions of a database."""

from pathlib import Path
from typing import Any

import pytest

from tests.ledger.small_run import RECIPE, tell_stage
from vantage.ledger.entries import RunEntry
from vantage.ledger.operations import Operation
from vantage.ledger.outbox import Outbox
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.to_mlflow.delivery import Delivery
from vantage.ledger.to_mlflow.run_writer import RunWriter
from vantage.ledger.to_mlflow.server import Server

RUN_ID = "0001-tiny-aaaaaa"
STAGES = ("model", "data.demos", "sft", "evaluation")


class Asked:
    """A client that notes what it is asked."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*positional: Any, **named: Any) -> Any:
            self.calls.append(name)
            return method(*positional, **named)

        return call


@pytest.fixture
def asked(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Return operation and stage → the calls that it took, of a whole run sent at once."""
    with Ledger("http://127.0.0.1:9", workspace, "tiny") as ledger:  # nobody listens there
        ledger.open_run(RUN_ID, "tiny", RECIPE)
        for stage in STAGES:
            tell_stage(ledger, stage)
        ledger.finish_run("completed")
    server = Server(f"sqlite:///{workspace / 'mlflow.db'}", artifacts=workspace / "mlartifacts")
    client = Asked(server.client)
    server.client = client  # type: ignore[assignment]
    found: list[tuple[str, list[str]]] = []
    apply = RunWriter.apply

    def noted(writer: RunWriter, entry: RunEntry, operation: Operation) -> None:
        before = len(client.calls)
        apply(writer, entry, operation)
        found.append(
            (f"{operation.operation} {getattr(operation, 'stage', '')}".strip(), client.calls[before:])
        )

    monkeypatch.setattr(RunWriter, "apply", noted)
    Delivery(server, Outbox(workspace / "runs" / RUN_ID / "ledger")).send()
    return found


def test_an_operation_writes_its_run_once_and_reads_only_what_nobody_told(
    asked: list[tuple[str, list[str]]],
) -> None:
    """``log_batch`` writes params, tags and metrics of one run at once; where there are two, the second is for the parent run."""
    model = ["search_logged_models", "create_logged_model", "finalize_logged_model", "log_outputs"]
    assert dict(asked) == {
        "open_run": ["search_runs", "create_run", "log_batch"],
        "open_stage model": ["create_run", "log_batch"],
        "finish_stage model": [*model, "log_batch", "set_terminated"],  # its metrics measure no run
        "open_stage data.demos": ["create_run", "log_batch"],
        "finish_stage data.demos": ["log_batch", "set_terminated"],
        "open_stage sft": ["create_run", "log_inputs", "log_batch"],
        "log_metrics sft": ["log_batch"],
        "record_verdicts sft": ["log_batch"],
        "finish_stage sft": [*model, "log_batch", "log_batch", "set_terminated"],
        "open_stage evaluation": ["create_run", "log_inputs", "log_batch"],
        # the table of its samples, its page, and a tag
        "finish_stage evaluation": [
            *("log_text", "log_text", "set_tag"),
            *("log_batch", "log_batch", "set_terminated"),
        ],
        # pages that name readers now: of the model, its stage, the data, sft's stage and its model
        "finish_run": [
            *("log_batch", "set_terminated", "set_experiment_tag"),
            *("log_batch", "set_logged_model_tags", "log_batch", "log_batch", "set_logged_model_tags"),
        ],
    }
