"""Frozen weights in 4 bits (NF4), under adapters: QLoRA, arXiv 2305.14314.

The weights are rounded once, when the recipe's model is imported: the folder in the store holds numbers that NF4 can hold,
in float32, and everything built on it (policy, reference, reward model, merged model) has the same base. Holding
them in 4 bits then changes only memory: rounding them again changes nothing, and on a CPU every pass gives the same
bits. Double quantisation is not used: it would round the scales too, the second time by another amount.
"""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from vantage.models.folders import load_policy, load_tokenizer, read_tensor, save_policy
from vantage.models.sharding import are_deferred, without_weights

SIDECAR = "quantization.json"
"""File in a model's folder: the names of the layers whose weights lie on NF4's grid."""
BLOCK = 64
"""Number of weights that share one scale."""


def round_folder(folder: Path, output: Path) -> None:
    """Write the model of a folder with all linear layers but its output head rounded to NF4; the same bytes each time.

    Raises:
        ValueError: bitsandbytes is not installed, or the model has no linear layers.
        UnsafeModel: see `vantage.models.folders.check_folder`.
    """
    model = load_policy(folder)
    names = _linear_layers(model)
    if not names:
        raise ValueError(
            f"model.quantization=nf4: {type(model).__name__} has no linear layers (GPT-2's are transposed convolutions, "
            "which bitsandbytes does not hold in 4 bits); leave quantization out"
        )
    with torch.no_grad():
        for name in names:
            weight = model.get_parameter(f"{name}.weight")
            packed, state = _quantised(weight)
            weight.copy_(_dequantised(packed, state))
    save_policy(model, load_tokenizer(folder), output)
    layout = {"weights": "nf4", "block": BLOCK, "layers": names}
    (output / SIDECAR).write_text(json.dumps(layout, indent=2) + "\n", encoding="utf-8")


def load_frozen(folder: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return a causal language model that is not trained: in 4 bits if its weights were rounded to 4 bits, else in
    `dtype`.

    Within `vantage.models.sharding.without_weights` the model has no weights.

    Raises:
        ValueError: its weights were rounded, and bitsandbytes is not installed.
        UnsafeModel: see `vantage.models.folders.check_folder`.
    """
    names = quantised_layers(folder)
    if not names:
        return load_policy(folder, dtype=dtype)
    with without_weights():
        model = load_policy(folder)
    for name in names:
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, _in_4_bits(model.get_submodule(name)))
    if not are_deferred():
        _fill(model, folder, quantised={f"{name}.weight" for name in names}, dtype=dtype)
    return model


def _fill(model: PreTrainedModel, folder: Path, *, quantised: set[str], dtype: torch.dtype) -> None:
    """Fill a model without weights from its folder, one weight after the other: it is never whole in a wider type,
    unless the folder's files give a weight another name, as those of GPT-NeoX do."""
    whole: dict[str, nn.Parameter] = {}
    called: dict[int, list[str]] = {}  # one weight may have several names, of which the file has one
    for name, parameter in model.named_parameters(remove_duplicate=False):
        called.setdefault(id(parameter), []).append(name)
    for names in called.values():
        weight = next((found for name in names if (found := read_tensor(folder, name)) is not None), None)
        if weight is None:
            whole = whole or dict(load_policy(folder).named_parameters(remove_duplicate=False))
            weight = whole[names[0]].detach()
        held = (
            _packed(weight) if quantised & set(names) else nn.Parameter(weight.to(dtype, copy=True))
        )  # a copy, not a view of the mapped file
        for name in names:
            place, _, last = name.rpartition(".")
            model.get_submodule(place)._parameters[last] = held


def quantised_layers(folder: Path) -> tuple[str, ...]:
    """Return the names of the layers whose weights were rounded; a plain model has none."""
    path = folder / SIDECAR
    return tuple(json.loads(path.read_text(encoding="utf-8"))["layers"]) if path.is_file() else ()


def _linear_layers(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    return [
        name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head
    ]


def _in_4_bits(linear: nn.Module) -> nn.Module:
    """Return the 4-bit layer that replaces a linear layer on the meta device; its weight is loaded later."""
    assert isinstance(linear, nn.Linear), "named when it was rounded"
    held = _layer_class()(linear.in_features, linear.out_features, bias=False, device="meta")
    held.bias = linear.bias
    return held.train(linear.training)


def _packed(weight: Tensor) -> nn.Parameter:
    packed, state = _quantised(weight)
    held: nn.Parameter = _library().nn.Params4bit(
        packed,
        quant_state=state,
        blocksize=BLOCK,
        compress_statistics=False,
        quant_type="nf4",
        bnb_quantized=True,
    )
    return held


@functools.cache
def _layer_class() -> type[nn.Linear]:
    """Return the class of bitsandbytes' linear layer, as a plain function of its inputs.

    The forward pass of bitsandbytes changes the layout of weights on some CPUs, remembers the type of its first input,
    and ignores autocast.
    """
    library = _library()

    class FrozenLinear(library.nn.Linear4bit):  # type: ignore[misc, name-defined]
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_autocast_enabled(x.device.type):
                x = x.to(torch.get_autocast_dtype(x.device.type))
            bias, state = None if self.bias is None else self.bias.to(x.dtype), self.weight.quant_state
            if x.device.type == "cpu":
                product: Tensor = _Linear.apply(x, self.weight.data, state, bias)  # type: ignore[no-untyped-call]
                return product
            result: Tensor = library.matmul_4bit(x, self.weight, bias=bias, quant_state=state)
            return result

    return FrozenLinear


class _Linear(torch.autograd.Function):
    """x·Wᵀ + b with frozen W and b; the backward pass keeps W in 4 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: Any, bias: Tensor | None) -> Tensor:
        ctx.state = state
        ctx.save_for_backward(packed)
        return nn.functional.linear(x, _dequantised(packed, state).to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        return grad @ _dequantised(packed, ctx.state).to(grad.dtype), None, None, None


def _dequantised(packed: Tensor, state: Any) -> Tensor:
    """Return the weights in float32; they are dequantised as one row and then reshaped.

    bitsandbytes 0.50.2 takes another block's scale on processors with AVX-512 if a row's length is no multiple of
    ``BLOCK``: a weight may be wrong by its whole size.
    """
    in_one_row = copy.copy(state)
    in_one_row.shape = torch.Size([state.shape.numel()])
    found: Tensor = _library().functional.dequantize_4bit(packed, in_one_row)
    return found.view(state.shape)


def _quantised(weight: Tensor) -> tuple[Tensor, Any]:
    packed, state = _library().functional.quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type="nf4"
    )
    return packed, state


def _library() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError(
            "model.quantization=nf4 needs the package bitsandbytes; pip install 'vantage-rlhf[qlora]'"
        ) from error
    return bitsandbytes
