"""Check that the decisions behind an alias are signed by a key that the policy on publishing names."""

from collections.abc import Collection, Iterator

from vantage.runs.record import RunRecord
from vantage.runs.workspace import Workspace
from vantage.schemas.records.approvals import Approval
from vantage.signing.decision_checks import DecisionChecks, Trust
from vantage.signing.decisions import Decision, approval_decision, loosened_decisions


def unsigned_decision(
    workspace: Workspace, record: RunRecord, steps: Collection[str], *, subject: str, trust: Trust
) -> str | None:
    """Return the first decision that is not signed as the policy requires; None: all are signed so.

    Args:
        workspace: the run's workspace.
        record: the run's record.
        steps: steps on which the alias depends, at any depth.
        subject: subject of the question about the alias itself.
        trust: keys of which one must have signed.
    """
    checks = DecisionChecks(workspace.storage, record, trust=trust, ref_of=workspace.storage.find)
    for decision in _decisions(record, steps, subject):
        for check in checks.of(decision):
            if check.outcome != "ok":
                return check.detail
    return None


def _decisions(record: RunRecord, steps: Collection[str], subject: str) -> Iterator[Decision]:
    for approval in record.approvals:
        if approval.approved and _is_about_now(record, approval, steps, subject):
            yield approval_decision(record, approval)
    for step in steps:
        if step in record.stages:
            yield from loosened_decisions(record, step)


def _is_about_now(record: RunRecord, approval: Approval, steps: Collection[str], subject: str) -> bool:
    """Return whether the answer is about a present artifact of the run."""
    question = approval.question
    if question.subject != subject and question.subject not in steps:
        return False
    return any(
        (stage.stage_key, stage.digest) == (question.stage_key, question.digest)
        for stage in record.stages.values()
    )
