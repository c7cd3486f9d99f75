"""Check an adapter's folder without a tensor library: its configuration and the headers of its weights."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vantage.models.folder_check import UnsafeModel, read_header, read_json_object

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of every name in the weights, as peft writes it."""

_TENSOR = re.compile(re.escape(PREFIX) + r"([A-Za-z0-9_.]{1,255})\.(lora_A|lora_B)\.weight")
_MAX_RANK = 2**16

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "modules_to_save": (None, [], ()),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "megatron_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "velora_config": (None,),
}
"""Field → its values in a plain LoRA adapter. Any other value means another computation, or weights of another kind.
Fields that name classes or a base are not listed, since they are never followed."""


@dataclass(frozen=True)
class AdapterShape:
    """Layers that have adapters, and the size of the adapters."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    """Names of the layers, as in the causal language model."""


def is_adapter(folder: Path) -> bool:
    """Return whether the folder holds adapters, and no whole model."""
    return (folder / CONFIG).is_file()


def check_adapter(folder: Path) -> AdapterShape:
    """Refuse a folder that is no plain LoRA adapter in safetensors; the name of its base is not followed.

    Raises:
        UnsafeModel: the folder is refused; the error names the file, the field and the rule.
    """
    path = folder / CONFIG
    config = read_json_object(path)
    for field, plain in _PLAIN.items():
        if config.get(field) not in plain:
            allowed = " or ".join(str(value) for value in plain if value not in ([], ()))
            raise UnsafeModel(
                f"{path}: {field}={str(config.get(field))[:100]!r}, must be {allowed}; only plain LoRA adapters are read, "
                "so merge this one into its model first"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _MAX_RANK:
        raise UnsafeModel(f"{path}: r={str(rank)[:60]} is no whole number from 1 to {_MAX_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0:
        raise UnsafeModel(f"{path}: lora_alpha={str(alpha)[:60]} is not above 0")
    return AdapterShape(rank, float(alpha), _modules(folder, rank))


def _modules(folder: Path, rank: int) -> tuple[str, ...]:
    path = folder / WEIGHTS
    if not path.is_file():
        raise UnsafeModel(f"{path} is missing; save the adapter as safetensors")
    parts: dict[str, set[str]] = {}
    for name, tensor in read_header(path).items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise UnsafeModel(
                f"{path}: {name[:100]!r} is none of {PREFIX}LAYER.lora_A.weight and lora_B.weight; only plain LoRA "
                "adapters are read"
            )
        side = 0 if found[2] == "lora_A" else 1
        if len(tensor.shape) != 2 or tensor.shape[side] != rank:
            raise UnsafeModel(f"{path}: {name} has the shape {tensor.shape}, and r={rank}; the two disagree")
        parts.setdefault(found[1], set()).add(found[2])
    single = sorted(name for name, both in parts.items() if len(both) == 1)
    if single or not parts:
        what = f"{single[0]} has only one of lora_A and lora_B" if single else "there are no adapters in it"
        raise UnsafeModel(f"{path}: {what}; save it again")
    return tuple(sorted(parts))
