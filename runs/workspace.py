"""The workspace: a user's runs, artifacts and ledger, in a folder or in a bucket."""

import os
import re
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from vantage.storage.machine_cache import cache_root
from vantage.storage.storage import Storage, open_storage

if TYPE_CHECKING:
    from vantage.runs.run_records import RunRecords

DEFAULT_WORKSPACE = ".vantage"
"""The workspace if none is named: a folder in the current folder."""
RUN_ID = re.compile(r"(\d{4,})-[a-z0-9_-]+-[0-9a-f]{6}")
"""Run id: number, recipe, and a random part."""

_INVALID_IN_ADDRESS = re.compile(r"[?%#\x00-\x1f\x7f]")
"""MLflow and Prefect use the path unescaped in the address of a database, where ``?`` starts options, ``%`` an encoded
character and ``#`` a fragment: the database would be at another path."""
_LONGEST_NAME = 255
_LONGEST_PATH = 3500
"""Most bytes of the path: Linux takes 4,095, and files within the workspace need some of them."""
_SHOWN = 60
"""Most characters of a path in a message."""


class RunError(ValueError):
    """A run cannot be found, read or resumed; the message contains the remedy."""


@dataclass(frozen=True)
class Workspace:
    """Runs, artifacts and ledger.

    Raises:
        RunError: the folder's path cannot be part of a database's address.
    """

    root: Path
    """The folder; of a workspace in a bucket, this machine's folder for what is not shared: the servers' databases
    without a configured server, and working copies of runs."""
    uri: str | None = None
    """A bucket's address (``vantage.storage.bucket``); None: the workspace is the folder."""

    def __post_init__(self) -> None:
        name = self.uri or str(self.root)
        try:
            longest = max((len(part.encode()) for part in self.root.parts), default=0)
            paths = (self.root, self.root.resolve())
        except UnicodeEncodeError:
            raise RunError(
                f"workspace {name!r} is not UTF-8, and records and addresses of databases are; name another with --workspace DIR"
            ) from None
        except (OSError, RuntimeError) as error:  # RuntimeError: a ring of links
            raise RunError(
                f"workspace {name[:_SHOWN]!r} is no path ({error}); name another with --workspace DIR"
            ) from None
        for found, what, most in (
            (longest, "has a folder name", _LONGEST_NAME),
            (len(os.fsencode(self.root)), "is a path", _LONGEST_PATH),
        ):
            if found > most:
                raise RunError(
                    f"workspace {name[:_SHOWN]!r}… {what} of {found:,} bytes, and there is room for {most:,}; "
                    "name a shorter one with --workspace DIR"
                )
        for path in paths:
            if unfit := _INVALID_IN_ADDRESS.search(str(path)):
                raise RunError(
                    f"workspace {str(path)!r} has {unfit[0]!r} in its path, which addresses of databases read as "
                    "something else; name another with --workspace DIR"
                )

    @classmethod
    def at(cls, place: str | Path) -> "Workspace":
        """Return the workspace at a folder's path or a bucket's address."""
        if "://" not in str(place):
            return cls(Path(place).absolute())
        uri = str(place).rstrip("/")
        return cls(cache_root() / "workspaces" / sha256(uri.encode()).hexdigest()[:16], uri)

    @property
    def address(self) -> str:
        """Address that ``--workspace`` takes, on any machine that reaches it."""
        return self.uri or str(self.root)

    @property
    def store(self) -> Path:
        """The folder of the artifact store, for a workspace in a folder."""
        return self.root / "store"

    @cached_property
    def storage(self) -> Storage:
        """The storage of artifacts, created if there is none yet."""
        return open_storage(f"{self.uri}/store" if self.uri else str(self.store))

    @property
    def existing_storage(self) -> Storage | None:
        """The storage of artifacts; None: there is none yet."""
        return self.storage if self.uri or self.store.is_dir() else None

    @cached_property
    def records(self) -> "RunRecords":
        """The records and locks of the workspace's runs."""
        if self.uri:
            from vantage.runs.bucket_records import BucketRecords
            from vantage.storage.bucket import open_bucket

            return BucketRecords(open_bucket(f"{self.uri}/runs"), self)
        from vantage.runs.folder_records import FolderRecords

        return FolderRecords(self)

    @property
    def runs(self) -> Path:
        """The folder of all runs; for a workspace in a bucket, of this machine's runs."""
        return self.root / "runs"

    def folder(self, run_id: str) -> Path:
        """Return a run's folder. Raises RunError if it is not a valid run id."""
        if not RUN_ID.fullmatch(run_id):
            raise RunError(f"run id {run_id!r} is not one of Vantage's; `vantage status` lists the runs")
        return self.runs / run_id
