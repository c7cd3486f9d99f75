"""MLflow's address and environment; nothing here imports it."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

DANGEROUS = (
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION",
    "MLFLOW_ALLOW_MODEL_CODE_EXECUTION",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION",
)
"""MLflow's switches that let it load pickles and run code; those that a version of MLflow does not know, it ignores."""

MLFLOW_ENVIRONMENT = {
    **dict.fromkeys(DANGEROUS, "false"),
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Time out after seconds, not minutes: the outbox keeps the records.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Settings for MLflow's client and server if Vantage starts one; the user's environment has priority, except ``DANGEROUS``."""


def address(tracking_uri: str | None, workspace: Path) -> str:
    """Return the given address, else ``MLFLOW_TRACKING_URI``, else SQLite in the workspace."""
    database = f"sqlite:///{workspace.absolute() / 'mlflow.db'}"
    return tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or database


def set_up_client() -> None:
    """Set `MLFLOW_ENVIRONMENT` before MLflow is imported, and turn off retries."""
    for name, value in MLFLOW_ENVIRONMENT.items():
        if name in DANGEROUS:
            os.environ[name] = value
        os.environ.setdefault(name, value)
    # MLflow's client repeats a request whose answer was lost, and would create a run twice. We look first.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"


def is_missing_database(tracking_uri: str) -> bool:
    """Return whether it is a SQLite file that is not there, which MLflow would create."""
    parts = urlsplit(tracking_uri)
    return parts.scheme.startswith("sqlite") and not Path(unquote(parts.path)[1:]).is_file()


def without_password(tracking_uri: str) -> str:
    """Return the address without login, for display."""
    return without_login(tracking_uri, tracking_uri)


def without_login(text: str, tracking_uri: str) -> str:
    """Return the text without the name and password in the address."""
    login, at, _ = urlsplit(tracking_uri).netloc.rpartition("@")
    return text.replace(login + at, "") if at else text
