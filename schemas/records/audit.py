"""What an audit found: a verdict for each check of each artifact, and for each edge to what it was made of."""

from collections.abc import Iterable, Iterator
from typing import Literal

from vantage.schemas.frozen import Frozen

Outcome = Literal["ok", "wrong", "unchecked", "note"]
"""``wrong``: two things that must agree do not. ``unchecked``: one of them is not there. ``note``: worth to know, and no fault."""

_WORST_FIRST: tuple[Outcome, ...] = ("wrong", "unchecked", "note", "ok")


class Check(Frozen):
    """One thing that was compared."""

    subject: str
    """What: ``files``, ``ref``, ``run record``, ``outbox``, ``MLflow`` …"""
    outcome: Outcome = "ok"
    detail: str = ""
    """With what it was compared; of ``wrong``, what differs; of ``unchecked``, what is missing."""


class Edge(Frozen):
    """From an artifact to one that it was made of."""

    role: str
    """``init``, ``data``, ``reward.main.0`` …"""
    digest: str
    parent: str | None
    """Id of the audited artifact; None: there is none."""
    checks: tuple[Check, ...]


class AuditedArtifact(Frozen):
    """One artifact of the lineage."""

    id: str
    """Within the report."""
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
    """What was checked of a run as a whole: its record, its recipe, its entry in MLflow."""

    run_id: str
    checks: tuple[Check, ...]


class Hashing(Frozen):
    """How much was hashed, and how fast."""

    num_bytes: int = 0
    seconds: float = 0.0
    """Wall time."""
    read_seconds: float = 0.0
    """Sum over threads of the time in which bytes were read."""
    hash_seconds: float = 0.0
    """Sum over threads of the time in which they were hashed."""

    @property
    def bound(self) -> Literal["reading", "hashing"]:
        """Return what took longer."""
        return "hashing" if self.hash_seconds >= self.read_seconds else "reading"


class AuditReport(Frozen):
    """The result of an audit."""

    target: str
    """As it was given."""
    described: str
    """What it is, in words."""
    checks: tuple[Check, ...] = ()
    """Of the target itself: its alias, its version, its folder."""
    roots: tuple[str, ...] = ()
    """Ids of the artifacts from which the walk began."""
    artifacts: tuple[AuditedArtifact, ...] = ()
    """Each once, in the order of the walk."""
    runs: tuple[AuditedRun, ...] = ()
    hashing: Hashing = Hashing()

    def every_check(self) -> Iterator[tuple[str, Check]]:
        """Yield where, and the check."""
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
        """0: all is well. 1: something is wrong. 2: something could not be checked, and nothing is wrong."""
        return {"wrong": 1, "unchecked": 2}.get(self.outcome, 0)


def worst(checks: Iterable[Check]) -> Outcome:
    """Return the worst outcome; ``ok`` of none."""
    found = {check.outcome for check in checks}
    return next((outcome for outcome in _WORST_FIRST if outcome in found), "ok")
