"""One outbox's way to one server: in order, one process at a time, from where it was left; refusals are set aside."""

import logging
from pathlib import Path

from ledger.entries import RunEntry, after
from ledger.operations import OpenRun, from_json
from ledger.outbox import Outbox
from ledger.to_mlflow.book import Book
from ledger.to_mlflow.server import Server, is_refusal
from schemas.safe_text import without_secrets

log = logging.getLogger(__name__)

_LOCK_PATIENCE_SECONDS = 5.0


class Busy(RuntimeError):
    """Another process is sending this outbox; it will not take long."""


def send_others(server: Server, runs: Path, *, but: Outbox | None) -> None:
    """Send what earlier runs of the workspace could not, the oldest run first."""
    for folder in sorted(runs.glob("*/ledger")):
        if but is not None and folder == but.folder:
            continue
        try:
            Delivery(server, Outbox(folder)).send(wait_seconds=0.0)
        except Busy:
            continue  # its own driver sends it
        except (
            ValueError,
            OSError,
        ) as error:  # damaged, or another user's: no reason to hold up all the others
            log.warning(
                "%s cannot be sent (%s); its run is missing in MLflow", folder, without_secrets(str(error))
            )


class Delivery:
    """One outbox on its way to one server."""

    def __init__(self, server: Server, outbox: Outbox) -> None:
        self._server = server
        self._outbox = outbox
        self._end = 0
        self._entry: RunEntry | None = None
        self.book: Book | None = None

    def send(self, *, wait_seconds: float = _LOCK_PATIENCE_SECONDS) -> None:
        """Send everything that the outbox holds now, in order.

        What the server refuses for good is set aside, with a warning.

        Raises:
            Busy: another process is at it.
            MlflowException, OSError: the server did not answer, or cannot now; the rest waits.
            ValueError: the outbox does not begin with the opening of a run.
        """
        if self.book is None:
            first = next(self._outbox.read(), None)
            if first is None:
                return
            opening = from_json(first[1])
            if not isinstance(opening, OpenRun):
                raise ValueError(f"the outbox begins with {opening.operation}, not with open_run")
            self.book = Book(self._server, opening)
        destination = self.book.destination
        if not self._outbox.is_pending(destination):
            return
        with self._outbox.sending(wait_seconds=wait_seconds) as ours:
            if not ours:
                raise Busy(f"{self._outbox.folder} is being sent by another process")
            try:
                self._send_rest(self.book, already_sent=self._outbox.sent(destination))
            except Exception:
                # The entry has seen an operation that was not sent: begin again from the start next time.
                self._end, self._entry = 0, None
                raise

    def _send_rest(self, book: Book, *, already_sent: int) -> None:
        if already_sent > self._end:
            book.forget()  # somebody else was here, and may have made what we remember as missing
        for end, line in self._outbox.read(self._end):
            operation = from_json(line)
            self._entry = after(self._entry, operation)
            self._end = end
            if end <= already_sent:
                continue
            try:
                book.apply(self._entry, operation)
            except Exception as error:
                if not is_refusal(error):
                    raise
                told = without_secrets(str(error))
                self._outbox.mark_refused(book.destination, line, f"{type(error).__name__}: {told}")
                book.note_refusal(operation, told)
                log.warning("MLflow refused %s: %s", operation.operation, told.partition("\n")[0])
            self._outbox.mark_sent(book.destination, end)
        if self._entry is not None:
            book.write_run_note(self._entry)
