"""The runs that this process drives: a flow run finds its own by the run's id, so that its parameters are plain."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flows.orchestrator import Orchestrator

_open: dict[str, "Orchestrator"] = {}


def orchestrator_of(run_id: str | None) -> "Orchestrator | None":
    """Who drives the run in this process; None where nobody does."""
    return None if run_id is None else _open.get(run_id)


@contextmanager
def opened(orchestrator: "Orchestrator") -> Iterator["Orchestrator"]:
    """Inside, the run is found by its id."""
    run_id = orchestrator.run.record.run_id
    _open[run_id] = orchestrator
    try:
        yield orchestrator
    finally:
        del _open[run_id]
