"""Records of a stage's guards: each firing with its evidence, and whether the stage ended early."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import is_off, is_unset
from vantage.schemas.recipe.guards import Guard

SHOWN_VALUES = 6


class Firing(Frozen):
    """One firing of a guard: its curve has left the bound."""

    guard: Guard
    step: int
    """Steps (iterations) done."""
    values: tuple[float, ...]
    """Reported values of the metric that the guard looked at, oldest first."""
    is_default: bool = Field(False, exclude_if=is_off)
    """Whether the guard is a default and not in the recipe. Such a firing is in no digest: the artifact is the same
    without guards."""

    def __str__(self) -> str:
        newest = self.values[-SHOWN_VALUES:]
        shown = ", ".join(f"{value:.4g}" for value in newest)
        before = "… " if len(newest) < len(self.values) else ""
        return f"guard {self.guard.condition}: fired after step {self.step} ({before}{shown}); {_DONE[self.guard.action]}"


_DONE = {
    "warn": "nothing was changed",
    "stop": "the stage was stopped",
    "restore_best": "the stage ended with the weights that measured best",
    "finish": "the stage was finished early",
    "freeze_policy": "the policy was frozen while the critic learned",
}


class EndedEarly(Frozen):
    """A stage that ended before its last step, with an artifact."""

    step: int
    """Steps (iterations) done."""
    total: int
    """Steps that the recipe asks for."""
    by: Literal["guard", "hand"]
    reason: str
    """The metric of the guard, or the text of the person."""

    def __str__(self) -> str:
        who = (
            f"by guard {self.reason}"
            if self.by == "guard"
            else f"by hand{f' ({self.reason})' if self.reason else ''}"
        )
        return f"finished at {self.step} of {self.total} {who}"


def in_words(firings: Iterable[Firing]) -> list[str]:
    """Return a line for each guard that fired: its first firing, and how often it fired again."""
    by_guard: dict[Guard, list[Firing]] = {}
    for firing in firings:
        by_guard.setdefault(firing.guard, []).append(firing)
    return [
        f"{first}{f'; it fired again after step {_listed([each.step for each in later])}' if later else ''}"
        for first, *later in by_guard.values()
    ]


def _listed(steps: list[int]) -> str:
    *most, last = map(str, steps)
    return f"{', '.join(most)} and {last}" if most else last


class Watched(Frozen):
    """Observations of an attempt's guards so far: a file in the stage's scratch folder."""

    firings: tuple[Firing, ...] = ()
    ended_early: EndedEarly | None = Field(None, exclude_if=is_unset)
