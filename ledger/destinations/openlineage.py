"""Send a run's events to a server of OpenLineage, each until the server has confirmed it."""

from openlineage.client import OpenLineageClient
from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport

from vantage.ledger.destinations.lineage_events import LineageEvents
from vantage.ledger.entries import RunEntry
from vantage.ledger.operations import OpenRun, Operation
from vantage.ledger.tracking import without_password

_SECONDS = 10.0
"""Seconds for an answer; the outbox keeps what was not confirmed."""


class LineageServer:
    """One server, by its address."""

    name = "openlineage"

    def __init__(self, url: str, *, endpoint: str, api_key: str | None, namespace: str) -> None:
        """
        Args:
            url: address of the server.
            endpoint: path of its API.
            api_key: login; None: the server asks for none.
            namespace: namespace of the jobs.
        """
        self._url = url
        self._namespace = namespace
        config = HttpConfig(url=url, endpoint=endpoint, timeout=_SECONDS, retry={"total": 0})
        if api_key:
            config.auth = ApiKeyTokenProvider({"api_key": api_key})
        self._client = OpenLineageClient(transport=HttpTransport(config))

    @property
    def address(self) -> str:
        """The server's address, without a login."""
        return without_password(self._url)

    def copy_of(self, opening: OpenRun) -> "RunLineage":
        """Return the lineage of a run."""
        return RunLineage(self._client, LineageEvents(opening, namespace=self._namespace))


class RunLineage:
    """The lineage of one run at the server."""

    def __init__(self, client: OpenLineageClient, events: LineageEvents) -> None:
        self._client = client
        self._events = events

    def apply(self, entry: RunEntry, operation: Operation, *, is_sent: bool) -> None:
        """Send the operation's events, unless they were confirmed."""
        for event in self._events.after(entry, operation):
            if not is_sent:
                self._client.emit(event)
