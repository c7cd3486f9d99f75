"""Registered models: a version's tags, MLflow's own copy of the weights, and who moved an alias."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from vantage.ledger.entries import RunEntry
from vantage.ledger.expected.changes import VersionChange, changes
from vantage.ledger.operations import Input, MoveAlias, Publish
from vantage.ledger.replay import Replay, Told
from vantage.review.audit.evidence import Evidence, check_of
from vantage.review.audit.judging import differs, is_unchanged, judge_again
from vantage.review.audit.sent import is_taken
from vantage.review.audit.served import copy_check
from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.view import Broken, Missing
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.recipe import Publication, ResolvedRecipe
from vantage.schemas.records.approvals import PUBLISH_PREFIX
from vantage.schemas.records.audit import Check
from vantage.schemas.records.verdicts import Verdict

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_runs import MlflowVersion

_FACTS = ("vantage.gate.", "vantage.measured.")
_OWN_TAGS = frozenset({"vantage.digest", "vantage.stage_key", "vantage.stage", "vantage.run_id"})


@dataclass(frozen=True)
class Recorded:
    """A publication, or a movement of an alias, that a run told of and that MLflow was sent."""

    run_id: str
    operation: Publish | MoveAlias
    entry: RunEntry
    """The run as it was then."""
    recipe: ResolvedRecipe | None
    """None: of another version of Vantage."""
    facts: Mapping[str, str] | None
    """Gates and measurements, as the tags of the version must show them; None: it is no publication."""

    @property
    def digest(self) -> str:
        """Content digest of the artifact that was published, or that the alias moved to."""
        told = self.operation
        return told.digest if isinstance(told, MoveAlias) else told.artifact.digest

    @property
    def by(self) -> str:
        """Who moved the alias."""
        person = self.operation.by
        return f"run {self.run_id}" if person is None else f"{person} (ledger of run {self.run_id})"


def publications(evidence: Evidence, name: str) -> list[Recorded]:
    """Return every publication under a name by the runs of the workspace, in the order in which they happened."""
    return [each for each in _recorded(evidence, name) if isinstance(each.operation, Publish)]


def is_published(evidence: Evidence, run_id: str, name: str, digest: str) -> bool:
    """Return whether MLflow has taken a publication by this run."""
    return any((each.run_id, each.digest) == (run_id, digest) for each in publications(evidence, name))


def movements(evidence: Evidence, name: str, alias: str) -> list[Recorded]:
    """Return every movement of an alias: by the runs at their end, by ``vantage publish`` and by ``vantage rollback``."""
    return [each for each in _recorded(evidence, name) if each.operation.alias == alias]


def _recorded(evidence: Evidence, name: str) -> list[Recorded]:
    return evidence.once(("recorded", name), lambda: _read_recorded(evidence, name))


def _read_recorded(evidence: Evidence, name: str) -> list[Recorded]:
    found = []
    for run_id in evidence.run_ids:
        replay = evidence.replay(run_id)
        for told in replay.told if isinstance(replay, Replay) else ():
            operation = told.operation
            if isinstance(operation, Publish | MoveAlias) and operation.registered_model == name:
                assert isinstance(replay, Replay)
                if is_taken(evidence, run_id, replay, told):
                    facts = _facts(told)
                    found.append(Recorded(run_id, operation, told.entry, _recipe(replay), facts))
    return sorted(found, key=lambda each: each.operation.time)


def _facts(told: Told) -> Mapping[str, str] | None:
    versions = (each for each in changes(told.entry, told.operation) if isinstance(each, VersionChange))
    return next((each.facts for each in versions), None)


def versions_of(evidence: Evidence, digest: str) -> "list[MlflowVersion] | Missing":
    """Return every version that names an artifact, which MLflow is asked about once."""
    return evidence.once(
        ("versions of", digest), lambda: evidence.ask(lambda server: server.versions_of(digest))
    )


def version_checks(evidence: Evidence, version: "MlflowVersion") -> Iterator[Check]:
    """Tags of a version that says it holds an artifact, its files, and every alias that points to it."""
    told = publications(evidence, version.name)
    subject = f"version {version.name}/{version.version}"
    problems = list(_tag_problems(evidence, version, told))
    ours = [each for each in told if each.digest == version.tags["vantage.digest"]]
    if problems:
        yield Check(subject=subject, outcome="wrong", detail="; ".join(problems))
    elif not ours:
        yield _unknown_publication(evidence, version, subject)
    else:
        yield Check(subject=subject, detail=f"published by run {ours[-1].run_id}")
    yield copy_check(evidence, version)
    for alias in version.aliases:
        yield alias_check(evidence, version, alias)


def alias_check(evidence: Evidence, version: "MlflowVersion", alias: str) -> Check:
    """Return a recorded publication moved the alias to this version, and its gates had passed."""
    subject = f"alias {version.name}@{alias}"
    moves = movements(evidence, version.name, alias)
    digest = version.tags.get("vantage.digest")
    if not moves or moves[-1].digest != digest:
        return _not_moved_here(evidence, version, alias, moves)
    why_not = list(_closed(evidence, moves[-1]))
    missing = [each for each in why_not if isinstance(each, Missing)]
    wrong = [each for each in why_not if not isinstance(each, Missing)]
    by = f"moved by {moves[-1].by}"
    if wrong:
        return Check(subject=subject, outcome="wrong", detail=f"{by}, and {'; '.join(wrong)}")
    if said := _otherwise_said(version, alias, moves[-1]):
        return Check(subject=subject, outcome="wrong", detail=f"{by}; {said}")
    if missing:
        return Check(subject=subject, outcome="unchecked", detail=f"{by}; {'; '.join(missing)}")
    return Check(subject=subject, detail=f"{by}{_after(moves[-1])}")


def _otherwise_said(version: "MlflowVersion", alias: str, last: Recorded) -> str:
    """Return what the tag of the registered model says of the movement, if that is another; empty: the same, or nothing."""
    told = version.moved.get(alias)
    if told is None:
        return ""  # of an earlier version of Vantage
    try:
        said = json.loads(told)
        same = (str(said["version"]), said["time"], said["run_id"]) == (
            version.version,
            last.operation.time,
            last.run_id,
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        same = False
    return "" if same else f"tag vantage.alias.{alias} of the registered model says {told[:120]}"


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
        elif present.tags.get("vantage.digest") != digest:
            said = f"this run was the last to move it, to {digest[:12]}, and it points to version {present.version}, by nobody's record"
            yield Check(subject=subject, outcome="wrong", detail=said)


def required_steps(recorded: Recorded) -> list[str]:
    """Return the steps whose gates hold the alias back: the published stage, and the one it waits for."""
    recipe, stage = recorded.recipe, recorded.operation.stage
    after = [each.after for each in _publications_of(recipe, recorded) if each.after]
    return list(dict.fromkeys([stage, *after]))


def _publications_of(recipe: ResolvedRecipe | None, recorded: Recorded) -> list[Publication]:
    """Return what of the recipe it was. A run moves its recipe's aliases alone, a person any alias of what is published."""
    told = recorded.operation
    return [
        each
        for each in (recipe.publish if recipe is not None else ())
        if (each.stage, each.registered_model) == (told.stage, told.registered_model)
        and (told.by is not None or told.alias in (each.alias, None))
    ]


def _recipe(replay: Replay) -> ResolvedRecipe | None:
    try:
        return ResolvedRecipe.model_validate(replay.opened.recipe)
    except ValidationError:
        return None


def _after(recorded: Recorded) -> str:
    judged = [
        f"{step}: {verdict}"
        for step in required_steps(recorded)
        for verdict in recorded.entry.stages[step].verdicts
    ]
    return f" after {'; '.join(judged)}" if judged else ""


def _tag_problems(evidence: Evidence, version: "MlflowVersion", told: list[Recorded]) -> Iterator[str]:
    tags, digest = version.tags, version.tags["vantage.digest"]
    refs = evidence.refs_of.get(digest, [])
    keys = {ref.artifact.stage_key for ref in refs}
    if keys and tags.get("vantage.stage_key") not in keys:
        yield f"tag vantage.stage_key is {str(tags.get('vantage.stage_key'))[:12]}, the artifact's is {min(keys)[:12]}"
    for name in ("vantage.digest", "vantage.stage_key", "vantage.stage", "vantage.run_id"):
        if version.model_tags and version.model_tags.get(name) != tags.get(name):
            yield f"tag {name} is {tags.get(name)}, that of its logged model is {version.model_tags.get(name)}"
    made = evidence.ask(lambda server: server.tags_of(version.run_id)) if version.run_id else None
    if made is None:
        yield f"MLflow has no run {version.run_id or 'of its own'}, which it names as the one that made it"
    elif not isinstance(made, Missing) and made.get("vantage.digest") != digest:
        yield f"the run of MLflow that it names made {str(made.get('vantage.digest'))[:12]}"
    doubles = versions_of(evidence, digest)
    numbers = (
        []
        if isinstance(doubles, Missing)
        else [int(each.version) for each in doubles if each.name == version.name]
    )
    if numbers and int(version.version) != min(numbers):
        yield f"version {min(numbers)} holds the artifact already, and no run makes a second one"
    facts = [each.facts for each in told if each.digest == digest and each.facts is not None]
    if not facts:
        return
    for name, value in tags.items():
        if name.startswith(_FACTS) and value not in {each.get(name) for each in facts}:
            yield f"tag {name} is “{value}”, which no run sent"
    for name, value in facts[-1].items():
        if name not in tags:
            yield f"tag {name} is absent, and was sent as “{value}”"
    for name in sorted(tags):
        if name.startswith("vantage.") and not name.startswith(_FACTS) and name not in _OWN_TAGS:
            yield f"tag {name} is “{tags[name]}”, which no run sent"


def _unknown_publication(evidence: Evidence, version: "MlflowVersion", subject: str) -> Check:
    run_id = version.tags.get("vantage.run_id", "")
    if run_id not in evidence.run_ids:
        said = f"it says that run {run_id} made it, which is not in {evidence.workspace.address}"
        return Check(subject=subject, outcome="unchecked", detail=said)
    if gone := _gone(evidence, version.name, version.tags.get("vantage.digest")):
        return Check(subject=subject, outcome="unchecked", detail=gone)
    return Check(subject=subject, outcome="wrong", detail="no run published it")


def _gone(evidence: Evidence, name: str, digest: str | None) -> str:
    """Return which removed run may have published the artifact; empty: none."""
    for run_id in evidence.run_ids:
        record = evidence.record(run_id)
        removed = isinstance(record, RunRecord) and record.status == REMOVED
        copy = record.copies.get(name) if isinstance(record, RunRecord) else None
        is_same = copy is not None and copy.digest == digest
        if removed and is_same and isinstance(evidence.replay(run_id), Missing):
            return f"run {run_id} published it and was removed since, with its outbox"
    return ""


def _not_moved_here(evidence: Evidence, version: "MlflowVersion", alias: str, moves: list[Recorded]) -> Check:
    subject = f"alias {version.name}@{alias}"
    if version.tags.get("vantage.run_id", "") not in evidence.run_ids and not moves:
        said = f"the version's run is not in {evidence.workspace.address}, nor who moved it"
        return Check(subject=subject, outcome="unchecked", detail=said)
    if gone := _gone(evidence, version.name, version.tags.get("vantage.digest")):
        return Check(subject=subject, outcome="unchecked", detail=gone)
    said = "no run moved it there"
    if moves:
        last = moves[-1]
        said += f"; run {last.run_id} was the last to move it, to {last.digest[:12]}"
    closed = _closed_gates(evidence, version)
    return Check(subject=subject, outcome="wrong", detail=f"{said}{closed}")


def _closed_gates(evidence: Evidence, version: "MlflowVersion") -> str:
    """Explain that the version's own gates were closed, where a run published it without the alias for that reason."""
    digest = version.tags.get("vantage.digest")
    for recorded in publications(evidence, version.name):
        if recorded.digest == digest:
            reasons = [str(each) for each in _closed(evidence, recorded) if not isinstance(each, Missing)]
            if reasons:
                return f"; {'; '.join(reasons)}"
    return ""


def _closed(evidence: Evidence, recorded: Recorded) -> Iterator[str]:
    """Yield why the alias must not have moved: gates judged again from the artifacts, and a model that is not new.

    ``Missing`` among them: what could not be judged.
    """
    recipe, told = recorded.recipe, recorded.operation
    if recipe is None:
        yield Missing("its recipe is of another version of Vantage, and its gates are not judged again")
        return
    named = _publications_of(recipe, recorded)
    if not named:
        yield f"its recipe publishes no {told.stage} as {told.registered_model}@{told.alias}"
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
    # a person may move another alias than the recipe's, which waits for the same answer
    meant = [each for each in named if each.alias == told.alias] or named
    if meant and all(each.approve for each in meant) and not _alias_is_approved(recorded):
        yield "nobody has approved of it, as its recipe asks"
    for other in _must_differ(recipe, recorded):
        stage = recorded.entry.stages.get(told.stage)
        if stage is not None and stage.artifact is not None:
            own = Input(stage=told.stage, artifact=stage.artifact)
            if is_unchanged(evidence, own, other):
                yield f"{told.stage} holds the weights of {other.stage}"


def _is_approved(recorded: Recorded, step: str, digest: str, verdict: Verdict) -> bool:
    """Return whether a person let exactly this closed gate of this artifact pass, before the alias moved."""
    return verdict.on_fail == "approve" and any(
        answer.approved
        and (answer.question.subject, answer.question.digest) == (step, digest)
        and any(not differs(asked, verdict) for asked in answer.question.verdicts)
        for answer in recorded.entry.approvals
    )


def _alias_is_approved(recorded: Recorded) -> bool:
    told = recorded.operation
    subject = f"{PUBLISH_PREFIX}{told.registered_model}@{told.alias}"
    return any(
        answer.approved and (answer.question.subject, answer.question.digest) == (subject, recorded.digest)
        for answer in recorded.entry.approvals
    )


def _must_differ(recipe: ResolvedRecipe, recorded: Recorded) -> Iterator[Input]:
    """Yield what the stage began with, and the baselines that it was compared with."""
    entry, stage = recorded.entry, recorded.operation.stage
    own = entry.stages.get(stage)
    if own is not None and "init" in own.inputs:
        yield own.inputs["init"]
    for name, other in recipe.stages.items():
        compared = entry.stages.get(name)
        is_of_stage = isinstance(other, PolicyEvaluation) and other.candidate == stage
        if is_of_stage and compared is not None and "baseline" in compared.inputs:
            yield compared.inputs["baseline"]
