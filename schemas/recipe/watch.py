"""An independent judge that looks at a policy while it trains."""

from typing import Literal

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import Count
from vantage.schemas.recipe.rewards import Judge


class Watch(Frozen):
    """A judge other than the reward, asked about the policy's responses to the validation prompts.

    Where the mean reward of these responses rose and the judge's score fell since the judge liked the policy best, each by more than
    its 95 % interval, at two measurements in a row, the policy has learnt to please the reward.
    """

    judge: Judge
    """A verifier, or another reward than the one that trains the policy."""
    every: Count = 5
    """Iterations between two measurements. The responses are those that validation samples, and each measurement validates too."""
    on_fall: Literal["warn", "stop", "restore_best", "finish"] = "restore_best"
    """What happens then, as the actions of ``guards``."""

    def measured_beside(self, validate_every: int) -> tuple[int, int]:
        """Return every how many iterations the policy is measured: by the reward alone, and by the judge too."""
        return validate_every, self.every

    @rule
    def _one_response_is_judged(self) -> None:
        if self.judge.model is not None:
            raise ValueError(
                f"judge.model={self.judge.model} compares two responses, and a watch has one of each prompt; "
                "name a verifier or a reward"
            )


class Keep(Frozen):
    """Rule for the policy that a stage returns."""

    by: Literal["validation", "watch"]
    """``validation``: the one whose responses to the validation prompts the reward scores best. ``watch``: the one that the watch's
    judge scores best."""

    @property
    def is_by_watch(self) -> bool:
        """Return whether the watch's judge chooses."""
        return self.by == "watch"
