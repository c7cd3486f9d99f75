"""The conclusion of a run: one plain verdict, from its outcome, the effects of its evaluations and its alarms."""

from collections.abc import Sequence
from dataclasses import dataclass

from vantage.schemas.records.alarms import Alarm
from vantage.schemas.records.effects import Direction, Effect


@dataclass(frozen=True)
class Judged:
    """An evaluation of a run, with the effects that it measured."""

    step: str
    candidate: str
    baseline: str
    effects: tuple[Effect, ...]

    @property
    def main(self) -> Effect | None:
        """Return the effect with most weight; None: it measured none."""
        return self.effects[0] if self.effects else None


@dataclass(frozen=True)
class Conclusion:
    """The verdict on a run in one line, and whether it is good news."""

    level: str
    """``good``, ``warning``, ``bad`` or ``note``."""
    text: str
    """``better: accuracy +0.311 (0.27 to 0.35)``."""


_WORDS: dict[Direction, str] = {
    "better": "better",
    "worse": "worse",
    "not shown": "no difference shown",
    "unknown": "certainty unknown",
}
_ENDED = {
    "running": ("note", "under way"),
    "failed": ("bad", "failed"),
    "gate_closed": ("bad", "gate closed"),
    "waiting_approval": ("warning", "waits for approval"),
    "resumable": ("warning", "stopped"),
    "removed": ("warning", "removed"),
}
"""Outcome of a run that did not complete → level and words."""
_LEVELS: dict[str, str] = {"better": "good", "worse": "bad"}


def conclude(outcome: str, judged: Sequence[Judged], alarms: Sequence[Alarm]) -> Conclusion:
    """Return the conclusion of a run.

    Several evaluations together are worse if one is worse, and better only if all are.
    """
    level, word = _ENDED.get(outcome, ("", ""))
    main = [effect for each in judged if (effect := each.main) is not None]
    measured = _together([effect.direction for effect in main])
    numbers = "; ".join(effect.short for effect in main[:_MOST])
    numbers += f"; and {len(main) - _MOST} more" if len(main) > _MOST else ""
    found = f"{_WORDS[measured]}: {numbers}" if measured else "nothing was compared"
    level = level or _LEVELS.get(measured or "", "warning" if measured else "note")
    titles = dict.fromkeys(alarm.title.lower() for alarm in sorted(alarms, key=lambda each: each.rank))
    parts = [*([word] if word else []), *titles, *([found] if measured or not word else [])]
    return Conclusion("bad" if alarms else level, "; ".join(parts))


_MOST = 3
"""Number of evaluations that a conclusion names."""


_FIRST: tuple[Direction, ...] = ("worse", "unknown", "not shown", "better")
"""Directions from the one that decides first, where several evaluations differ."""


def _together(directions: Sequence[Direction]) -> Direction | None:
    return next((each for each in _FIRST if each in directions), None)
