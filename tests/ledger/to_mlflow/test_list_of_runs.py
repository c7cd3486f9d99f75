"""The shared view shows verdict, publication and numbers of a recipe's runs in MLflow."""

import json
from types import SimpleNamespace
from typing import Any, cast

from vantage.ledger.to_mlflow.list_of_runs import page_of_runs, view_of, write_view


class Client:
    """A client that keeps the tags of one experiment."""

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}
        self.calls = 0

    def set_experiment_tag(self, experiment_id: str, name: str, value: str) -> None:
        self.calls += 1
        self.tags[name] = value


def write(client: Client, metrics: list[str]) -> None:
    experiment = SimpleNamespace(experiment_id="7", tags=dict(client.tags))
    write_view(cast(Any, client), cast(Any, experiment), metrics)


def test_it_shows_verdict_publication_and_numbers_of_parent_runs() -> None:
    view = json.loads(view_of(["evaluation.accuracy_gain"]))
    assert view["searchFilter"] == "tags.`vantage.recipe` != ''", "stages have no such tag"
    assert {"tags.`vantage.conclusion`", "tags.`vantage.published`", "metrics.`evaluation.accuracy_gain`"} < {
        *view["selectedColumns"]
    }


def test_the_address_names_the_tag_that_is_written_once() -> None:
    client = Client()
    for _ in range(2):
        write(client, ["evaluation.accuracy_gain"])
    assert client.calls == 1
    [tag] = client.tags
    key = tag.removeprefix("mlflow.sharedViewState.")
    assert f"viewStateShareKey={key}&" in page_of_runs("7")
    write(client, ["evaluation.score_gain"])
    assert client.calls == 2 and "score_gain" in client.tags[tag]


def test_a_view_that_does_not_fit_is_not_written() -> None:
    """MLflow's column of an experiment's tag has 5,000 characters."""
    client = Client()
    write(client, ["x" * 5000])
    assert client.calls == 0
