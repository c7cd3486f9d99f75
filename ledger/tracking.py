"""Which MLflow, and how it is set up: its address and its environment. Nothing here imports it."""

import os
from pathlib import Path
from urllib.parse import urlsplit

MLFLOW_ENVIRONMENT = {
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_ALLOW_MODEL_CODE_EXECUTION": "false",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # A dead server is given up after seconds, not minutes: the outbox waits better than a socket does.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Settings for MLflow, client and server, wherever Vantage starts one; what the user has set wins."""


def address(tracking_uri: str | None, workspace: Path) -> str:
    """The address as it was given; or else ``MLFLOW_TRACKING_URI``; or else SQLite in the workspace."""
    database = f"sqlite:///{workspace.absolute() / 'mlflow.db'}"
    return tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or database


def set_up_client() -> None:
    """Tell MLflow's client, before anything imports it, what `MLFLOW_ENVIRONMENT` says, and not to ask twice."""
    for name, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # MLflow's client sends a request again when the answer was lost, and would make a run twice. We look first.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"


def without_password(tracking_uri: str) -> str:
    """The address as it may be shown and written down."""
    return without_login(tracking_uri, tracking_uri)


def without_login(text: str, tracking_uri: str) -> str:
    """The text without the name and password that the address holds."""
    login, at, _ = urlsplit(tracking_uri).netloc.rpartition("@")
    return text.replace(login + at, "") if at else text
