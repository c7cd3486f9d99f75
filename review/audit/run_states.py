"""Check the status of a run and its stages, and people's answers: each has more than one record."""

from collections.abc import Iterator

from pydantic import ValidationError

from vantage.ledger.operations import FinishStage, RecordReuse
from vantage.ledger.replay import Replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.run_claims import ENDED
from vantage.runs.record import REMOVED, RunRecord, StageRecord
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
    wrong = [*_run_problems(record), *_stage_problems(record, replay)]
    missing: list[str] = []
    outcome = replay.entry.outcome
    if record.status != outcome:
        problem = _differing_status(record, outcome)
        (missing if isinstance(problem, Missing) else wrong).extend([problem] if problem else [])
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
    shown, said = record.status.replace("_", " "), outcome.replace("_", " ")
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
            return  # answered, and not resumed since
        yield f"run.json has the status {record.status.replace('_', ' ')}, and by its stages the run is {follows.replace('_', ' ')}"


def _stage_problems(record: RunRecord, replay: Replay) -> Iterator[str]:
    for step, entry in replay.entry.stages.items():
        stage = record.stages.get(step)
        if stage is None or stage.status not in ENDED or entry.artifact is None:
            continue
        if stage.digest != entry.artifact.digest:
            continue  # another check finds it
        if stage.status == "reused" and stage.seconds:
            yield f"run.json records that {step} was found in the store, and that it took {stage.seconds:.1f} s"
        if stage.status == "completed" and entry.outcome == "reused":
            yield f"the outbox records that {step} was found in the store, run.json that it was made"
        if (
            stage.status == "reused"
            and entry.outcome == "completed"
            and not _may_be_reused(replay, step, stage)
        ):
            yield f"the outbox records that {step} was made, run.json that it was found in the store"


def _may_be_reused(replay: Replay, step: str, stage: StageRecord) -> bool:
    """Return whether a run that was resumed has found its own artifact."""
    if stage.attempt is None:
        return False
    operations = [each.operation for each in reversed(replay.lines)]
    last = next(
        (
            each
            for each in operations
            if isinstance(each, RecordReuse | FinishStage)
            and each.stage == step
            and each.artifact is not None
        ),
        None,
    )
    # one that was killed before it recorded all records it again, as made
    return isinstance(last, RecordReuse) or replay.entry.openings > 1
