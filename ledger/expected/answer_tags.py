"""Tags of a stage's run for people's decisions: their answers, and the aliases that they moved."""

from vantage.ledger.operations import MoveAlias
from vantage.schemas.records.approvals import PUBLISH_PREFIX, Approval

ANSWER, ALIAS = "vantage.approval", "vantage.alias."
"""Prefix of the names of these tags."""


def answer_tags(answer: Approval) -> dict[str, str]:
    """Return tags with an answer: in words, and all of it as JSON."""
    name, subject = ANSWER, answer.question.subject
    if subject.startswith(PUBLISH_PREFIX):  # MLflow's names have neither ":" nor "@"
        name += f".publish.{subject.removeprefix(PUBLISH_PREFIX).replace('@', '.')}"
    # The evidence of a verdict is in a tag of its own, and may be long.
    record = answer.model_dump_json(exclude={"question": {"verdicts": {"__all__": {"evidence"}}}})
    return {name: str(answer), f"{name}.record": record}


def alias_tags(operation: MoveAlias) -> dict[str, str]:
    """Return tags with the movement of an alias: both versions, the person and the reason."""
    name = f"{ALIAS}{operation.registered_model}.{operation.alias}"
    from_version = operation.from_version or "none"
    return {name: f"version {from_version} → {operation.to_version}, by {operation.by}: {operation.reason}"}
