"""The controller of the entropy coefficient: it rises while the policy's entropy is below a target."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EntropyController:
    """The adaptive entropy coefficient of Skywork-OR1, arXiv 2505.22312.

    `coef`: c, in loss per nat. `is_low`: whether the entropy was below the target when it was last measured; the bonus
    counts only then. `target`: nats **per token**. `step`: change of c at each update. `highest`: the largest c; the
    smallest is 0.

    Raises ValueError for a target or step that is not positive and finite, and for a c outside [0, highest].
    """

    coef: float
    is_low: bool
    target: float
    step: float
    highest: float

    def __post_init__(self) -> None:
        for name in ("target", "step"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is not a positive, finite number")
        if not 0 <= self.coef <= self.highest < math.inf:
            raise ValueError(f"coef={self.coef} is not between 0 and highest={self.highest}")

    @property
    def applied(self) -> float:
        """The coefficient of the entropy bonus: c, or 0 while the entropy is not below the target."""
        return self.coef if self.is_low else 0.0

    def update(self, entropy: float) -> "EntropyController":
        """Return the controller with c + step if the entropy is below the target, else c − step, within [0, highest].

        `entropy` is the mean over tokens, in nats per token.

        Raises ValueError for an entropy that is not finite.
        """
        if not math.isfinite(entropy):
            raise ValueError(f"entropy={entropy} is not finite: no coefficient follows from it")
        is_low = entropy < self.target
        moved = self.coef + (self.step if is_low else -self.step)
        return replace(self, coef=min(max(moved, 0.0), self.highest), is_low=is_low)
