"""Collect the movements of an alias from the records of a workspace's runs."""

from dataclasses import dataclass

from vantage.ledger.operations import MoveAlias, Publish, from_json
from vantage.ledger.outbox import operation_in
from vantage.runs.run_ids import run_ids
from vantage.runs.workspace import Workspace

_KINDS = ("publish", "move_alias")


@dataclass(frozen=True)
class Pointed:
    """An alias was moved to an artifact's version."""

    order: int
    """Number by which movements are ordered: milliseconds since 1970, unless a clock was wrong."""
    run_id: str
    """The run whose ledger contains the movement."""
    stage: str
    digest: str
    goes_back: bool
    """Whether ``vantage rollback`` moved the alias."""


def movements(workspace: Workspace, name: str, alias: str) -> list[Pointed]:
    """Return all recorded movements of the alias, the earliest first."""
    found = []
    for run_id in run_ids(workspace):
        for line in (workspace.records.read_outbox(run_id) or b"").splitlines():
            found += _movement(run_id, line, name, alias)
    return sorted(found, key=lambda each: each.order)


def newest_order(workspace: Workspace, name: str, alias: str) -> int | None:
    """Return the order of the alias's last recorded movement; None: there is none."""
    history = movements(workspace, name, alias)
    return history[-1].order if history else None


def pointed_to(history: list[Pointed]) -> list[Pointed]:
    """Return the artifacts that the alias pointed to, in order, without those that were rolled back; the last is the
    present one."""
    stack: list[Pointed] = []
    for each in history:
        if each.goes_back and any(other.digest == each.digest for other in stack):
            while stack[-1].digest != each.digest:
                stack.pop()
        elif not stack or stack[-1].digest != each.digest:
            stack.append(each)
    return stack


def _movement(run_id: str, line: bytes, name: str, alias: str) -> list[Pointed]:
    # Parsing every line would take seconds in a large workspace.
    if not any(kind.encode() in line for kind in _KINDS):
        return []
    try:
        value = operation_in(line)
        if (
            value.get("operation") not in _KINDS
            or value.get("registered_model") != name
            or value["alias"] != alias
        ):
            return []
        operation = from_json(value)
    except (ValueError, KeyError, AttributeError):  # the line is half-written, or another version wrote it
        return []
    match operation:
        case Publish():
            return [Pointed(operation.order, run_id, operation.stage, operation.artifact.digest, False)]
        case MoveAlias():
            return [Pointed(operation.order, run_id, operation.stage, operation.digest, True)]
        case _:
            return []
