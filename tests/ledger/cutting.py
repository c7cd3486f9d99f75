"""A sender that is killed after every single call that writes, and what another makes of the outbox."""

import shutil
from collections.abc import Callable
from contextlib import suppress
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


def cut_after_every_write(
    workspace: Path, run_id: str, found: Callable[[MlflowClient], Found], *, since: str | None = None
) -> tuple[Found, list[str]]:
    """Assert that after a cut at any call that writes, from the first ``since`` on, MLflow holds the same in the end.

    Returns what is ``found`` after sending without a cut, and the names of the calls that wrote.
    """
    folder = workspace / "runs" / run_id / "ledger"

    def send(server: Server, copy: Path, cut_at: int) -> list[str]:
        client = server.client
        cutting = Cutting(client, cut_at=cut_at)
        server.client = cutting  # type: ignore[assignment]
        with suppress(Lost):
            Delivery(server, Outbox(copy / "ledger")).send()
        server.client = client
        return cutting.written

    def server_of(copy: Path) -> Server:
        return Server(f"sqlite:///{copy / 'mlflow.db'}", artifacts=copy / "mlartifacts")

    def fresh(name: str) -> Path:
        copy = workspace / name
        copy.mkdir()
        shutil.copy(workspace / "mlflow.db", copy)
        shutil.copytree(folder, copy / "ledger")
        return copy

    whole = fresh("whole")
    server = server_of(whole)
    written = send(server, whole, cut_at=0)
    expected = found(server.client)
    first = written.index(since) if since else 0
    for cut_at, name in list(enumerate(written, start=1))[first:]:
        copy = fresh(f"cut-at-{cut_at}")
        server = server_of(copy)
        assert send(server, copy, cut_at)[-1] == name
        send(server, copy, cut_at=0)
        assert found(server.client) == expected, f"cut after call {cut_at}, {name}"
        shutil.rmtree(copy)
    return expected, written
