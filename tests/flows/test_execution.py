"""The exit code of a run follows from its record, and flow runs that were left open are closed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vantage.attempts.exit_codes import ExitCode
from vantage.flows import execution
from vantage.flows.execution import exit_code
from vantage.flows.prefect_server import flow_runs
from vantage.flows.prefect_server import server as servers


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


class Records:
    """The records of a run and of the other runs of its workspace, and what was asked of Prefect's server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.own: list[Any] = []
        """Open flow runs of the run itself."""
        self.others: list[Any] = []
        """Records of the other runs."""
        self.active: set[str] = set()
        """Names of the runs that a process executes now."""
        self.closed: list[tuple[Any, str]] = []
        """The arguments of each call that closes flow runs."""
        self.unavailable = False
        """Whether Prefect's server does not answer."""
        self.run = SimpleNamespace(
            workspace=SimpleNamespace(root=root), record=SimpleNamespace(open_flow_runs=self.own)
        )
        monkeypatch.setattr(execution, "read_runs", lambda workspace: self.others)
        monkeypatch.setattr(execution, "is_active", lambda workspace, run_id: run_id in self.active)
        monkeypatch.setattr(flow_runs, "close_open_flow_runs", self.close)
        for settings in ("SETTINGS", "QUIET"):  # the function would set these for this process
            monkeypatch.setattr(execution, settings, {})
        monkeypatch.setattr(servers, "server_name", lambda root: "here")
        monkeypatch.setattr(servers, "prefect_server", self.server)

    @contextmanager
    def server(self, root: Path) -> Iterator[None]:
        if self.unavailable:
            raise servers.ServerUnavailable("it does not answer")
        yield

    async def close(self, given: Any, *, server: str) -> None:
        """Close what is open on the server."""
        self.closed.append((given, server))
        self.own[:] = [each for each in self.own if each.server != server]

    def closes(self) -> bool:
        """Call the function, and return its answer."""
        orchestrator: Any = SimpleNamespace(run=self.run)
        return execution._close_open_flow_runs(orchestrator)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Records:
    return Records(monkeypatch, tmp_path)


def open_flow_run(server: str, attempt: int | None = None) -> Any:
    """Return an open flow run of a run (``attempt=None``) or of an attempt."""
    return SimpleNamespace(server=server, attempt=attempt)


def test_the_flow_runs_of_this_run_are_closed_too(records: Records) -> None:
    """The run has an open flow run of an earlier process, which Prefect's server still shows as running."""
    records.own += [open_flow_run("here"), open_flow_run("elsewhere", attempt=3)]
    assert records.closes()
    assert records.closed == [(records.run, "here")]


def test_the_flow_runs_of_a_run_whose_process_was_killed_are_closed(records: Records) -> None:
    records.others.append(SimpleNamespace(run_id="killed", open_flow_runs=[open_flow_run("here")]))
    assert records.closes()
    assert records.closed == [(records.run, "here")]


def test_a_run_that_another_process_executes_keeps_its_flow_runs(records: Records) -> None:
    records.others.append(SimpleNamespace(run_id="active", open_flow_runs=[open_flow_run("here")]))
    records.active.add("active")
    assert records.closes()
    assert records.closed == []


def test_a_flow_run_of_another_server_stays_open(records: Records) -> None:
    """Only the server that has a flow run can record its end."""
    records.own.append(open_flow_run("elsewhere"))
    assert not records.closes()
    assert records.closed == []


def test_a_server_that_does_not_answer_leaves_the_flow_runs_open(records: Records) -> None:
    records.own.append(open_flow_run("here"))
    records.unavailable = True
    assert not records.closes()
    records.unavailable = False
    assert records.closes()
