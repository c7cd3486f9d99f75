"""Define the baselines that are compared: each a sum of a few basic ones with a weight for each rollout."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from docs.critic_boundary.study.critics import ORACLE, PRETRAINED
from vantage.algorithms.diagnostics import blended_weight, switched_weight

ONE, MEAN, OTHERS = "one", "batch mean", "others' mean"
"""1 on every token; each rollout's mean return over its tokens; the mean score of the prompt's other responses."""
NOISES = ("white noise", "response noise", "prompt noise")
"""Standard normal, drawn for each token, for each response and for each prompt of a rollout."""
WHITE_EARLY = "white noise early"
"""White noise where `EARLY_TOKENS` or more are left, 0 elsewhere."""
EARLY_TOKENS = 40
NOISY_VARIANCES = (0.45, 0.3, 0.15, 0.0, -0.25, -0.5, -1.0)
"""Explained variances that noise brings a critic down to, where it is above."""
SCALES = (0.25, 0.5, 0.75, 1.5, 2.0, 2.5, 3.0, 4.0)
SHIFTS = (-1.5, -1.0, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1.0, 1.5)
CONSTANTS = (-1.0, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Tokens:
    """All response tokens of all R rollouts, N of them, and the basic baselines there."""

    names: list[str]
    """Names of the J basic baselines."""
    baselines: Tensor
    """(N,J)."""
    returns: Tensor
    """(N,)."""
    rollout: Tensor
    """(N,): the number of each token's rollout."""
    left: Tensor
    """(N,): tokens left before the reward; the last token has 0."""
    weights: Tensor
    """(N,): ‖∇ log π‖² of the matrices whose gradient is measured."""

    def column(self, name: str) -> Tensor:
        """Return a basic baseline (N,)."""
        return self.baselines[:, self.names.index(name)]

    def advantages(self, weights: Tensor) -> Tensor:
        """Return less the baseline (N,) of weights (R,J)."""
        return self.returns - (self.baselines * weights[self.rollout]).sum(dim=1)


@dataclass(frozen=True)
class Arm:
    """A baseline, by the way in which it was made."""

    family: str
    critic: str
    x: float | None
    """The number that differs within the family: the explained variance aimed at, the factor, the shift or the constant."""
    weights: Tensor
    """(R,J)."""


class ArmMaker:
    """Makes arms of weights by name."""

    def __init__(self, tokens: Tokens, critics: list[str]) -> None:
        self._tokens = tokens
        self._critics = critics
        self._num_rollouts = int(tokens.rollout.max()) + 1

    def all(self) -> Iterator[Arm]:
        """Yield every arm; the batch mean, which the others are held against, comes first."""
        yield self._arm("baseline", MEAN, None, {MEAN: 1.0})
        yield self._arm("baseline", "none", None, {})
        yield self._arm("baseline", OTHERS, None, {OTHERS: 1.0})
        for constant in CONSTANTS:
            yield self._arm("constant", "none", constant, {ONE: constant})
        for critic in self._critics:
            yield self._arm("critic", critic, None, {critic: 1.0})
            yield from self._switched(critic, {critic: 1.0}, None)
        for critic in (PRETRAINED, ORACLE):
            for factor in SCALES:
                yield self._arm("scaled", critic, factor, {critic: factor})
            for shift in SHIFTS:
                yield self._arm("shifted", critic, shift, {critic: 1.0, ONE: shift})
            for noise in NOISES:
                for target, weights in self._noisy(critic, noise):
                    yield self._arm(noise, critic, target, weights)
                    if noise == NOISES[0]:
                        yield from self._switched(critic, weights, target)
            for _, weights in self._noisy(critic, WHITE_EARLY, targets=(0.05,)):
                yield self._arm(WHITE_EARLY, critic, 0.05, weights)

    def _noisy(
        self, critic: str, noise: str, targets: tuple[float, ...] = NOISY_VARIANCES
    ) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield each target of the explained variance that lies below the critic's, with the weights of critic and
        noise that reach it over all tokens.
        """
        returns = self._tokens.returns.double()
        start = explained(self._tokens.column(critic), returns)
        share = self._tokens.column(noise).double().var(correction=0) / returns.var(correction=0)
        for target in targets:
            if target < start:
                yield target, {critic: 1.0, noise: ((start - target) / share.item()) ** 0.5}

    def _switched(self, critic: str, weights: dict[str, float], x: float | None) -> Iterator[Arm]:
        """Yield EVPO's switch and the smooth form, by the explained variance of each rollout."""
        alone, mean = self._row(weights), self._row({MEAN: 1.0})
        advantages = self._tokens.advantages(alone.repeat(self._num_rollouts, 1))
        variances = [
            explained(
                self._tokens.returns[here].double() - advantages[here].double(),
                self._tokens.returns[here].double(),
            )
            for here in (self._tokens.rollout == r for r in range(self._num_rollouts))
        ]
        for family, shares in (
            ("switched", [switched_weight(each, threshold=0.0) for each in variances]),
            ("blended", [blended_weight(each) for each in variances]),
        ):
            share = torch.tensor(shares)[:, None]
            yield Arm(family, critic, x, share * alone + (1 - share) * mean)

    def _arm(self, family: str, critic: str, x: float | None, weights: dict[str, float]) -> Arm:
        return Arm(family, critic, x, self._row(weights).repeat(self._num_rollouts, 1))

    def _row(self, weights: dict[str, float]) -> Tensor:
        """Return the weights (J,)."""
        return torch.tensor([weights.get(name, 0.0) for name in self._tokens.names])


def explained(values: Tensor, returns: Tensor) -> float:
    """Return 1 − Var(G − V) / Var(G) over tokens (N,)."""
    return 1 - ((returns - values).var(correction=0) / returns.var(correction=0)).item()
