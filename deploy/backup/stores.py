"""The parts of a backup, and their places in it."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

INDEX = "backup.json"
"""Index of a backup. It is written last: a folder without it is no backup."""
DATABASES = "databases"
"""Folder of the dumps, one for each of PostgreSQL's databases."""
SETTINGS = "settings.json"
"""The logins of `make servers`."""
ARTIFACTS = "mlflow_artifacts"
"""Folder of the files that MLflow's server keeps."""
WORKSPACE = "workspace"
"""Folder of the workspace."""


@dataclass(frozen=True)
class Stores:
    """Folders that a call saves or restores; None: that part is left out."""

    workspace: Path | None
    """Folder of runs and artifacts. Without servers it also contains both databases, which are in SQLite then."""
    servers: Path | None
    """Folder of ``make servers``: its settings, and MLflow's files. The databases are in PostgreSQL."""


class Index(BaseModel):
    """Contents of ``backup.json``."""

    model_config = ConfigDict(extra="forbid")

    format: int = 1
    began: str
    """Time in UTC. Later records may be missing from the backup."""
    ended: str
    has_servers: bool
    has_workspace: bool
