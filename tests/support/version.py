"""Read the version of the project from pyproject.toml."""

import tomllib
from pathlib import Path

PROJECT_VERSION: str = tomllib.loads(
    (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
)["project"]["version"]
"""The version that an installation of this tree has; `make setup` installs it again when the file changes."""
