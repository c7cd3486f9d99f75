"""The report of a run is among its artifacts in MLflow."""

import logging
from pathlib import Path

import pytest

from tests.ledger.small_run import client_of, record_run, runs_of, tell_run
from vantage.ledger.run_ledger import Ledger

RUN = "0001-tiny-aaaaaa"


def reported(workspace: Path, text: str | None, *, times: int = 1) -> None:
    """Record a run that ends with a report; without a text, its file is gone when it is sent."""
    file = workspace / "runs" / RUN / "report.html"

    def tell(ledger: Ledger, run_id: str) -> None:
        tell_run(ledger, run_id)
        if text is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for _ in range(times):
            ledger.log_report(file)

    record_run(workspace, RUN, tell)


def files(workspace: Path) -> list[str]:
    client = client_of(workspace)
    return [each.path for each in client.list_artifacts(runs_of(client, RUN)[""].info.run_id)]


@pytest.mark.slow
def test_it_is_an_artifact_of_the_parent_run_and_told_on_its_page(workspace: Path) -> None:
    reported(workspace, "first")
    reported(workspace, "second <b>", times=2)
    client = client_of(workspace)
    parent = runs_of(client, RUN)[""]
    assert files(workspace) == ["report.html"]
    assert Path(client.download_artifacts(parent.info.run_id, "report.html")).read_text() == "second <b>"
    assert "`report.html` under Artifacts" in parent.data.tags["mlflow.note.content"]
    assert parent.info.status == "FINISHED", "it comes after the end, and opens nothing again"


def test_a_file_that_is_gone_is_missed_and_nothing_else(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        reported(workspace, None)
    assert files(workspace) == []
    assert "MLflow has no report of this run" in caplog.text
    assert not (workspace / "runs" / RUN / "ledger" / "refused.jsonl").exists()
    assert runs_of(client_of(workspace), RUN)[""].info.status == "FINISHED"
