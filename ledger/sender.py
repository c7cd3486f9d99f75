"""A background thread that sends the outboxes of a workspace.

MLflow is imported only here, in the thread. A server that is down or slow, or a broken connection, delays the records
and nothing else.
"""

import logging
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vantage.ledger.outbox import Outbox, OutboxBusy
from vantage.ledger.tracking import set_up_client, without_login, without_password
from vantage.schemas.safe_text import without_secrets

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.delivery import Delivery
    from vantage.ledger.to_mlflow.registered_models import Published
    from vantage.ledger.to_mlflow.server import Server

log = logging.getLogger(__name__)

RETRY_SECONDS = 15.0
"""Seconds to pause after a server did not answer, unless a flush is requested."""
BUSY_SECONDS = 1.0
"""Seconds to pause while another process sends the outbox. This is no outage: a run that begins sends all outboxes."""

_CAUSE = re.compile(r"\[Errno -?\d+\] ([^)\"']+)")
"""Error of the operating system, at the end of a long message of the HTTP library."""


class Sender:
    """Sends one run's outbox to one server, after those of earlier runs."""

    def __init__(self, tracking_uri: str, workspace: Path) -> None:
        self.run_ids: dict[str | None, str] = {}
        """Stage → MLflow's id of its run; None → id of the parent run."""
        self.pages: dict[str | None, str | None] = {}
        """Stage → its page within MLflow's site."""
        self.page_of_runs: str | None = None
        """Page of all runs within MLflow's site."""
        self.published: dict[tuple[str, str], Published] = {}
        """(Registered model, content digest) → its version, if it was published."""
        self.unpublished: dict[tuple[str, str], str] = {}
        """(Registered model, content digest) → why MLflow has no version of it."""
        self.moves: dict[tuple[str, str], str | None] = {}
        """(Registered model, alias) → why a person's movement of the alias was not made; None: it was."""
        self._tracking_uri = tracking_uri
        self._workspace = workspace
        self._outbox: Outbox | None = None
        self._server: Server | None = None
        self._delivery: Delivery | None = None
        self._thread: threading.Thread | None = None
        # The condition guards all below: numbers of operations (recorded, sent) and of flushes (requested, tried).
        self._changed = threading.Condition()
        self._recorded = self._sent = 0
        self._flushes_requested = self._flushes_tried = 0
        self._given_up_at = -1  # the value of `_recorded` at the last attempt that failed
        self._closed = False
        self._error = ""

    def notify(self, outbox: Outbox, *, can_wait: bool = False) -> None:
        """Note that the run's outbox has one more operation.

        ``can_wait``: if the server did not answer the last attempt, ``close`` does not try again for this alone.
        """
        with self._changed:
            self._outbox = outbox
            gave_up = self._given_up_at == self._recorded
            self._recorded += 1
            if can_wait and gave_up:
                self._given_up_at = self._recorded
            self._changed.notify_all()
        self.warm_up()

    def why_unsent(self) -> str:
        """Return the server's address and the reason why it has not received everything, for display; see ``close``."""
        with self._changed:
            why = self._error or "it has not answered in time"
        return f"{without_password(self._tracking_uri)}: {why}"

    def warm_up(self) -> None:
        """Start importing MLflow and preparing its database in the background."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._send_forever, name="vantage-ledger", daemon=True)
                self._thread.start()

    def flush(self, timeout_seconds: float) -> bool:
        """Send everything in the outboxes now, including those of earlier runs; returns whether that worked.

        Never raises: operations that could not be sent are sent by a later flush, of this run or of the next.
        """
        self.warm_up()
        with self._changed:
            self._flushes_requested += 1
            wanted = self._flushes_requested
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._flushes_tried >= wanted or self._closed, timeout_seconds)
            return self._flushes_tried >= wanted and self._sent == self._recorded and self._server is not None

    def close(self, timeout_seconds: float) -> bool:
        """Send operations that were not tried yet, and end the thread; returns whether MLflow has everything."""
        with self._changed:
            tried = self._recorded in (self._sent, self._given_up_at)
            everything = self._recorded == self._sent
        if not tried:
            everything = self.flush(timeout_seconds)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return everything

    def _send_forever(self) -> None:
        """Connect, then send the outbox whenever it has something new."""
        set_up_client()
        retry_at = 0.0
        warned = False
        while True:
            with self._changed:
                while not self._closed and not self._has_work(retry_at):
                    self._changed.wait(max(retry_at - time.monotonic(), 0.0) or None)
                if self._closed:
                    return
                recorded, requested = self._recorded, self._flushes_requested
            error = self._try_to_send()
            if isinstance(error, OutboxBusy):
                with self._changed:
                    self._error = self._shown(error)
                retry_at = time.monotonic() + BUSY_SECONDS
                continue
            reason = "" if error is None else self._shown(error)
            # Warn before the flush counts as tried: the process may end right after that.
            if error is not None and not warned:
                log.warning(
                    "MLflow (%s) cannot be reached; the run goes on, and its records wait in %s: %s",
                    without_password(self._tracking_uri),
                    self._outbox.folder if self._outbox else self._workspace,
                    reason,
                )
            retry_at = 0.0 if error is None else time.monotonic() + RETRY_SECONDS
            with self._changed:
                self._flushes_tried = requested
                self._error = reason
                if error is None:
                    self._sent = recorded
                else:
                    self._given_up_at = recorded
                self._changed.notify_all()
            warned = error is not None

    def _has_work(self, retry_at: float) -> bool:
        if self._flushes_requested > self._flushes_tried:
            return True
        return (self._sent < self._recorded or self._server is None) and time.monotonic() >= retry_at

    def _shown(self, error: Exception) -> str:
        said = _first_line(error)
        if found := _CAUSE.search(said):
            said = found[1]
        return without_secrets(without_login(said, self._tracking_uri))

    def _try_to_send(self) -> Exception | None:
        """Send everything; returns the error that stopped it, or None."""
        try:
            from vantage.ledger.to_mlflow.delivery import Delivery, send_earlier_runs
            from vantage.ledger.to_mlflow.server import Server

            if self._server is None:
                server = Server(self._tracking_uri, artifacts=self._workspace / "mlartifacts")
                send_earlier_runs(server, self._workspace / "runs", skip=self._outbox)
                self._server = server
            if self._delivery is None and self._outbox is not None:
                self._delivery = Delivery(self._server, self._outbox)
            if self._delivery is not None:
                self._delivery.send()
                self._read_back(self._delivery)
        except Exception as error:  # no error of the ledger may stop a run
            return error
        return None

    def _read_back(self, delivery: "Delivery") -> None:
        """Copy the ids and pages of MLflow's objects, so that callers need not wait for the server."""
        writer = delivery.writer
        if writer is not None:
            self.run_ids = dict(writer.runs.ids)
            self.page_of_runs = writer.page_of_runs
            self.pages = {stage: writer.runs.page(stage) for stage in self.run_ids}
            self.published = dict(writer.published)
            self.unpublished = dict(writer.unpublished)
            self.moves = dict(writer.moves)


def _first_line(error: Exception) -> str:
    """Return the first line of the error's message; its type if there is none, as in a timeout."""
    return next(iter(str(error).splitlines()), type(error).__name__)
