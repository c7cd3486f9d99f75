"""Start MLflow's server: with its own basic-auth app, artifacts through the server, no job processes."""

import sys
from pathlib import Path

from deploy.servers.processes import Server
from deploy.servers.settings import LOOPBACK, USER, Settings, write_private
from vantage.ledger.tracking import DANGEROUS


def mlflow_server(settings: Settings, folder: Path, environment: dict[str, str]) -> Server:
    """Return the server on ``settings.ports["mlflow"]``; its logins are in its environment and in a private file."""
    return Server(
        name="mlflow",
        command=[
            *(sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--workers", "1"),
            *("--host", LOOPBACK, "--port", str(settings.ports["mlflow"])),
            *("--artifacts-destination", str(folder / "artifacts")),
            *("--uvicorn-opts", "--log-level warning"),
            *_for_others(settings),
        ],
        environment={
            **environment,
            "MLFLOW_BACKEND_STORE_URI": settings.database_url("vantage_mlflow", "psycopg"),
            "MLFLOW_AUTH_CONFIG_PATH": str(auth_config_path(folder)),
            "MLFLOW_AUTH_ADMIN_USERNAME": USER,
            "MLFLOW_AUTH_ADMIN_PASSWORD": settings.mlflow_password,
            "MLFLOW_FLASK_SERVER_SECRET_KEY": settings.mlflow_secret_key,
            **dict.fromkeys(DANGEROUS, "false"),  # job execution would start huey, which outlives the server
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "1",
            "PYTHONSAFEPATH": "1",
        },
        folder=folder,
        log=folder / "mlflow.log",
    )


def _for_others(settings: Settings) -> list[str]:
    """Return the options by which MLflow also answers under its public name; it refuses unknown names."""
    address = settings.public.get("mlflow")
    if address is None:
        return []
    port = settings.ports["mlflow"]
    hosts = [f"{LOOPBACK}:{port}", f"localhost:{port}", address.partition("://")[2]]
    origins = [settings.local("mlflow"), f"http://localhost:{port}", address]
    return ["--allowed-hosts", ",".join(hosts), "--cors-allowed-origins", ",".join(origins)]


def auth_config_path(folder: Path) -> Path:
    """Return the file with the settings of MLflow's basic-auth app."""
    return folder / "mlflow_auth.ini"


def write_auth_config(settings: Settings, folder: Path) -> None:
    """Write the only file that names the database of MLflow's users. In the database's address ``%`` is doubled, since
    ``%`` is syntax in this file."""
    database = settings.database_url("vantage_mlflow_auth", "psycopg").replace("%", "%%")
    write_private(
        auth_config_path(folder),
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {database}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        "auth_cache_ttl_seconds = 60\n",  # a password is hashed once a minute, not with every request
    )
