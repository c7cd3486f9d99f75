"""Look up registered models of MLflow by name, and their publications; MLflow is asked once about each."""

from typing import TYPE_CHECKING

from vantage.ledger import tracking
from vantage.runs.meanings import RegisteredNamed
from vantage.runs.workspace import RunError, Workspace

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.published_models import PublishedVersion


class NotRegistered(RunError):
    """MLflow has no such registered model, version or alias, or Vantage did not publish it."""


class MlflowRegistry:
    """The registered models of the MLflow server of a workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._address = tracking.address(None, workspace.root)
        self._found: dict[RegisteredNamed, PublishedVersion] = {}

    def has(self, named: RegisteredNamed) -> bool:
        """Return whether MLflow has such a version, whether or not Vantage published it.

        Raises:
            vantage.ledger.to_mlflow.published_models.RegistryUnavailable: MLflow does not answer.
        """
        if tracking.is_missing_database(self._address):  # MLflow would create a missing database
            return False
        tracking.set_up_client()
        from vantage.ledger.to_mlflow.published_models import NoSuchModel, UnusableVersion  # imports MLflow

        try:
            self._find(named)
        except UnusableVersion:
            return True
        except NoSuchModel:
            return False
        return True

    def published(self, named: RegisteredNamed) -> "PublishedVersion":
        """Return the publication of this version.

        Raises:
            NotRegistered: there is none, or Vantage did not publish it.
            vantage.ledger.to_mlflow.published_models.RegistryUnavailable: MLflow does not answer.
        """
        if tracking.is_missing_database(self._address):
            raise NotRegistered(
                f"{named} is no model that MLflow has: there is no database at {tracking.without_password(self._address)}; "
                "set MLFLOW_TRACKING_URI, or name the workspace with --workspace"
            )
        tracking.set_up_client()
        from vantage.ledger.to_mlflow.published_models import NoSuchModel  # imports MLflow

        try:
            return self._find(named)
        except NoSuchModel as error:
            raise NotRegistered(str(error)) from None

    def _find(self, named: RegisteredNamed) -> "PublishedVersion":
        if named not in self._found:
            from vantage.ledger.to_mlflow.published_models import find_published  # imports MLflow

            self._found[named] = find_published(
                self._address, named.name, version=named.version, alias=named.alias
            )
        return self._found[named]
