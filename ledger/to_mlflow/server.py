"""Connect to an MLflow server or database: its experiments, and which of its errors are permanent."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlflow import entities
from mlflow.exceptions import MlflowException
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.tracking import MlflowClient

from vantage.storage.durable_files import locked, make_folder, make_private
from vantage.storage.empty_databases import migrated_once

log = logging.getLogger(__name__)

EXPERIMENT_TAG = "vantage"
"""Tag that marks the ledger's experiments on a server."""

_PERMANENT_ERRORS = frozenset(
    {
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "BAD_REQUEST",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_DOES_NOT_EXIST",
    }
)
"""Error codes for which a retry does not help."""

_EXPERIMENT_TAGS = {
    EXPERIMENT_TAG: "true",
    # without this tag MLflow opens the experiment in its view of chats and traces
    "mlflow.experimentKind": "custom_model_development",
}


class Server:
    """A connected MLflow server or database."""

    def __init__(self, tracking_uri: str, *, artifacts: Path) -> None:
        """Connect; ``artifacts`` is the folder for artifacts if there is no server.

        Creating a SQLite database takes seconds and must not happen twice at the same time, hence the lock.
        """
        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.tracking_uri = tracking_uri
        self._opened: dict[str, entities.Experiment] = {}
        database = _sqlite_file(tracking_uri)
        self._artifacts = artifacts.as_uri() if is_database(tracking_uri) else None
        with _creating(database):
            # only the workspace's own database is made private
            if database is not None and database.parent == artifacts.parent:
                make_private(database)  # SQLite's other files get the same mode
            with migrated_once(f"mlflow-{version('mlflow')}.db", database, rows_of=["workspaces"]):
                self.client = MlflowClient(tracking_uri=tracking_uri)
                self.client.search_experiments(max_results=1)

    def experiment(self, name: str) -> entities.Experiment:
        """Return the experiment with this name, created if missing."""
        if name not in self._opened:
            found = self.client.get_experiment_by_name(name) or self._create_experiment(name)
            if found.lifecycle_stage == "deleted":
                log.warning("MLflow's experiment %r was deleted; it is restored for this run", name)
                self.client.restore_experiment(found.experiment_id)
            for tag, value in _EXPERIMENT_TAGS.items():
                if tag not in found.tags:
                    self.client.set_experiment_tag(found.experiment_id, tag, value)
            self._opened[name] = found
        return self._opened[name]

    def experiment_ids(self) -> list[str]:
        """Return the ids of all experiments of ledgers: an artifact may come from a run of another recipe."""
        found = self.client.search_experiments(filter_string=f"tags.{EXPERIMENT_TAG} = 'true'")
        return [experiment.experiment_id for experiment in found]

    def _create_experiment(self, name: str) -> entities.Experiment:
        try:
            experiment_id = self.client.create_experiment(name, self._artifacts, tags=_EXPERIMENT_TAGS)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = self.client.get_experiment_by_name(name)  # another process has created it in the meantime
            assert found is not None
            return found
        return self.client.get_experiment(experiment_id)


def is_database(tracking_uri: str) -> bool:
    """Return whether the address is a database; MLflow would then write artifacts to ``mlruns`` in the working folder."""
    engine, _, _ = urlsplit(tracking_uri).scheme.partition("+")
    return engine in DATABASE_ENGINES


def is_permanent_error(error: Exception) -> bool:
    """Return whether a retry does not help; errors that come neither from MLflow nor from the network are our own."""
    if isinstance(error, MlflowException):
        return error.error_code in _PERMANENT_ERRORS
    return not isinstance(error, OSError)


@contextmanager
def _creating(database: Path | None) -> Iterator[None]:
    """Let one process at a time create or migrate the database."""
    if database is None:
        yield
        return
    make_folder(database.parent)
    with locked(database.with_name(f"{database.name}.lock")):
        yield


def _sqlite_file(tracking_uri: str) -> Path | None:
    """Return the database's file; None for a server."""
    parts = urlsplit(tracking_uri)
    return Path(unquote(parts.path)[1:]) if parts.scheme.startswith("sqlite") else None
