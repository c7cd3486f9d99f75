"""Movements of aliases become events in Prefect: each is announced once, and starts one run of a deployment."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mlflow.tracking import MlflowClient

from tests.support.orchestrated import Witness
from tests.support.real_runs import evaluating_automations, wait_for
from vantage.flows.pools.pipelines import pipeline_of
from vantage.flows.publishing.announcing import announce_moves
from vantage.ledger.alias_moves import FILE, AliasMove, AliasMoves
from vantage.ledger.to_mlflow.aliases import Movement, move_alias
from vantage.runs.workspace import Workspace

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

RUN = "0001-judge-abcdef"


@pytest.fixture
def moves(workspace: Workspace) -> AliasMoves:
    """Return the movements of one run, whose outbox is sent."""
    folder = workspace.root / "runs" / RUN / "ledger"
    folder.mkdir(parents=True)
    return AliasMoves(folder)


class Prefect:
    """A server's stand-in: it keeps the events, or does not answer."""

    def __init__(self) -> None:
        self.received: list[list[dict[str, Any]]] = []
        self.answers = True

    def send(self, events: list[dict[str, Any]]) -> None:
        if not self.answers:
            raise ConnectionError("Connection refused")
        self.received.append(events)


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Prefect:
    """Return the configured server."""
    server = Prefect()
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    monkeypatch.setattr("vantage.flows.publishing.announcing._send", server.send)
    return server


def moved(version: int, before: str = "") -> AliasMove:
    return AliasMove(
        registered_model="judge",
        alias="champion",
        from_version=before,
        to_version=str(version),
        time=1_700_000_000_000 + version,
        run_id=RUN,
        by="",
    )


def test_mlflow_is_changed_after_the_movement_is_written_and_repeating_it_is_the_same_movement(
    ledger_database: str, moves: AliasMoves
) -> None:
    client = MlflowClient(tracking_uri=ledger_database)
    client.create_registered_model("noted")
    for _ in range(2):
        client.create_model_version("noted", source="file:///nowhere")

    def note_and_die(move: AliasMove) -> None:
        moves.note(move)
        raise OSError("killed")

    first = Movement("1", 5, RUN, "", "")
    with pytest.raises(OSError, match="killed"):
        move_alias(client, "noted", "champion", first, note_and_die)
    assert client.get_registered_model("noted").aliases == {}
    assert move_alias(client, "noted", "champion", first, moves.note) is None
    assert move_alias(client, "noted", "champion", first, moves.note) is None, "sent again, it moves nothing"
    assert move_alias(client, "noted", "champion", Movement("2", 7, RUN, "ada", ""), moves.note) is None
    late = move_alias(client, "noted", "champion", Movement("1", 6, RUN, "", ""), moves.note)
    assert late == (
        "ada moved it to version 2 after that, at 1970-01-01 00:00:00 UTC; if that time is wrong, delete the tag "
        "vantage.alias.champion of the registered model noted in MLflow, and publish again"
    )
    assert [(each.from_version, each.to_version, each.by) for each in moves.waiting()] == [
        ("", "1", ""),
        ("1", "2", "ada"),
    ]
    assert len({each.id for each in moves.waiting()}) == 2


def test_each_movement_is_announced_once_with_its_own_id(
    workspace: Workspace, moves: AliasMoves, prefect: Prefect
) -> None:
    moves.note(moved(1))
    moves.note(moved(1))
    moves.note(moved(2, before="1"))
    file = workspace.root / "runs" / RUN / "ledger" / FILE
    # a process was killed in the middle of a line
    file.write_bytes(file.read_bytes() + b'{"move": {"registered_mo')
    announce_moves(workspace, Witness())
    announce_moves(workspace, Witness())
    [events] = prefect.received
    assert [(each["event"], each["resource"]["prefect.resource.id"]) for each in events] == [
        ("vantage.alias.moved", "vantage.alias.judge@champion")
    ] * 2
    assert [each["payload"]["to_version"] for each in events] == ["1", "2"]
    assert [each["id"] for each in events] == [each["resource"]["vantage.move"] for each in events]
    assert events[0]["occurred"] == "2023-11-14T22:13:20.001000+00:00"
    assert moves.waiting() == []


def test_what_mlflow_lacks_waits_and_so_does_what_prefect_did_not_take(
    workspace: Workspace, moves: AliasMoves, prefect: Prefect
) -> None:
    moves.note(moved(1))
    outbox = workspace.root / "runs" / RUN / "ledger" / "outbox.jsonl"
    outbox.write_text("{}\n")
    announce_moves(workspace, Witness())
    assert prefect.received == []
    outbox.unlink()
    prefect.answers = False
    witness = Witness()
    announce_moves(workspace, witness)
    [line] = witness.lines
    assert "was not informed that judge@champion moved" in line
    assert "the next run of this workspace informs it" in line
    assert len(moves.waiting()) == 1
    prefect.answers = True
    announce_moves(workspace, Witness())
    assert moves.waiting() == []


def test_without_a_configured_server_a_movement_starts_nothing_later(
    workspace: Workspace, moves: AliasMoves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vantage.flows.publishing.announcing.configured_url", lambda: None)
    moves.note(moved(1))
    announce_moves(workspace, Witness())
    assert moves.waiting() == []


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("judge@champion", "is no alias of a registered model; write --on 'models:/NAME@ALIAS'"),
        ("models:/judge/3", "is no alias of a registered model"),
        ("models:/judge", "is no alias of a registered model"),
        ("models:/judge@champion#none", "is no alias of a registered model"),
        ("models:/fake@champion", "publishes fake@champion itself, so each of its runs would start the next"),
    ],
)
def test_what_cannot_start_a_deployment_is_refused(recipe_file: Path, on: str, message: str) -> None:
    publish = "publish=[{stage: policy, registered_model: fake, alias: champion}]"
    with pytest.raises(ValueError, match=message):
        pipeline_of(str(recipe_file), [publish], workspace="s3://team/rlhf", pool="orders", on=on)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["SyncPrefectClient"]:
    with evaluating_automations(tmp_path, monkeypatch) as client:
        yield client


@pytest.mark.slow
def test_a_deployment_runs_once_for_each_movement(
    client: "SyncPrefectClient", recipe_file: Path, workspace: Workspace, moves: AliasMoves
) -> None:
    """It runs once also where an event arrives twice, and not at all when another alias moves."""
    from vantage.cli.deploy import _described
    from vantage.flows.pools.pipelines import register, registered, remove

    def runs() -> list[Any]:
        return [run.deployment_id for run in client.read_flow_runs()]

    def announce(*moved: AliasMove) -> None:
        for move in moved:
            moves.note(move)
        announce_moves(workspace, Witness())

    named = {"workspace": "s3://team/rlhf", "pool": "orders"}
    ours = register(client, pipeline_of(str(recipe_file), (), on="models:/judge@champion", **named))
    elsewhere = pipeline_of(str(recipe_file), (), name="other", on="models:/judge@challenger", **named)
    other = register(client, elsewhere)
    assert {each.name: _described(each)["started by"] for each in registered(client)} == {
        "fake": "models:/judge@champion",
        "other": "models:/judge@challenger",
    }
    announce(moved(1))
    wait_for(lambda: runs() == [ours])
    (workspace.root / "runs" / RUN / "ledger" / FILE).unlink()  # as if it was killed before it was marked
    announce(moved(1), moved(2, before="1"))
    wait_for(lambda: len(runs()) >= 2)
    announce(moved(3).model_copy(update={"alias": "challenger"}))  # handled after all before it
    wait_for(lambda: other in runs())
    assert sorted(map(str, runs())) == sorted(map(str, [ours, ours, other]))
    assert {run.parameters["recipe"].splitlines()[0] for run in client.read_flow_runs()} == {"recipe: fake"}
    remove(client, "fake")
    remove(client, "other")
    assert client.read_automations() == []
