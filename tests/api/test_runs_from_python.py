"""Python starts a run's process and reads its records; a small program replaces ``vantage run`` here."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vantage
from vantage.api import places, records, running
from vantage.runs.history import RunHistory
from vantage.runs.record import StageRecord
from vantage.runs.view import Broken, Missing
from vantage.runs.workspace import RunError

PROGRAM = """
import json, os, signal, sys
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--workspace") + 1])
folder.mkdir(exist_ok=True)
asked = {"words": sys.argv[1:], "leads": os.getsid(0) == os.getpid(), "colour": os.environ.get("FORCE_COLOR")}
(folder / "asked.json").write_text(json.dumps(asked))
print("vantage: it goes wrong", file=sys.stderr, flush=True)
if os.environ.get("WAITS"):
    signal.signal(signal.SIGINT, lambda *_: (print("saved", file=sys.stderr), os._exit(75)))
    (folder / "waits").touch()
    signal.pause()
print(json.dumps({"run_id": os.environ["ID"]}))
sys.exit(int(os.environ["CODE"]))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have ``vantage.run`` start the program; returns the workspace's folder."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(running, "COMMAND", (sys.executable, str(tmp_path / "program.py")))
    monkeypatch.setenv("ID", "0001-fake-000001")
    monkeypatch.setenv("CODE", "0")
    return tmp_path / "workspace"


def asked(workspace: Path) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads((workspace / "asked.json").read_text())
    return found


@pytest.mark.parametrize("status", ["completed", "gate_closed", "waiting_approval"])
def test_every_option_reaches_the_run(
    program: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    found = SimpleNamespace(id="0001-fake-000001", status=status)
    monkeypatch.setattr(running, "Run", lambda place, run_id: found if run_id == found.id else None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    options = {"set": {"seed": 5, "recipe": "other"}, "until": "sft", "strict": True}
    assert vantage.run(recipe_file, workspace=program, **options) is found  # type: ignore[arg-type]
    seen = asked(program)
    assert seen["words"] == [
        *("run", str(recipe_file), "--workspace", str(program), "--json"),
        *("--set", "seed=5", "--set", 'recipe="other"', "--until=sft", "--strict"),
    ]
    assert seen["leads"], "a notebook's interrupt reaches its whole process group"
    assert seen["colour"] is None


@pytest.mark.parametrize("status", ["failed", "resumable", "running"])
def test_a_run_that_did_not_end_well_is_an_error(
    program: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    found = SimpleNamespace(id="0001-fake-000001", status=status, record=SimpleNamespace(stages={}))
    monkeypatch.setattr(running, "Run", lambda place, run_id: found)
    monkeypatch.setattr(running, "reasons", lambda record: ["the disk is full"])
    monkeypatch.setenv("CODE", "74")
    with pytest.raises(
        vantage.RunFailed, match=f"run 0001-fake-000001 is {status}: the disk is full"
    ) as failed:
        vantage.run(recipe_file, workspace=program)
    assert (failed.value.exit_code, failed.value.run) == (74, found)


def test_a_run_that_did_not_begin_is_an_error_with_its_last_message(program: Path, recipe_file: Path) -> None:
    with pytest.raises(vantage.RunFailed, match="the run could not begin: it goes wrong") as failed:
        vantage.run(recipe_file, workspace=program)  # the program has made no run
    assert failed.value.run is None


def test_an_interrupt_is_passed_on_and_waited_for(
    program: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WAITS", "1")

    def interrupt() -> None:
        while not (program / "waits").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # in the background of a shell the signal is ignored
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt, match="the run was interrupted"):
            vantage.run(recipe_file, workspace=program)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert "saved" in capsys.readouterr().out, "it was asked by SIGINT, and had time"


# Records


def run_of(stages: dict[str, StageRecord], curves: dict[str, Any], **view: Any) -> Any:
    run = object.__new__(records.Run)
    run.id = "0002-fake-000002"
    vars(run)["record"] = SimpleNamespace(stages=stages, status="completed")
    vars(run)["_view"] = SimpleNamespace(history=RunHistory(curves=curves), **view)
    return run


def test_a_metric_stands_with_its_interval() -> None:
    record = StageRecord(metrics={"accuracy": 0.5, "seen": None}, intervals={"accuracy": (0.4, 0.6)})
    frame = run_of({"evaluation": record}, {}).metrics()
    assert frame.to_dict("records")[0] == {
        **{"stage": "evaluation", "metric": "accuracy", "value": 0.5},
        **{"lower": 0.4, "upper": 0.6},
    }
    assert frame["lower"].isna().tolist() == [False, True]


def test_curves_of_a_reused_stage_are_those_of_the_run_that_made_it() -> None:
    theirs = SimpleNamespace(
        step="tuned",
        run=SimpleNamespace(history=RunHistory(curves={"tuned": {"loss": [(2, 0, 0.5), (1, 0, 0.7)]}})),
    )
    stages = {"sft": StageRecord(status="reused"), "dpo": StageRecord(status="completed")}
    run = run_of(stages, {"dpo": {"loss": [(1, 0, 0.1)]}}, maker=lambda name: theirs)
    assert run.stage("sft").curve("loss").to_dict() == {1: 0.7, 2: 0.5}
    assert list(run.stage("sft").curve("loss").index) == [1, 2], "in the order of the steps"
    assert run.stage("dpo").curve("loss").to_dict() == {1: 0.1}
    with pytest.raises(KeyError, match="no curve 'reward'; it has loss"):
        run.stage("dpo").curve("reward")


@pytest.mark.parametrize("value", [Missing("it was removed"), Broken("it is damaged")])
def test_what_is_missing_or_damaged_is_an_error(value: Any) -> None:
    with pytest.raises(RunError, match="it was removed|it is damaged"):
        records._found(value)
    assert records._found(None) is None


def test_the_workspace_is_that_of_the_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VANTAGE_WORKSPACE", raising=False)
    assert places.workspace_of(None).root.absolute() == tmp_path / ".vantage"
    monkeypatch.setenv("VANTAGE_WORKSPACE", str(tmp_path / "named"))
    assert places.workspace_of(None).root == tmp_path / "named"
    assert places.workspace_of(tmp_path / "given").root == tmp_path / "given"
