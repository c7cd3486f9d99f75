"""Corrections for responses that another policy sampled: one that is an update behind, or the same one in other arithmetic."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import MAX_NUMBER, is_default, is_unset

NAMED: dict[str, dict[str, Any]] = {
    "tis": {"action": "truncate", "high": 2.0},
    "icepop": {"action": "mask", "low": 0.5, "high": 2.0},
}
"""Name → its values: truncated importance sampling, and IcePop's mask (both with the bounds of arXiv 2510.18855)."""


class RolloutCorrection(Frozen):
    """Bounds on w = π_old/π_sampler, by which advantages are weighted; a recipe may give one of the names ``tis`` and ``icepop``."""

    action: Literal["truncate", "mask"]
    """Treatment of a ratio outside the bounds: ``truncate`` sets it to the bound; ``mask`` leaves its tokens out of the
    loss and of its denominators."""
    ratio_of: Literal["token", "sequence", "sequence_mean"] = Field("token", exclude_if=is_default("token"))
    """``token``: each token has its own ratio. ``sequence``: all tokens of a response have the product of their ratios.
    ``sequence_mean``: they have the geometric mean."""
    low: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] | None = Field(None, exclude_if=is_unset)
    """Lower bound of the ratio, at most 1, the ratio of a policy to itself; None: no bound."""
    high: Annotated[float, Field(ge=1.0, le=MAX_NUMBER, strict=True)] | None = Field(
        None, exclude_if=is_unset
    )
    """Upper bound of the ratio, at least 1; None: no bound."""

    @model_validator(mode="before")
    @classmethod
    def _read_a_name(cls, data: Any) -> Any:
        if not isinstance(data, str):
            return data
        if data not in NAMED:
            raise ValueError(
                f"{data!r} is not one of {', '.join(NAMED)}; use one of them, or a mapping with action, low and high"
            )
        return NAMED[data]

    @rule
    def _something_is_bounded(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("neither low nor high is set, so that no ratio is bounded; set one of them")
