"""Compare a run's record with its artifacts: metrics, and verdicts recomputed from them.

``run.json`` is a plain file. The metrics are in each artifact, under its manifest's sha256; a verdict is a function of
the metrics and the gate.
"""

from collections.abc import Collection, Iterator

from vantage.attempts.jobs import gates_of
from vantage.runs.record import REMOVED, RunRecord, StageRecord
from vantage.runs.summary import printed_intervals
from vantage.runs.view import Replaced, RunView
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.verdicts import Verdict, check_gate
from vantage.schemas.steps import dependencies
from vantage.storage.measured_file import Sealed, differences

_CHECKED = frozenset({"completed", "reused", "gate_closed", "waiting_approval"})
_COMPARED = (
    *("passed", "metric", "measured", "relation", "threshold", "n", "interval", "method", "counts"),
    "confidence",
)


def contradictions(
    workspace: Workspace, record: RunRecord, steps: Collection[str] | None = None
) -> list[str]:
    """Return a line for each metric or verdict of the run that differs from its artifacts; empty: none.

    ``steps``: the steps to compare; None: all.
    """
    if record.status == REMOVED:
        return []
    sealed: dict[str, Sealed] = {}
    found: list[str] = []
    run = RunView.of(workspace, record)
    for step, stage in record.stages.items():
        if stage.status not in _CHECKED or stage.digest is None:
            continue
        if _made_again(workspace, run, step, stage.digest):
            continue
        try:
            sealed[step] = workspace.storage.sealed(stage.digest)
        except (ValueError, OSError) as error:
            if steps is None or step in steps:
                found.append(f"{step}: what was measured cannot be looked up: {error}")
            continue
        if steps is None or step in steps:
            found += (f"{step}: {each}" for each in _of_stage(record.recipe, step, stage, sealed))
    return found


def _made_again(workspace: Workspace, run: RunView, step: str, digest: str) -> bool:
    """Return whether the stage key has another artifact by now, and the run's own artifact is no longer kept."""
    return not workspace.storage.has_object(digest) and isinstance(run.ref(step), Replaced)


def _of_stage(
    recipe: ResolvedRecipe, step: str, stage: StageRecord, sealed: dict[str, Sealed]
) -> Iterator[str]:
    measured = sealed[step].measured
    yield from differences("metrics", stage.metrics, measured.metrics)
    if stage.intervals:  # an earlier version recorded none
        found = printed_intervals(measured.metrics, measured.uncertainty, stage.verdicts)
        yield from differences("intervals", stage.intervals, found)
    gates = gates_of(recipe, step)
    if len(gates) != len(stage.verdicts):
        yield f"run.json has {len(stage.verdicts)} verdicts, the recipe {len(gates)} gates"
    equal = "the same weights" if _compares_one_model(recipe, step, sealed) else None
    for gate, recorded in zip(gates, stage.verdicts, strict=False):
        if gate.metric not in measured.metrics:
            yield f"gate {recorded}: the artifact holds no {gate.metric}"
            continue
        expected = check_gate(gate, measured.metrics, measured.uncertainty, equal=equal, like=recorded)
        if any(getattr(recorded, field) != getattr(expected, field) for field in _COMPARED):
            yield f"the verdict is recorded as {_quoted(recorded)}, but the artifact says {_quoted(expected)}"


def _compares_one_model(recipe: ResolvedRecipe, step: str, sealed: dict[str, Sealed]) -> bool:
    """Return whether the stage's candidate and baseline hold the same files."""
    inputs = dependencies(recipe)[step]
    sides = [sealed.get(inputs.get(role, "")) for role in ("candidate", "baseline")]
    candidate, baseline = sides
    return candidate is not None and baseline is not None and candidate.files_digest == baseline.files_digest


def _quoted(verdict: Verdict) -> str:
    return f"“{verdict}”"
