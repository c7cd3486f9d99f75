"""The head of a critic: one value per position, quantiles of the return, or several values that learn apart."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import NonNegative, is_default, is_unset

if TYPE_CHECKING:
    from vantage.schemas.recipe.algorithm import Algorithm

DEFAULT_HUBER = 0.1


class CriticHead(Frozen):
    """The prediction of the critic at each position; the value is the mean of it. Left empty: one value."""

    quantiles: Annotated[int, Field(ge=2, le=1024, strict=True)] | None = Field(None, exclude_if=is_unset)
    """N quantiles of the return, at the levels (i + ½)/N (QR-DQN, arXiv 1710.10044; critics of language models, arXiv
    2512.03847). None: no quantiles."""
    huber: NonNegative = Field(DEFAULT_HUBER, exclude_if=is_default(DEFAULT_HUBER))
    """κ of the quantile Huber loss, in units of reward. 0: the absolute error, whose minima are the quantiles. Among errors
    smaller than κ the minima are expectiles, and their mean is no longer the expected return: with returns 0 and 1 and a
    success share of 0.1 it is 0.184 at κ = 1 (QR-DQN's), 0.111 at 0.1."""
    ensemble: Annotated[int, Field(ge=2, le=64, strict=True)] | None = Field(None, exclude_if=is_unset)
    """K values that begin with different weights and learn from disjoint prompts (AsyPPO, arXiv 2510.01656); their standard
    deviation is their disagreement. None: no ensemble."""

    @property
    def is_scalar(self) -> bool:
        """Return whether the head predicts one value."""
        return self.quantiles is None and self.ensemble is None

    @property
    def outputs(self) -> int:
        """Return the number of predictions at each position."""
        return self.quantiles or self.ensemble or 1

    @property
    def form(self) -> str:
        """Return the form as a recipe writes it, without settings of the loss."""
        if self.quantiles is not None:
            return f"{{quantiles: {self.quantiles}}}"
        return "{}" if self.ensemble is None else f"{{ensemble: {self.ensemble}}}"

    @rule
    def _one_form(self) -> None:
        if self.quantiles is not None and self.ensemble is not None:
            raise ValueError(
                f"quantiles={self.quantiles} and ensemble={self.ensemble} are two forms of a head; leave one of them out"
            )
        if self.quantiles is None and self.huber != DEFAULT_HUBER:
            raise ValueError(f"huber={self.huber:g} is about quantiles, and there are none; leave huber out")


ONE_VALUE = CriticHead()
"""The head of most critics."""


def refuse_head(algorithm: "Algorithm") -> None:
    """Raise ValueError if the algorithm's other switches contradict the form of its critic."""
    head = algorithm.critic_head
    if not head.is_scalar:
        if not algorithm.reads_critic:
            why = (
                "shared_trunk: true has a head on the policy's trunk"
                if algorithm.shared_trunk
                else f"advantage={algorithm.advantage} has none"
            )
            raise ValueError(
                f"critic_head={head.form} is about a critic of its own, and {why}; leave critic_head out"
            )
        if algorithm.value_clip_range is not None:
            raise ValueError(
                f"value_clip_range={algorithm.value_clip_range:g} clips around one value, and critic_head={head.form} predicts "
                f"{head.outputs}; set value_clip_range: null"
            )
    if algorithm.mask_agreed_share is not None and head.ensemble is None:
        raise ValueError(
            f"mask_agreed_share={algorithm.mask_agreed_share:g} asks where several values agree, and critic_head={head.form} is no "
            "ensemble; set critic_head: {ensemble: 2}, or leave mask_agreed_share out"
        )


def refuse_frozen(algorithm: "Algorithm") -> None:
    """Raise ValueError if ``freeze_critic: all`` meets a switch by which the critic learns."""
    if algorithm.freeze_critic != "all":
        return
    for name, value, off in (
        ("policy_starts_at", algorithm.policy_starts_at, 0),
        ("critic_steps", algorithm.critic_steps, 1),
        ("critic_first", algorithm.critic_first, False),
    ):
        if value != off:
            shown, without = str(value).lower(), str(off).lower()
            raise ValueError(
                f"{name}={shown} is about a critic that learns, and freeze_critic=all lets none learn; set {name}: {without}, or "
                "freeze_critic: attention"
            )
