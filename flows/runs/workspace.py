"""The workspace: the folder of a user's runs, artifacts and ledger."""

import re
from dataclasses import dataclass
from pathlib import Path

RUN_ID = re.compile(r"(\d{4,})-[a-z0-9_-]+-[0-9a-f]{6}")
"""Number, recipe, and a random part."""

_INVALID_IN_ADDRESS = re.compile(r"[?%#\x00-\x1f\x7f]")
"""MLflow and Prefect use the path unescaped in the address of a database, where ``?`` starts options, ``%`` an encoded
character and ``#`` a fragment: the database would be at another path."""


class RunError(ValueError):
    """A run cannot be found, read or resumed; the message says what to do."""


@dataclass(frozen=True)
class Workspace:
    """The folder with runs, artifacts and ledger.

    Raises:
        RunError: its path cannot be part of a database's address.
    """

    root: Path

    def __post_init__(self) -> None:
        for path in (self.root, self.root.resolve()):
            if unfit := _INVALID_IN_ADDRESS.search(str(path)):
                raise RunError(
                    f"workspace {str(path)!r} has {unfit[0]!r} in its path, which addresses of databases read as "
                    "something else; name another with --workspace DIR"
                )

    @property
    def store(self) -> Path:
        """The folder of the artifact store."""
        return self.root / "store"

    @property
    def runs(self) -> Path:
        """The folder of all runs."""
        return self.root / "runs"

    def folder(self, run_id: str) -> Path:
        """A run's folder; RunError if it is not a valid run id."""
        if not RUN_ID.fullmatch(run_id):
            raise RunError(f"run id {run_id!r} is not one of Vantage's; `vantage status` lists the runs")
        return self.runs / run_id
