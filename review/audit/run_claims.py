"""Compare what a run's record and its outbox claim about an artifact with each other, the ref and the artifact's own files."""

from collections.abc import Iterator, Mapping

from vantage.attempts.jobs import BASE_SUFFIX, work_of
from vantage.ledger.operations import Input
from vantage.ledger.replay import Replay
from vantage.review.audit.earlier_lines import earlier_problems
from vantage.review.audit.evidence import Evidence, check_of
from vantage.review.audit.judging import gate_checks, is_close, judge_again
from vantage.review.audit.shorter_stages import key_problems
from vantage.runs.gates import standing
from vantage.runs.loosened import known_loosened
from vantage.runs.record import REMOVED, SUCCEEDED, RunRecord, StageRecord
from vantage.runs.summary import printed_intervals
from vantage.runs.view import Broken, Missing
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.extending import PREVIOUS_ROLES
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.work import SOURCE, copied_stage
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.audit import Check
from vantage.schemas.records.stage_key import differences as key_differences
from vantage.schemas.records.stage_key import stage_key as hash_key_parts
from vantage.storage.measured_file import differences
from vantage.storage.refs import Ref

ENDED = frozenset({"completed", "reused", "gate_closed", "waiting_approval"})
"""Status of a step that has an artifact."""


def steps_of(record: RunRecord, stage_key: str, digest: str) -> list[str]:
    """Return the run's steps that have this stage key; first those with this artifact."""
    steps = [step for step, stage in record.stages.items() if stage.stage_key == stage_key]
    return sorted(steps, key=lambda step: record.stages[step].digest != digest)


def record_checks(
    evidence: Evidence, run_id: str, step: str, digest: str, ref: Ref | None
) -> Iterator[Check]:
    """Check ``run.json`` against the ref, the artifact's own metrics, and the recipe in it; then each of its gates."""
    record = evidence.record(run_id)
    if isinstance(record, Missing | Broken):
        yield check_of("run record", record)
        return
    stage = record.stages.get(step)
    if stage is None or stage.status not in ENDED:
        yield _unfinished(evidence, run_id, step, digest, ref, stage)
        return
    problems = [*_against_ref(stage, digest, ref), *_against_files(evidence, stage, digest)]
    problems += _against_recipe(record.recipe, step, stage, ref)
    yield Check(subject="run record", outcome="wrong" if problems else "ok", detail="; ".join(problems))
    inputs = _inputs(evidence, record, step)
    judged = judge_again(evidence, record.recipe, step, digest, inputs, recorded=stage.verdicts)
    yield from gate_checks(stage.verdicts, judged, by="run.json")
    yield from _loosened_checks(evidence, record, step)
    if ref is not None and (said := _wrong_status(record, step, stage, ref.artifact)):
        yield Check(subject="gates", outcome="wrong", detail=said)


def _loosened_checks(evidence: Evidence, record: RunRecord, step: str) -> Iterator[Check]:
    """Yield each loosened gate as a note; one that the earlier run's record does not confirm is wrong."""
    stage, earlier = record.stages[step], evidence.earlier_verdicts(record)
    shown = () if stage.digest is None else earlier.loosened(stage.digest, stage.verdicts)
    for _, gate in known_loosened(record, [step], earlier):
        before = evidence.record(gate.run_id)
        is_wrong = gate not in shown and isinstance(before, RunRecord)
        detail = f"loosened: {gate}" + (f", which run {gate.run_id} does not confirm" if is_wrong else "")
        yield Check(subject="gates", outcome="wrong" if is_wrong else "note", detail=detail)


def _wrong_status(record: RunRecord, step: str, stage: StageRecord, artifact: Artifact) -> str:
    """Return the status that a step should have by its verdicts and by people's answers; empty: it has that status."""
    stands = standing(step, artifact, stage.verdicts, record.approvals)
    if stage.status == stands or (stands == "open" and stage.status in SUCCEEDED):
        return ""
    if stage.status == "waiting_approval" == standing(step, artifact, stage.verdicts, ()):
        return ""  # a person answered, and the run was not resumed since
    must_be = "completed" if stands == "open" else stands.replace("_", " ")
    return f"run.json says {stage.status.replace('_', ' ')}; by its verdicts and the answers to them it is {must_be}"


def outbox_check(evidence: Evidence, run_id: str, step: str, digest: str, ref: Ref | None) -> Check:
    """Return the check of the run's operations about a step, against the ref and ``run.json``."""
    replay = evidence.replay(run_id)
    if isinstance(replay, Missing | Broken):
        return check_of("outbox", replay)
    entry, record = replay.entry.stages.get(step), evidence.record(run_id)
    if entry is None or entry.artifact is None:
        known = record.stages.get(step) if isinstance(record, RunRecord) else None
        ended = known is not None and known.status in ENDED
        said = f"the outbox of run {run_id} has no artifact of {step}" + (
            ", and run.json has one" if ended else ""
        )
        return Check(subject="outbox", outcome="wrong" if ended else "unchecked", detail=said)
    problems: list[str] = []
    if entry.artifact.digest != digest:
        problems.append(f"the outbox has {entry.artifact.digest[:12]}")
    elif ref is not None:
        problems += _artifact_differences(entry.artifact, ref.artifact)
    problems += _input_problems(entry.inputs, entry.artifact)
    if ref is not None and ref.run_id == run_id:
        problems += _claims_of_making(replay, step, ref)
    if isinstance(record, RunRecord) and (stage := record.stages.get(step)) is not None:
        problems += _outbox_against_record(replay, record, step, stage)
        problems = problems or list(earlier_problems(replay, record.recipe, step, digest, ref))
    return Check(
        subject="outbox",
        outcome="wrong" if problems else "ok",
        detail="; ".join(problems) or f"{len(replay.lines)} operations",
    )


def edge_problems(
    evidence: Evidence, run_id: str, step: str, role: str, digest: str, parent: Ref | None
) -> Iterator[str]:
    """Yield the claims of the run that made an artifact about one of its parents, where they differ from the parent's ref."""
    record, replay = evidence.record(run_id), evidence.replay(run_id)
    if isinstance(record, RunRecord) and step in record.stages and record.stages[step].status in ENDED:
        read = evidence.reads(record, step).get(role)
        stage = None if read is None else record.stages.get(read)
        if read is None and role in PREVIOUS_ROLES:
            if not record.stages[step].shorter:
                yield f"run.json does not record that {step} goes on from a shorter stage"
        elif role == SOURCE:
            yield from _source_problems(record, step, digest)
        elif read is None and not role.endswith(BASE_SUFFIX):
            yield f"the recipe in run.json gives {step} no {role}"
        if stage is not None and stage.digest != digest:
            yield f"by run.json {read} made {str(stage.digest)[:12]}"
        if stage is not None and stage.status in ("gate_closed", "waiting_approval"):
            yield f"{read} is {stage.status.replace('_', ' ')}, so nothing could be made of it"
    if isinstance(replay, Replay) and step in replay.entry.stages:
        given = replay.entry.stages[step].inputs.get(role)
        if given is None and not role.endswith(BASE_SUFFIX) and role not in (*PREVIOUS_ROLES, SOURCE):
            yield f"the outbox names no {role}"
        elif given is not None and given.artifact.digest != digest:
            yield f"the outbox has {given.artifact.digest[:12]}"
        elif given is not None and parent is not None:
            for problem in _artifact_differences(given.artifact, parent.artifact):
                yield f"as {step} read it, {problem}"


def _source_problems(record: RunRecord, step: str, digest: str) -> Iterator[str]:
    """Yield the difference of a copied model from the one that the run has pinned."""
    copied = copied_stage(work_of(record.recipe, step))
    if copied is None:
        yield f"the recipe in run.json gives {step} no stage of another run"
    elif copied.digest != digest:
        yield f"by run.json {copied.named} is {str(copied.digest)[:12]}"


def _unfinished(
    evidence: Evidence, run_id: str, step: str, digest: str, ref: Ref | None, stage: StageRecord | None
) -> Check:
    """Check whether another run has recorded the artifact, if the run that made it ended before it could record it."""
    if stage is None or ref is None:
        return Check(subject="run record", outcome="wrong", detail=f"run {run_id} has no step {step}")
    for other in evidence.run_ids:
        record = evidence.record(other)
        stages = record.stages.values() if isinstance(record, RunRecord) else ()
        if any(
            each.digest == digest and each.stage_key == ref.artifact.stage_key and each.status in ENDED
            for each in stages
        ):
            said = (
                f"run {run_id} ended before it recorded the artifact; run {other} has found and recorded it"
            )
            return Check(subject="run record", detail=said)
    said = f"{step} of run {run_id} is {stage.status}, and no run has recorded the artifact"
    return Check(subject="run record", outcome="unchecked", detail=said)


def _against_ref(stage: StageRecord, digest: str, ref: Ref | None) -> Iterator[str]:
    if stage.digest != digest:
        yield f"its digest is {str(stage.digest)[:12]}"
    if ref is None:
        return
    if stage.stage_key != ref.artifact.stage_key:
        yield f"its stage key is {str(stage.stage_key)[:12]}"
    if stage.key_parts and stage.key_parts != ref.key_parts:
        changed = key_differences(ref.key_parts, stage.key_parts)
        yield f"key_parts differ from the ref's: {'; '.join(changed)}"
    if stage.firings != ref.artifact.firings:
        yield f"it has {len(stage.firings)} firings of guards, and the ref has {len(ref.artifact.firings)} or others"
    if stage.provenance != ref.provenance:
        yield _provenance_said("run.json has", stage.provenance, ref.provenance)


def _against_files(evidence: Evidence, stage: StageRecord, digest: str) -> Iterator[str]:
    sealed = evidence.sealed(digest)
    if not isinstance(sealed, Missing | Broken):
        measured = sealed.measured
        yield from differences("metrics", stage.metrics, measured.metrics)
        if stage.intervals:  # an earlier version recorded none
            found = printed_intervals(measured.metrics, measured.uncertainty, stage.verdicts)
            if not is_close(stage.intervals, found):
                yield from differences("intervals", stage.intervals, found)


def _against_recipe(recipe: ResolvedRecipe, step: str, stage: StageRecord, ref: Ref | None) -> Iterator[str]:
    """Yield a difference of the stage key from the key that is made again from the recipe in ``run.json`` and the inputs'
    digests."""
    parts = ref.key_parts if ref is not None else stage.key_parts
    kind = KINDS.get(str(parts.get("kind")))
    if kind is None or kind.revision != parts.get("revision") or stage.stage_key is None:
        return  # made by a version with other rules for keys
    if hash_key_parts(stage.key_parts or parts) != stage.stage_key:
        yield "its key_parts do not hash to its stage key"
    if ref is None:
        return  # only a ref names every input
    yield from key_problems(recipe, step, ref)


def _inputs(evidence: Evidence, record: RunRecord, step: str) -> dict[str, Input]:
    """Return role → step and artifact that a step read, by the run's own record."""
    found = {}
    for role, read in evidence.reads(record, step).items():
        stage = record.stages.get(read)
        ref = evidence.ref(stage.stage_key) if stage is not None and stage.stage_key else None
        if isinstance(ref, Ref):
            found[role] = Input(stage=read, artifact=ref.artifact)
    return found


def _artifact_differences(claimed: Artifact, artifact: Artifact) -> Iterator[str]:
    """Yield fields in which two descriptions of one artifact differ."""
    ours, theirs = artifact.model_dump(mode="json"), claimed.model_dump(mode="json")
    for field in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(field), theirs.get(field)
        if one == other:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
            yield ", ".join(f"{field}.{name} was recorded as {other.get(name)}" for name in names)
        else:
            yield f"{field} was recorded as {other if other is None else str(other)[:12]}"


def _claims_of_making(replay: Replay, step: str, ref: Ref) -> Iterator[str]:
    """Yield the run's operations that contradict the ref's claim that the run made the artifact."""
    attempt = replay.entry.stages[step].attempt
    if attempt is None:
        yield "by the ref this run made the artifact, and by the outbox the run found it"
    elif attempt != ref.attempt:
        yield f"by the ref attempt {ref.attempt} made the artifact, and by the outbox attempt {attempt}"
    finished = replay.finished(step)
    if finished is None or finished.artifact is None or finished.artifact.digest != ref.artifact.digest:
        return
    if dict(ref.provenance) != finished.provenance:
        yield _provenance_said("the outbox has", finished.provenance, ref.provenance)


def _input_problems(inputs: Mapping[str, Input], artifact: Artifact) -> Iterator[str]:
    for role, given in inputs.items():
        if artifact.parents.get(role) != given.artifact.digest:
            yield f"input {role} was recorded as {given.artifact.digest[:12]}, and the artifact's parent as another"


def _outbox_against_record(replay: Replay, record: RunRecord, step: str, stage: StageRecord) -> Iterator[str]:
    entry = replay.entry.stages[step]
    if entry.stage_key != stage.stage_key:
        yield f"its stage key is {entry.stage_key[:12]}, that in run.json {str(stage.stage_key)[:12]}"
    if stage.status in ENDED and record.status != REMOVED:
        recorded = replay.recorded_verdicts(step)
        claimed = () if recorded is None else recorded.verdicts
        if tuple(claimed) != tuple(stage.verdicts):
            shown = "; ".join(map(str, claimed)) or "none"
            yield f"the outbox has other verdicts than run.json: {shown}"
        if stage.loosened != (() if recorded is None else recorded.loosened):
            yield "its outbox has other loosened gates than run.json"
    if record.recipe.model_dump(mode="json") != replay.opened.recipe:
        return  # the check of the run reports this
    params = next(
        (
            each.operation.params
            for each in reversed(replay.lines)
            if each.operation.operation in ("open_stage", "record_reuse")
            and getattr(each.operation, "stage", None) == step
        ),
        None,
    )
    expected = work_of(record.recipe, step).model_dump(mode="json")
    if params is not None and params != expected:
        changed = "; ".join(key_differences(expected, params))
        yield f"the outbox has other params than the recipe: {changed}"


def _provenance_said(who: str, one: Mapping[str, object], other: Mapping[str, object]) -> str:
    names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    said = ", ".join(f"{name} {str(one.get(name, 'absent'))[:40]}" for name in names)
    return f"provenance differs from the ref's: {who} {said}"
