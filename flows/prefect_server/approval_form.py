"""Ask a person in Prefect: the run's flow run is suspended, and resumed by a form.

A suspended flow run holds no process. When its form is sent, Prefect starts it again from the beginning; the same call then
returns the form's content.
"""

import logging
import time
from itertools import count
from typing import Annotated, Literal

from prefect.flow_runs import asuspend_flow_run
from prefect.input import RunInput
from pydantic import Field, StringConstraints, ValidationError

from vantage.runs.answers import add_answer
from vantage.runs.record import UNFINISHED
from vantage.runs.run import read_run, read_runs
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.approvals import MAX_REASON, Approval, Question

log = logging.getLogger(__name__)


class Decision(RunInput):
    """Fields of Prefect's form, as the person fills them in."""

    decision: Annotated[Literal["approve", "reject"], Field(description="Approve of it, or reject it.")]
    reason: Annotated[
        str,
        StringConstraints(min_length=1, max_length=MAX_REASON),
        Field(description="Why; it is kept with the run."),
    ]
    name: Annotated[str, StringConstraints(min_length=1, max_length=200), Field(description="Who decides.")]


def run_of(flow_run_id: str, workspace: str) -> str | None:
    """Return the unfinished run that an earlier process of this flow run executed; None: none."""
    unfinished = (each for each in read_runs(Workspace.at(workspace)) if each.status in UNFINISHED)
    return next((each.run_id for each in unfinished if flow_run_id in each.prefect_flow_run_ids), None)


async def answer_in_form(run_id: str, workspace: str) -> bool:
    """Get an answer to every open question of the run; suspends the flow run if the form was not sent yet.

    Returns whether all are answered. Prefect cannot suspend a flow run without a deployment, or one within another flow
    run.

    Raises:
        prefect.exceptions.Pause: the flow run is suspended, and this process has to end.
    """
    place = Workspace.at(workspace)
    while questions := read_run(place, run_id).open_questions:
        question = next(iter(questions.values()))
        try:
            decision = await _ask(run_id, question)
        except RuntimeError:
            log.debug("flow run of %s cannot be suspended", run_id, exc_info=True)
            return False
        given = Approval(
            question=question,
            run_id=run_id,
            approved=decision.decision == "approve",
            by=" ".join(decision.name.split()),
            reason=" ".join(decision.reason.split()),
            time=time.time_ns() // 1_000_000,
        )
        try:
            add_answer(place, run_id, given)
        except RunError:  # somebody has answered on the command line meanwhile, and that answer counts
            continue
    return True


async def _ask(run_id: str, question: Question) -> Decision:
    about = "\n".join(f"- {verdict}" for verdict in question.verdicts)
    text = f"**{question.subject}** of run {run_id} waits for a person.\n\n{about}\n\nArtifact `{question.digest}`"
    form = Decision.with_initial_data(description=text)
    for number in count():  # each form is sent once; after invalid content there is another form
        try:
            given = await asuspend_flow_run(wait_for_input=form, key=f"{question.id[:32]}-{number}")
            if given.reason.strip() and given.name.strip():
                return given
        except ValidationError:
            continue
    raise AssertionError("count has no end")
