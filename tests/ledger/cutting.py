"""Kill a sender after every single call that writes, and let another send the rest of the outbox."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

from mlflow.tracking import MlflowClient

from vantage.ledger.outbox import Outbox
from vantage.ledger.to_mlflow.delivery import Delivery
from vantage.ledger.to_mlflow.server import Server

Found = TypeVar("Found")


class Lost(ConnectionError):
    """The server did what it was asked, and the answer never arrived."""


class Cutting:
    """A client whose answer to the n-th call that writes is lost after the call was served."""

    def __init__(self, client: MlflowClient, *, cut_at: int) -> None:
        self._client = client
        self._cut_at = cut_at
        self.written: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name.startswith(("get_", "search_")):
            return method

        def call(*positional: Any, **named: Any) -> Any:
            self.written.append(name)
            answer = method(*positional, **named)
            if len(self.written) == self._cut_at:
                raise Lost(name)
            return answer

        return call


class Racing(Cutting):
    """A client whose first search finds no version, as if it came just before another process created one."""

    def __init__(self, client: MlflowClient, *, cut_at: int) -> None:
        super().__init__(client, cut_at=cut_at)
        self._has_looked = False

    def search_model_versions(self, *positional: Any, **named: Any) -> Any:
        """Return nothing at first, then what there is."""
        has_looked, self._has_looked = self._has_looked, True
        return self._client.search_model_versions(*positional, **named) if has_looked else []


def cut_after_every_write(
    workspace: Path,
    run_id: str,
    found: Callable[[MlflowClient], Found],
    *,
    since: str | None = None,
    client_of: type[Cutting] = Cutting,
) -> tuple[Found, list[str]]:
    """Assert that after a cut at any call that writes, from the first ``since`` on, MLflow holds the same in the end.

    ``client_of``: makes the client of a sender that is cut; the one that sends the rest later has a ``Cutting``.

    Returns what is ``found`` after sending without a cut, and the names of the calls that wrote.
    """
    folder, place = workspace / "runs" / run_id / "ledger", workspace / "cut"
    place.mkdir()
    shutil.copy(workspace / "mlflow.db", place)
    server = Server(f"sqlite:///{place / 'mlflow.db'}", artifacts=place / "mlartifacts")

    def renew() -> None:
        """Restore everything, in the database that is open: opening another would take a third of the time."""
        for name in ("ledger", "mlartifacts"):
            shutil.rmtree(place / name, ignore_errors=True)
        shutil.copytree(folder, place / "ledger")
        with (
            closing(sqlite3.connect(workspace / "mlflow.db")) as before,
            closing(sqlite3.connect(place / "mlflow.db")) as database,
        ):
            before.backup(database)

    def send(cut_at: int, client_of: type[Cutting] = Cutting) -> list[str]:
        """Send as a new process does, which knows only from the folder what was sent."""
        client = server.client
        cutting = client_of(client, cut_at=cut_at)
        server.client = cutting  # type: ignore[assignment]
        server._opened.clear()
        with suppress(Lost):
            Delivery(server, Outbox(place / "ledger")).send()
        server.client = client
        return cutting.written

    renew()
    written = send(0, client_of)
    expected = found(server.client)
    first = written.index(since) if since else 0
    for cut_at, name in list(enumerate(written, start=1))[first:]:
        renew()
        assert send(cut_at, client_of)[-1] == name
        send(cut_at=0)
        assert found(server.client) == expected, f"cut after call {cut_at}, {name}"
    return expected, written
