"""Prefect's own server finds pipelines whose worker or process is lost before their first heartbeat, and starts them again."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.real_runs import evaluating_automations
from vantage.flows.pools.pipelines import pipeline_of, register

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

pytestmark = pytest.mark.slow

LOST, NOT_BEGUN = 12.0, 20.0
"""Seconds; Prefect takes no less than 10."""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["SyncPrefectClient"]:
    with evaluating_automations(tmp_path, monkeypatch) as client:
        yield client


def test_a_flow_run_that_is_lost_before_its_first_heartbeat_is_started_again(
    client: "SyncPrefectClient", recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is lost after a worker has taken it, and one when it has just begun; one waits for its schedule."""
    from prefect.client.schemas.objects import State, StateType

    monkeypatch.setattr("vantage.flows.pools.pipelines.LOST_SECONDS", LOST)
    monkeypatch.setattr("vantage.flows.pools.pipelines.NOT_BEGUN_SECONDS", NOT_BEGUN)
    identity = register(client, pipeline_of(str(recipe_file), (), workspace="s3://team/rlhf", pool="orders"))
    time.sleep(5)  # the server has read the new automations
    runs = {}
    for kind, name in (
        (StateType.SCHEDULED, "Scheduled"),
        (StateType.PENDING, "Submitting"),
        (StateType.RUNNING, "Running"),
    ):
        runs[name] = client.create_flow_run_from_deployment(identity).id
        if kind != StateType.SCHEDULED:
            client.set_flow_run_state(runs[name], State(type=kind, name=name), force=True)

    def states() -> dict[str, str | None]:
        return {name: client.read_flow_run(run).state_name for name, run in runs.items()}

    expected = {"Scheduled": "Scheduled", "Submitting": "Crashed", "Running": "Crashed"}
    deadline = time.monotonic() + 180
    while (found := states()) != expected and time.monotonic() < deadline:
        time.sleep(1)
    assert found == expected
    messages = {(client.read_flow_run(runs[name]).state or State(type=kind)).message for name in runs}
    assert {
        "no heartbeat for 12 s",
        "a worker has taken it, and it has not begun for 20 s",
    } <= messages

    def restarts() -> list[int]:
        others = [run for run in client.read_flow_runs() if run.id not in runs.values()]
        return [run.parameters["restarts"] for run in others]

    while len(restarts()) < 2 and time.monotonic() < deadline:
        time.sleep(1)
    assert restarts() == [1, 1]
