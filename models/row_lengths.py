"""Keep the lengths of a batch's rows as Python numbers, so that code need not wait for a GPU's queued work."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowLengths:
    """Lengths of B sequences, in order; the tensors of `Sequences` have the same numbers."""

    prompts: list[int]
    """Tokens of each prompt."""
    responses: list[int]
    """Tokens of each response."""
    prompt_numbers: list[int] | None = None
    """Numbers that are equal exactly if the prompts are equal; None: unknown."""

    @property
    def totals(self) -> list[int]:
        """Tokens of each prompt with its response."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]

    def select(self, rows: Sequence[int]) -> "RowLengths":
        """Return the lengths of the sequences at ``rows``, in that order."""
        numbers = self.prompt_numbers
        return RowLengths(
            prompts=[self.prompts[row] for row in rows],
            responses=[self.responses[row] for row in rows],
            prompt_numbers=None if numbers is None else [numbers[row] for row in rows],
        )


def first_places(keys: Iterable[Hashable]) -> list[int]:
    """Return for each key the place of the first equal key."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(key, place) for place, key in enumerate(keys)]


def on_device(numbers: Sequence[int] | Tensor, device: torch.device | str) -> Tensor:
    """Return whole numbers, or a tensor, on a device, without waiting for a GPU's queued work."""
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.long)
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
