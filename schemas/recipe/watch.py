"""An independent judge that looks at a policy while it trains."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import Count, Name, is_unset
from vantage.schemas.recipe.rewards import Judge


def _refuse_test_prompts(value: Any) -> Any:
    if value == "test":
        raise ValueError(
            "test is what gates and evaluations are measured on, which stays unseen while a policy trains; use validation or train"
        )
    return value


def _read_prompts(value: Any) -> Any:
    return {"data": value} if isinstance(value, str) else value


class WatchPrompts(Frozen):
    """The prompts of a watch, if they are not the stage's validation prompts."""

    data: Name
    """A dataset of prompts, or a mixture."""
    split: Annotated[Literal["validation", "train"], BeforeValidator(_refuse_test_prompts)] = "validation"
    """Split of its rows. Test prompts are refused: gates are measured on them."""
    samples: Count | None = Field(None, exclude_if=is_unset)
    """Responses in one measurement, to the first prompts; None: as many as to validation prompts."""


class Watch(Frozen):
    """A judge other than the reward, asked about the policy's responses to prompts that train nothing.

    Where the mean reward of these responses rose and the judge's score fell since the judge liked the policy best, each by more than
    its 95 % interval, at two measurements in a row, the policy has learnt to please the reward.
    """

    judge: Judge
    """A verifier, another reward than the one that trains the policy, or a model that compares the policy's responses with those of
    the policy that the stage started from."""
    every: Count = 5
    """Iterations between two measurements. Each measurement validates too, and each validation (``validate_every``) is a measurement."""
    prompts: Annotated[WatchPrompts | None, BeforeValidator(_read_prompts)] = Field(None, exclude_if=is_unset)
    """The prompts that are answered: a dataset, or a mapping of ``data``, ``split`` and ``samples``. None: those that validate the
    stage, whose responses are judged too."""
    on_fall: Literal["warn", "stop", "restore_best", "finish"] = "restore_best"
    """Action when the judge's score falls in this way; the actions are those of ``guards``."""

    def measured_beside(self, validate_every: int) -> tuple[int, int]:
        """Return the intervals, in iterations, at which reward and judge measure the policy: at every multiple of either."""
        return validate_every, self.every


class Keep(Frozen):
    """Rule for the policy that a stage returns."""

    by: Literal["validation", "watch"]
    """``validation``: the one whose responses to the validation prompts the reward scores best. ``watch``: the one that the watch's
    judge scores best."""

    @property
    def is_by_watch(self) -> bool:
        """Return whether the watch's judge chooses."""
        return self.by == "watch"
