"""A run whose records MLflow has not got ends all the same, and its last lines have the command that sends them."""

import logging
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fork_server import WITH_PREFECT
from tests.support.orchestrated import Witness
from tests.support.real_runs import Starter, run_recipe
from vantage.flows.unsent_ledger import unsent_said
from vantage.ledger.outbox import Outbox
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace

DEAD = "http://127.0.0.1:1"


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url")
def test_the_last_lines_say_what_mlflow_has_not_got_and_the_command_there_sends_it(
    workspace: Workspace,
    recipe_file: Path,
    start_vantage: Starter,
    monkeypatch: pytest.MonkeyPatch,
    ledger_database: str,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DEAD)
    process = start_vantage()
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    [record] = read_runs(workspace)
    outbox = Outbox(workspace.root / "runs" / record.run_id / "ledger")
    assert printed.count("cannot be reached") == 1
    *_, has_not, waits, command = printed.rstrip().splitlines()
    assert has_not == f"  MLflow has not got all records of this run ({DEAD}: Connection refused)."
    assert waits == f"  They wait in {outbox.folder}; this sends them once MLflow answers:"
    assert f"  MLflow  {DEAD}" not in printed, "nothing of the run is there"
    assert outbox.is_unsent()

    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    program, *words = shlex.split(command)
    assert program.endswith("vantage")
    done = WITH_PREFECT.run([sys.executable, program, *words], timeout=300)
    assert done.returncode == 0, done.stderr
    assert not outbox.is_unsent()
    assert "has not got" not in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url")
def test_a_run_whose_records_were_sent_says_nothing_of_it(workspace: Workspace, recipe_file: Path) -> None:
    record, printed = run_recipe(workspace, recipe_file)
    assert record.mlflow_run_id is not None
    assert "has not got" not in printed
    assert "warning: " not in printed.replace("warning: stages.", "")


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url")
def test_a_warning_of_the_storage_is_on_the_screen_of_the_run(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vantage.flows.orchestrator import Orchestrator

    begin = Orchestrator.begin

    def warn(self: Orchestrator) -> None:
        begin(self)
        logging.getLogger("vantage.storage.leases").warning("the lease could not be renewed")

    monkeypatch.setattr(Orchestrator, "begin", warn)
    _, printed = run_recipe(workspace, recipe_file)
    assert printed.count("  warning: the lease could not be renewed") == 1


def test_records_that_the_disk_did_not_take_are_said_to_be_lost_and_an_error_goes_on_up(
    workspace: Workspace,
) -> None:
    watcher = Witness()
    ledger: Any = SimpleNamespace(close=lambda: False, unwritten="/w/ledger cannot be written (No space)")
    run: Any = SimpleNamespace(workspace=workspace, record=SimpleNamespace(run_id="0001-fake-abcdef"))
    with pytest.raises(KeyError), unsent_said(run, ledger, watcher):
        raise KeyError
    [said] = watcher.lines
    lost, room, command = said.splitlines()
    assert lost == "  The last records of this run are lost: /w/ledger cannot be written (No space)."
    assert room == "  Make room; this records them anew:"
    assert "resume 0001-fake-abcdef" in command
