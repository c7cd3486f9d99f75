"""Alarms of a run: signs that its numbers must not be believed, found in what the stages recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

from vantage.schemas.records.firings import Firing, in_words

LEARNED_NOTHING = "learned nothing: "
"""Beginning of the remark on a stage whose best weights are those that it started from."""
COMPARED_WITH_ITSELF = "a model is compared with itself"
"""End of the remark on an evaluation of two equal models."""
OVER_OPTIMIZED = "towards what the reward model likes and not towards right answers"
"""End of the warning about a score that rose while the accuracy fell."""


_TITLES = ("Over-optimisation", "Learned nothing", "Compared with itself", "A guard fired")


@dataclass(frozen=True)
class Alarm:
    """A sign that a stage's numbers must not be believed."""

    step: str
    title: str
    text: str

    @property
    def rank(self) -> int:
        """Return the alarm's rank; alarms that leave a run without a result come first."""
        return _TITLES.index(self.title) if self.title in _TITLES else len(_TITLES)

    def __str__(self) -> str:
        return f"{self.title} ({self.step}): {self.text}"


def alarms_of(
    step: str, *, remark: str | None, warnings: Sequence[str], firings: Sequence[Firing]
) -> tuple[Alarm, ...]:
    """Return the alarms of a stage: over-optimisation, guards that fired, nothing learned, nothing compared."""
    found = [Alarm(step, "Over-optimisation", text) for text in warnings if text.endswith(OVER_OPTIMIZED)]
    found += [Alarm(step, "A guard fired", text) for text in in_words(firings)]
    for part in (remark or "").split("; "):
        if part.startswith(LEARNED_NOTHING):
            found.append(Alarm(step, "Learned nothing", part.removeprefix(LEARNED_NOTHING)))
        elif part.endswith(COMPARED_WITH_ITSELF):
            found.append(Alarm(step, "Compared with itself", part))
    return tuple(found)
