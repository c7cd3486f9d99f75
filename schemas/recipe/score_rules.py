"""The rules by which one score counts in a reward's sum: its weight, clip and offset."""

from pydantic import Field

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import Number, Switch, is_default, is_off, is_unset


class ScoreRange(Frozen):
    """The bounds to which a score is clipped, in the score's own unit."""

    low: Number | None = None
    """Least value; None: no bound below."""
    high: Number | None = None
    """Largest value; None: no bound above."""

    @rule
    def _bounds_something(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("clip has neither low nor high; give one or both, or leave clip out")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(
                f"clip.low={self.low:g} is not below clip.high={self.high:g}; give the smaller bound as low"
            )


class ScoreRule(Frozen):
    """The part of one score in a reward's sum: weight · (clipped score + offset)."""

    weight: Number = 1.0
    """The factor in the sum; 0 only records the score."""
    clip: ScoreRange | None = Field(None, exclude_if=is_unset)
    """Bounds of the score, in its own unit, before offset and weight; None: no bounds."""
    offset: Number = Field(0.0, exclude_if=is_default(0.0))
    """Number that is added to the clipped score, in its own unit, before the weight."""
    whiten: Switch = Field(False, exclude_if=is_off)
    """In rollouts that are learned from, the clipped score less its mean over the rollout's responses, divided by their standard
    deviation (0 where all are equal). Curves, validation and judges have the score itself."""

    @rule
    def _an_offset_is_not_whitened_away(self) -> None:
        if self.whiten and self.offset:
            raise ValueError(
                f"offset={self.offset:g} has no effect on a score whose mean is subtracted; leave it out, or whiten: false"
            )
