"""AdamW with moments in 8 bits (Dettmers et al., arXiv 2110.02861 §2): bitsandbytes' version, with a state of plain
tensors."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from bitsandbytes.optim.adamw import AdamW8bit as _AdamW8bit
from torch import Tensor

BLOCK = 256
"""Elements of a moment that share a scale."""
LEAST_ELEMENTS = 4096
"""Moments of smaller parameters stay in float32."""
_MAPS = ("qmap1", "qmap2")
"""The 256 numbers that the 8 bits encode: constants, which checkpoints do not contain."""


class AdamW8bit(_AdamW8bit):
    """AdamW with moments in 8 bits. Like that of torch's AdamW, its ``state_dict`` has only tensors, and restores the
    same bits."""

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            groups, lr=lr, betas=betas, eps=eps, weight_decay=0.0, min_8bit_size=LEAST_ELEMENTS
        )

    def state_dict(self) -> dict[str, Any]:
        """Return states by the parameters' numbers, and the groups; the tensors are not copied."""
        described = torch.optim.Optimizer.state_dict(self)
        states = {
            number: {
                name: torch.tensor(float(value)) if name == "step" else value
                for name, value in state.items()
                if name not in _MAPS
            }
            for number, state in described["state"].items()
        }
        return {**described, "state": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore what ``state_dict`` returned."""
        states = {
            number: {name: int(value) if name == "step" else value for name, value in state.items()}
            for number, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": states})  # type: ignore[no-untyped-call]
        for parameter, state in self.state.items():
            if state["state1"].dtype == torch.uint8:
                for name, kind in zip(_MAPS, ("dynamic", "udynamic"), strict=True):
                    self.name2qmap[kind] = self.name2qmap[kind].to(parameter.device)
                    state[name] = self.name2qmap[kind]

    def layout(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state's tensors of a parameter, by name, without memory (on the device ``meta``)."""
        is_small = parameter.numel() < LEAST_ELEMENTS
        moment = torch.empty_like(parameter, dtype=torch.float32 if is_small else torch.uint8, device="meta")
        found = {"step": torch.empty((), device="meta"), "state1": moment, "state2": moment}
        if not is_small:
            scales = torch.empty(math.ceil(parameter.numel() / BLOCK), device="meta")
            found |= {"absmax1": scales, "absmax2": scales}
        return found
