"""Compile the layers of a network by torch.compile, for passes over whole sequences; docs/decisions/0041.

All layers of a model share the compiled code. Its shapes are symbols, so that few graphs serve all passes. Passes with
a key-value cache are not compiled: each layer would be compiled separately, and a sampler's shapes change with each
token.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

MOST_GRAPHS = 64
"""Most graphs of one kind of layer. Torch's own limit is 8, after which it goes on uncompiled."""
TRIAL_ROWS, TRIAL_TOKENS = 3, 11
"""Shape of the passes by which layers are compiled. Its numbers differ from every number of heads and every width,
since torch gives equal numbers the same symbol."""


class CannotCompile(Exception):
    """No compiler is installed, or the layers cannot be compiled; the network is unchanged."""


def compile_layers(network: nn.Module, *, packs: bool = False, backend: str = "inductor") -> int:
    """Compile the network's layers, in place; returns the number of graphs.

    They are compiled by passes that always have the same shapes. The first numbers that torch sees may decide how it
    compiles symbols, and a resumed stage must compute the same.

    Args:
        packs: whether passes will have rows with several sequences.

    Raises:
        CannotCompile: nothing is compiled.
    """
    trunks = [part for part in network.modules() if isinstance(part, PreTrainedModel) and _is_trunk(part)]
    layers = [layer for trunk in trunks for layer in _layers(trunk)]
    if not layers:
        raise CannotCompile(f"{type(network).__name__} has no layers that transformers marks as such")
    _allow_graphs()
    before = _num_graphs()
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # a copy of the layer gets its own method
        vars(layer)[_BACKEND] = backend
    try:
        for trunk in trunks:
            _try(trunk, packs=packs)
    except Exception as error:
        # Whatever the error is, the uncompiled layers work
        for layer in layers:
            del layer.forward, vars(layer)[_BACKEND]
        message = next((line for line in str(error).splitlines() if line.strip()), "no message")
        raise CannotCompile(f"{type(error).__name__}: {message.strip()}") from error
    return _num_graphs() - before


def taken_graphs() -> int:
    """Return the number of graphs that this process has compiled since the last call."""
    global _taken
    now = _num_graphs()
    since, _taken = now - _taken, now
    return since


_BACKEND = "compiled_by"
_taken = 0


def _num_graphs() -> int:
    """Return the number of graphs that this process has compiled; torch's compiler is not loaded if there are none."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else int(compiler.counters["stats"]["unique_graphs"])


def _forward(layer: nn.Module, *inputs: Any, **options: Any) -> Any:
    written = type(layer).forward
    if any(isinstance(each, Cache) for each in (*inputs, *options.values())):
        return written(layer, *inputs, **options)
    return _compiled(written, vars(layer)[_BACKEND])(layer, *inputs, **options)


@cache
def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(forward, dynamic=True, backend=backend)
    return compiled


@cache
def _allow_graphs() -> None:
    """Allow as many graphs as the networks need. This is done once, since importing torch's compiler takes seconds."""
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = MOST_GRAPHS


def _try(trunk: PreTrainedModel, *, packs: bool) -> None:
    """Try all kinds of passes, with and without gradients."""
    learns = any(parameter.requires_grad for parameter in trunk.parameters())
    for inputs in _kinds_of_passes(trunk.device, packs=packs):
        with torch.no_grad():
            trunk(**inputs, use_cache=False)
        if learns:
            with _kept_gradients(trunk), torch.enable_grad():
                trunk(**inputs, use_cache=False).last_hidden_state.sum().backward()


def _kinds_of_passes(device: torch.device, *, packs: bool) -> Iterator[dict[str, Tensor]]:
    """Yield passes of several rows and of a single row (torch takes the number 1 for a constant), without and with
    padding, and packed."""
    for rows in (TRIAL_ROWS, 1):
        ids = torch.ones(rows, TRIAL_TOKENS, dtype=torch.long, device=device)
        whole = torch.ones_like(ids)
        padded = whole.clone()
        padded[0, TRIAL_TOKENS // 2 :] = 0
        yield {"input_ids": ids, "attention_mask": whole}
        yield {"input_ids": ids, "attention_mask": padded}
        if packs:  # a row may also hold a single sequence
            for length in (TRIAL_TOKENS // 2, TRIAL_TOKENS):
                positions = torch.arange(TRIAL_TOKENS, device=device) % length
                yield {"input_ids": ids, "position_ids": positions.repeat(rows, 1)}


@contextmanager
def _kept_gradients(trunk: nn.Module) -> Iterator[None]:
    """Restore the gradients at the end of the block."""
    kept = {parameter: parameter.grad for parameter in trunk.parameters()}
    for parameter in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept.items():
            parameter.grad = gradient


def _is_trunk(part: PreTrainedModel) -> bool:
    """Return whether the part contains layers directly."""
    return bool(_layers(part)) and part.base_model is part


def _layers(trunk: nn.Module) -> list[GradientCheckpointingLayer]:
    return [part for part in trunk.modules() if isinstance(part, GradientCheckpointingLayer)]
