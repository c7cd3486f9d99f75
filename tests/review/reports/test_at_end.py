"""A process of its own makes the report at a run's end; the ledger logs it, and the run never waits for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.orchestrated import Witness, attempt_all, orchestrated
from vantage.review.reports import at_end
from vantage.review.reports.at_end import ReportProcess
from vantage.review.reports.files import REPORT, page_of
from vantage.runs.history import RunHistory
from vantage.runs.run import read_run
from vantage.runs.view import RunView
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.slow


@pytest.fixture
def nothing_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MLflow not answer: its address is a closed port."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")


@pytest.fixture(autouse=True)
def _wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(at_end.VARIABLE)


@pytest.mark.usefixtures("nothing_sent")
def test_a_run_without_one_makes_none(
    tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_REPORT", "0")
    with orchestrated(Workspace(tmp_path / "workspace"), recipe_file) as orchestrator:
        orchestrator.end()
        assert orchestrator.send_report() is None
        assert not (orchestrator.run.folder / REPORT).exists()


@pytest.mark.usefixtures("nothing_sent")
def test_a_run_of_a_sweep_starts_no_process_for_one(
    tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vantage.flows.orchestrator.ReportProcess", None)  # calling it is an error
    workspace = Workspace(tmp_path / "workspace")
    with orchestrated(workspace, recipe_file, makes_report=False) as orchestrator:
        stages = attempt_all(orchestrator)
        assert {stage.status for stage in stages.values()} == {"completed"}
        orchestrator.draw_report()  # as Prefect's flow does before it publishes
        orchestrator.end()
        assert orchestrator.send_report() is None


@pytest.mark.usefixtures("nothing_sent")
def test_it_is_that_of_the_command_and_waits_for_mlflow(tmp_path: Path, recipe_file: Path) -> None:
    workspace = Workspace(tmp_path / "workspace")
    with orchestrated(workspace, recipe_file) as orchestrator:
        attempt_all(orchestrator, until="reward")
        assert orchestrator.send_report() is None, "nothing was begun"
        orchestrator.end()
        file = orchestrator.send_report()
        run_id = orchestrator.run.record.run_id
    assert file == workspace.folder(run_id) / REPORT
    assert file.read_text() == page_of(workspace, read_run(workspace, run_id))
    history = RunView(workspace, run_id).history
    assert isinstance(history, RunHistory) and history.openings == 1
    lines = (workspace.records.read_outbox(run_id) or b"").splitlines()
    assert b'"log_report"' in lines[-1] and str(file).encode() in lines[-1]
    assert b'"finish_run"' in lines[-2], "the run's end is recorded first"


@pytest.mark.usefixtures("nothing_sent")
def test_one_that_was_begun_before_the_run_ended_is_of_the_runs_end(
    tmp_path: Path, recipe_file: Path
) -> None:
    workspace = Workspace(tmp_path / "workspace")
    with orchestrated(workspace, recipe_file) as orchestrator:
        attempt_all(orchestrator, until="sft")
        orchestrator.draw_report()
        earlier = page_of(workspace, read_run(workspace, orchestrator.run.record.run_id))
        attempt_all(orchestrator, until="reward")
        assert not (orchestrator.run.folder / REPORT).exists(), "nothing is written before the end"
        orchestrator.end()
        file = orchestrator.send_report()
        run_id = orchestrator.run.record.run_id
    assert file is not None
    assert file.read_text() == page_of(workspace, read_run(workspace, run_id)) != earlier


@pytest.mark.usefixtures("nothing_sent")
def test_it_is_begun_with_the_last_step_and_told_of_what_comes_after(
    tmp_path: Path, recipe_file: Path
) -> None:
    workspace = Workspace(tmp_path / "workspace")
    with orchestrated(workspace, recipe_file) as orchestrator:
        *_, last = orchestrator.inputs
        attempt_all(orchestrator, until=last)
        assert orchestrator._report is None, "a step is left"
        attempt_all(orchestrator)
        assert orchestrator._report is not None
        process = orchestrator._report._process
        assert process is not None
        assert process.poll() is None, "it waits for the run's end"
        assert os.getpgid(process.pid) != os.getpgid(0), "Ctrl-C stops the last step alone"
        orchestrator.end()
        file = orchestrator.send_report()
        run_id = orchestrator.run.record.run_id
    assert file is not None
    assert file.read_text() == page_of(workspace, read_run(workspace, run_id))
    assert process.returncode == 0


@pytest.mark.usefixtures("nothing_sent")
def test_a_run_that_dies_before_its_end_leaves_no_report(tmp_path: Path, recipe_file: Path) -> None:
    with orchestrated(Workspace(tmp_path / "workspace"), recipe_file) as orchestrator:
        attempt_all(orchestrator, until="model")
        begun = ReportProcess(orchestrator.run)._process
        assert begun is not None
        begun.communicate()  # closes its standard input, as the death of the run's process does
        assert begun.returncode == 0
        assert not (orchestrator.run.folder / REPORT).exists()


@pytest.mark.usefixtures("nothing_sent")
@pytest.mark.parametrize(
    "program, said",
    [
        ("import sys; sys.exit('no plot today')", "no plot today"),
        ("import time; time.sleep(60)", "more than 0.5 s"),
    ],
    ids=["fails", "hangs"],
)
def test_one_that_cannot_be_made_is_said_and_the_run_is_none_the_worse(
    tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    broken = tmp_path / "python"
    broken.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    broken.chmod(0o755)
    monkeypatch.setattr(at_end, "LONGEST_SECONDS", 0.5 if "sleep" in program else 60.0)
    workspace, witness = Workspace(tmp_path / "workspace"), Witness()
    with orchestrated(workspace, recipe_file) as orchestrator:
        attempt_all(orchestrator, until="model")
        monkeypatch.setattr(at_end.sys, "executable", str(broken))
        process = ReportProcess(orchestrator.run)
        assert process.finish(orchestrator.ledger, witness) is None
        assert process.finish(orchestrator.ledger, witness) is None, "asked again"
        run_id = orchestrator.run.record.run_id
        orchestrator.ledger.close(1.0)
    assert said in witness.lines[0] and f"vantage report {run_id}" in witness.lines[0]
    assert b"log_report" not in (workspace.records.read_outbox(run_id) or b"")


@pytest.mark.usefixtures("nothing_sent")
def test_a_program_that_cannot_be_started_is_no_error(
    tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, witness = Workspace(tmp_path / "workspace"), Witness()
    with orchestrated(workspace, recipe_file) as orchestrator:
        monkeypatch.setattr(at_end.sys, "executable", str(tmp_path / "gone"))
        assert ReportProcess(orchestrator.run).finish(orchestrator.ledger, witness) is None
        orchestrator.ledger.close(1.0)
    assert "could not be made" in witness.lines[0]


@pytest.mark.usefixtures("nothing_sent")
def test_it_ends_at_once_when_the_runs_process_dies(tmp_path: Path, recipe_file: Path) -> None:
    """The report's process ends even in the middle of a plot, which in this test is drawn for ever."""
    with orchestrated(Workspace(tmp_path / "workspace"), recipe_file, makes_report=False) as orchestrator:
        attempt_all(orchestrator)
        run = orchestrator.run
        code = (
            "import time, sys; from vantage.review.reports import __main__ as reports; "
            "reports.page_of = lambda *of: (print('drawing', flush=True), time.sleep(600)); "
            f"sys.argv = ['reports', {run.record.run_id!r}, {run.workspace.address!r}]; reports.main()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "drawing\n"
        process.stdin.write("draw\n")
        process.stdin.close()
        assert process.wait(10) == 0
        process.stdout.close()
        assert not (run.folder / REPORT).exists()
