"""Check the status of a run and its stages, and people's answers: each has more than one record."""

from collections.abc import Iterator

from pydantic import ValidationError

from vantage.ledger.operations import (
    FinishRun,
    FinishStage,
    OpenRun,
    OpenStage,
    Operation,
    RecordApproval,
    RecordReuse,
)
from vantage.ledger.replay import Replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.run_claims import ENDED
from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.run import outcome_of
from vantage.runs.run_records import APPROVALS
from vantage.runs.view import Missing
from vantage.runs.workspace import RunError
from vantage.schemas.records.approvals import Approval
from vantage.schemas.records.audit import Check

_SETTLED = frozenset({"completed", "gate_closed", "waiting_approval", "failed"})
"""Status of a run that is a function of its stages."""


def status_checks(evidence: Evidence, record: RunRecord, replay: Replay) -> Iterator[Check]:
    """Check the status of the run and of each stage in ``run.json`` and in the outbox."""
    if record.status == REMOVED:
        return
    problems = [*_run_problems(record), *_stage_problems(record, replay)]
    outcome = replay.entry.outcome
    if record.status != outcome and (problem := _differing_status(record, outcome)):
        problems.append(problem)
    missing = [each for each in problems if isinstance(each, Missing)]
    wrong = [each for each in problems if not isinstance(each, Missing)]
    if not (wrong or missing) or evidence.workspace.records.is_active(record.run_id):
        return  # whether a process executes a run takes seconds to see in a bucket
    if missing:
        yield Check(subject="status", outcome="unchecked", detail="; ".join(missing))
    if wrong:
        yield Check(subject="status", outcome="wrong", detail="; ".join(wrong))


def answer_checks(evidence: Evidence, record: RunRecord) -> Iterator[Check]:
    """Check each answer of a person in ``run.json`` against the file that was written once, when it was given."""
    wrong, missing = [], []
    for answer in record.approvals:
        question = answer.question
        file = f"{APPROVALS}/{question.id[:12]}….json"
        try:
            data = evidence.workspace.records.read_answer(record.run_id, question.id)
            given = None if data is None else Approval.model_validate_json(data)
        except (OSError, ValidationError, RunError) as error:
            wrong.append(
                f"{file}, the answer about {question.subject}, cannot be read ({type(error).__name__})"
            )
            continue
        if given is None:
            missing.append(f"the answer about {question.subject} is in run.json alone: there is no {file}")
        elif given != answer:
            wrong.append(f"run.json has the answer about {question.subject} as {answer}; {file} has {given}")
    if wrong:
        yield Check(subject="answers", outcome="wrong", detail="; ".join(wrong))
    elif missing:
        yield Check(subject="answers", outcome="unchecked", detail="; ".join(missing))


def _differing_status(record: RunRecord, outcome: str) -> str | Missing:
    """Return the meaning of two different statuses; empty: the process died in between, and another has noted it."""
    shown, said = _words(record.status), _words(outcome)
    if outcome == "running":
        if record.status == "resumable":
            return ""
        return Missing(
            f"run.json has the status {shown}, and the outbox has no end of the run: its process was killed as it ended, or one was edited"
        )
    if record.status in ("running", "resumable"):
        return Missing(
            f"run.json has the status {shown}, the outbox {said}: a process was killed as it began to resume the run, or one was "
            "edited"
        )
    return f"the outbox has the status {said}, run.json {shown}"


def _run_problems(record: RunRecord) -> Iterator[str]:
    """Yield a status of the run that does not follow from those of its stages."""
    follows = outcome_of(record)
    if record.status in _SETTLED and record.status != follows:
        if record.status == "waiting_approval" and record.questions:
            return  # a person answered, and the run was not resumed since
        yield f"run.json has the status {_words(record.status)}, and by its stages the run is {_words(follows)}"


_TELLING = (OpenStage, FinishStage, RecordReuse)
"""Operations by which a stage's status changes."""


def _stage_problems(record: RunRecord, replay: Replay) -> Iterator[str | Missing]:
    """Yield a status of a stage that is not the one which the run recorded of it since it was last started or resumed."""
    since = _since_last_opening(replay)
    is_over = any(isinstance(each, FinishRun) for each in since)
    for step, stage in record.stages.items():
        entry = replay.entry.stages.get(step)
        if (
            entry is not None
            and entry.artifact is not None
            and stage.digest not in (None, entry.artifact.digest)
        ):
            continue  # another check finds it
        its = [each for each in since if getattr(each, "stage", None) == step]
        last = next((each for each in reversed(its) if isinstance(each, _TELLING)), None)
        if stage.status == "reused" and stage.seconds:
            yield f"run.json records that {step} was found in the store, and that it took {stage.seconds:.1f} s"
        if stage.status not in ENDED:
            if is_over and (said := _recorded_status(last)) in ENDED:
                yield Missing(
                    f"run.json has {step} as {_words(stage.status)}, the outbox as {_words(said)}: its process failed after "
                    "that, or one was edited"
                )
        elif last is None:
            yield f"run.json records that {step} is {_words(stage.status)}, the outbox nothing of it since the run was last opened"
        elif isinstance(last, OpenStage):
            if is_over:
                yield f"run.json records that {step} is {_words(stage.status)}, the outbox no end of attempt {last.attempt}"
        elif isinstance(last, FinishStage) and last.outcome in ("failed", "resumable"):
            yield f"the outbox records that {step} is {_words(last.outcome)}, run.json that it is {_words(stage.status)}"
        elif isinstance(last, RecordReuse) or last.artifact is None:
            # the artifact was found, and then the stage waited for a person
            if stage.status == "completed" and not _is_answered(since, step):
                yield f"the outbox records that {step} was found in the store, run.json that it was made"
        elif stage.status == "reused" and not _is_recorded_late(replay, last):
            yield f"the outbox records that {step} was made, run.json that it was found in the store"


def _since_last_opening(replay: Replay) -> list[Operation]:
    """Return the operations since the run was last started or resumed."""
    operations = [each.operation for each in replay.lines]
    first = max(number for number, each in enumerate(operations) if isinstance(each, OpenRun))
    return operations[first:]


def _recorded_status(last: Operation | None) -> str:
    """Return the status of a stage by its last operation."""
    if isinstance(last, RecordReuse):
        return "reused"
    return last.outcome if isinstance(last, FinishStage) else ""


def _is_answered(since: list[Operation], step: str) -> bool:
    """Return whether a person has approved of the stage meanwhile: a stage that waited is then completed."""
    return any(
        isinstance(each, RecordApproval) and each.approval.question.subject == step and each.approval.approved
        for each in since
    )


def _is_recorded_late(replay: Replay, finished: FinishStage) -> bool:
    """Return whether a process may have found, and recorded as made, what an earlier process of the run had made.

    Then its usage was not measured. Nor is that of an attempt on several nodes, so a run that was never resumed must
    have begun the attempt twice.
    """
    begun = [each.operation for each in replay.lines if isinstance(each.operation, OpenStage)]
    numbers = [each.attempt for each in begun if each.stage == finished.stage]
    is_repeated = bool(numbers) and numbers.count(numbers[-1]) > 1
    return finished.usage is None and (is_repeated or replay.entry.openings > 1)


def _words(status: str) -> str:
    return status.replace("_", " ")
