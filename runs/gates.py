"""Judge a step's gates on its artifact, and decide whether dependent steps may start."""

from collections.abc import Mapping, Sequence
from typing import Literal

from vantage.attempts.jobs import gates_of
from vantage.ledger.operations import Input
from vantage.ledger.remarks import compared_with_itself
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.approvals import Approval, Question, answer_to
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.verdicts import STOPS, Verdict, check_artifact_gate, recorded_verdict

Standing = Literal["open", "waiting_approval", "gate_closed"]
"""Whether steps that depend on an artifact may start: yes; only after a person approves the artifact; or no."""


def check_gates(
    recipe: ResolvedRecipe,
    step: str,
    artifact: Artifact,
    inputs: Mapping[str, Input],
    *,
    like: Sequence[Verdict] = (),
) -> tuple[Verdict, ...]:
    """Return a verdict for each of the step's gates.

    ``like``: the verdicts that the run has on this artifact already; their interval methods are kept.
    """
    equal = compared_with_itself(inputs)
    return tuple(
        check_artifact_gate(gate, artifact, equal=equal, like=recorded_verdict(like, place, gate))
        for place, gate in enumerate(gates_of(recipe, step))
    )


def question_about(step: str, artifact: Artifact, verdicts: tuple[Verdict, ...]) -> Question | None:
    """Return the question to a person about the artifact; None: all gates passed, or one stops the run anyway."""
    closed = [verdict for verdict in verdicts if not verdict.passed]
    asking = tuple(verdict for verdict in closed if verdict.on_fail == "approve")
    if not asking or any(verdict.on_fail in STOPS for verdict in closed):
        return None
    return Question(
        subject=step, stage=step, stage_key=artifact.stage_key, digest=artifact.digest, verdicts=asking
    )


def standing(
    step: str, artifact: Artifact, verdicts: tuple[Verdict, ...], approvals: tuple[Approval, ...]
) -> Standing:
    """Return whether steps that depend on this one may start."""
    question = question_about(step, artifact, verdicts)
    if question is None:
        stopped = any(not verdict.passed and verdict.on_fail in STOPS for verdict in verdicts)
        return "gate_closed" if stopped else "open"
    answer = answer_to(question, approvals)
    if answer is None:
        return "waiting_approval"
    return "open" if answer.approved else "gate_closed"
