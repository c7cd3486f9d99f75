"""The report of an audit: a verdict for each check of each artifact, and for each edge to one of its inputs."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator

from vantage.schemas.frozen import Frozen

Outcome = Literal["ok", "wrong", "unchecked", "note"]
"""``wrong``: two things that must agree differ. ``unchecked``: one of them is missing. ``note``: worth knowing, and no
fault."""

_WORST_FIRST: tuple[Outcome, ...] = ("wrong", "unchecked", "note", "ok")


_LONGEST = 20_000
"""Most characters of a subject or a detail: records and MLflow may have texts of any length."""


def _bounded(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


class Check(Frozen):
    """One comparison."""

    subject: Annotated[str, AfterValidator(_bounded)]
    """Subject of the comparison: ``files``, ``ref``, ``run record``, ``outbox``, ``MLflow`` …"""
    outcome: Outcome = "ok"
    detail: Annotated[str, AfterValidator(_bounded)] = ""
    """The other side of the comparison; if ``wrong``, the difference; if ``unchecked``, what is missing."""


class Edge(Frozen):
    """An edge from an artifact to one of its inputs."""

    role: str
    """``init``, ``data``, ``reward.main.0`` …"""
    digest: str
    parent: str | None
    """Id of the audited input; None: it was not found."""
    checks: tuple[Check, ...]


class AuditedArtifact(Frozen):
    """One artifact of the lineage."""

    id: str
    """Id within the report."""
    step: str
    """Name of the step that made it, or its kind."""
    kind: str
    digest: str
    stage_key: str | None
    run_id: str | None
    """The run that made it; None: not known."""
    num_files: int
    num_bytes: int
    checks: tuple[Check, ...]
    parents: tuple[Edge, ...] = ()


class AuditedRun(Frozen):
    """Checks of a run as a whole: its record, its recipe, its entry in MLflow."""

    run_id: str
    checks: tuple[Check, ...]


class Hashing(Frozen):
    """Amount and speed of hashing."""

    num_bytes: int = 0
    seconds: float = 0.0
    """Wall time."""
    read_seconds: float = 0.0
    """Sum over threads of the time in which bytes were read."""
    hash_seconds: float = 0.0
    """Sum over threads of the time in which bytes were hashed."""

    @property
    def bound(self) -> Literal["reading", "hashing"]:
        """Return which of the two took longer."""
        return "hashing" if self.hash_seconds >= self.read_seconds else "reading"


class AuditReport(Frozen):
    """The result of an audit."""

    target: str
    """Target as it was given."""
    described: str
    """Description of the target, in words."""
    checks: tuple[Check, ...] = ()
    """Checks of the target itself: its alias, its version, its folder."""
    roots: tuple[str, ...] = ()
    """Ids of the artifacts at which the walk began."""
    artifacts: tuple[AuditedArtifact, ...] = ()
    """Each artifact once, in the order of the walk."""
    runs: tuple[AuditedRun, ...] = ()
    hashing: Hashing = Hashing()

    def every_check(self) -> Iterator[tuple[str, Check]]:
        """Yield each check with its place in the report."""
        yield from ((self.target, check) for check in self.checks)
        for artifact in self.artifacts:
            yield from ((artifact.step, check) for check in artifact.checks)
            for edge in artifact.parents:
                yield from ((f"{artifact.step} ← {edge.role}", check) for check in edge.checks)
        for run in self.runs:
            yield from ((f"run {run.run_id}", check) for check in run.checks)

    @property
    def outcome(self) -> Outcome:
        """The worst of all checks."""
        return worst(check for _, check in self.every_check())

    @property
    def exit_code(self) -> int:
        """0: everything is ok. 1: something is wrong. 2: something could not be checked, and nothing is wrong."""
        return {"wrong": 1, "unchecked": 2}.get(self.outcome, 0)


def worst(checks: Iterable[Check]) -> Outcome:
    """Return the worst outcome; ``ok`` if there are no checks."""
    found = {check.outcome for check in checks}
    return next((outcome for outcome in _WORST_FIRST if outcome in found), "ok")
