"""A background thread that sends the outboxes of a workspace to the destinations beside MLflow.

A destination that does not answer delays its own records and nothing else. Records that it has not received are sent
later, by this run or by the next run of the workspace.
"""

import logging
import os
import threading
import time
from pathlib import Path

from pydantic import TypeAdapter

from vantage.ledger.destination_settings import is_any_set
from vantage.ledger.destinations.configured import configured_destinations
from vantage.ledger.destinations.destination import Destination, RunCopy
from vantage.ledger.entries import RunEntry, apply_operation
from vantage.ledger.operations import OpenRun, from_json
from vantage.ledger.outbox import Outbox
from vantage.schemas.safe_text import safe_text, without_secrets
from vantage.storage.durable_files import open_lock, replace_file, try_lock

log = logging.getLogger(__name__)

RETRY_SECONDS = 15.0
"""Seconds to pause after a destination did not answer."""

_ENDS: TypeAdapter[dict[str, int]] = TypeAdapter(dict[str, int])


class Destinations:
    """Sends one run's outbox to all configured destinations, after those of earlier runs."""

    def __init__(self, workspace: Path) -> None:
        self._runs = workspace / "runs"
        self._outbox: Outbox | None = None
        self._thread: threading.Thread | None = None
        # The condition guards all below.
        self._changed = threading.Condition()
        self._recorded = self._tried = 0
        self._closed = False

    def notify(self, outbox: Outbox) -> None:
        """Note that the run's outbox has one more operation."""
        with self._changed:
            self._outbox = outbox
            self._recorded += 1
            self._changed.notify_all()
            if self._thread is None and not self._closed and is_any_set():
                self._thread = threading.Thread(
                    target=self._send_forever, name="vantage-destinations", daemon=True
                )
                self._thread.start()

    def close(self, timeout_seconds: float) -> None:
        """Send operations that were not tried yet, for at most this time, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._thread is not None:
                self._changed.wait_for(lambda: self._tried == self._recorded, timeout_seconds)

    def _send_forever(self) -> None:
        # Importing the destinations' packages takes a second, which the run does not wait for.
        senders = [_Sender(place, self._runs) for place in configured_destinations()]
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._recorded > self._tried, timeout=RETRY_SECONDS
                )
                recorded, outbox, is_last = self._recorded, self._outbox, self._closed
            for sender in senders:
                sender.send(outbox, is_last=is_last)
            with self._changed:
                self._tried = recorded
                self._changed.notify_all()
                if self._closed and self._tried == self._recorded:
                    return


class _Sender:
    """Sends the outboxes of a workspace to one destination."""

    def __init__(self, place: Destination, runs: Path) -> None:
        self._place = place
        self._runs = runs
        self._earlier_sent = False
        self._delivery: Delivery | None = None
        self._retry_at = 0.0
        self._warned = False

    def send(self, outbox: Outbox | None, *, is_last: bool) -> None:
        """Send all operations, those of earlier runs first. Never raises: no destination may stop a run."""
        if time.monotonic() < self._retry_at and not is_last:
            return
        try:
            if not self._earlier_sent:
                send_earlier_runs(self._place, self._runs, skip=outbox)
                self._earlier_sent = True
            if outbox is not None:
                self._delivery = self._delivery or Delivery(self._place, outbox)
                self._delivery.send()
        except Exception as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if not self._warned:
                log.warning(
                    "%s (%s) did not take the records of this run, which wait in its outbox; the run goes on: %s",
                    self._place.name,
                    self._place.address,
                    safe_text(without_secrets(str(error) or type(error).__name__))[:500],
                )
            self._warned = True


def send_earlier_runs(place: Destination, runs: Path, *, skip: Outbox | None) -> None:
    """Send what the destination lacks of the workspace's other runs, the oldest first."""
    for folder in sorted(runs.glob("*/ledger")):
        if skip is None or folder != skip.folder:
            try:
                Delivery(place, Outbox(folder)).send()
            except (ValueError, PermissionError) as error:
                # this outbox is damaged, or another user's: the others are still sent
                reason = safe_text(without_secrets(str(error)))[:300]
                log.warning("%s cannot be sent to %s (%s)", folder, place.name, reason)


class Delivery:
    """Sends one outbox to one destination, one process at a time."""

    def __init__(self, place: Destination, outbox: Outbox) -> None:
        self._place = place
        self._outbox = outbox
        self._path = outbox.folder / f"sent-{place.name}.json"
        self._end = 0
        self._entry: RunEntry | None = None
        self._copy: RunCopy | None = None

    def send(self) -> None:
        """Send everything that is in the outbox now, in order; nothing while another process sends it.

        Raises:
            ValueError: the outbox cannot be read.
        """
        if not self._outbox.is_longer_than(self._sent()):
            return
        lock = open_lock(self._outbox.folder / f"sending-{self._place.name}.lock")
        try:
            if try_lock(lock):
                self._send_rest(already_sent=self._sent())
        except Exception:
            self._end, self._entry, self._copy = 0, None, None  # read the outbox from its start next time
            raise
        finally:
            os.close(lock)

    def _send_rest(self, *, already_sent: int) -> None:
        for end, line in self._outbox.read(self._end):
            operation = from_json(line)
            self._entry = apply_operation(self._entry, operation)
            if self._copy is None:
                assert isinstance(operation, OpenRun), "apply_operation refuses any other beginning"
                self._copy = self._place.copy_of(operation)
            self._copy.apply(self._entry, operation, is_sent=end <= already_sent)
            self._end = end
            if end > already_sent:
                self._mark_sent(end)

    def _sent(self) -> int:
        return self._all_sent().get(self._place.address, 0)

    def _mark_sent(self, end: int) -> None:
        ends = _ENDS.dump_json({**self._all_sent(), self._place.address: end})
        replace_file(self._path, ends, private=True)

    def _all_sent(self) -> dict[str, int]:
        """Return address → offset; empty if the file cannot be read: operations that are sent again change nothing."""
        try:
            return _ENDS.validate_json(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
