"""Runs that reused everything get a flow run in Prefect, which is made up here."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from vantage.flows import reused_runs
from vantage.flows.reused_runs import show_earlier_runs, show_run
from vantage.runs.record import StageRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import Run, acquire_run, read_runs
from vantage.runs.workspace import Workspace


class Prefect:
    """A server that keeps flow runs, or that is down."""

    def __init__(self, *, is_down: bool = False) -> None:
        self.is_down = is_down
        self.shown: dict[str, tuple[str | None, str | None]] = {}
        self.tags: list[list[str]] = []

    async def create_flow_run(self, flow: Any, *, name: str, parameters: Any, tags: list[str]) -> Any:
        if self.is_down:
            raise ConnectionError("nobody listens")
        assert flow.name == "vantage" and parameters["run_id"] == name
        self.shown[name] = (None, None)
        self.tags.append(tags)
        return SimpleNamespace(id=UUID(int=len(self.shown)), name=name)

    async def set_flow_run_state(self, flow_run_id: UUID, state: Any, force: bool) -> None:
        self.shown[list(self.shown)[flow_run_id.int - 1]] = (state.name, state.message)


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Prefect:
    server = Prefect()

    @asynccontextmanager
    async def client() -> AsyncIterator[Prefect]:
        yield server

    monkeypatch.setattr(reused_runs, "get_client", client)
    return server


@contextmanager
def reused(workspace: Workspace, recipe: Path) -> Iterator[Run]:
    """Yield a run that has reused all of its stages and has ended, while its process goes on."""
    resolved, _ = load_resolved(recipe)
    stages = {step: StageRecord(status="reused") for step in ("sft", "policy")}
    with acquire_run(workspace, resolved, source=str(recipe)) as run:
        run.update(status="completed", lacks_flow_run=True, stages=stages)
        yield run


def test_a_run_that_ends_is_shown_with_what_it_reused(
    tmp_path: Path, recipe_file: Path, prefect: Prefect
) -> None:
    with reused(Workspace(tmp_path / "workspace"), recipe_file) as run:
        assert asyncio.run(show_run(run))
        assert prefect.shown == {run.record.run_id: ("Reused", "2 reused")}
        assert prefect.tags == [["recipe:fake", f"run:{run.record.run_id}"]]
        assert run.record.prefect_flow_run_ids == (str(UUID(int=1)),) and not run.record.lacks_flow_run


def test_a_run_without_a_server_is_shown_by_the_next_process_and_once(
    tmp_path: Path, recipe_file: Path, prefect: Prefect
) -> None:
    workspace = Workspace(tmp_path / "workspace")
    with reused(workspace, recipe_file):
        prefect.is_down = True
        [run] = read_runs(workspace)
        asyncio.run(show_earlier_runs(workspace))
        prefect.is_down = False
        asyncio.run(show_earlier_runs(workspace))
        assert prefect.shown == {}, "a process still executes it"
    asyncio.run(show_earlier_runs(workspace))
    asyncio.run(show_earlier_runs(workspace))
    assert list(prefect.shown) == [run.run_id]
    [record] = read_runs(workspace)
    assert record.prefect_flow_run_ids == (str(UUID(int=1)),) and not record.lacks_flow_run


def test_a_server_that_is_down_stops_no_run(tmp_path: Path, recipe_file: Path, prefect: Prefect) -> None:
    workspace = Workspace(tmp_path / "workspace")
    prefect.is_down = True
    with reused(workspace, recipe_file) as run:
        assert not asyncio.run(show_run(run))
    asyncio.run(show_earlier_runs(workspace))
    assert read_runs(workspace)[0].lacks_flow_run, "the next process tries again"
