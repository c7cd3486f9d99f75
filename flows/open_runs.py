"""Find the runs that are open in this process by id, so that the parameters of a flow run can be plain values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vantage.flows.orchestrator import Orchestrator

_open: dict[str, "Orchestrator"] = {}


def orchestrator_of(run_id: str | None) -> "Orchestrator | None":
    """Return the orchestrator of the run in this process; None if it is not open here."""
    return None if run_id is None else _open.get(run_id)


@contextmanager
def opened(orchestrator: "Orchestrator") -> Iterator["Orchestrator"]:
    """Register the run inside this block."""
    run_id = orchestrator.run.record.run_id
    _open[run_id] = orchestrator
    try:
        yield orchestrator
    finally:
        del _open[run_id]
