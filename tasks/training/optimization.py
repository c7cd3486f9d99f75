"""One optimiser step, and its learning rate: shared by every stage that trains."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import nn

from vantage.models.sharding import whole
from vantage.schemas.recipe.resolved import ResolvedTraining
from vantage.schemas.recipe.stage import OptimizerStates, Training
from vantage.tasks.training import nonfinite
from vantage.tasks.training.gradients import add_gradients
from vantage.tasks.training.host_optimizer import HostAdamW

Schedule = Literal["constant", "linear", "cosine"]
Precision = Literal["float32", "bfloat16"]
BETAS = (0.9, 0.95)
EPS = 1e-8


def training_device() -> torch.device:
    """Return the GPU of this rank (without ranks: the first visible one), or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def optimizer_of(module: nn.Module, work: Training) -> torch.optim.Optimizer:
    """Return an optimiser of the module with the stage's settings."""
    return make_optimizer(
        module,
        weight_decay=work.weight_decay,
        states=work.optimizer_states,
        in_host="optimizer" in work.resources.offload,
    )


def make_optimizer(
    module: nn.Module,
    *,
    weight_decay: float,
    states: OptimizerStates = "float32",
    in_host: bool = False,
) -> torch.optim.Optimizer:
    """Return AdamW over all trainable parameters; those with fewer than two dimensions are not decayed.

    Args:
        states: type of the two moments.
        in_host: whether the moments are in host memory and a CPU computes the updates; only in float32.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if states == "8bit":
        from vantage.tasks.training.eight_bit import AdamW8bit  # loads bitsandbytes, an optional package

        return AdamW8bit(groups, lr=0.0, betas=BETAS, eps=EPS)
    kind = HostAdamW if in_host else torch.optim.AdamW
    return kind(groups, lr=0.0, betas=BETAS, eps=EPS, fused=True)


def learning_rate_at(
    step: int, *, peak: float, warmup_steps: int, total_steps: int, schedule: Schedule
) -> float:
    """Return the learning rate of optimiser step ``step`` (from 0): linear warm-up, then the schedule down to 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    if schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def update_weights(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    work: ResolvedTraining,
    *,
    step: int,
    total_steps: int,
    peak: float | None = None,
    warmup_steps: int | None = None,
) -> dict[str, float]:
    """Take optimiser step ``step`` of ``total_steps`` as the recipe schedules it.

    Args:
        peak: highest learning rate; None: ``work.learning_rate``.
        warmup_steps: steps of the warm-up; None: ``work.warmup_steps``.

    Returns:
        ``grad_norm`` (before clipping) and ``learning_rate``.

    Raises:
        TrainingDiverged: the gradient is not finite, and that is not tolerated; weights and optimiser are unchanged.
    """
    peak = work.learning_rate if peak is None else peak
    learning_rate = learning_rate_at(
        step,
        peak=peak,
        warmup_steps=work.warmup_steps if warmup_steps is None else warmup_steps,
        total_steps=total_steps,
        schedule=work.schedule,
    )
    grad_norm = take_step(optimizer, module, learning_rate=learning_rate, max_grad_norm=work.max_grad_norm)
    return {"grad_norm": grad_norm, "learning_rate": learning_rate}


def take_step(
    optimizer: torch.optim.Optimizer, module: nn.Module, *, learning_rate: float, max_grad_norm: float
) -> float:
    """Add the ranks' gradients, clip the sum to ``max_grad_norm`` (L2), step, and clear it; returns the norm before.

    If the norm is not finite, the step is left out: weights and optimiser stay unchanged.

    Raises:
        TrainingDiverged: the norm is not finite, and that is not tolerated.
    """
    add_gradients(module)
    norm = float(whole(nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm, foreach=True)))
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        nonfinite.meet("the gradient's norm", norm, remedy="lower the learning rate, or look at the batch")
        nonfinite.leave_out_step()
        return norm
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def frozen_dtype(precision: Precision) -> torch.dtype:
    """Return the type of a reward's models.

    A reference does not get this type: its embeddings and norms would compute in bfloat16, but autocast leaves those of
    the policy in float32, so equal weights would give different results.
    """
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Compute in ``precision`` inside the block; weights stay unchanged."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
