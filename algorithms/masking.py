"""Check and apply masks; all algorithms use this module for it."""

import torch
from torch import Tensor


def keep(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return `tensor` where `mask` is True and 0 elsewhere, in float32 or better.

    Selection comes before any arithmetic: NaN · 0 is NaN in the value and, through the chain rule, in the
    gradient, while `where` passes neither.
    """
    precise = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return torch.where(mask, precise, 0.0)


def check_response_mask(response_mask: Tensor, **per_token: Tensor) -> None:
    """Raise unless `response_mask` is a boolean (B,T) tensor and every named tensor has its shape.

    Raises TypeError for a mask that is not boolean, ValueError for a wrong shape.
    """
    check_boolean("response_mask", response_mask)
    if response_mask.dim() != 2:
        raise ValueError(f"response_mask has shape {tuple(response_mask.shape)}; it must be (B, T)")
    for name, tensor in per_token.items():
        check_shape(name, tensor, tuple(response_mask.shape))


def check_boolean(name: str, mask: Tensor) -> None:
    """Raise TypeError unless `mask` is boolean: as indices or factors, 0 and 1 mean something else."""
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{name} has dtype {mask.dtype}; it must be torch.bool; call .bool() on a mask of 0 and 1"
        )


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` has exactly this shape: broadcasting would hide the mistake."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(shape)}")
