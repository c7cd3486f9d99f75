"""Send one outbox to one server: in order, one process at a time, from the last sent operation."""

import logging
from pathlib import Path

from vantage.ledger.alias_moves import AliasMoves
from vantage.ledger.entries import RunEntry, apply_operation
from vantage.ledger.operations import OpenRun, from_json
from vantage.ledger.outbox import Outbox, OutboxBusy
from vantage.ledger.to_mlflow.run_writer import RunWriter
from vantage.ledger.to_mlflow.server import Server, is_permanent_error
from vantage.schemas.safe_text import without_secrets

log = logging.getLogger(__name__)

_LOCK_WAIT_SECONDS = 5.0


def send_earlier_runs(server: Server, runs: Path, *, skip: Outbox | None) -> None:
    """Send the outboxes of earlier runs of the workspace, the oldest first."""
    for folder in sorted(runs.glob("*/ledger")):
        if skip is not None and folder == skip.folder:
            continue
        try:
            Delivery(server, Outbox(folder)).send(wait_seconds=0.0)
        except OutboxBusy:
            continue  # the process of that run sends it
        except (
            ValueError,
            OSError,
        ) as error:  # this outbox is damaged, or another user's: the others are still sent
            log.warning(
                "%s cannot be sent (%s); its run is missing in MLflow", folder, without_secrets(str(error))
            )


class Delivery:
    """Sends one outbox to one server."""

    def __init__(self, server: Server, outbox: Outbox) -> None:
        self._server = server
        self._outbox = outbox
        self._end = 0
        self._entry: RunEntry | None = None
        self.writer: RunWriter | None = None

    def send(self, *, wait_seconds: float = _LOCK_WAIT_SECONDS) -> None:
        """Send everything that is in the outbox now, in order.

        Operations that the server refuses permanently are recorded in ``refused.jsonl``, with a warning.

        Raises:
            OutboxBusy: another process is sending.
            MlflowException, OSError: the server did not answer, or failed temporarily; the rest is not sent.
            ValueError: the outbox does not start with the opening of a run.
        """
        if self.writer is None:
            first = next(self._outbox.read(), None)
            if first is None:
                return
            opening = from_json(first[1])
            if not isinstance(opening, OpenRun):
                raise ValueError(f"the outbox begins with {opening.operation}, not with open_run")
            self.writer = RunWriter(self._server, opening, AliasMoves(self._outbox.folder).note)
        destination = self.writer.destination
        if not self._outbox.is_pending(destination):
            return
        with self._outbox.sending(wait_seconds=wait_seconds) as ours:
            if not ours:
                raise OutboxBusy(f"{self._outbox.folder} is being sent by another process")
            try:
                self._send_rest(self.writer, already_sent=self._outbox.sent(destination))
            except Exception:
                # The entry contains an operation that was not sent: read from the start next time.
                self._end, self._entry = 0, None
                raise

    def _send_rest(self, writer: RunWriter, *, already_sent: int) -> None:
        if already_sent > self._end:
            writer.forget()  # another process has sent since, and may have created runs that we cached as missing
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
