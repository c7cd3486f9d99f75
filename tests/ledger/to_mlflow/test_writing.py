"""More than MLflow takes at once is sent in parts, and longer values than it takes are cut."""

from pathlib import Path
from typing import Any

from mlflow import entities

from tests.ledger.small_run import (
    RECIPE,
    client_of,
    curve,
    record_run,
    runs_of,
    sha,
)
from vantage.ledger.journal import Entry
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.to_mlflow.server import Server
from vantage.ledger.to_mlflow.writing import write


def test_metrics_that_are_not_finite_and_thousands_of_them_arrive(workspace: Path) -> None:
    entries = [
        Entry(step=step, time=float(step), metrics={"loss": float("nan") if step == 7 else 0.5, "kl": 0.1})
        for step in range(1200)
    ]

    def tell(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        ledger.open_stage("sft", kind="sft", stage_key=sha("k"), attempt=1, params={}, inputs={})
        ledger.send_metrics("sft", entries)

    record_run(workspace, "0001-tiny-aaaaaa", tell)
    client = client_of(workspace)
    points = curve(client, runs_of(client, "0001-tiny-aaaaaa")["sft"], "loss")
    assert [step for step, _, _ in points] == list(range(1200))
    assert [step for step, _, value in points if value != value] == [7]


def test_more_params_than_mlflow_takes_at_once_and_a_value_longer_than_it_takes(workspace: Path) -> None:
    long = "ü" * 7000
    recipe: dict[str, Any] = {"recipe": "tiny", "stages": {f"s{i}": i for i in range(250)}, "template": long}

    def tell(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", recipe)

    record_run(workspace, "0001-tiny-aaaaaa", tell)
    params = runs_of(client_of(workspace), "0001-tiny-aaaaaa")[""].data.params
    assert len(params) == 252
    assert params["stages.s249"] == "249"
    assert len(params["template"]) == 6000
    assert params["template"].endswith(f"ü… sha256 {sha(long)}")


def test_params_tags_and_metrics_share_the_room_of_a_call(workspace: Path) -> None:
    """A request takes 100 params, 100 tags and 1,000 of all together; MLflow's client makes several."""
    server = Server(f"sqlite:///{workspace / 'mlflow.db'}", artifacts=workspace / "mlartifacts")
    run = server.client.create_run(server.experiment("tiny").experiment_id)
    write(
        server.client,
        run.info.run_id,
        params={f"p{number}": str(number) for number in range(150)},
        tags={f"t{number}": str(number) for number in range(120)},
        metrics=[entities.Metric("loss", number / 8, 1000 + number, number) for number in range(2100)],
    )
    found = server.client.get_run(run.info.run_id).data
    assert found.params == {f"p{number}": str(number) for number in range(150)}
    assert {name: found.tags[f"t{name}"] for name in range(120)} == {name: str(name) for name in range(120)}
    points = server.client.get_metric_history(run.info.run_id, "loss")
    assert sorted((point.step, point.value) for point in points) == [(step, step / 8) for step in range(2100)]
