"""The state of a critic's AdamW beside its weights, for the stage that trains the critic further."""

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from vantage.tasks.training.host_optimizer import HOST, HostAdamW

_FILE = "optimizer.safetensors"
_PREFIX = "optimizer:"
"""Prefix of the state's names among the weights of a kept network."""


class NoOptimizerState(ValueError):
    """A critic's folder lacks the optimiser state that the recipe wants to carry on."""


def state_of(optimizer: Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of both moments and the number of steps of each trained parameter, on the CPU; empty before the first step."""
    return {
        f"{_PREFIX}{name}/{key}": tensor.detach().to("cpu", copy=True)
        for name, parameter in module.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def write_state(folder: Path, kept: dict[str, Tensor]) -> None:
    """Write the state from ``state_of``, wherever it is among ``kept``, into a critic's folder."""
    state = {name.removeprefix(_PREFIX): each for name, each in kept.items() if name.startswith(_PREFIX)}
    save_file(state, folder / _FILE)


def carry_over(optimizer: Optimizer, module: nn.Module, folder: Path) -> None:
    """Continue the optimiser of the critic in ``folder``, for every parameter that is trained now.

    Learning rates, weight decay and betas are those of the new optimiser. A critic whose best weights were its first
    has no state, and begins with fresh moments.

    Raises:
        NoOptimizerState: the folder has no state.
    """
    if not (folder / _FILE).is_file():
        raise NoOptimizerState(
            "critic_optimizer: carry needs the optimiser's state beside the critic, and there is none; pretrain the critic "
            "with keep_optimizer: true, or set critic_optimizer: fresh"
        )
    saved = load_file(folder / _FILE)
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in module.named_parameters():
        entries = {
            key.rpartition("/")[2]: each for key, each in saved.items() if key.rpartition("/")[0] == name
        }
        if parameter in trained and entries:
            # AdamW's fused kernel reads the number of steps on the device too
            device = HOST if isinstance(optimizer, HostAdamW) else parameter.device
            optimizer.state[parameter] = {key: each.to(device) for key, each in entries.items()}
