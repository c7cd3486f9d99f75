"""Record what the models of a stage are given to read, as transformers sees it, sampling left out."""

from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest
from transformers import LlamaModel

from vantage.models import sampling


@dataclass(frozen=True)
class Read:
    """One forward pass of a trunk."""

    model: int
    """The trunk, by its id."""
    positions: int
    tokens: int
    """Number of the positions that are not padding."""


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """Return a list to which every pass is added from now on that has a mask: a model is tried without one."""
    reads: list[Read] = []
    forward, sample_batch = LlamaModel.forward, sampling._sample_batch
    is_sampling = False

    @wraps(forward)  # the parameters of its forward pass show whether it takes positions
    def recorded(self: LlamaModel, *args: Any, **inputs: Any) -> Any:
        mask, ids = inputs.get("attention_mask"), inputs["input_ids"]
        if mask is not None and not is_sampling:
            reads.append(Read(id(self), ids.numel(), int(mask[:, -ids.shape[1] :].sum())))
        return forward(self, *args, **inputs)

    def sampled(*args: Any, **inputs: Any) -> Any:
        nonlocal is_sampling
        is_sampling = True
        try:
            return sample_batch(*args, **inputs)
        finally:
            is_sampling = False

    monkeypatch.setattr(LlamaModel, "forward", recorded)
    monkeypatch.setattr(sampling, "_sample_batch", sampled)
    return reads
