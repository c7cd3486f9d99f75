"""Adapters of a policy as vLLM takes them: which ones it can apply, the room that it keeps for them, and their files."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from vantage.models.adapters import NAME, has_adapters, shape_of, write_adapters
from vantage.schemas.checks.engines import VLLM_RANKS
from vantage.tasks.training import ranks

_PLAIN = tuple(f".{part}.{NAME}.weight" for part in ("lora_A", "lora_B"))


@dataclass(frozen=True)
class AdapterRoom:
    """Room that vLLM keeps for one adapter."""

    max_rank: int
    """One of ``VLLM_RANKS``; smaller adapters are padded with zeros."""
    targets: tuple[str, ...]
    """Last parts of the names of the layers that may have an adapter. On a CPU, vLLM computes log-probabilities of
    prompts only if the output head is not among them."""


def room_for(model: PreTrainedModel) -> AdapterRoom | None:
    """Return the room that the model's adapters need; None: it has none.

    Raises:
        ValueError: vLLM cannot apply the adapters.
    """
    if not has_adapters(model):
        return None
    shape = shape_of(model)
    if shape.rank > VLLM_RANKS[-1]:
        raise ValueError(
            f"rollout.engine=vllm applies adapters of rank {VLLM_RANKS[-1]} at most, and lora.rank={shape.rank}; use a smaller rank, or "
            "engine: loop"
        )
    packed = [name for name, weight in model.named_parameters() if not weight.is_floating_point()]
    if packed:
        raise ValueError(
            f"rollout.engine=vllm takes the base's weights as numbers, and {packed[0]} is held in 4 bits; use engine: loop, or leave "
            "model.quantization out"
        )
    unsent = [
        name
        for name, weight in model.named_parameters()
        if (".lora_" in name or weight.requires_grad) and not name.endswith(_PLAIN)
    ]
    if unsent:
        raise ValueError(
            f"rollout.engine=vllm takes the base once and then the matrices A and B of adapters alone, and {unsent[0]} is trained beside "
            "them; use plain LoRA, or engine: loop"
        )
    targets = sorted({name.rpartition(".")[2] for name in shape.modules})
    return AdapterRoom(next(rank for rank in VLLM_RANKS if rank >= shape.rank), tuple(targets))


@contextmanager
def adapter_files(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> Iterator[Path]:
    """Write the adapters in peft's format and yield their folder; it is removed at the end.

    All ranks must enter the block if the weights are sharded. The first rank writes, and the files of the others are
    discarded.

    Args:
        weights: the model's parameters by name, of which the adapters are written.
        folder: holds nothing else; files that a killed attempt left there are removed.

    Raises:
        OSError: the folder cannot be written.
    """
    if ranks.rank() != 0:
        if ranks.are_sharded():
            with tempfile.TemporaryDirectory() as thrown_away:
                write_adapters(model, Path(thrown_away), base=None, weights=weights)
        yield folder
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        write_adapters(model, folder, base=None, weights=weights)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
