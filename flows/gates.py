"""The verdicts of a step's gates on its artifact."""

from collections.abc import Mapping

from flows.attempts.jobs import gates_of
from ledger.operations import Input
from ledger.remarks import compared_with_itself
from schemas.recipe.recipe import ResolvedRecipe
from schemas.records.artifacts import Artifact
from schemas.records.verdicts import Verdict, check_artifact_gate


def check_gates(
    recipe: ResolvedRecipe, step: str, artifact: Artifact, inputs: Mapping[str, Input]
) -> tuple[Verdict, ...]:
    """A verdict for each of the step's gates."""
    equal = compared_with_itself(inputs)
    return tuple(check_artifact_gate(gate, artifact, equal=equal) for gate in gates_of(recipe, step))


def are_closed(verdicts: tuple[Verdict, ...]) -> bool:
    """Whether steps that depend on this one must not start."""
    return any(not verdict.passed and verdict.on_fail == "stop" for verdict in verdicts)
