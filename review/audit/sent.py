"""Find how much of a run's outbox one MLflow server has received, by the files beside the outbox."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from vantage.ledger.expected.changes import Change, changes
from vantage.ledger.expected.runs import ExpectedRun, expected_runs
from vantage.ledger.operations import to_json
from vantage.ledger.replay import OutboxLine, Replay
from vantage.review.audit.evidence import Evidence
from vantage.runs.view import Missing
from vantage.schemas.records.audit import Check

_CLOCKS_DIFFER_SECONDS = 3600
"""Most seconds by which the clocks of machines that take one run over from another may differ."""
_WITHOUT_ENTRY = ("publish", "close_run")
"""Operations that leave nothing in the entry of a run or a stage."""


@dataclass(frozen=True)
class SentTo:
    """The operations that a server must have of a run."""

    required: tuple[OutboxLine, ...]
    """Operations that were sent to it, and that it did not refuse."""
    remark: str
    """Reason why it may lack some of them; empty: it must have all."""

    @cached_property
    def expected(self) -> dict[str | None, ExpectedRun]:
        """Return the contents that MLflow must show for these operations."""
        return expected_runs(self.required)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Byte offsets at which their lines end."""
        return frozenset(each.end for each in self.required)


def sent_to(evidence: Evidence, run_id: str, replay: Replay) -> SentTo | Missing:
    """Return the operations that the server must have of the run; Missing: the run was never sent to it."""
    return evidence.once(("sent", run_id), lambda: _sent_to(evidence, run_id, replay))


def _sent_to(evidence: Evidence, run_id: str, replay: Replay) -> SentTo | Missing:
    experiment = replay.opened.experiment
    destination = evidence.ask(lambda server: server.destination(experiment))
    if isinstance(destination, Missing):
        return destination
    end = None if destination is None else _ends(evidence, run_id).get(destination)
    if end is None:  # the destination has nothing of the run, or the file with the offset was lost
        knows = evidence.ask(lambda server: server.knows(experiment, run_id))
        if isinstance(knows, Missing) or not knows:
            return Missing(
                f"{evidence.server.address} was never sent run {run_id}; set MLFLOW_TRACKING_URI to the server that was"
            )
    refused = _refused(evidence, run_id, str(destination))
    length = replay.end if end is None else end
    sent = [each for each in replay.lines if each.end <= length]
    taken = tuple(each for each in sent if to_json(each.operation) not in refused)
    counted = [each for each in refused if each.get("operation") not in _WITHOUT_ENTRY]
    remarks = []
    if end is None:
        remarks.append(
            "ledger/sent.json has no entry for this MLflow, so how much it was sent is not known, nor whether the outbox "
            "was cut since"
        )
    if len(sent) < len(replay.lines):
        remarks.append(
            f"MLflow has not got the last {len(replay.lines) - len(sent)} operations yet; the next run sends them"
        )
    if counted:
        remarks.append(
            f"MLflow refused {len(counted)} operations when they were sent (ledger/refused.jsonl says why)"
        )
    return SentTo(taken, "; ".join(remarks))


def is_taken(evidence: Evidence, run_id: str, replay: Replay, line: OutboxLine) -> bool:
    """Return whether the server must have applied this operation."""
    sent = sent_to(evidence, run_id, replay)
    return isinstance(sent, SentTo) and line.end in sent.ends


def expected_of(evidence: Evidence, run_id: str, replay: Replay) -> dict[str | None, ExpectedRun]:
    """Return the contents that MLflow would show with the whole outbox of the run."""
    return evidence.once(("expected", run_id), lambda: expected_runs(replay.lines))


def changes_of(evidence: Evidence, run_id: str, replay: Replay) -> list[tuple[OutboxLine, list[Change]]]:
    """Return each operation of the run with what it changes in MLflow."""
    return evidence.once(
        ("changes", run_id),
        lambda: [(each, list(changes(each.entry, each.operation))) for each in replay.lines],
    )


def order_checks(evidence: Evidence, run_id: str, replay: Replay) -> Iterator[Check]:
    """Check whether the outbox is still the one that was written and sent, and its times follow one another."""
    if replay.changed:
        yield Check(subject="outbox", outcome="wrong", detail=replay.changed)
    lines = {0, *(each.end for each in replay.lines)}
    cut = sorted({end for end in _ends(evidence, run_id).values() if end not in lines})
    if cut:
        said = f"{cut[0]:,} bytes of it were sent to MLflow, and none of its lines ends there: it was changed since"
        yield Check(subject="outbox", outcome="wrong", detail=said)
    timed = [each.operation for each in replay.lines if hasattr(each.operation, "time")]
    for one, other in pairwise(timed):
        if (ahead := (one.time - other.time) / 1000) > _CLOCKS_DIFFER_SECONDS:
            said = (
                f"its {one.operation.replace('_', ' ')} says that it was {ahead:,.0f} s after the {other.operation.replace('_', ' ')} "
                "that follows it: a clock was wrong, or the time was edited, so who moved an alias last is not known. Nothing that was "
                "computed is in doubt; set the clock right, and if an alias is in doubt, move it again (`vantage publish` or `vantage "
                "rollback`), so that a record with the right time is the last"
            )
            yield Check(subject="outbox", outcome="unchecked", detail=said)
            return


def num_destinations(evidence: Evidence, run_id: str) -> int:
    """Return the number of MLflow databases that a run was sent to; a lost database that is written again counts as
    another one."""
    return len(_ends(evidence, run_id))


def _ends(evidence: Evidence, run_id: str) -> dict[str, int]:
    """Return destination → byte offset up to which the outbox was sent to it; empty if nothing is recorded."""
    data = _ledger_file(evidence, run_id, "sent.json")
    try:
        ends = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(ends, dict):
        return {}
    return {str(name): end for name, end in ends.items() if isinstance(end, int)}


def _refused(evidence: Evidence, run_id: str, destination: str) -> list[dict[str, Any]]:
    """Return the operations that the server refused for good."""
    data = _ledger_file(evidence, run_id, "refused.jsonl")
    return [
        line["operation"]
        for line in _lines(data)
        if line.get("destination") == destination and isinstance(line.get("operation"), dict)
    ]


def _ledger_file(evidence: Evidence, run_id: str, name: str) -> bytes | None:
    """Return a file beside the outbox; None: it is missing, or cannot be read (a folder, a pipe)."""
    try:
        return evidence.workspace.records.read_ledger_file(run_id, name)
    except OSError:
        return None


def _lines(data: bytes | None) -> Iterator[dict[str, Any]]:
    for line in (data or b"").splitlines():
        try:
            read = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(read, dict):
            yield read
