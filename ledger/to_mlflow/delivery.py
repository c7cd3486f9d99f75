"""One outbox's way to one server: in order, one process at a time, from where it was left; refusals are set aside."""

import logging
from pathlib import Path

from ledger.entries import RunEntry, apply_operation
from ledger.operations import OpenRun, from_json
from ledger.outbox import Outbox
from ledger.to_mlflow.run_writer import RunWriter
from ledger.to_mlflow.server import Server, is_permanent_error
from schemas.safe_text import without_secrets

log = logging.getLogger(__name__)

_LOCK_WAIT_SECONDS = 5.0


class OutboxBusy(RuntimeError):
    """Another process is sending this outbox; it will not take long."""


def send_earlier_runs(server: Server, runs: Path, *, skip: Outbox | None) -> None:
    """Send what earlier runs of the workspace could not, the oldest run first."""
    for folder in sorted(runs.glob("*/ledger")):
        if skip is not None and folder == skip.folder:
            continue
        try:
            Delivery(server, Outbox(folder)).send(wait_seconds=0.0)
        except OutboxBusy:
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
        self.writer: RunWriter | None = None

    def send(self, *, wait_seconds: float = _LOCK_WAIT_SECONDS) -> None:
        """Send everything that the outbox holds now, in order.

        What the server refuses for good is set aside, with a warning.

        Raises:
            OutboxBusy: another process is at it.
            MlflowException, OSError: the server did not answer, or cannot now; the rest waits.
            ValueError: the outbox does not begin with the opening of a run.
        """
        if self.writer is None:
            first = next(self._outbox.read(), None)
            if first is None:
                return
            opening = from_json(first[1])
            if not isinstance(opening, OpenRun):
                raise ValueError(f"the outbox begins with {opening.operation}, not with open_run")
            self.writer = RunWriter(self._server, opening)
        destination = self.writer.destination
        if not self._outbox.is_pending(destination):
            return
        with self._outbox.sending(wait_seconds=wait_seconds) as ours:
            if not ours:
                raise OutboxBusy(f"{self._outbox.folder} is being sent by another process")
            try:
                self._send_rest(self.writer, already_sent=self._outbox.sent(destination))
            except Exception:
                # The entry has seen an operation that was not sent: begin again from the start next time.
                self._end, self._entry = 0, None
                raise

    def _send_rest(self, writer: RunWriter, *, already_sent: int) -> None:
        if already_sent > self._end:
            writer.forget()  # somebody else was here, and may have made what we remember as missing
        for end, line in self._outbox.read(self._end):
            operation = from_json(line)
            self._entry = apply_operation(self._entry, operation)
            self._end = end
            if end <= already_sent:
                continue
            try:
                writer.apply(self._entry, operation)
            except Exception as error:
                if not is_permanent_error(error):
                    raise
                reason = without_secrets(str(error))
                self._outbox.mark_refused(writer.destination, line, f"{type(error).__name__}: {reason}")
                writer.record_refusal(operation, reason)
                log.warning("MLflow refused %s: %s", operation.operation, reason.partition("\n")[0])
            self._outbox.mark_sent(writer.destination, end)
        if self._entry is not None:
            writer.write_run_note(self._entry)
