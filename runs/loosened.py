"""Find the gates of a run that were loosened after they had closed for the same artifact in an earlier run of the workspace."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.loosened_gates import LoosenedGate, loosened_gates
from vantage.schemas.records.verdicts import Verdict


class EarlierVerdicts:
    """Closed gates of the runs that began before a run; the records are read once, when they are first needed."""

    def __init__(self, record: RunRecord, records: Callable[[], Iterable[RunRecord]]) -> None:
        """Hold the run whose gates are compared; ``records`` returns the records of all runs, in any order."""
        self._number = record.number
        self._records = records

    def loosened(self, digest: str, verdicts: Sequence[Verdict]) -> tuple[LoosenedGate, ...]:
        """Return the gates on the artifact of this digest that ``verdicts`` show to be loosened."""
        return loosened_gates(verdicts, self._closed.get(digest, ()))

    @cached_property
    def _closed(self) -> Mapping[str, list[tuple[str, Verdict]]]:
        """Content digest → (run, closed verdict), the oldest run first."""
        found: dict[str, list[tuple[str, Verdict]]] = {}
        earlier = (record for record in self._records() if record.number < self._number)
        for record in sorted(earlier, key=lambda record: record.number):
            for stage in record.stages.values():
                closed = [verdict for verdict in stage.verdicts if not verdict.passed]
                if stage.digest is not None and closed:
                    found.setdefault(stage.digest, []).extend((record.run_id, each) for each in closed)
        return found


def earlier_verdicts(workspace: Workspace, record: RunRecord) -> EarlierVerdicts:
    """Return the closed gates of the workspace's earlier runs that can be read."""
    return EarlierVerdicts(record, lambda: read_runs(workspace))


def known_loosened(
    record: RunRecord, steps: Iterable[str], earlier: EarlierVerdicts
) -> Iterator[tuple[str, LoosenedGate]]:
    """Yield (step, loosened gate) for the given steps, from the run's own record and from other runs' present records.

    The two sources differ if an earlier run closed a gate after this run had judged, or if that run's record is gone.
    """
    for step in steps:
        stage = record.stages[step]
        shown = () if stage.digest is None else earlier.loosened(stage.digest, stage.verdicts)
        for gate in dict.fromkeys((*stage.loosened, *shown)):
            yield step, gate
