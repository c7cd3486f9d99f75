"""The exit code of a run follows from its record."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vantage.attempts.exit_codes import ExitCode
from vantage.flows import execution
from vantage.flows.execution import exit_code
from vantage.flows.prefect_server import flow_runs


def record(status: str, *codes: int | None, **left: tuple[str, ...]) -> Any:
    stages = {
        str(number): SimpleNamespace(status="failed" if code != 0 else "completed", exit_code=code)
        for number, code in enumerate(codes)
    }
    nothing: dict[str, tuple[str, ...]] = {"unpublished": (), "refused_aliases": (), "unsigned": ()}
    return SimpleNamespace(status=status, stages=stages, **nothing | left)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 137, 65), ExitCode.OUT_OF_MEMORY),
        ((65, 0, 137), ExitCode.BAD_INPUT),
        ((None, 65), ExitCode.BAD_INPUT),
        ((None,), ExitCode.INTERNAL),
    ],
)
def test_the_first_stage_that_failed_decides(codes: tuple[int | None, ...], expected: int) -> None:
    assert exit_code(record("failed", *codes)) == expected


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ({}, ExitCode.OK),
        ({"unsigned": ("sft",)}, ExitCode.BAD_INPUT),
        ({"refused_aliases": ("a",), "unsigned": ("sft",)}, ExitCode.GATE_CLOSED),
        ({"unpublished": ("m",), "refused_aliases": ("a",), "unsigned": ("sft",)}, ExitCode.STORAGE),
    ],
)
def test_what_a_complete_run_could_not_do_has_a_code(left: dict[str, Any], expected: int) -> None:
    """A failed publication decides the exit code before a refused alias, and a refused alias before a missing signature."""
    assert exit_code(record("completed", 0, **left)) == expected


def test_only_a_complete_run_is_asked_what_it_published() -> None:
    assert exit_code(record("gate_closed", 0, unpublished=("m",))) == ExitCode.GATE_CLOSED
    assert exit_code(record("running", 0, unsigned=("sft",))) == ExitCode.RESUME


def test_the_flow_runs_of_this_run_are_closed_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run has an open flow run of an earlier process, which Prefect's server still shows as running."""
    open_runs = [SimpleNamespace(server="here", attempt=None), SimpleNamespace(server="elsewhere", attempt=3)]
    run = SimpleNamespace(
        workspace=SimpleNamespace(root=tmp_path), record=SimpleNamespace(open_flow_runs=open_runs)
    )
    closed: list[Any] = []

    async def close(given: Any, *, server: str) -> None:
        closed.append((given, server))
        del open_runs[0]

    monkeypatch.setattr(execution, "read_runs", lambda workspace: [])
    monkeypatch.setattr(flow_runs, "close_open_flow_runs", close)
    for settings in ("SETTINGS", "QUIET"):  # the function would set these for this process
        monkeypatch.setattr(execution, settings, {})
    monkeypatch.setattr(execution.servers, "server_name", lambda root: "here")
    monkeypatch.setattr(execution.servers, "prefect_server", lambda root: nullcontext())
    orchestrator: Any = SimpleNamespace(run=run)
    assert execution._close_open_flow_runs(orchestrator)
    assert closed == [(run, "here")]
