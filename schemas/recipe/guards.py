"""Guards of a training stage: bounds on its curves, and what happens when a curve leaves them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag, WithJsonSchema

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.metric_names import INITIAL_AGREEMENT_LOW
from vantage.schemas.recipe.fields import (
    MAX_NAMED,
    SWITCHED_OFF,
    Number,
    Positive,
    is_unset,
    read_switch,
)

Relation = Literal["above", "below", "rises_by", "falls_by"]
RELATIONS: tuple[Relation, ...] = ("above", "below", "rises_by", "falls_by")
Action = Literal["warn", "stop", "restore_best", "finish", "freeze_policy"]

OFF: Literal["off"] = "off"
WATCH_FALLS = "watch_falls"
"""The curve by which a watch acts: measurements in a row at which the reward had risen and the judge's score fallen."""
MAX_OVER = 1000
"""Most reports of a curve that a guard looks at; it remembers twice as many."""


Share = Annotated[
    str, StringConstraints(pattern=r"^([1-9][0-9]{0,5}(\.[0-9]{1,6})?|0\.[0-9]{0,5}[1-9])%$", strict=True)
]
"""A share above 0, as it is written: ``50%``."""
Change = Annotated[
    Annotated[Positive, Tag("amount")] | Annotated[Share, Tag("share")],
    Discriminator(lambda given: "share" if isinstance(given, str) else "amount"),
]
"""How far a curve moves: a number in its unit, or a share of its starting value."""


class Guard(Frozen):
    """A bound on a curve of the stage, and what happens when the curve leaves it."""

    metric: str
    """A curve of the stage (docs/metrics.md)."""
    above: Number | None = Field(None, exclude_if=is_unset)
    """The guard fires when each of the newest ``over`` reports is above this value."""
    below: Number | None = Field(None, exclude_if=is_unset)
    """The guard fires when each of the newest ``over`` reports is below this value."""
    rises_by: Change | None = Field(None, exclude_if=is_unset)
    """The guard fires when the mean of the newest ``over`` reports exceeds the mean of the ``over`` reports before them by
    more than this: a number in the metric's unit, or a share (``50%``) of the earlier mean."""
    falls_by: Change | None = Field(None, exclude_if=is_unset)
    """The guard fires when the mean of the newest ``over`` reports is below the mean of the ``over`` reports before them by more
    than this; written as in ``rises_by``."""
    over: Annotated[int, Field(ge=1, le=MAX_OVER, strict=True)] = 3
    """Number of reports that must agree."""
    action: Action = "warn"
    """``warn``: only the record changes. ``stop``: the stage fails, with its state saved. ``restore_best``: the stage ends with
    the weights that measured best on validation data. ``finish``: the stage ends after one more iteration as if it were its
    last. ``freeze_policy``: only the critic learns until the newest report is within the bound again."""

    @rule
    def _one_condition(self) -> None:
        given = [name for name, value in self._conditions.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"a guard has one of {', '.join(RELATIONS)}, and this one has {' and '.join(given) or 'none'}; "
                "give exactly one of them"
            )

    @rule
    def _a_freeze_has_an_end(self) -> None:
        changes = [name for name in ("rises_by", "falls_by") if getattr(self, name) is not None]
        if self.action == "freeze_policy" and changes:
            raise ValueError(
                f"action=freeze_policy lasts until the metric is within a bound again, and {changes[0]} has none; "
                "use above or below"
            )

    @property
    def relation(self) -> Relation:
        """Return which of its conditions is given."""
        return next(name for name, value in self._conditions.items() if value is not None)

    @property
    def _conditions(self) -> dict[Relation, float | str | None]:
        return {
            "above": self.above,
            "below": self.below,
            "rises_by": self.rises_by,
            "falls_by": self.falls_by,
        }

    @property
    def amount(self) -> float:
        """The bound, or the size of the change; a share as a plain number."""
        value = self._conditions[self.relation]
        assert value is not None, "that is what makes it the relation"
        return float(value.removesuffix("%")) / 100 if isinstance(value, str) else float(value)

    @property
    def is_relative(self) -> bool:
        """Return whether ``amount`` is a share."""
        return isinstance(self._conditions[self.relation], str)

    @property
    def condition(self) -> str:
        """``kl_to_reference above 20, 3 reports in a row``."""
        if self.metric == WATCH_FALLS:
            return f"watch: the reward rose and the judge's score fell, at {self.amount + 1:g} measurements in a row"
        if self.metric == INITIAL_AGREEMENT_LOW and self.below is not None:
            return (
                f"{INITIAL_AGREEMENT_LOW} below {self.below:g}: reward and watch are not shown to agree, so one of them may be wrong, and "
                "the curves cannot show which"
            )
        value = self._conditions[self.relation]
        shown = value if isinstance(value, str) else f"{value:g}"
        reports = "1 report" if self.over == 1 else f"{self.over} reports"
        window = f"{reports} in a row" if self.relation in ("above", "below") else f"over {reports}"
        return f"{self.metric} {self.relation.replace('_', ' ')} {shown}, {window}"

    def __str__(self) -> str:
        return f"{self.condition}: {self.action}"


def _read_guards(value: Any) -> Any:
    if isinstance(value, dict | Guard):
        return (value,)
    return OFF if read_switch(value) is False else value


Guards = Annotated[
    Annotated[tuple[Guard, ...], Field(max_length=MAX_NAMED), Tag("guards")]
    | Annotated[Literal["off"], WithJsonSchema({"enum": [False, *SWITCHED_OFF]}), Tag("off")],
    Discriminator(lambda given: "off" if isinstance(given, str) else "guards"),
    BeforeValidator(_read_guards),
]
"""A guard, a list of guards, or ``off``."""
