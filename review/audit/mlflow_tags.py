"""Check tags of MLflow's runs, models and versions: each tag with our prefix is what was sent, and none was added."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vantage.ledger.expected.runs import ExpectedRun

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import MlflowRun

PREFIX = "vantage."
"""Prefix of the name of every tag of ours. Other tags are not compared."""
LINKS = frozenset({"vantage.model", "vantage.reused_from", "vantage.published", "vantage.interrupted"})
"""Tags that name other entries of the server, or how the run was written; each is compared at its target."""
SWEEP = frozenset({"vantage.sweep_id", "vantage.arm", "vantage.seed"})
"""Tags that a sweep gives to its runs; they are compared with the sweep's own entry."""
NOT_COMPARED = frozenset({"vantage.critic"})
"""Tags with advice that was made from files of the artifact."""


def tag_problems(required: ExpectedRun, allowed: ExpectedRun, found: "MlflowRun") -> Iterator[str]:
    """Yield tags that are missing, that have another value, or that nobody sent."""
    for name, value in required.tags.items():
        stored = found.tags.get(name)
        if stored not in (value, allowed.tags.get(name)):
            yield f"tag {name} is {shown(stored)}, and was sent as {shown(value)}"
    for name, value in allowed.optional_tags.items():
        stored = found.tags.get(name)
        if name not in required.tags and stored not in (None, value, allowed.tags.get(name)):
            yield f"tag {name} is {shown(stored)}, and was sent as {shown(value)}"
    known = allowed.tags.keys() | allowed.optional_tags.keys() | LINKS | SWEEP | NOT_COMPARED
    for name in sorted(found.tags):
        is_ours = name.startswith(PREFIX) and name not in known
        if is_ours and not (is_pointer(name) and name.removesuffix(_RUN) in allowed.tags):
            yield f"tag {name} is {shown(found.tags[name])}, which nobody sent"


def other_tags(allowed: ExpectedRun, found: "MlflowRun") -> Iterator[str]:
    """Yield tags with another value, for a run that may lack any of them."""
    for name, value in allowed.tags.items():
        if name in found.tags and name != "vantage.status" and found.tags[name] != value:
            yield f"tag {name} is {shown(found.tags[name])}, and was sent as {shown(value)}"


def differing(what: str, stored: Mapping[str, str], expected: Mapping[str, str | None]) -> Iterator[str]:
    """Yield tags that are not as expected."""
    for tag, value in expected.items():
        if stored.get(tag) != value:
            yield f"{what} {tag} is {shown(stored.get(tag))}, and must be {shown(value)}"


_RUN = ".run"


def is_parent(tag: str) -> bool:
    """Return whether a tag has the digest of a parent."""
    return tag.startswith("vantage.parent.") and not is_pointer(tag)


def is_pointer(tag: str) -> bool:
    """Return whether a tag names the run of MLflow that made a parent."""
    return tag.startswith("vantage.parent.") and tag.endswith(_RUN)


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    if value is None:
        return "absent"
    text = str(value)
    short = text if len(text) <= 60 else f"{text[:57]}…"
    return f"“{short}”"
