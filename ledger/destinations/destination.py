"""A place that gets a run's operations, in order, from its outbox."""

from typing import Protocol

from vantage.ledger.entries import RunEntry
from vantage.ledger.operations import OpenRun, Operation


class RunCopy(Protocol):
    """The records of one run at a destination."""

    def apply(self, entry: RunEntry, operation: Operation, *, is_sent: bool) -> None:
        """Write one operation.

        Args:
            entry: the run after the operation.
            operation: may come again after a kill between writing and noting it; that must change nothing.
            is_sent: whether it was noted as written, and only shows the copy what precedes the next operation.
        """


class Destination(Protocol):
    """One configured place."""

    @property
    def name(self) -> str:
        """Kind of the destination, which is part of file names: ``tensorboard``."""

    @property
    def address(self) -> str:
        """Address of the destination, without a login."""

    def copy_of(self, opening: OpenRun) -> RunCopy:
        """Return the copy of the run that this operation opens."""
