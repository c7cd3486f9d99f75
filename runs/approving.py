"""Approve and reject: record a person's answer to a question of a run, in the run and in its ledger."""

import time
from collections.abc import Callable

from vantage.ledger.run_ledger import Ledger
from vantage.runs.answers import add_answer, already_answered
from vantage.runs.origin import user
from vantage.runs.own_commands import own_command
from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.run import Run, hold_run, read_run
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.approvals import MAX_REASON, PUBLISH_PREFIX, Approval, Question, answer_to
from vantage.schemas.safe_text import safe_text


def answer(
    workspace: Workspace,
    run_id: str,
    subject: str,
    *,
    approved: bool,
    by: str | None,
    reason: str,
    prepare: Callable[[Approval], Callable[[], None]] = lambda approval: lambda: None,
) -> tuple[Approval, bool]:
    """Record a person's answer; returns it, and whether MLflow has received it already.

    Args:
        workspace: the run's workspace.
        run_id: id of the run. If a process executes the run, that process takes the answer up by itself.
        subject: a stage that waits, or ``publish:NAME`` with or without ``@ALIAS``.
        approved: whether the person approves; False: the person rejects.
        by: name of the person; None: the login name.
        reason: the person's reason.
        prepare: called before the answer is stored; the function that it returns is called after that, before MLflow
            receives the answer.

    Raises:
        RunError: the subject has no question, the question has an answer, or the reason is empty or too long.
    """
    record = read_run(workspace, run_id)
    given = Approval(
        question=open_question(record, subject),
        run_id=run_id,
        approved=approved,
        by=text_of("--by", by, longest=200) if by is not None else user(),
        login=user(),
        reason=text_of("--reason", reason),
        time=time.time_ns() // 1_000_000,
    )
    complete = prepare(given)
    add_answer(workspace, run_id, given)
    complete()
    try:
        with Ledger(None, workspace.root, record.recipe.recipe) as ledger:
            with hold_run(workspace, run_id) as run:
                _record(run, ledger)
            # sent without the run's lock, so that `vantage resume` can take the lock
            return given, ledger.flush()
    except RunError:  # a process executes the run, and will read the answer
        return given, False


def _record(run: Run, ledger: Ledger) -> None:
    """Copy the answers into ``run.json`` and the ledger's outbox."""
    record = run.record
    run.update()  # this writes the answers that were read with the record
    outcome = run.outcome()
    ledger.attach(record.run_id, record.recipe.recipe, record.recipe.model_dump(mode="json"), outcome=outcome)
    for approval in record.approvals:
        ledger.record_approval(approval)


def text_of(option: str, text: str, *, longest: int = MAX_REASON) -> str:
    """Return an option's text in one line, without secrets. Raises RunError if nothing visible is left, or it is too
    long.

    The text is shown after the name of its stage, where a second line could pass for another answer.
    """
    stripped = safe_text(" ".join(text.split()))
    if not any(each.isprintable() and not each.isspace() for each in stripped):
        raise RunError(f"{option} is empty; say it in a few words, which are kept with the run")
    if len(stripped) > longest:
        raise RunError(f"{option} has {len(stripped):,} characters; give {longest:,} or fewer")
    return stripped


def open_question(record: RunRecord, subject: str) -> Question:
    """Return the open question about the subject. Raises RunError if there is no question, or it is answered."""
    found = record.questions.get(subject) or _only_alias_of(record, subject)
    if found is not None:
        if given := answer_to(found, record.approvals):
            raise RunError(already_answered(record.run_id, given))
        return found
    waiting = ", ".join(record.open_questions)
    if record.status == REMOVED:
        raise RunError(f"run {record.run_id} was removed by `vantage gc`; run its recipe again")
    named = subject in record.stages or subject.startswith(PUBLISH_PREFIX)
    why = "does not wait for approval" if named else "is no stage of it and no publish:NAME"
    if subject in record.stages:
        why += f" (it is {record.stages[subject].status.replace('_', ' ')})"
    there = f"what waits: {waiting}" if waiting else "nothing of it waits"
    raise RunError(
        f"run {record.run_id}: {subject} {why}; {there}. `{own_command('status', record.run_id)}` shows it"
    )


def _only_alias_of(record: RunRecord, subject: str) -> Question | None:
    """Return the question about ``publish:NAME`` without its alias, if there is only one alias."""
    if not subject.startswith(PUBLISH_PREFIX):
        return None
    found = [question for name, question in record.open_questions.items() if name.startswith(f"{subject}@")]
    if len(found) > 1:
        raise RunError(f"{subject} is {' or '.join(each.subject for each in found)}; name one of them")
    return found[0] if found else None
