"""Check a run as a whole: its record, the recipe in it, and its outbox."""

from collections.abc import Iterator

from pydantic import ValidationError

from vantage.ledger.operations import OpenRun, RecordApproval
from vantage.ledger.remarks import remark_on
from vantage.ledger.replay import Replay
from vantage.review.audit.decisions import decision_checks
from vantage.review.audit.evidence import Evidence, check_of
from vantage.review.audit.guards import failed_guard_checks
from vantage.review.audit.mlflow_claims import mlflow_check
from vantage.review.audit.published import published_checks
from vantage.review.audit.run_claims import ENDED
from vantage.review.audit.run_pages import page_checks
from vantage.review.audit.run_states import answer_checks, status_checks
from vantage.review.audit.sent import expected_of, order_checks
from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.run import recipe_digest
from vantage.runs.run_ids import number_in
from vantage.runs.view import Broken, Missing
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.sources import PinnedSource
from vantage.schemas.records.audit import AuditedRun, Check
from vantage.schemas.records.estimate_warnings import warnings_about
from vantage.schemas.records.stage_key import differences


def run_checks(evidence: Evidence, run_id: str) -> AuditedRun:
    """Return every check of a run that belongs to none of its steps."""
    record, replay = evidence.record(run_id), evidence.replay(run_id)
    checks = []
    if isinstance(record, Missing | Broken):
        checks.append(check_of("run record", record))
    else:
        problems = list(_record_problems(record))
        checks.append(_check("run record", problems))
        checks += answer_checks(evidence, record)
        checks += failed_guard_checks(evidence, record)
        checks += decision_checks(evidence, run_id)
    if isinstance(replay, Missing | Broken):
        checks.append(check_of("outbox", replay))
    elif isinstance(record, RunRecord):
        checks.append(_check("outbox", list(_outbox_problems(record, replay))))
        checks += status_checks(evidence, record, replay)
        checks.append(mlflow_check(evidence, run_id, None))
        if record.status != REMOVED:
            checks += page_checks(evidence, run_id, replay)
        checks += _strange_stages(evidence, run_id, replay)
        checks += order_checks(evidence, run_id, replay)
        checks += published_checks(evidence, run_id, replay)
    return AuditedRun(run_id=run_id, checks=tuple(checks))


def _check(subject: str, problems: list[str]) -> Check:
    return Check(subject=subject, outcome="wrong" if problems else "ok", detail="; ".join(problems))


def _record_problems(record: RunRecord) -> Iterator[str]:
    models = (record.recipe.model, *record.recipe.models.values())
    pinned = any(isinstance(model.origin, PinnedSource) for model in models)
    if not pinned and recipe_digest(record.recipe) != record.recipe_digest:
        yield (
            f"its recipe hashes to {recipe_digest(record.recipe)[:12]}, recipe_digest is {record.recipe_digest[:12]}"
        )
    if record.number != number_in(record.run_id):
        yield f"its number is {record.number}, and its id begins with {number_in(record.run_id)}"
    closed = sorted(step for step, stage in record.stages.items() if stage.status == "gate_closed")
    waiting = [step for step, stage in record.stages.items() if stage.status == "waiting_approval"]
    if record.status == "completed" and waiting:
        yield f"its status is completed, and {', '.join(waiting)} waits for approval"
    if record.status == "completed" and closed:
        yield f"its status is completed, and the gate of {', '.join(closed)} is closed"
    if record.status == "gate_closed" and not closed:
        yield "its status is gate closed, and no gate of it is"


def _strange_stages(evidence: Evidence, run_id: str, replay: Replay) -> Iterator[Check]:
    """Yield runs of MLflow with the tags of a stage that this run does not have."""
    runs = evidence.mlflow_runs(replay.opened.experiment, run_id)
    if isinstance(runs, Missing):
        return  # the check of the parent run reports this
    strange = sorted(
        str(stage) for stage in runs.keys() - expected_of(evidence, run_id, replay).keys() if stage
    )
    for stage in strange:
        said = (
            f"MLflow has a run that claims to be stage {stage} of this run, and the outbox has no such stage"
        )
        yield Check(subject="MLflow", outcome="wrong", detail=said)


def _stage_problems(record: RunRecord, replay: Replay) -> Iterator[str]:
    """Yield problems of stages in the outbox, against ``run.json``: their number, their outcomes, and remarks on them."""
    for step, entry in replay.entry.stages.items():
        stage = record.stages.get(step)
        if stage is None or (entry.artifact is not None and stage.digest is None):
            yield f"the outbox has {step}, which run.json does not have"
            continue
        if entry.artifact is None or stage.status not in ENDED or stage.digest != entry.artifact.digest:
            continue
        if entry.attempt is not None and stage.attempt != entry.attempt:
            yield f"the outbox records that attempt {entry.attempt} made {step}, run.json has {stage.attempt}"
        if stage.remark != (remark := remark_on(entry.artifact, entry.inputs)):
            yield f"run.json remarks on {step}: {stage.remark or 'nothing'}; by its metrics and files it is: {remark or 'nothing'}"
        # An earlier version recorded no intervals, and warned of no estimate.
        warnings = warnings_about(entry.artifact, of_estimates=bool(stage.intervals))
        if stage.warnings != warnings:
            shown = "; ".join(warnings) or "none"
            yield f"run.json has other warnings about {step} than its metrics give: {shown}"


def _outbox_problems(record: RunRecord, replay: Replay) -> Iterator[str]:
    for opening in (each.operation for each in replay.lines if isinstance(each.operation, OpenRun)):
        try:
            sent = ResolvedRecipe.model_validate(opening.recipe)
        except ValidationError:
            continue  # another version of Vantage wrote the recipe
        if sent != record.recipe:
            changed = differences(record.recipe.model_dump(mode="json"), sent.model_dump(mode="json"))
            yield f"the outbox has another recipe than run.json: {'; '.join(changed)}"
            break
    if record.status == REMOVED:
        return
    sent_answers = [
        each.operation.approval for each in replay.lines if isinstance(each.operation, RecordApproval)
    ]
    is_taken_up = record.status not in ("running", "waiting_approval")
    for answer in record.approvals:
        if answer.run_id not in (None, record.run_id):
            yield f"run.json has an answer about {answer.question.subject} that was given to run {answer.run_id}"
        if is_taken_up and answer not in sent_answers:
            yield f"run.json has an answer about {answer.question.subject} ({answer}), which the outbox does not have"
    for answer in sent_answers:
        if answer not in record.approvals:
            yield f"the outbox has an answer about {answer.question.subject} ({answer}), which run.json does not have"
    yield from _stage_problems(record, replay)
    sent_copies = {(each.registered_model, each.artifact.digest) for each, _ in replay.publications()}
    for name, copy in record.copies.items():
        if (name, copy.digest) not in sent_copies:
            yield f"run.json records that {copy.digest[:12]} was published as {name}, and the outbox does not"
