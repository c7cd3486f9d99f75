"""Check MLflow's own fields of a run: its status, its times, and the address of its files."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vantage.ledger.expected.changes import RUNNING
from vantage.ledger.expected.runs import KILLED, ExpectedRun
from vantage.ledger.operations import CloseRun, Publish
from vantage.ledger.replay import Replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.mlflow_tags import SWEEP, shown
from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.view import Missing

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import MlflowRun

_PUBLISHED, _INTERRUPTED = "vantage.published", "vantage.interrupted"
_BETWEEN = "; "
"""Separator of the publications in the tag of a parent run."""


def state_problems(
    evidence: Evidence,
    run_id: str,
    stage: str | None,
    required: ExpectedRun,
    allowed: ExpectedRun,
    found: "MlflowRun",
) -> Iterator[str]:
    """Yield differences between the status, times and address of one of MLflow's runs and what was sent."""
    closed = _closed_by_others(evidence, run_id, found)
    statuses = {required.status, allowed.status}
    if RUNNING in statuses and closed:
        statuses.add(KILLED)
    if found.status not in statuses:
        yield f"its status is {found.status}, and was sent as {required.status}"
    if found.files != f"{found.root.rstrip('/')}/{found.run_id}/artifacts":
        yield f"MLflow looks for its files in {shown(found.files)}, and its experiment keeps them in {shown(found.root)}"
    yield from _interruption_problems(allowed, found, closed)
    record = evidence.record(run_id)
    if isinstance(record, RunRecord) and record.status == REMOVED:
        return  # its outbox was begun again, so its first times are not known
    if found.started not in (required.started, allowed.started):
        yield f"it started at {found.started}, and was sent as {required.started}"
    is_settled = required.status == allowed.status == found.status != RUNNING and allowed.interrupted is None
    if is_settled and not closed and found.ended not in (required.ended, allowed.ended):
        yield f"it ended at {found.ended}, and was sent as {required.ended}"


def link_problems(
    evidence: Evidence, replay: Replay, stage: str | None, required: ExpectedRun, found: "MlflowRun"
) -> Iterator[str]:
    """Yield tags that do not lead to the entries of MLflow that they name: producers, publications, a sweep."""
    if required.optional_tags and not found.tags.keys() & {"vantage.reused_from", "vantage.uri"}:
        yield "tag vantage.reused_from is absent, and the run does not show the artifact itself"
    tag = found.tags.get(_PUBLISHED)
    if tag is not None:
        # the parent run has the publications of all stages
        for each in tag.split(_BETWEEN) if stage is None else [tag]:
            yield from _publication_problems(evidence, replay, stage, each)
    if SWEEP & found.tags.keys():
        yield from _sweep_problems(evidence, found)


def _closed_by_others(evidence: Evidence, run_id: str, found: "MlflowRun") -> set[str]:
    """Return the reasons for which other runs closed this one; an unknown one is that of a removed run."""
    if found.status != KILLED and _INTERRUPTED not in found.tags:
        return set()
    reasons = set()
    for other in evidence.run_ids:
        replay = evidence.replay(other)
        if not isinstance(replay, Replay):
            reasons.add(found.tags.get(_INTERRUPTED, ""))
            continue
        operations = (each.operation for each in replay.lines)
        reasons |= {
            each.reason for each in operations if isinstance(each, CloseRun) and each.run_id == run_id
        }
    return reasons


def _interruption_problems(allowed: ExpectedRun, found: "MlflowRun", closed: set[str]) -> Iterator[str]:
    tag = found.tags.get(_INTERRUPTED)
    if tag is not None and tag not in closed | {allowed.interrupted}:
        yield f"tag {_INTERRUPTED} is {shown(tag)}, which nobody sent"


def _publication_problems(evidence: Evidence, replay: Replay, stage: str | None, tag: str) -> Iterator[str]:
    for each in (each.operation for each in replay.lines if isinstance(each.operation, Publish)):
        target = f"{each.registered_model}@{each.alias}" if each.alias else each.registered_model
        number = tag.removeprefix(f"{target} version ")
        if stage not in (each.stage, None) or number == tag or not number.isdigit():
            continue
        name, digest = each.registered_model, each.artifact.digest
        version = evidence.ask(lambda server, name=name, number=number: server.version(name, number, None))  # type: ignore[misc]
        if isinstance(version, Missing) or version is None or version.tags.get("vantage.digest") == digest:
            return  # another check finds whether the version is there
    yield f"tag {_PUBLISHED} is {shown(tag)}, and it published no such version"


def _sweep_problems(evidence: Evidence, found: "MlflowRun") -> Iterator[str]:
    parent = found.tags.get("mlflow.parentRunId", "")
    sweep = evidence.once(
        ("tags", parent), lambda: evidence.ask(lambda server: server.tags_of(parent)) if parent else None
    )
    if isinstance(sweep, Missing):
        return
    arm, seed = found.tags.get("vantage.arm"), found.tags.get("vantage.seed")
    cell = f"vantage.cell.{arm}.{seed}"
    if sweep is None or sweep.get("vantage.sweep") != found.tags.get("vantage.sweep_id"):
        yield f"tag vantage.sweep_id is {shown(found.tags.get('vantage.sweep_id'))}, and its parent is no such sweep"
    elif sweep.get(cell) not in (None, found.run_id):
        yield f"tags vantage.arm and vantage.seed are {shown(arm)} and {shown(seed)}, which is another run of the sweep"
    elif cell not in sweep:
        yield f"tags vantage.arm and vantage.seed are {shown(arm)} and {shown(seed)}, of which the sweep knows nothing"
