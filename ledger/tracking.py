"""MLflow's address and environment; nothing here imports MLflow."""

import os
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vantage.ledger.destination_settings import check_destinations
from vantage.schemas.safe_text import safe_text

DANGEROUS = (
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION",
    "MLFLOW_ALLOW_MODEL_CODE_EXECUTION",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION",
)
"""MLflow's switches that let it load pickles and run code. MLflow ignores switches that its version does not know."""

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


def check_configured() -> None:
    """Refuse a ``MLFLOW_TRACKING_URI`` that ``check_address`` refuses, and other destinations that cannot work."""
    check_destinations()
    if tracking_uri := os.environ.get("MLFLOW_TRACKING_URI"):
        check_address(tracking_uri)


def check_address(tracking_uri: str) -> None:
    """Refuse an address at which MLflow can keep nothing, before a run computes for hours and its records go nowhere.

    It does not matter here whether a server answers: a server that is down gets the records later.

    Raises:
        ValueError: MLflow keeps no runs there (folders, since 3.17), or it is no address; the message contains a valid
            one.
    """
    scheme = _scheme_of(tracking_uri)
    shown = f"MLFLOW_TRACKING_URI={safe_text(tracking_uri)!r}"
    remedy = (
        "name a server (http://HOST:PORT) or a database (sqlite:///FILE.db, postgresql://…), or unset it: then the "
        "records go to mlflow.db in the workspace"
    )
    if scheme is None or tracking_uri != tracking_uri.strip():
        raise ValueError(f"{shown} is not an address; {remedy}")
    if tracking_uri in _NAMES:
        return
    if scheme in ("", "file") or _is_windows_drive(scheme):
        raise ValueError(f"{shown} is a folder, in which MLflow keeps no runs since version 3.17; {remedy}")
    engine, _, _ = scheme.partition("+")
    if scheme in _SERVERS:
        host = urlsplit(tracking_uri).hostname or ""
        if not host or any(character.isspace() for character in tracking_uri):
            raise ValueError(f"{shown} names no host; {remedy}")
    elif engine == "sqlite":
        if not tracking_uri.startswith(f"{scheme}:///") or _database_file(tracking_uri) in ("", ":memory:"):
            raise ValueError(f"{shown} names no file; {remedy}")
    elif engine not in _DATABASES and scheme not in _of_plugins():
        raise ValueError(f"{shown} begins with {scheme}:, which MLflow does not know; {remedy}")


_SERVERS = ("http", "https")
_DATABASES = ("postgresql", "mysql", "mssql")
_NAMES = ("databricks",)
"""Addresses of MLflow that are a single word."""


def _scheme_of(address: str) -> str | None:
    """Return the scheme of an address; None if it is malformed, as with an odd port or an open bracket."""
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018 - raises
    except ValueError:
        return None
    return parts.scheme


def _is_windows_drive(scheme: str) -> bool:
    return len(scheme) == 1


def _database_file(tracking_uri: str) -> str:
    return unquote(urlsplit(tracking_uri).path)[1:]


def _of_plugins() -> set[str]:
    """Return further schemes of MLflow, from packages that are installed beside it."""
    return {"databricks", *(each.name for each in entry_points(group="mlflow.tracking_store"))}


_OF_OTHERS = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_REGISTRY_URI")
"""Variables that point MLflow's client to another project's run, experiment or registry: records name their own."""


def set_up_client() -> None:
    """Set `MLFLOW_ENVIRONMENT` before MLflow is imported, turn off retries, and forget another project's run."""
    for name in _OF_OTHERS:
        os.environ.pop(name, None)
    # Rows that wait in memory are lost with the process, and would count as sent.
    os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] = "false"
    for name, value in MLFLOW_ENVIRONMENT.items():
        if name in DANGEROUS:
            os.environ[name] = value
        os.environ.setdefault(name, value)
    # MLflow's client repeats a request whose answer was lost, and would create a run twice. We look first.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"


def is_missing_database(tracking_uri: str) -> bool:
    """Return whether the address is a SQLite file that does not exist, which MLflow would create."""
    parts = urlsplit(tracking_uri)
    return parts.scheme.startswith("sqlite") and not Path(unquote(parts.path)[1:]).is_file()


def without_password(tracking_uri: str) -> str:
    """Return the address without login, for display."""
    return without_login(tracking_uri, tracking_uri)


def without_login(text: str, tracking_uri: str) -> str:
    """Return the text without the name and password in the address."""
    login, at, _ = urlsplit(tracking_uri).netloc.rpartition("@")
    return text.replace(login + at, "") if at else text
