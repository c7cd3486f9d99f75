"""Check aliases of registered models: who moved them where and why, and whether the gates had passed."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vantage.ledger.expected.answer_tags import ALIAS
from vantage.ledger.operations import Input, MoveAlias
from vantage.ledger.replay import Replay
from vantage.review.audit.evidence import Evidence, check_of
from vantage.review.audit.judging import differs, is_unchanged, judge_again
from vantage.review.audit.other_workspaces import mover_elsewhere
from vantage.review.audit.publications import (
    Recorded,
    gone,
    movements,
    publications,
    publications_of,
    required_steps,
    unsettled,
)
from vantage.runs.view import Broken, Missing
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.approvals import PUBLISH_PREFIX
from vantage.schemas.records.audit import Check
from vantage.schemas.records.verdicts import Verdict

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import MlflowVersion


def alias_check(evidence: Evidence, version: "MlflowVersion", alias: str) -> Check:
    """Check that a recorded publication moved the alias to this version, and that its gates had passed."""
    subject = f"alias {version.name}@{alias}"
    moves = movements(evidence, version.name, alias)
    digest = version.tags.get("vantage.digest")
    tag = version.registered.get(f"{ALIAS}{alias}")
    if mover := mover_elsewhere(evidence, tag):
        return Check(subject=subject, outcome="unchecked", detail=_moved_elsewhere(evidence, mover))
    if not moves or moves[-1].digest != digest:
        return _not_moved_here(evidence, version, alias, moves)
    last = moves[-1]
    why_not = list(_closed(evidence, last))
    missing = [each for each in why_not if isinstance(each, Missing)]
    missing += [Missing(each) for each in unsettled(evidence, version.name, alias)]
    wrong = [each for each in why_not if not isinstance(each, Missing)]
    by = f"moved by {last.by}"
    if wrong:
        return Check(subject=subject, outcome="wrong", detail=f"{by}, and {'; '.join(wrong)}")
    if tag is None and last.has_tag:
        missing.append(Missing("MLflow does not record any longer who moved it, and why"))
    elif tag is not None and (said := _otherwise_said(version, alias, last, tag)):
        return Check(subject=subject, outcome="wrong", detail=f"{by}; {said}")
    if missing:
        return Check(subject=subject, outcome="unchecked", detail=f"{by}; {'; '.join(missing)}")
    why = f", who gave as reason: {last.operation.reason}" if isinstance(last.operation, MoveAlias) else ""
    if tag is None:  # an earlier version of Vantage wrote none
        said = "only the outbox records it: MLflow has no tag that names who moved it"
        return Check(subject=subject, outcome="note", detail=f"{by}{_after(last)}; {said}")
    return Check(subject=subject, detail=f"{by}{why}{_after(last)}")


def _moved_elsewhere(evidence: Evidence, mover: str) -> str:
    """Return the message about an alias that a run of another workspace moved last."""
    return (
        f"run {mover} was the last to move it, by its tag in MLflow; that run is not in {evidence.workspace.address}: audit it in "
        "the workspace where it is"
    )


def _otherwise_said(version: "MlflowVersion", alias: str, last: Recorded, tag: str) -> str:
    """Return the difference between the tag of the registered model and the recorded movement; empty: there is none."""
    operation = last.operation
    expected = {
        "version": version.version,
        "time": operation.order,
        "run_id": last.run_id,
        "by": operation.by or "",
        "reason": operation.reason if isinstance(operation, MoveAlias) else "",
    }
    try:
        said = json.loads(tag)
        same = {name: said[name] for name in expected} == expected
    except (ValueError, TypeError, KeyError, RecursionError):
        same = False
    if not same:
        return f"tag {ALIAS}{alias} of the registered model says {tag[:120]}, and the outbox {json.dumps(expected)[:200]}"
    if isinstance(operation, MoveAlias) and operation.to_version != version.version:
        return f"the outbox has a movement to version {operation.to_version}"
    return ""


def moved_away(evidence: Evidence, run_id: str) -> Iterator[Check]:
    """Yield a check for each alias that the run was the last to move, and that points elsewhere now."""
    replay = evidence.replay(run_id)
    moved = list(replay.movements()) if isinstance(replay, Replay) else []
    for name, alias in dict.fromkeys((each.registered_model, each.alias) for each in moved if each.alias):
        assert alias is not None
        moves = movements(evidence, name, alias)
        if not moves or moves[-1].run_id != run_id:
            continue
        subject, digest = f"alias {name}@{alias}", moves[-1].digest
        present = evidence.ask(lambda server, name=name, alias=alias: server.version(name, None, alias))  # type: ignore[misc]
        if isinstance(present, Missing):
            yield check_of(subject, present)
        elif present is None:
            said = (
                f"this run was the last to move it, to {digest[:12]}, and MLflow has no such alias any longer"
            )
            yield Check(subject=subject, outcome="wrong", detail=said)
        elif mover := mover_elsewhere(evidence, present.registered.get(f"{ALIAS}{alias}")):
            yield Check(subject=subject, outcome="unchecked", detail=_moved_elsewhere(evidence, mover))
        elif present.tags.get("vantage.digest") != digest:
            said = f"this run was the last to move it, to {digest[:12]}, and it points to version {present.version}, by nobody's record"
            yield Check(subject=subject, outcome="wrong", detail=said)


def _after(recorded: Recorded) -> str:
    judged = [
        f"{step}: {verdict}"
        for step in required_steps(recorded)
        for verdict in recorded.entry.stages[step].verdicts
    ]
    return f" after {'; '.join(judged)}" if judged else ""


def _not_moved_here(evidence: Evidence, version: "MlflowVersion", alias: str, moves: list[Recorded]) -> Check:
    subject = f"alias {version.name}@{alias}"
    if version.tags.get("vantage.run_id", "") not in evidence.run_ids and not moves:
        said = f"the version's run is not in {evidence.workspace.address}, nor who moved it"
        return Check(subject=subject, outcome="unchecked", detail=said)
    if why := gone(evidence, version.name, version.tags.get("vantage.digest")):
        return Check(subject=subject, outcome="unchecked", detail=why)
    said = "no run moved it there"
    if moves:
        last = moves[-1]
        said += f"; run {last.run_id} was the last to move it, to {last.digest[:12]}"
    closed = _closed_gates(evidence, version)
    return Check(subject=subject, outcome="wrong", detail=f"{said}{closed}")


def _closed_gates(evidence: Evidence, version: "MlflowVersion") -> str:
    """Explain that closed gates held the alias back, if a run published the version without it for that reason."""
    digest = version.tags.get("vantage.digest")
    for recorded in publications(evidence, version.name):
        if recorded.digest == digest:
            reasons = [str(each) for each in _closed(evidence, recorded) if not isinstance(each, Missing)]
            if reasons:
                return f"; {'; '.join(reasons)}"
    return ""


def _closed(evidence: Evidence, recorded: Recorded) -> Iterator[str]:
    """Yield the reasons why the alias must not have moved: gates judged again from the artifacts, and a model that is
    not new.

    A reason of type ``Missing`` names a gate that could not be judged.
    """
    recipe, operation = recorded.recipe, recorded.operation
    if recipe is None:
        yield Missing("its recipe is of another version of Vantage, and its gates are not judged again")
        return
    named = publications_of(recipe, recorded)
    if not named:
        yield f"its recipe publishes no {operation.stage} as {operation.registered_model}@{operation.alias}"
    for step in required_steps(recorded):
        entry = recorded.entry.stages.get(step)
        if entry is None or entry.artifact is None:
            yield f"{step} had made nothing"
            continue
        if entry.outcome not in ("completed", "reused"):
            yield f"{step} was {entry.outcome.replace('_', ' ')}"
        judged = judge_again(
            evidence, recipe, step, entry.artifact.digest, entry.inputs, recorded=entry.verdicts
        )
        if isinstance(judged, Missing):
            yield Missing(f"the gates of {step} are not judged again: {judged}")
        elif isinstance(judged, Broken):
            yield f"the gates of {step} cannot be judged: {judged}"
        else:
            yield from (
                f"the gate of {step} is closed: {verdict}"
                for verdict in judged
                if not verdict.passed and not _is_approved(recorded, step, entry.artifact.digest, verdict)
            )
    # a person may move an alias that the recipe does not name; it needs the same approval
    meant = [each for each in named if each.alias == operation.alias] or named
    if meant and all(each.approve for each in meant) and not _alias_is_approved(recorded):
        yield "nobody has approved of it, as its recipe asks"
    for other in _must_differ(recipe, recorded):
        stage = recorded.entry.stages.get(operation.stage)
        if stage is not None and stage.artifact is not None:
            own = Input(stage=operation.stage, artifact=stage.artifact)
            if is_unchanged(evidence, own, other):
                yield f"{operation.stage} holds the weights of {other.stage}"


def _is_approved(recorded: Recorded, step: str, digest: str, verdict: Verdict) -> bool:
    """Return whether a person let exactly this closed gate of this artifact pass, before the alias moved."""
    return verdict.on_fail == "approve" and any(
        answer.approved
        and (answer.question.subject, answer.question.digest) == (step, digest)
        and any(not differs(asked, verdict) for asked in answer.question.verdicts)
        for answer in recorded.entry.approvals
    )


def _alias_is_approved(recorded: Recorded) -> bool:
    operation = recorded.operation
    subject = f"{PUBLISH_PREFIX}{operation.registered_model}@{operation.alias}"
    return any(
        answer.approved and (answer.question.subject, answer.question.digest) == (subject, recorded.digest)
        for answer in recorded.entry.approvals
    )


def _must_differ(recipe: ResolvedRecipe, recorded: Recorded) -> Iterator[Input]:
    """Yield the model that the stage began with, and the baselines that it was compared with."""
    entry, stage = recorded.entry, recorded.operation.stage
    own = entry.stages.get(stage)
    if own is not None and "init" in own.inputs:
        yield own.inputs["init"]
    for name, other in recipe.stages.items():
        compared = entry.stages.get(name)
        is_of_stage = isinstance(other, PolicyEvaluation) and other.candidate == stage
        if is_of_stage and compared is not None and "baseline" in compared.inputs:
            yield compared.inputs["baseline"]
