"""Start Prefect's server: all its services in one process, only for this machine's browsers and clients."""

import sys
from pathlib import Path

from deploy.servers.processes import Server
from deploy.servers.settings import LOOPBACK, USER, Settings
from vantage.attempts.identity.child_python import python_environment
from vantage.flows.prefect_server.public_address import PUBLIC_ADDRESS


def prefect_server(settings: Settings, folder: Path, environment: dict[str, str]) -> Server:
    """Return the server on ``settings.ports["prefect"]``; its logins are in its environment, which other users cannot read."""
    port = str(settings.ports["prefect"])
    address = settings.public.get("prefect")
    return Server(
        name="prefect",
        command=[
            *(
                sys.executable,
                "-m",
                "uvicorn",
                "--factory",
                "vantage.flows.prefect_server.app:create_guarded_app",
            ),
            *("--host", LOOPBACK, "--port", port, "--log-level", "warning"),
        ],
        environment={
            **environment,
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_SERVER_API_HOST": LOOPBACK,
            "PREFECT_SERVER_API_PORT": port,
            "PREFECT_SERVER_API_AUTH_STRING": f"{USER}:{settings.prefect_password}",
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": settings.database_url("vantage_prefect", "asyncpg"),
            # A database that is slow for a moment must not cause an error 500, which ends Prefect's workers.
            "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
            "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
            "PREFECT_SERVER_DATABASE_SQLALCHEMY_POOL_SIZE": "20",
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": address or settings.local("prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            **python_environment(),
            **({} if address is None else {PUBLIC_ADDRESS: address, "PREFECT_UI_API_URL": f"{address}/api"}),
        },
        folder=folder,
        log=folder / "prefect.log",
    )
