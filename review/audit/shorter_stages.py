"""Check the shorter stages that longer stages went on from, and the training states that the shorter ones have left."""

from collections.abc import Iterator

from vantage.attempts.jobs import BASE_SUFFIX, facts_in_key, step_of
from vantage.ledger.operations import FinishStage
from vantage.ledger.replay import Replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.judging import gate_checks, judge_again
from vantage.runs.extending import extended_step
from vantage.runs.record import RunRecord
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.audit import Check
from vantage.schemas.records.extensions import STATE_KIND, Shorter, state_key_parts
from vantage.schemas.records.stage_key import differences, stage_key
from vantage.storage.refs import Ref


def shorter_in(record: object, stage_key: str | None, digest: str) -> tuple[str, Shorter] | None:
    """Return the step of a run that made an artifact and went on from it, with the record of the shorter stage; None:
    no step did."""
    if not isinstance(record, RunRecord):
        return None
    found = (
        (step, each)
        for step, stage in record.stages.items()
        for each in stage.shorter
        if (each.stage_key, each.digest) == (stage_key, digest) and each.run_id == record.run_id
    )
    return next(found, None)


def gone_on_from(record: object, stage_key: str | None) -> Shorter | None:
    """Return the shorter stage that a run's stage of this key goes on from; None: it began from nothing, or no stage has the key.

    Compares keys and not digests, since a longer stage may have kept the same weights as a shorter one.
    """
    for stage in record.stages.values() if isinstance(record, RunRecord) else ():
        keys = [*(each.stage_key for each in stage.shorter), stage.stage_key]
        if stage_key in keys[1:]:
            return stage.shorter[keys.index(stage_key) - 1]
    return None


def shorter_checks(
    evidence: Evidence, record: RunRecord, step: str, shorter: Shorter, ref: Ref | None
) -> Iterator[Check]:
    """Check what a run that went on from an artifact of its own recorded of that, against the ref, the gates and the outbox."""
    problems = [] if ref is None else [*_against_recipe(record.recipe, step, shorter, ref)]
    yield Check(subject="run record", outcome="wrong" if problems else "ok", detail="; ".join(problems))
    if shorter.verdicts:
        judged = judge_again(evidence, record.recipe, step, shorter.digest, {}, recorded=shorter.verdicts)
        yield from gate_checks(shorter.verdicts, judged, by="run.json")
    replay = evidence.replay(record.run_id)
    was_sent = isinstance(replay, Replay) and any(
        isinstance(line.operation, FinishStage)
        and line.operation.stage == step
        and line.operation.artifact is not None
        and line.operation.artifact.digest == shorter.digest
        for line in replay.lines
    )
    yield Check(
        subject="outbox",
        outcome="ok" if was_sent else "unchecked",
        detail="" if was_sent else f"the outbox of run {record.run_id} does not name it",
    )


def _against_recipe(recipe: ResolvedRecipe, step: str, shorter: Shorter, ref: Ref) -> Iterator[str]:
    yield from key_problems(recipe, step, ref)
    unit = ref.key_parts.get("configuration", {})
    if shorter.length not in (unit.get("iterations"), unit.get("epochs")):
        yield f"its length is {shorter.length:g}, and its stage key was made with another"


def key_problems(recipe: ResolvedRecipe, step: str, ref: Ref) -> Iterator[str]:
    """Yield the difference between a stage key and the one that the recipe makes, perhaps extended by a gate."""
    parts = ref.key_parts
    inputs = {role: each for role, each in ref.artifact.parents.items() if not role.endswith(BASE_SUFFIX)}
    source = parts.get("inputs", {}).get("source")
    try:
        again = extended_step(step_of(recipe, step), parts).key_parts(
            inputs, source={} if source is None else {"source": source}, facts=facts_in_key(parts)
        )
    except (ValueError, KeyError, OSError) as error:
        yield f"its recipe makes no such step ({error})"
        return
    if stage_key(again) != ref.artifact.stage_key:
        yield f"its recipe makes another stage key: {'; '.join(differences(parts, again))}"


def is_state(ref: Ref | None) -> bool:
    """Return whether a ref names a training state."""
    return ref is not None and ref.artifact.kind == STATE_KIND


def state_problems(ref: Ref) -> Iterator[str]:
    """Yield problems of the key parts of a training state. They must name the stage that has left it."""
    of = ref.key_parts.get("of")
    if ref.key_parts != state_key_parts(str(of)):
        yield "key_parts are not those of a training state"
    if ref.artifact.parents:
        yield "a training state has no parents, and the ref names some"


def edge_problem(state: Ref | None, previous_key: str | None) -> str | None:
    """Return why a training state is not the one that the shorter stage has left; None: it is."""
    of = None if state is None else state.key_parts.get("of")
    if of is None or of == previous_key:
        return None
    return f"it is the training state of stage key {str(of)[:12]}, and not of what the stage goes on from"
