"""Store people's answers to a run's questions, each in a file of its own that is written once.

Only the process that executes the run writes its ``run.json``. So an answer is first a new file beside it, named by its
question. The next reader of the run finds it there, and the process that executes the run copies it into ``run.json``.
"""

from pydantic import ValidationError

from vantage.runs.record import RunRecord
from vantage.runs.run_records import APPROVALS
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.approvals import Approval, Question


def add_answer(workspace: Workspace, run_id: str, approval: Approval) -> None:
    """Store the answer. Raises RunError if the question has one already."""
    data, question = approval.model_dump_json(indent=1).encode(), approval.question
    if not workspace.records.add_answer(run_id, question.id, data):
        there = _read(workspace, run_id, question)
        if there is None:
            raise RunError(
                f"{_place(workspace, run_id, question)} leads nowhere; move it away, and decide again"
            )
        raise RunError(already_answered(run_id, there))


def already_answered(run_id: str, answer: Approval) -> str:
    """Return the message for a second answer."""
    return (
        f"{answer.question.subject} of run {run_id} is {answer}; an answer is never changed. A new run of the recipe "
        "reuses everything and asks again"
    )


def with_answers(workspace: Workspace, record: RunRecord) -> RunRecord:
    """Return the record with the answers that were given since it was written."""
    found = (_read(workspace, record.run_id, question) for question in record.open_questions.values())
    new = tuple(each for each in found if each is not None)
    return record.model_copy(update={"approvals": (*record.approvals, *new)}) if new else record


def _read(workspace: Workspace, run_id: str, question: Question) -> Approval | None:
    """Return the stored answer to a question of a run. Raises RunError if what is stored there is not an answer."""
    try:
        data = workspace.records.read_answer(run_id, question.id)
        if data is None:
            return None
        found = Approval.model_validate_json(data)
    except (OSError, ValidationError) as error:
        why = f"cannot be read ({getattr(error, 'strerror', None) or type(error).__name__})"
    else:
        if found.question == question and found.run_id in (None, run_id):
            return found
        why = f"is an answer to another question, about {found.question.subject} of run {found.run_id or 'unknown'}"
    raise RunError(f"{_place(workspace, run_id, question)} {why}; move it away, and decide again")


def _place(workspace: Workspace, run_id: str, question: Question) -> str:
    return f"{workspace.address}/runs/{run_id}/{APPROVALS}/{question.id}.json"
