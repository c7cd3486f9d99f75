"""The environment of a computation: Python, the operating system, and every installed distribution."""

import hashlib

from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.frozen import Frozen


class Installed(Frozen):
    """One installed distribution."""

    name: str
    """Normalised name: lower case, words joined by ``-``."""
    version: str
    license: str = ""
    """Licence in its metadata: an SPDX expression, or some name; empty: the metadata has none."""


class Environment(Frozen):
    """The distributions that were installed where something was computed; stored once per digest."""

    python: str
    """Version of Python."""
    implementation: str
    """Name of the implementation: ``CPython``."""
    system: str
    """Name and version of the operating system."""
    machine: str
    """Architecture: ``x86_64``."""
    installed: tuple[Installed, ...]
    """Installed distributions, sorted by name."""

    @property
    def content(self) -> bytes:
        """Canonical JSON."""
        return canonical_json(self.model_dump(mode="json")).encode()

    @property
    def digest(self) -> str:
        """sha256 of ``content``."""
        return hashlib.sha256(self.content).hexdigest()
