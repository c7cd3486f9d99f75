"""The policy's weights as files, for servers that read them from a folder."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vantage.models.sharding import whole
from vantage.tasks.rollout.checksums import GivenWeights
from vantage.tasks.training import ranks
from vantage.tasks.training.optimization import Precision

BYTES_IN_FILE = 4 * 2**30
"""Bytes of weights after which a new file begins, so that only few bytes are in memory twice."""


@contextmanager
def update_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield the folder of one update's files below ``parent``, which is removed at the end.

    Args:
        parent: holds nothing else; files that a killed attempt left there are removed.
        name: must differ for each update, since network file systems may show the old content of a folder with an old
            name.
    """
    is_first = ranks.rank() == 0
    if is_first:
        shutil.rmtree(parent, ignore_errors=True)
    try:
        yield parent / name
    finally:
        if is_first:
            shutil.rmtree(parent, ignore_errors=True)


@contextmanager
def weight_files(
    weights: Mapping[str, Tensor], folder: Path, *, precision: Precision, hashed: GivenWeights | None = None
) -> Iterator[Path]:
    """Write the weights, in the type that the servers compute with, and yield their folder; they are removed at the end.

    Sharded weights are gathered one by one, for which all ranks must enter the block; the first one writes.

    Args:
        folder: does not exist yet.
        hashed: gets each weight that is written; None: none is hashed.

    Raises:
        OSError: the folder cannot be written; only on the first rank, after all weights were gathered.
    """
    is_first = ranks.rank() == 0
    try:
        parts = _parts(weights, getattr(torch, precision), kept=is_first)
        try:
            if is_first:
                folder.mkdir(parents=True)
            for number, part in enumerate(parts, start=1):
                if hashed is not None:
                    for name, weight in part.items():
                        hashed.add(name, weight)
                save_file(part, folder / f"model-{number:05d}.safetensors")
        finally:
            for _ in parts:  # the other ranks wait for this one's share of each weight
                pass
        yield folder
    finally:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)


def contents_of(folder: Path) -> dict[str, int]:
    """Return the names of the safetensors files in a folder, and the number of tensors of each."""
    found: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found[file.name] = len(opened.keys())
    return found


def _parts(weights: Mapping[str, Tensor], dtype: torch.dtype, *, kept: bool) -> Iterator[dict[str, Tensor]]:
    """Yield all weights, whole, in parts of a file's size; the parts are empty if they are not ``kept``."""
    part: dict[str, Tensor] = {}
    for name, weight in weights.items():
        gathered = whole(weight.detach().to(dtype))
        if not kept:
            continue
        part[name] = gathered.to("cpu").contiguous()
        if sum(each.nbytes for each in part.values()) >= BYTES_IN_FILE:
            yield part
            part = {}
    if part:
        yield part
