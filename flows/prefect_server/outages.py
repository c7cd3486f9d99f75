"""Report a Prefect server that does not answer: a line a minute, in place of Prefect's tracebacks, until it answers again."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from vantage.flows.prefect_server.server import configured_url
from vantage.ledger.tracking import without_password
from vantage.schemas.safe_text import safe_text

SECONDS_BETWEEN_LINES = 60.0


class Outage:
    """Reports an outage of one server, however many threads notice it."""

    def __init__(self, server: Callable[[], str], say: Callable[[str], None]) -> None:
        """
        Args:
            server: returns the server's name for the lines; called at the first line.
            say: prints a line.
        """
        self._server = server
        self._say = say
        self._changing = threading.Lock()
        self._since: float | None = None
        """When the server was first noticed not to answer, by the wall clock, for people; None while it answers."""
        self._said_at: float | None = None
        """When a line was last printed, by the monotonic clock."""
        self._is_said = False
        """Whether a line was printed about the present outage."""
        self.was_noticed = False
        """Whether there was an outage, which may be over."""

    def noticed(self, error: Exception) -> None:
        """Print that the server does not answer, unless a line was printed within the last minute."""
        with self._changing:
            now, self.was_noticed = monotonic(), True
            if self._since is None:
                self._since = time.time()
            if self._said_at is not None and now - self._said_at < SECONDS_BETWEEN_LINES:
                return
            self._said_at, self._is_said = now, True
            since = _clock(self._since)
        reason = safe_text(_reason(error))
        self._say(f"{self._server()} has not answered since {since} ({reason}); it is asked again")

    def is_over(self) -> None:
        """Print that the server answers again, if a line was printed about its outage."""
        with self._changing:
            since, self._since = self._since, None
            was_said, self._is_said = self._is_said, False
        if since is not None and was_said:
            self._say(f"{self._server()} answers again; it had not answered since {_clock(since)}")


@dataclass(frozen=True)
class Outages:
    """The outages of the two servers that a run with attempts on pools needs."""

    prefect: Outage
    storage: Outage


def outages_of(storage: str, say: Callable[[str], None]) -> Outages:
    """Return the outages that a process reports; ``storage`` is the address of its storage."""
    return Outages(prefect_outage(say), Outage(lambda: f"the storage {without_password(storage)}", say))


def prefect_outage(say: Callable[[str], None]) -> Outage:
    """Return the outage of the Prefect server that this process uses."""

    def server() -> str:
        url = configured_url()
        return "the Prefect server" if url is None else f"the Prefect server at {without_password(url)}"

    return Outage(server, say)


def services_outlast(outage: Outage) -> None:
    """Let the loops of Prefect's worker in this process outlast an outage.

    Prefect's own loop prints tracebacks at every third failure, and ends the worker after a minute or two.
    """
    import prefect._internal.observers
    import prefect.workers.base

    async def loop(workload: Callable[[], Awaitable[Any]], interval: float, **options: Any) -> None:
        await _service_loop(workload, interval, outage, run_once=bool(options.get("run_once")))

    for module in (prefect.workers.base, prefect._internal.observers):
        vars(module)["critical_service_loop"] = loop
    errors_of_logging_are_quiet()


def errors_of_logging_are_quiet() -> None:
    """Keep Prefect's client from printing a line for each log message that a server does not take."""
    logging.raiseExceptions = False


async def _service_loop(
    workload: Callable[[], Awaitable[Any]], interval: float, outage: Outage, *, run_once: bool
) -> None:
    """Call ``workload`` at an interval in seconds; a permanent error ends the loop."""
    from httpx import HTTPStatusError, TransportError

    while True:
        try:
            await workload()
            outage.is_over()
        except TransportError as error:
            outage.noticed(error)
        except HTTPStatusError as error:
            if error.response.status_code < 500:
                raise
            outage.noticed(error)
        if run_once:
            return
        await asyncio.sleep(interval)


def _reason(error: Exception) -> str:
    """Return the status of an answer, whose text would be long, or the first line of an error."""
    answer = getattr(error, "response", None)
    if answer is not None:
        return f"{answer.status_code} {answer.reason_phrase}"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _clock(seconds: float) -> str:
    """Return a time of today in the form of a clock."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))
