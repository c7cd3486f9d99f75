"""What is saved, and where each part lies in a backup."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

INDEX = "backup.json"
"""Written last: a folder without it is no backup."""
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
    """What a call saves or restores; None: not that."""

    workspace: Path | None
    """Of runs and artifacts; without servers also of both databases, which are SQLite's then."""
    servers: Path | None
    """Of ``make servers``: its settings, and MLflow's files. The databases are PostgreSQL's."""


class Index(BaseModel):
    """Contents of ``backup.json``."""

    model_config = ConfigDict(extra="forbid")

    format: int = 1
    began: str
    """UTC. What was recorded after it may be missing."""
    ended: str
    has_servers: bool
    has_workspace: bool
