"""Settings that ``make servers`` keeps from call to call: addresses and generated passwords."""

import secrets
import socket
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from vantage.storage.durable_files import replace_file

LOOPBACK = "127.0.0.1"
USER = "vantage"
"""User name on all three servers."""
PORTS = {"postgres": 5433, "prefect": 4200, "mlflow": 5000}
"""Default port of each server."""


def _password() -> str:
    return secrets.token_urlsafe(24)


class Settings(BaseModel):
    """Contents of ``settings.json``, which only its owner can read."""

    model_config = ConfigDict(extra="forbid")

    postgres_url: str | None = None
    """Address of the user's own PostgreSQL; None: ``make servers`` starts one."""
    postgres_folder: Path
    """Folder with the data of our own PostgreSQL."""
    public: dict[str, str] = Field(default_factory=dict)
    """Server → the address at which a proxy serves it to other machines: ``https://prefect.example.org``."""
    ports: dict[str, int] = Field(default_factory=lambda: dict(PORTS))
    postgres_password: str = Field(default_factory=_password)
    prefect_password: str = Field(default_factory=_password)
    mlflow_password: str = Field(default_factory=_password)
    mlflow_secret_key: str = Field(default_factory=_password)

    @property
    def server_url(self) -> str:
        """Address of PostgreSQL, without a database."""
        own = f"postgresql://{USER}:{self.postgres_password}@{LOOPBACK}:{self.ports['postgres']}"
        return self.postgres_url or own

    def database_url(self, database: str, driver: str) -> str:
        """Return the address of a database for SQLAlchemy, with its driver (``asyncpg`` or ``psycopg``)."""
        return f"{self.server_url.replace('postgresql://', f'postgresql+{driver}://', 1)}/{database}"

    def local(self, server: str) -> str:
        """Return the address of a server for this machine."""
        return f"http://{LOOPBACK}:{self.ports[server]}"

    def exports(self, *, elsewhere: bool = False) -> str:
        """Return the variables that a client needs, as lines for a shell. No value has a character that is syntax in a
        shell.

        ``elsewhere``: whether the client is on another machine, from which it reaches the servers at their public
        addresses.
        """
        address = {name: self.local(name) for name in ("prefect", "mlflow")} | (
            self.public if elsewhere else {}
        )
        variables = {
            "PREFECT_API_URL": f"{address['prefect']}/api",
            "PREFECT_API_AUTH_STRING": f"{USER}:{self.prefect_password}",
            "MLFLOW_TRACKING_URI": address["mlflow"],
            "MLFLOW_TRACKING_USERNAME": USER,
            "MLFLOW_TRACKING_PASSWORD": self.mlflow_password,
        }
        return "".join(f"export {name}={value}\n" for name, value in variables.items())


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, in place of an earlier one."""
    replace_file(path, text.encode(), private=True)


def is_free(port: int) -> bool:
    """Return whether a server can listen on this port of the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
