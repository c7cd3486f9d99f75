"""The policy's weights as files, for servers that read them from a folder."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vantage.tasks.training.optimization import Precision

BYTES_IN_FILE = 4 * 2**30
"""Bytes of weights after which another file begins, so that few are in memory twice."""


@contextmanager
def weight_files(weights: Mapping[str, Tensor], folder: Path, *, precision: Precision) -> Iterator[Path]:
    """Write the weights, in the type that the servers compute with, and yield their folder; they are removed at the end.

    Args:
        folder: holds nothing else; what a killed attempt left there is removed.

    Raises:
        OSError: the folder cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        for number, part in enumerate(_parts(weights, getattr(torch, precision)), start=1):
            save_file(part, folder / f"model-{number:05d}.safetensors")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parts(weights: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    for name, weight in weights.items():
        part[name] = weight.detach().to(device="cpu", dtype=dtype).contiguous()
        if sum(each.nbytes for each in part.values()) >= BYTES_IN_FILE:
            yield part
            part = {}
    if part:
        yield part
