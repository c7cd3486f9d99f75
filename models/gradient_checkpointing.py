"""Gradient checkpointing: only each layer's inputs are kept for the backward pass, which computes the rest again."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

_LAYERS = "checkpointed_layers"


def checkpoint_gradients(network: nn.Module) -> None:
    """Make the network's layers drop their intermediate results in passes that have gradients; in place.

    transformers does so only in training mode, and a layer in that mode drops the cache that sampling needs. Networks
    here
    are always in evaluation mode, so a layer enters training mode just for passes with gradients. Dropout is 0 in both.

    Raises:
        ValueError: the network's architecture has no such layers.
    """
    for model in [part for part in network.modules() if isinstance(part, PreTrainedModel)]:
        layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(
                f"gradient_checkpointing: {type(model).__name__} has no layers that can be computed again; leave it out"
            )
        model.gradient_checkpointing_enable(
            {"use_reentrant": False}
        )  # the non-reentrant form also works with frozen embeddings
        vars(model)[_LAYERS] = layers  # a copy of the model has copies of them here
        model.register_forward_pre_hook(lambda model, _: _switch(vars(model)[_LAYERS]))


def _switch(layers: list[GradientCheckpointingLayer]) -> None:
    for layer in layers:
        layer.training = torch.is_grad_enabled()
