"""Everything that an audit reads of MLflow, as plain data; nothing is written, and no database is made.

A SQLite database is copied to a temporary folder first, by SQLite itself: MLflow would open the file for writing.
"""

import logging
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, cast
from urllib.parse import unquote, urlsplit

from mlflow import entities
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.tracking import MlflowClient
from sqlalchemy import create_engine, inspect
from sqlalchemy.exc import SQLAlchemyError

from vantage.ledger.expected.runs import Row, row_of
from vantage.ledger.expected.system_metrics import SYSTEM_METRICS
from vantage.ledger.to_mlflow.aliases import TAG
from vantage.ledger.to_mlflow.logged_models import model_in
from vantage.ledger.to_mlflow.runs import search
from vantage.ledger.to_mlflow.server import EXPERIMENT_TAG, is_database
from vantage.ledger.tracking import is_missing_database, without_login, without_password

_Found = TypeVar("_Found")

_ARTIFACTS = "mlartifacts"
"""Folder of MLflow's files in a workspace."""
_MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


class Unanswered(ConnectionError):
    """MLflow does not answer, or there is none."""


@dataclass(frozen=True)
class MlflowRun:
    """One of MLflow's runs."""

    run_id: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    rows: frozenset[Row]
    latest: Mapping[str, float]
    """Metric → the value that MLflow shows, which it keeps beside the rows."""
    datasets: "tuple[DatasetInput, ...]"
    models: tuple[str, ...]
    """Ids of the logged models that it made."""


@dataclass(frozen=True)
class DatasetInput:
    """A dataset that one of MLflow's runs has read."""

    digest: str
    """In MLflow's field, of 36 characters."""
    name: str
    source: str
    """JSON: address and digests."""
    profile: str
    """JSON: metrics."""
    tags: Mapping[str, str]


@dataclass(frozen=True)
class LoggedModel:
    """An artifact on MLflow's page of models."""

    name: str
    kind: str
    run_id: str
    """Of MLflow's run that made it."""
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class MlflowVersion:
    """A version of a registered model."""

    name: str
    version: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...]
    location: str
    """Of its files; empty: it has none."""
    model_tags: Mapping[str, str]
    """Of its logged model."""
    run_id: str = ""
    """Of MLflow's run that made it."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """Alias → who moved it last, as a tag of the registered model says."""


class AuditedServer:
    """One MLflow server or database; use it in a ``with`` block. What one name or id stands for is asked once.

    Raises:
        Unanswered: of every method, and from then on.
    """

    def __init__(self, tracking_uri: str, *, workspace: Path) -> None:
        self._address = tracking_uri
        self._workspace = workspace.absolute()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._client: MlflowClient | None = None
        self._why_not: str | None = None
        self._uri = tracking_uri
        self._kept: dict[tuple[str, str], Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def address(self) -> str:
        """For display."""
        return without_password(self._address)

    def destination(self, experiment: str) -> str | None:
        """Return how an outbox names the experiment of this server; None: there is none of this name."""
        with self._answers() as client:
            found = client.get_experiment_by_name(experiment)
        return None if found is None else f"{found.experiment_id} {found.name} {found.creation_time}"

    def runs(self, experiment: str, run_id: str) -> dict[str | None, list[MlflowRun]]:
        """Stage → MLflow's runs that say they are of this stage of a run of ours, the earliest first; None: the parents."""
        found: dict[str | None, list[MlflowRun]] = {}
        with self._answers() as client:
            place = client.get_experiment_by_name(experiment)
            if place is None or place.lifecycle_stage != "active":
                return {}
            for run in search(client, [place.experiment_id], "vantage.run_id", run_id):
                found.setdefault(run.data.tags.get("vantage.stage"), []).append(self._read(client, run))
        return found

    def knows(self, experiment: str, run_id: str) -> bool:
        """Return whether the server has anything of a run of ours."""
        with self._answers() as client:
            place = client.get_experiment_by_name(experiment)
            found = () if place is None else search(client, [place.experiment_id], "vantage.run_id", run_id)
            return next(iter(found), None) is not None

    def tags_of(self, mlflow_run_id: str) -> Mapping[str, str] | None:
        """Tags of one of MLflow's runs; None: there is none, or it is deleted."""
        with self._answers() as client:
            return self._once("tags", mlflow_run_id, lambda: _active_tags(client, mlflow_run_id))

    def model(self, model_id: str) -> LoggedModel | None:
        """Return a logged model; None: there is none."""
        with self._answers() as client:
            found = self._once("model", model_id, lambda: _model(client, model_id))
        if found is None:
            return None
        return LoggedModel(
            name=str(found.name),
            kind=str(found.model_type),
            run_id=str(found.source_run_id),
            tags=dict(found.tags),
            params=dict(found.params),
            metrics=tuple(sorted({each.key for each in found.metrics or ()})),
        )

    def versions(self, name: str) -> list[MlflowVersion]:
        """Return every version of a registered model."""
        with self._answers() as client:
            return [
                self._described(client, each) for each in client.search_model_versions(f"name = '{name}'")
            ]

    def version(self, name: str, version: str | None, alias: str | None) -> MlflowVersion | None:
        """Return a version by its number or alias; without both, the newest; None: there is none."""
        with self._answers() as client:
            try:
                if alias is not None:
                    found = client.get_model_version_by_alias(name, alias)
                elif version is not None:
                    found = client.get_model_version(name, version)
                else:
                    all_versions = list(client.search_model_versions(f"name = '{name}'"))
                    if not all_versions:
                        return None
                    found = max(all_versions, key=lambda each: int(each.version))
            except MlflowException as error:
                if error.error_code not in _MISSING:
                    raise
                return None
            return self._described(client, found)

    def versions_of(self, digest: str) -> list[MlflowVersion]:
        """Return every version that says it holds this artifact."""
        with self._answers() as client:
            found = self._once(
                "versions",
                digest,
                lambda: list(client.search_model_versions(f"tags.`vantage.digest` = '{digest}'")),
            )
            return [self._described(client, each) for each in found]

    @contextmanager
    def copy_of(self, version: MlflowVersion) -> Iterator[Path]:
        """Yield the folder with a version's files; a server's are downloaded while the block runs."""
        local = self._local(version.location)
        if local is not None:
            yield local
            return
        with tempfile.TemporaryDirectory(prefix="vantage-audit-") as temporary:
            with self._answers():
                repository = get_artifact_repository(version.location, tracking_uri=self._uri)
                if isinstance(repository, LocalArtifactRepository):
                    local = Path(repository.artifact_dir)
                else:
                    repository.download_artifacts("", dst_path=temporary)
            yield local or Path(temporary)

    # Implementation

    def _once(self, what: str, name: str, find: Callable[[], _Found]) -> _Found:
        """Return what ``find`` finds, which is asked for once under this name."""
        if (what, name) not in self._kept:
            self._kept[what, name] = find()
        return cast(_Found, self._kept[what, name])

    def _local(self, location: str) -> Path | None:
        """Return a path on this machine; of a workspace that was moved with its own database, where the files are now."""
        place = urlsplit(location)
        if place.scheme not in ("", "file"):
            return None
        path = Path(unquote(place.path))
        own = urlsplit(self._address).path.removeprefix("/") == str(self._workspace / "mlflow.db")
        if own and _ARTIFACTS in path.parts:
            after = path.parts[len(path.parts) - path.parts[::-1].index(_ARTIFACTS) :]
            moved = self._workspace.joinpath(_ARTIFACTS, *after)
            return (
                moved if moved.is_dir() else path
            )  # what was published after the move lies at the old place
        return path

    def _read(self, client: MlflowClient, run: entities.Run) -> MlflowRun:
        rows = {
            row_of(name, point.value, point.timestamp, point.step)
            for name in run.data.metrics
            if not name.startswith(SYSTEM_METRICS)
            for point in client.get_metric_history(run.info.run_id, name)
        }
        given = run.inputs.dataset_inputs if run.inputs is not None else []
        datasets = tuple(
            DatasetInput(
                digest=each.dataset.digest,
                name=each.dataset.name,
                source=each.dataset.source,
                profile=each.dataset.profile or "",
                tags={tag.key: tag.value for tag in each.tags or []},
            )
            for each in given
        )
        made = run.outputs.model_outputs if run.outputs is not None else []
        tags = dict(run.data.tags)
        self._kept["tags", run.info.run_id] = tags  # the search finds active runs only
        return MlflowRun(
            run_id=run.info.run_id,
            tags=tags,
            params=dict(run.data.params),
            rows=frozenset(rows),
            latest={
                name: row_of(name, value, 0, 0)[3]
                for name, value in run.data.metrics.items()
                if not name.startswith(SYSTEM_METRICS)
            },
            datasets=datasets,
            models=tuple(each.model_id for each in made),
        )

    def _described(self, client: MlflowClient, found: Any) -> MlflowVersion:
        location, model_tags = str(found.source or ""), {}
        model_id = model_in(f"{location}/") or (
            location.removeprefix("models:/") if location.startswith("models:/m-") else None
        )
        if model_id is not None:
            model = self._once("model", model_id, lambda: _model(client, model_id))
            model_tags = dict(model.tags) if model is not None else {}
            if location.startswith("models:/"):
                location = client.get_logged_model(model_id).artifact_location
        aliases, registered = self._once("registered", found.name, lambda: _registered(client, found.name))
        return MlflowVersion(
            name=found.name,
            version=str(found.version),
            tags=dict(found.tags),
            aliases=tuple(alias for alias, version in aliases.items() if version == str(found.version)),
            location=location,
            model_tags=model_tags,
            run_id=str(found.run_id or ""),
            moved={name.removeprefix(TAG): text for name, text in registered.items() if name.startswith(TAG)},
        )

    @contextmanager
    def _answers(self) -> Iterator[MlflowClient]:
        """Yield the client; Unanswered for every way in which there is no answer."""
        if self._why_not is not None:
            raise Unanswered(self._why_not)
        try:
            if self._client is None:
                self._client = self._connect()
            yield self._client
        except Unanswered as error:
            self._why_not = str(error)
            raise
        except (MlflowException, SQLAlchemyError, OSError, ImportError, sqlite3.Error) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self._why_not = (
                f"MLflow at {self.address} does not answer ({without_login(first, self._address)})"
            )
            raise Unanswered(self._why_not) from error

    def _connect(self) -> MlflowClient:
        for name in ("alembic", "mlflow"):  # what goes wrong comes as an exception, and is told once
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if is_missing_database(self._address):
            raise Unanswered(f"there is no MLflow database at {self.address}")
        if self._address.startswith("sqlite"):
            self._uri = self._copied(Path(unquote(urlsplit(self._address).path)[1:]))
        elif is_database(self._address):  # MLflow would make its tables
            engine = create_engine(self._address)
            try:
                if "experiments" not in inspect(engine).get_table_names():
                    raise Unanswered(f"the database at {self.address} has no tables of MLflow")
            finally:
                engine.dispose()
        client = MlflowClient(tracking_uri=self._uri)
        client.search_experiments(max_results=1, filter_string=f"tags.{EXPERIMENT_TAG} = 'true'")
        return client

    def _copied(self, database: Path) -> str:
        self._temporary = tempfile.TemporaryDirectory(prefix="vantage-audit-")
        target = Path(self._temporary.name) / "mlflow.db"
        with (
            closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)
        return f"sqlite:///{target}"


def _active_tags(client: MlflowClient, mlflow_run_id: str) -> Mapping[str, str] | None:
    """Return the tags of one of MLflow's runs; None: there is none, or it is deleted."""
    try:
        run = client.get_run(mlflow_run_id)
    except MlflowException as error:
        if error.error_code not in _MISSING:
            raise
        return None
    return dict(run.data.tags) if run.info.lifecycle_stage == "active" else None


def _model(client: MlflowClient, model_id: str) -> entities.LoggedModel | None:
    try:
        return client.get_logged_model(model_id)
    except MlflowException as error:
        if error.error_code not in _MISSING:
            raise
        return None


def _registered(client: MlflowClient, name: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Alias → version, and the tags, of a registered model: what is searched for comes without them."""
    try:
        found = client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code not in _MISSING:
            raise
        return {}, {}
    return {alias: str(version) for alias, version in sorted(found.aliases.items())}, dict(found.tags)
