"""AdamW whose moments are in host memory, and whose updates a CPU computes.

Weights and their gradients are copied to the host one by one, and the updated weights back. On a CPU nothing is copied,
and the bits are those of torch's fused AdamW. For weights on a GPU, the result differs from the GPU's AdamW by
rounding.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

HOST = torch.device("cpu")


class HostAdamW(torch.optim.AdamW):
    """AdamW with its state in host memory, wherever the parameters are."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        assert closure is None, "a step has its gradients"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        weight, gradient = in_host(parameter.detach()), in_host(parameter.grad)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        adamw(
            [weight],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if weight.data_ptr() != parameter.data_ptr():
            parameter.copy_(weight)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; torch's own function would move the moments to the parameters' device."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state = defaultdict(dict)
        for number, state in state_dict["state"].items():
            self.state[parameters[number]] = {
                name: tensor.to(HOST, copy=True) for name, tensor in state.items()
            }


def in_host(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory: itself, if it is there."""
    return tensor.to(HOST)
