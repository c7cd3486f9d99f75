"""The trust-region guard: take back an optimiser step that moves the policy too far, or makes it worse.

A line search as in TRPO (arXiv 1502.05477 appendix C), along the step of any optimiser.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

SURROGATE_ROUNDING = 1e-7
"""Amount, relative to its size, by which the surrogate may get worse from rounding alone."""


@dataclass(frozen=True)
class Guarded:
    """Outcome of a guarded step."""

    metrics: dict[str, float]
    """Metrics of the step that was tried last."""
    undone: int
    """Number of steps that were taken back."""
    accepted: bool
    """Whether a step was kept; if not, the weights and the optimiser are unchanged."""


def guarded_step(
    step: Callable[[float], dict[str, float]],
    measure: Callable[[], tuple[float, float]],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    surrogate_before: float,
    max_kl: float,
    halvings: int,
) -> Guarded:
    """Take a step, halved at most ``halvings`` times, that stays in the trust region; if there is none, take no step.

    Args:
        step: function that takes a step with the accumulated gradient at a share of its learning rate, and clears the gradient.
        measure: function that returns the present surrogate loss and KL(old‖new), in nats per token.
        surrogate_before: the loss that must not be exceeded.
        max_kl: the KL that must not be exceeded.
    """
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    moments = copy.deepcopy(optimizer.state_dict())
    metrics: dict[str, float] = {}
    highest = surrogate_before + SURROGATE_ROUNDING * abs(surrogate_before)
    for halved in range(halvings + 1):
        metrics = step(0.5**halved)
        surrogate, kl = measure()
        if kl <= max_kl and surrogate <= highest:  # NaN fails
            return Guarded(metrics, undone=halved, accepted=True)
        _restore(module, weights)
        optimizer.load_state_dict(copy.deepcopy(moments))
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name].clone() if name in gradients else None
    optimizer.zero_grad(set_to_none=True)
    return Guarded(metrics, undone=halvings + 1, accepted=False)


@torch.no_grad()
def _restore(module: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        parameter.copy_(weights[name])
