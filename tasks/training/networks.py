"""Networks on the device of this rank: whole, or of each weight the rank's own rows."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.policy import PolicyModel
from models.sharding import like, local, read_own_rows, shard, without_weights
from tasks.training import ranks

Network = TypeVar("Network", bound=nn.Module)


def placed(build: Callable[[], Network], folder: Path, device: torch.device) -> Network:
    """The network that ``build`` loads from the folder; with sharded ranks it is never whole in any of them."""
    if not ranks.are_sharded():
        return build().to(device)
    with without_weights():
        network = build()
    shard(network, device=device, methods=("next_logits",) if isinstance(network, PolicyModel) else ())
    model = next(part for part in network.modules() if isinstance(part, PreTrainedModel))
    read_own_rows(network, model, folder)
    return network


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of this rank's weights on the CPU, to go back to."""
    return {name: local(tensor.detach()).to("cpu", copy=True) for name, tensor in module.state_dict().items()}


@torch.no_grad()
def put_back(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Go back to weights that ``weights_of`` gave."""
    module.load_state_dict(
        {
            name: like(tensor, weights[name].to(local(tensor).device))
            for name, tensor in module.state_dict().items()
        }
    )
