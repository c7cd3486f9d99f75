"""The answers of people to a run's questions, each in a file of its own that is written once.

A process that executes the run is the only writer of its ``run.json``. So an answer is first a new file beside it, named by
its question; whoever reads the run next finds it there, and whoever executes the run copies it into ``run.json``.
"""

from pydantic import ValidationError

from flows.runs.record import RunRecord
from flows.runs.workspace import RunError, Workspace
from schemas.records.approvals import Approval


def add_answer(workspace: Workspace, run_id: str, approval: Approval) -> None:
    """Store the answer; RunError if the question has one already."""
    data = approval.model_dump_json(indent=1).encode()
    if not workspace.records.add_answer(run_id, approval.question.id, data):
        record = workspace.records.read(run_id)
        there = _read(workspace, record, approval.question.id)
        raise RunError(already_answered(record.run_id, there or approval))


def already_answered(run_id: str, answer: Approval) -> str:
    """The message for a second answer."""
    return (
        f"{answer.question.subject} of run {run_id} is {answer}; an answer is never changed. A new run of the recipe "
        "reuses everything and asks again"
    )


def with_answers(workspace: Workspace, record: RunRecord) -> RunRecord:
    """The record with the answers that were given since it was written."""
    found = (_read(workspace, record, question.id) for question in record.open_questions.values())
    new = tuple(each for each in found if each is not None and each.question in record.questions.values())
    return record.model_copy(update={"approvals": (*record.approvals, *new)}) if new else record


def _read(workspace: Workspace, record: RunRecord, question_id: str) -> Approval | None:
    data = workspace.records.read_answer(record.run_id, question_id)
    if data is None:
        return None
    try:
        return Approval.model_validate_json(data)
    except ValidationError as error:
        raise RunError(
            f"{workspace.address}/runs/{record.run_id}/approvals/{question_id}.json cannot be read "
            f"({type(error).__name__}); move the file away, and decide again"
        ) from error
