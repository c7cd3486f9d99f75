"""Check operations of an outbox that later operations about the same step have replaced, as when a run is resumed.

No other record has their contents, but they must be about the same artifact, recipe and inputs as the last operations.
"""

from collections.abc import Iterator, Mapping

from vantage.ledger.operations import OpenStage, RecordReuse, RecordVerdicts
from vantage.ledger.replay import OutboxLine, Replay
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.artifacts import Artifact
from vantage.storage.refs import Ref


def earlier_problems(
    replay: Replay, recipe: ResolvedRecipe, step: str, digest: str, ref: Ref | None
) -> Iterator[str]:
    """Yield what an operation about a step contradicts: the artifact's ref, the recipe, or what was recorded later.

    Args:
        recipe: the run's recipe.
        digest: digest of the artifact that the run recorded for the step.
    """
    entry = replay.entry.stages[step]
    lines = [each for each in replay.lines if getattr(each.operation, "stage", None) == step]
    found = list(_of_artifact(lines, step, digest, ref))
    for line in lines:
        operation = line.operation
        if not isinstance(operation, OpenStage | RecordReuse):
            continue
        for role, given in operation.inputs.items():
            last = entry.inputs.get(role)
            if last is not None and given.artifact.digest == last.artifact.digest and given != last:
                found.append(f"input {role} was recorded in two ways")
        if operation.kind != entry.kind:
            found.append(f"it was recorded as {operation.kind} and as {entry.kind}")
        # Params of implicit steps contain paths of the package, which may have been elsewhere at that time.
        if step in recipe.stages and _contradict(
            operation.params, recipe.stages[step].model_dump(mode="json")
        ):
            found.append("it was opened with other params than the recipe's")
        if ref is not None and operation.stage_key == ref.artifact.stage_key:
            source = ref.key_parts.get("inputs", {}).get("source")
            if operation.source_sha256 != source:
                found.append(f"its source was recorded as {str(operation.source_sha256)[:12]}")
    found += _of_verdicts(lines)
    yield from dict.fromkeys(found)


def _of_artifact(lines: list[OutboxLine], step: str, digest: str, ref: Ref | None) -> Iterator[str]:
    for line in lines:
        artifact: Artifact | None = getattr(line.operation, "artifact", None)
        if artifact is None or artifact.digest != digest:
            continue
        said = line.operation.operation.replace("_", " ")
        if artifact.stage_key != (key := line.entry.stages[step].stage_key):
            yield f"its {said} has the stage key {artifact.stage_key[:12]}, and it was opened with {key[:12]}"
        elif ref is not None and artifact.stage_key == ref.artifact.stage_key and artifact != ref.artifact:
            yield f"its {said} describes the artifact otherwise than the ref"


def _of_verdicts(lines: list[OutboxLine]) -> Iterator[str]:
    """Yield verdicts of one artifact that differ; the same gates must give the same verdicts."""
    digests = {
        artifact.digest
        for line in lines
        if (artifact := getattr(line.operation, "artifact", None)) is not None
    }
    judged = {
        tuple((verdict.metric, verdict.passed) for verdict in line.operation.verdicts)
        for line in lines
        if isinstance(line.operation, RecordVerdicts)
    }
    if len(digests) == 1 and len(judged) > 1:
        yield "its gates were judged in two ways"


def _contradict(one: object, other: object) -> bool:
    """Return whether two values differ in a field that both have; other versions may record more or fewer fields."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return any(_contradict(value, other[name]) for name, value in one.items() if name in other)
    return one != other
