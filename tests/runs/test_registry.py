"""Registered models that a person names: whether there is one, what was published as it, and how often MLflow is asked."""

from typing import Any

import pytest

from vantage.ledger import tracking
from vantage.ledger.to_mlflow import published_models
from vantage.ledger.to_mlflow.published_models import NoSuchModel, PublishedVersion, UnusableVersion
from vantage.runs.meanings import RegisteredNamed
from vantage.runs.registry import MlflowRegistry, NotRegistered
from vantage.runs.workspace import Workspace

OURS = PublishedVersion("ours", "2", "", "a" * 64, "sft", "b" * 64, "0001-small-59aaf7", {}, {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str | None]]:
    """MLflow has ``ours`` and a model of somebody else; returns what it was asked."""
    found: list[tuple[str, str | None, str | None]] = []

    def find_version(address: str, name: str, *, version: str | None, alias: str | None) -> Any:
        found.append((name, version, alias))
        if name == "ours":
            return OURS
        if name == "theirs":
            raise UnusableVersion("version 1 of theirs was not published by Vantage")
        raise NoSuchModel(f"MLflow has no registered model {name}")

    monkeypatch.setattr(published_models, "find_version", find_version)
    monkeypatch.setattr(tracking, "is_missing_database", lambda address: False)
    return found


def test_a_version_is_asked_for_once(asked: list[Any], tmp_path: Any) -> None:
    registry = MlflowRegistry(Workspace(tmp_path))
    named = RegisteredNamed("ours", alias="champion")
    assert registry.has(named)
    assert registry.published(named) == OURS
    assert registry.published(RegisteredNamed("ours", version="2")) == OURS
    assert asked == [("ours", None, "champion"), ("ours", "2", None)]


def test_a_model_of_somebody_else_is_there_and_was_not_published(asked: list[Any], tmp_path: Any) -> None:
    registry = MlflowRegistry(Workspace(tmp_path))
    assert registry.has(RegisteredNamed("theirs"))
    with pytest.raises(NotRegistered, match="version 1 of theirs was not published by Vantage"):
        registry.published(RegisteredNamed("theirs"))
    assert not registry.has(RegisteredNamed("nobodys"))
    with pytest.raises(NotRegistered, match="MLflow has no registered model nobodys"):
        registry.published(RegisteredNamed("nobodys"))


def test_a_missing_database_has_nothing_and_is_not_made(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    registry = MlflowRegistry(Workspace(tmp_path))
    named = RegisteredNamed("ours", version="2")
    assert not registry.has(named)
    with pytest.raises(
        NotRegistered, match="ours/2 is no model that MLflow has: there is no database at sqlite:"
    ):
        registry.published(named)
    assert list(tmp_path.iterdir()) == []
