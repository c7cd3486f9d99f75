"""Read everything in MLflow that an audit needs, as plain data; nothing is written, and no database is created.

A SQLite database is copied to a temporary folder first, by SQLite itself: MLflow would open the file for writing.
"""

import logging
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from mlflow import entities
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy import create_engine, inspect
from sqlalchemy.exc import SQLAlchemyError

from vantage.ledger.expected.system_metrics import SYSTEM_METRICS
from vantage.ledger.published_copies import local_folder
from vantage.ledger.to_mlflow.audited_entries import (
    DatasetInput,
    LoggedModel,
    MlflowRun,
    MlflowVersion,
    ModelRow,
)
from vantage.ledger.to_mlflow.logged_models import model_in
from vantage.ledger.to_mlflow.mlflow_runs import search
from vantage.ledger.to_mlflow.served_files import (
    UnboundedFiles,
    address_of_version,
    files_at,
    followed,
)
from vantage.ledger.to_mlflow.server import EXPERIMENT_TAG, is_database
from vantage.ledger.to_mlflow.stored_values import stored_row, text, texts
from vantage.ledger.tracking import is_missing_database, without_login, without_password

_ARTIFACTS = "mlartifacts"
"""Folder of MLflow's files in a workspace."""
_OF_MODEL = re.compile(r".*/models/(?P<model>m-[0-9a-f]{32})/artifacts/?")
"""Address that MLflow gives to the files of a logged model."""
_NEWEST = "latest"
"""Alias that MLflow resolves to the newest version, whatever its tables say."""
_MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
_RUN_ID = re.compile("[0-9a-f]{32}")


class Unanswered(ConnectionError):
    """MLflow does not answer, or there is none."""


class AuditedServer:
    """One MLflow server or database; use it in a ``with`` block.

    Raises:
        Unanswered: by any method; then by all later calls too.
    """

    def __init__(self, tracking_uri: str, *, workspace: Path) -> None:
        self._address = tracking_uri
        self._workspace = workspace.absolute()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._client: MlflowClient | None = None
        self._why_not: str | None = None
        self._uri = tracking_uri
        self._found: dict[str, entities.Run | None] = {}
        """Id → each run that was asked for."""
        self._runs: dict[str, MlflowRun] = {}
        """Id → each run that was read."""
        self._roots: dict[str, str] = {}
        self._experiments: dict[str, entities.Experiment | None] = {}
        """Name → each experiment that was asked for."""
        self._versions: dict[tuple[str, str | None, str | None], MlflowVersion | None] = {}
        """(name, version, alias) → each version that was asked for."""
        self._listed: dict[str, dict[str, Any]] = {}
        """Name → version → all versions of each registered model that was asked for."""
        self._locations: dict[tuple[str, str], str] = {}
        """(name, version) → the address of the files of each version that was asked for."""
        self._logged: dict[str, entities.LoggedModel | None] = {}
        """Id → each logged model that was asked for."""
        self._models: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def address(self) -> str:
        """Return the address without its password, for display."""
        return without_password(self._address)

    def destination(self, experiment: str) -> str | None:
        """Return the name that an outbox gives to the experiment of this server; None: there is no such experiment."""
        with self._answers() as client:
            found = self._experiment(client, experiment)
        return None if found is None else f"{found.experiment_id} {found.name} {found.creation_time}"

    def runs(self, experiment: str, run_id: str) -> dict[str | None, list[MlflowRun]]:
        """Return stage → MLflow's runs with the tags of this stage of a Vantage run, the earliest first; None: the parents."""
        found: dict[str | None, list[MlflowRun]] = {}
        with self._answers() as client:
            place = self._experiment(client, experiment)
            if place is None or place.lifecycle_stage != "active":
                return {}
            for run in search(client, [place.experiment_id], "vantage.run_id", run_id):
                whole = self._active_run(
                    client, run.info.run_id
                )  # a search leaves out the models that were read
                if whole is not None:
                    found.setdefault(whole.data.tags.get("vantage.stage"), []).append(
                        self._read(client, whole)
                    )
        return found

    def knows(self, experiment: str, run_id: str) -> bool:
        """Return whether the server has anything of a Vantage run."""
        with self._answers() as client:
            place = self._experiment(client, experiment)
            found = () if place is None else search(client, [place.experiment_id], "vantage.run_id", run_id)
            return next(iter(found), None) is not None

    def tags_of(self, mlflow_run_id: str) -> Mapping[str, str] | None:
        """Return tags of one of MLflow's runs; None: there is none, or it is deleted."""
        with self._answers() as client:
            run = self._active_run(client, mlflow_run_id)
        return None if run is None else texts(run.data.tags)

    def tags_with(self, tag: str, value: str) -> list[Mapping[str, str]]:
        """Return the tags of every run, of whatever experiment and workspace, that has this tag."""
        with self._answers() as client:
            places = [each.experiment_id for each in client.search_experiments()]
            return [texts(each.data.tags) for each in search(client, places, tag, value)]

    def model(self, model_id: str) -> LoggedModel | None:
        """Return a logged model; None: there is none."""
        with self._answers() as client:
            found = self._logged_model(client, model_id)
            if found is None:
                return None
            root = self._root(client, found.experiment_id)
            location = _found(lambda: followed(client, str(found.artifact_location)))
            return LoggedModel(
                name=text(found.name),
                kind=text(found.model_type),
                run_id=text(found.source_run_id),
                tags=texts(found.tags),
                params=texts(found.params),
                rows=tuple(map(_model_row, found.metrics or ())),
                location=location,
                root=root,
                status=text(found.status),
                status_message=text(found.status_message),
            )

    def run(self, mlflow_run_id: str) -> MlflowRun | None:
        """Return one of MLflow's runs; None: there is none, or it is deleted."""
        if mlflow_run_id in self._runs:
            return self._runs[mlflow_run_id]
        with self._answers() as client:
            run = self._active_run(client, mlflow_run_id)
            return None if run is None else self._read(client, run)

    def versions(self, name: str) -> list[MlflowVersion]:
        """Return every version of a registered model."""
        with self._answers() as client:
            return [self._described(client, each) for each in self._versions_named(client, name).values()]

    def version(self, name: str, version: str | None, alias: str | None) -> MlflowVersion | None:
        """Return a version by its number or alias; without both, the newest; None: there is none."""
        asked = name, version, alias
        if asked not in self._versions:
            self._versions[asked] = self._read_version(*asked)
        return self._versions[asked]

    def _read_version(self, name: str, version: str | None, alias: str | None) -> MlflowVersion | None:
        with self._answers() as client:
            listed = self._versions_named(client, name)
            try:
                if alias is not None:
                    found = self._aliased(client, name, alias, listed)
                elif version is not None:
                    found = listed.get(version) or client.get_model_version(name, version)
                elif listed:
                    found = max(listed.values(), key=lambda each: int(each.version))
                else:
                    return None
            except MlflowException as error:
                if error.error_code not in _MISSING:
                    raise
                return None
            return self._described(client, found)

    def versions_of(self, digest: str) -> list[MlflowVersion]:
        """Return every version whose tags claim that it holds this artifact."""
        with self._answers() as client:
            found = client.search_model_versions(f"tags.`vantage.digest` = '{digest}'")
            return [self._described(client, each) for each in found]

    @contextmanager
    def files_at(self, location: str, *, digest: str) -> Iterator[Path]:
        """Yield the folder with the files of an address; files on a server are downloaded for the time of the block.

        Raises:
            UnboundedFiles: there is more than was published under the digest.
        """
        local = local_folder(location)
        if local is not None:
            yield local
            return
        with ExitStack() as stack:
            with self._answers():
                folder = stack.enter_context(files_at(location, tracking_uri=self._uri, digest=digest))
            yield folder

    def moved_to(self, location: str) -> Path | None:
        """Return where this workspace has the files of an address outside it; None: it was not moved.

        Only the workspace's own database can have been moved with it.
        """
        found = _OF_MODEL.fullmatch(location)
        local = local_folder(location)
        own = urlsplit(self._address).path.removeprefix("/") == str(self._workspace / "mlflow.db")
        if not own or found is None or local is None:
            return None
        inside = self._workspace.joinpath(_ARTIFACTS, "models", found["model"], "artifacts")
        return None if local == inside or not inside.is_dir() else inside

    # Implementation

    def _read(self, client: MlflowClient, run: entities.Run) -> MlflowRun:
        rows = {
            stored_row(name, point.value, point.timestamp, point.step)
            for name in run.data.metrics
            if not text(name).startswith(SYSTEM_METRICS)
            for point in client.get_metric_history(run.info.run_id, name)
        }
        given = run.inputs.dataset_inputs if run.inputs is not None else []
        datasets = tuple(
            DatasetInput(
                digest=text(each.dataset.digest),
                name=text(each.dataset.name),
                source=text(each.dataset.source),
                profile=text(each.dataset.profile),
                tags=texts({tag.key: tag.value for tag in each.tags or []}),
                source_type=text(each.dataset.source_type),
                schema=text(each.dataset.schema),
            )
            for each in given
        )
        read = run.inputs.model_inputs if run.inputs is not None else []
        made = run.outputs.model_outputs if run.outputs is not None else []
        self._runs[run.info.run_id] = MlflowRun(
            run_id=run.info.run_id,
            tags=texts(run.data.tags),
            params=texts(run.data.params),
            rows=frozenset(rows),
            latest={
                text(name): stored_row(name, value, 0, 0)[3]
                for name, value in run.data.metrics.items()
                if not text(name).startswith(SYSTEM_METRICS)
            },
            datasets=datasets,
            models=tuple(text(each.model_id) for each in made),
            read_models=tuple(text(each.model_id) for each in read),
            named_by=_models_naming(client, run),
            status=text(run.info.status),
            started=run.info.start_time,
            ended=run.info.end_time,
            files=text(run.info.artifact_uri),
            root=self._root(client, run.info.experiment_id),
        )
        return self._runs[run.info.run_id]

    def _described(self, client: MlflowClient, found: Any) -> MlflowVersion:
        location = self._location(client, found.name, str(found.version))
        ids = (model_in(f"{each}/") for each in (str(found.source or ""), location))
        model_id = next((each for each in ids if each is not None), None)
        model = None if model_id is None else self._logged_model(client, model_id)
        aliases, registered = self._registered_model(client, found.name)
        return MlflowVersion(
            name=text(found.name),
            version=str(found.version),
            tags=texts(found.tags),
            aliases=tuple(alias for alias, version in aliases.items() if version == str(found.version)),
            location=location,
            model_tags={} if model is None else texts(model.tags),
            source=text(found.source),
            model_location=None if model is None else text(model.artifact_location),
            run_id=text(found.run_id),
            registered=registered,
            status=text(found.status),
            stage=text(found.current_stage) or "None",
            run_link=text(found.run_link),
            description=text(found.description),
            status_message=text(found.status_message),
        )

    def _experiment(self, client: MlflowClient, name: str) -> entities.Experiment | None:
        """Return the experiment with this name, asking MLflow once; None: there is none."""
        if name not in self._experiments:
            self._experiments[name] = client.get_experiment_by_name(name)
        return self._experiments[name]

    def _versions_named(self, client: MlflowClient, name: str) -> dict[str, Any]:
        """Return version → entity, for the newest versions of a registered model (10,000 at most), asking MLflow once."""
        if name not in self._listed:
            try:
                found = list(client.search_model_versions(f"name = '{name}'"))
            except MlflowException as error:
                if error.error_code not in _MISSING:
                    raise
                found = []  # MLflow cannot search for a name with a quotation mark
            self._listed[name] = {str(each.version): each for each in found}
        return self._listed[name]

    def _aliased(self, client: MlflowClient, name: str, alias: str, listed: Mapping[str, Any]) -> Any:
        """Return the version that an alias points to, from the listed ones if possible, else from MLflow."""
        aliases, _ = self._registered_model(client, name)
        number = "" if alias.lower() == _NEWEST else aliases.get(alias, "")
        return listed.get(number) or client.get_model_version_by_alias(name, alias)

    def _location(self, client: MlflowClient, name: str, version: str) -> str:
        """Return the address of a version's files, asking MLflow once."""
        if (name, version) not in self._locations:
            self._locations[name, version] = _found(lambda: address_of_version(client, name, version))
        return self._locations[name, version]

    def _root(self, client: MlflowClient, experiment_id: str) -> str:
        """Return the address of all files of an experiment; empty: there is none."""
        if experiment_id not in self._roots:
            try:
                self._roots[experiment_id] = str(client.get_experiment(experiment_id).artifact_location)
            except MlflowException as error:
                if error.error_code not in _MISSING:
                    raise
                self._roots[experiment_id] = ""
        return self._roots[experiment_id]

    def _logged_model(self, client: MlflowClient, model_id: str) -> entities.LoggedModel | None:
        if model_id not in self._logged:
            self._logged[model_id] = _model(client, model_id)
        return self._logged[model_id]

    def _registered_model(
        self, client: MlflowClient, name: str
    ) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return alias → version, and the tags, of a registered model, asking MLflow once."""
        if name not in self._models:
            self._models[name] = _registered(client, name)
        return self._models[name]

    @contextmanager
    def _answers(self) -> Iterator[MlflowClient]:
        """Yield the client; raise Unanswered for each error by which MLflow gives no answer."""
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
            first = (str(error).splitlines() or [type(error).__name__])[0][:500]
            self._why_not = (
                f"MLflow at {self.address} does not answer ({without_login(first, self._address)})"
            )
            raise Unanswered(self._why_not) from error
        except UnboundedFiles:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # A database takes any value in any column; MLflow's entities, and ours, do not.
            self._why_not = f"MLflow at {self.address} has a value that cannot be read ({type(error).__name__}: {str(error)[:200]})"
            raise Unanswered(self._why_not) from error

    def _connect(self) -> MlflowClient:
        for name in ("alembic", "mlflow"):  # their errors also come as exceptions, and are reported once
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if is_missing_database(self._address):
            raise Unanswered(f"there is no MLflow database at {self.address}")
        if self._address.startswith("sqlite"):
            self._uri = self._copied(Path(unquote(urlsplit(self._address).path)[1:]))
        elif is_database(self._address):  # MLflow would create its tables in an empty database
            engine = create_engine(self._address)
            try:
                if "experiments" not in inspect(engine).get_table_names():
                    raise Unanswered(f"the database at {self.address} has no tables of MLflow")
            finally:
                engine.dispose()
        client = MlflowClient(tracking_uri=self._uri)
        client.search_experiments(max_results=1, filter_string=f"tags.{EXPERIMENT_TAG} = 'true'")
        return client

    def _active_run(self, client: MlflowClient, mlflow_run_id: str) -> entities.Run | None:
        """Return one of MLflow's runs, asking MLflow once; None: there is none, or it is deleted."""
        if mlflow_run_id not in self._found:
            try:
                run = client.get_run(mlflow_run_id)
            except MlflowException as error:
                if error.error_code not in _MISSING:
                    raise
                self._found[mlflow_run_id] = None
            else:
                self._found[mlflow_run_id] = run if run.info.lifecycle_stage == "active" else None
        return self._found[mlflow_run_id]

    def _copied(self, database: Path) -> str:
        self._temporary = tempfile.TemporaryDirectory(prefix="vantage-audit-")
        target = Path(self._temporary.name) / "mlflow.db"
        with (
            closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)
        return f"sqlite:///{target}"


def _model(client: MlflowClient, model_id: str) -> entities.LoggedModel | None:
    try:
        return client.get_logged_model(model_id)
    except MlflowException as error:
        if error.error_code not in _MISSING:
            raise
        return None


def _found(address: Callable[[], str]) -> str:
    """Return the address; empty if it leads to a model that MLflow does not have."""
    try:
        return address()
    except MlflowException as error:
        if error.error_code not in _MISSING:
            raise
        return ""


def _models_naming(client: MlflowClient, run: entities.Run) -> tuple[str, ...]:
    """Return the ids of the logged models that name a run as their maker."""
    if not _RUN_ID.fullmatch(text(run.info.run_id)):  # edited; MLflow could refuse the question
        return ()
    found: list[str] = []
    token: str | None = None
    while token != "":
        page = client.search_logged_models(
            [run.info.experiment_id],
            filter_string=f"source_run_id = '{run.info.run_id}'",
            page_token=token,
        )
        found += (text(each.model_id) for each in page)
        token = page.token or ""
    return tuple(found)


def _model_row(point: Any) -> ModelRow:
    """Return a metric of a logged model."""
    row = stored_row(point.key, point.value, point.timestamp, point.step)
    return ModelRow(row, text(point.run_id), (text(point.dataset_name), text(point.dataset_digest)))


def _registered(client: MlflowClient, name: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return alias → version, and the tags, of a registered model. Results of a search contain neither."""
    try:
        found = client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code not in _MISSING:
            raise
        return {}, {}
    return dict(sorted(texts(found.aliases).items())), texts(found.tags)
