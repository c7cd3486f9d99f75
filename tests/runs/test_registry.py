"""A registered model that a person names is found or not, with what was published as it, and MLflow is asked rarely."""

from typing import Any

import pytest

from vantage.ledger import tracking
from vantage.ledger.to_mlflow import published_models
from vantage.ledger.to_mlflow.published_models import NoSuchModel, PublishedVersion, UnusableVersion
from vantage.runs.meanings import RegisteredNamed
from vantage.runs.named_models import _chat_of, _date_of, _generation_of
from vantage.runs.registry import MlflowRegistry, NotRegistered
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.inputs import DEFAULT_DATE

OURS = PublishedVersion("ours", "2", "", "a" * 64, "sft", "b" * 64, "0001-small-59aaf7", {}, {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str | None]]:
    """Let MLflow have ``ours`` and a model of somebody else, and return what it was asked."""
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("generation.temperature", value)
            for value in ("", "warm", "NaN,", "[" * 100_000, '"warm"', "-1", "true")
        ),
        *(("generation.stop", value) for value in ("3", "{}", "[3]")),
        *(("model.chat", value) for value in ("yes", '"yes"', "3", "{}")),
        *(("model.date", value) for value in ("2026-11-28", '"yesterday"', "3", "[1]")),
    ],
)
def test_a_param_that_somebody_changed_in_mlflow_is_refused_by_its_name(name: str, value: str) -> None:
    changed = OURS._replace(params={name: value})
    with pytest.raises(UnusableVersion) as refused:
        _generation_of(changed), _chat_of(changed), _date_of(changed)
    said = str(refused.value)
    assert said.startswith(
        f"version 2 of ours: MLflow's param {name}={value[:100]!r} is no value that a run has recorded; "
    )
    assert "`vantage audit ours/2`" in said


def test_params_as_a_run_writes_them_are_read() -> None:
    params = {
        "generation.temperature": "0.5",
        "generation.stop": '["x"]',
        "model.chat": "false",
        "model.date": '"2026-11-28"',
    }
    ours = OURS._replace(params=params)
    generation = _generation_of(ours)
    assert generation is not None
    assert (generation.temperature, generation.stop, _chat_of(ours), str(_date_of(ours))) == (
        0.5,
        ("x",),
        False,
        "2026-11-28",
    )
    assert (_generation_of(OURS), _chat_of(OURS), _date_of(OURS)) == (None, None, DEFAULT_DATE)
