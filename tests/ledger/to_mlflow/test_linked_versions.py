"""A version is linked to its model whatever the tag was before; anybody may edit this tag in MLflow."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlflow.tracking import MlflowClient

from vantage.ledger.to_mlflow.registered_models import _VERSIONS, _link_version


class Client:
    """An MLflow that has one model with a tag."""

    def __init__(self, tag: str | None) -> None:
        self.tags = {} if tag is None else {_VERSIONS: tag}

    def get_logged_model(self, _: str) -> Any:
        return SimpleNamespace(tags=self.tags)

    def set_logged_model_tags(self, _: str, tags: dict[str, str]) -> None:
        self.tags |= tags


THIS, OTHER = {"name": "a", "version": 3}, {"name": "b", "version": "1"}


@pytest.mark.parametrize(
    ("tag", "kept"),
    [
        *((tag, []) for tag in (None, "", "[", "{}", "3", "null", "[3]", '[{"name": "a"}]', "[" * 100_000)),
        (json.dumps([THIS]), []),
        (json.dumps([{**THIS, "version": "3"}]), []),
        (json.dumps([OTHER, {"name": "a", "version": "three"}]), [OTHER, {"name": "a", "version": "three"}]),
    ],
)
def test_a_version_is_linked_whatever_the_tag_was(tag: str | None, kept: list[dict[str, Any]]) -> None:
    client = Client(tag)
    for _ in range(2):
        _link_version(cast(MlflowClient, client), "m-1", "a", 3)
        assert json.loads(client.tags[_VERSIONS]) == [*kept, THIS]
