"""Find gates that a run has made less strict than an earlier run in which they closed on the same artifact."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from vantage.schemas.frozen import Frozen
from vantage.schemas.records.verdicts import STOPS, Verdict

_STRICTNESS = {"continue": 0, "approve": 1, "stop": 2, "extend": 2}
_EFFECTS = {
    "stop": "stops the run",
    "extend": "has the stage trained further, and then stops the run",
    "approve": "asks a person",
    "continue": "lets the run go on",
}


class Asked(Frozen):
    """The demand of a gate on its metric, and what happens when it closes."""

    relation: Literal[">=", "<="]
    threshold: float
    confidence: float | None
    on_fail: str

    @classmethod
    def by(cls, verdict: Verdict) -> "Asked":
        """Return the demand of a verdict's gate."""
        return cls.model_validate(
            {name: getattr(verdict, name) for name in ("relation", "threshold", "confidence", "on_fail")}
        )

    def is_at_least_as_strict_as(self, other: "Asked") -> bool:
        """Return whether this gate passes nothing that the other gate, on the same metric, would not pass."""
        if self.relation != other.relation:
            return False
        bound, others = self.threshold, other.threshold
        return (
            (bound >= others if self.relation == ">=" else bound <= others)
            and (self.confidence or 0.0) >= (other.confidence or 0.0)
            and _STRICTNESS[self.on_fail] >= _STRICTNESS[other.on_fail]
        )

    def __str__(self) -> str:
        sure = "" if self.confidence is None else f" at {100 * self.confidence:g} %"
        return f"{self.relation} {self.threshold:g}{sure}"


class LoosenedGate(Frozen):
    """A gate that closed in an earlier run, and that a later run has made less strict for the same artifact."""

    metric: str
    run_id: str
    """The earlier run."""
    closed: Asked
    """The demand of the earlier run."""
    now: Asked | None
    """The demand of the later run on the metric; None: no gate reads it any longer."""
    passed: bool | None
    """Whether the later run's gate passed; None: there is none."""

    def __str__(self) -> str:
        was = f"closed at {self.closed} in run {self.run_id}"
        if self.now is None:
            return f"{self.metric} has no gate any longer; {was}"
        if self.passed:
            return f"{self.metric} passed at {self.now}; {was}"
        return (
            f"{self.metric} is closed at {self.now} and {_EFFECTS[self.now.on_fail]}; "
            f"{was}, where a closed gate {_EFFECTS[self.closed.on_fail]}"
        )


def loosened_gates(
    verdicts: Sequence[Verdict], earlier: Iterable[tuple[str, Verdict]]
) -> tuple[LoosenedGate, ...]:
    """Return the gates that were loosened after they had closed.

    A gate is not loosened if another one reads the same metric with a bound, a confidence and an ``on_fail`` that are
    each at least as strict. If a gate still stops the run, none is returned, since loosening had no effect.

    Args:
        verdicts: a run's verdicts on an artifact.
        earlier: (run, verdict) of earlier runs on the same artifact.
    """
    if any(not verdict.passed and verdict.on_fail in STOPS for verdict in verdicts):
        return ()
    found: dict[tuple[str, Asked], LoosenedGate] = {}
    for gate in _loosened(verdicts, earlier):
        found.setdefault((gate.metric, gate.closed), gate)
    return tuple(found.values())


def _loosened(verdicts: Sequence[Verdict], earlier: Iterable[tuple[str, Verdict]]) -> Iterator[LoosenedGate]:
    for run_id, before in earlier:
        if before.passed:
            continue
        closed = Asked.by(before)
        same = [verdict for verdict in verdicts if verdict.metric == before.metric]
        if any(Asked.by(verdict).is_at_least_as_strict_as(closed) for verdict in same):
            continue
        now = next((each for each in same if each.relation == before.relation), None)
        yield LoosenedGate(
            metric=before.metric,
            run_id=run_id,
            closed=closed,
            now=None if now is None else Asked.by(now),
            passed=None if now is None else now.passed,
        )
