"""Compare MLflow's entry of a run or a stage with the run's outbox."""

from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING

from vantage.ledger.expected.changes import GUARD_TAGS, guard_tags
from vantage.ledger.expected.runs import ExpectedRun, Row
from vantage.ledger.operations import FinishStage, RecordReuse
from vantage.ledger.replay import Replay
from vantage.review.audit.dataset_inputs import dataset_problems
from vantage.review.audit.evidence import Evidence, check_of
from vantage.review.audit.logged_models import (
    claimed_model_problems,
    model_problems,
    read_model_problems,
)
from vantage.review.audit.mlflow_states import link_problems, state_problems
from vantage.review.audit.mlflow_tags import differing, is_pointer, other_tags, shown, tag_problems
from vantage.review.audit.sent import SentTo, expected_of, sent_to
from vantage.runs.record import RunRecord
from vantage.runs.view import Broken, Missing
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.audit import Check

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import MlflowRun

_SUBJECT = "MLflow"
_SHOWN = 3


def mlflow_check(evidence: Evidence, run_id: str, stage: str | None) -> Check:
    """Check tags, params, metric rows and dataset inputs of a stage's run (None: of the parent run), and the entries that they
    point to."""
    replay = evidence.replay(run_id)
    if isinstance(replay, Missing | Broken):
        return Check(
            subject=_SUBJECT, outcome="unchecked", detail=f"there is nothing to compare it with: {replay}"
        )
    runs = evidence.mlflow_runs(replay.opened.experiment, run_id)
    if isinstance(runs, Missing):
        return check_of(_SUBJECT, runs)
    sent = sent_to(evidence, run_id, replay)
    if isinstance(sent, Missing):
        return check_of(_SUBJECT, sent)
    required = sent.expected.get(stage, ExpectedRun())
    allowed = expected_of(evidence, run_id, replay).get(stage, ExpectedRun())
    found = runs.get(stage, [])
    if not found:
        return _absent(sent, required, stage)
    problems = [*_problems(evidence, required, allowed, found[0]), *_latest_problems(found[0])]
    problems += _pointers(evidence, found[0], runs.get(None, []), stage)
    problems += state_problems(evidence, run_id, stage, required, allowed, found[0])
    problems += link_problems(evidence, replay, stage, required, found[0])
    artifact = replay.artifact_of(stage) if stage is not None else None
    headline = artifact.metrics if artifact is not None and replay.is_chained and not sent.remark else {}
    problems += model_problems(evidence, found[0], allowed, headline=headline, is_pending=bool(sent.remark))
    problems += claimed_model_problems(evidence, found[0], _digests_of(replay, stage))
    for double in found[1:]:
        contradicting = [*_problems(evidence, ExpectedRun(), allowed, double), *other_tags(allowed, double)]
        problems += [
            f"a second run of MLflow ({double.run_id[:8]}) claims to be this one: {each}"
            for each in contradicting
        ]
    if problems:
        return Check(subject=_SUBJECT, outcome="wrong", detail="; ".join(problems))
    if sent.remark:
        return Check(subject=_SUBJECT, outcome="unchecked", detail=sent.remark)
    if len(found) > 1:
        return Check(
            subject=_SUBJECT,
            outcome="note",
            detail=f"MLflow has {len(found)} runs that claim to be this one",
        )
    return Check(subject=_SUBJECT, detail=_counts(found[0]))


def check_without_outbox(evidence: Evidence, record: RunRecord, step: str, artifact: Artifact) -> Check:
    """Check what remains without the run's outbox: digest, key, parents, headline metrics, firings of guards."""
    runs = evidence.mlflow_runs(record.recipe.recipe, record.run_id)
    if isinstance(runs, Missing):
        return check_of(_SUBJECT, runs)
    if not runs.get(step):
        return Check(
            subject=_SUBJECT,
            outcome="unchecked",
            detail=f"MLflow has no run of {step} of run {record.run_id}",
        )
    found = runs[step][0]
    tags = {
        "vantage.digest": artifact.digest,
        "vantage.stage_key": artifact.stage_key,
        **guard_tags(artifact),
    }
    tags |= {
        f"vantage.parent.{role}": digest
        for role, digest in artifact.parents.items()
        if f"vantage.parent.{role}" in found.tags
    }
    others = {name: value for name, value in found.tags.items() if name not in GUARD_TAGS}
    problems = list(tag_problems(ExpectedRun(tags=tags), ExpectedRun(tags=others | tags), found))
    if "vantage.reused_from" not in found.tags:
        values = {(name, value) for name, _, _, value in found.rows}
        problems += [
            f"metric {name} is not {value}, which is sealed in the artifact"
            for name, value in artifact.metrics.items()
            if value is not None and (name, value) not in values
        ]
    if problems:
        return Check(subject=_SUBJECT, outcome="wrong", detail="; ".join(problems))
    said = "its digest, parents and headline metrics agree; the rest cannot be compared, since the outbox is gone"
    return Check(subject=_SUBJECT, outcome="unchecked", detail=said)


def _absent(sent: SentTo, required: ExpectedRun, stage: str | None) -> Check:
    what = "the run" if stage is None else f"stage {stage}"
    if not required.tags:
        return Check(
            subject=_SUBJECT,
            outcome="unchecked",
            detail=sent.remark or f"nothing about {what} was sent to MLflow",
        )
    said = f"MLflow has no run of {what} any longer: it was deleted, or its vantage.run_id or vantage.stage was edited"
    return Check(subject=_SUBJECT, outcome="wrong", detail=said)


def _problems(
    evidence: Evidence, required: ExpectedRun, allowed: ExpectedRun, found: "MlflowRun"
) -> Iterator[str]:
    yield from tag_problems(required, allowed, found)
    yield from _named_problems("param", required.params, allowed.params, found.params)
    yield from _row_problems(required.rows, allowed.rows | allowed.optional_rows, found.rows)
    yield from dataset_problems(evidence, required, allowed, found)


def _named_problems(
    what: str, required: Mapping[str, str], allowed: Mapping[str, str], found: Mapping[str, str]
) -> Iterator[str]:
    for name, value in required.items():
        if found.get(name) != value:
            yield f"{what} {name} is {shown(found.get(name))}, and was sent as {shown(value)}"
    for name in sorted(found.keys() - allowed.keys()):
        yield f"{what} {name} is {shown(found[name])}, which nobody sent"


def _row_problems(required: Set[Row], allowed: Set[Row], found: Set[Row]) -> Iterator[str]:
    missing, added = sorted(required - found, key=_place), sorted(found - allowed, key=_place)
    instead = {(name, step): value for name, _, step, value in added}
    for name, _, step, value in missing[:_SHOWN]:
        other = instead.get((name, step))
        said = "is missing" if other is None else f"is {other:g}"
        yield f"metric {name} at step {step} {said}, and was sent as {value!r}"
    lost = {(name, step) for name, _, step, _ in missing}
    strange = [row for row in added if (row[0], row[2]) not in lost]
    for name, _, step, value in strange[:_SHOWN]:
        yield f"metric {name} at step {step} is {value:g}, which nobody sent"
    more = max(len(missing) - _SHOWN, 0) + max(len(strange) - _SHOWN, 0)
    if more:
        yield f"and {more} more rows"


def _latest_problems(found: "MlflowRun") -> Iterator[str]:
    """Yield problems of the newest value of each metric, which MLflow stores a second time and shows in its tables."""
    newest: dict[str, tuple[int, int]] = {}
    for name, time, step, _ in found.rows:
        newest[name] = max(newest.get(name, (step, time)), (step, time))
    values: dict[str, list[float]] = {}
    for name, time, step, value in found.rows:
        if newest[name] == (step, time):
            values.setdefault(name, []).append(value)
    for name, value in sorted(found.latest.items()):
        if name not in values:
            yield f"metric {name} is shown as {value:g}, and has no row"
        elif value not in values[name]:
            yield f"metric {name} is shown as {value!r}, and its newest row is {values[name][0]!r}"


def _pointers(
    evidence: Evidence, found: "MlflowRun", parents: "list[MlflowRun]", stage: str | None
) -> Iterator[str]:
    """Yield the tags that point to a wrong run or model of MLflow, with what the target really is."""
    tags = found.tags
    if stage is not None and parents and tags.get("mlflow.parentRunId") != parents[0].run_id:
        yield f"tag mlflow.parentRunId is {shown(tags.get('mlflow.parentRunId'))}, and not the run's own {parents[0].run_id}"
    for name in filter(is_pointer, sorted(tags)):
        role = name.removesuffix(".run")
        yield from _points_to(evidence, name, tags[name], {"vantage.digest": tags.get(role)})
    yield from read_model_problems(
        evidence, found, {name: tags[name] for name in filter(is_pointer, sorted(tags))}
    )
    same = {name: tags.get(name) for name in ("vantage.digest", "vantage.stage_key")}
    if "vantage.reused_from" in tags:
        yield from _points_to(evidence, "vantage.reused_from", tags["vantage.reused_from"], same)


def _digests_of(replay: Replay, stage: str | None) -> set[str]:
    """Return the digests of all artifacts that a run has recorded of a stage."""
    operations = (each.operation for each in replay.lines)
    return {
        each.artifact.digest
        for each in operations
        if isinstance(each, FinishStage | RecordReuse) and each.stage == stage and each.artifact is not None
    }


def _points_to(
    evidence: Evidence, name: str, mlflow_run_id: str, expected: Mapping[str, str | None]
) -> Iterator[str]:
    tags = evidence.ask(lambda server: server.tags_of(mlflow_run_id))
    if tags is None:
        yield f"tag {name} is {mlflow_run_id}, and MLflow has no such run"
    elif not isinstance(tags, Missing):
        yield from differing(f"tag {name} points to a run whose tag", tags, expected)


def _place(row: Row) -> tuple[str, int, int]:
    return row[0], row[2], row[1]


def _counts(run: "MlflowRun") -> str:
    return f"{len(run.tags)} tags, {len(run.params)} params, {len(run.rows):,} metric rows"
