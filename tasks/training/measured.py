"""Convert measurements on held-out rows into the two parts of a ``StageResult``: values and uncertainties."""

import hashlib
from array import array
from collections.abc import Hashable, Mapping, Sequence
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from vantage.algorithms.uncertainty import Estimate, clustered_mean, with_cluster_sizes
from vantage.schemas.records.uncertainty import Uncertainty

_DIGEST_BYTES = 16


def clusters_of(prompts: Sequence[Hashable]) -> Tensor:
    """Return the number of each row's prompt, (N,): rows of equal prompts are one cluster, wherever they are."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=torch.int64)


def clusters_of_ids(prompts: Sequence[Sequence[int]]) -> Tensor:
    """Return the clusters of prompts that are token ids; digests represent prompts, since there may be many rows."""
    digests = np.empty(len(prompts), dtype=f"S{_DIGEST_BYTES}")
    for row, prompt in enumerate(prompts):
        digests[row] = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=_DIGEST_BYTES).digest()
    _, first, cluster = np.unique(digests, return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))  # the number of each prompt, in the order of first appearance
    return torch.from_numpy(number[cluster])


def mean_among(values: Tensor, clusters: Tensor, members: Tensor) -> Estimate:
    """Return the mean of ``values`` (N,) over the rows of ``members`` (N,), boolean; NaN if there are none. ``clusters`` (N,): the rows' prompts."""
    if bool(members.any()):
        kept = clusters[members]
        return with_cluster_sizes(clustered_mean(values[members], kept), kept)
    nan = float("nan")
    return Estimate(nan, nan, num_clusters=len(clusters.unique()), num_rows=len(values))


def values_of(estimates: Mapping[str, Estimate]) -> dict[str, float | None]:
    """Return metric → its value; None where it is undefined."""
    return {name: defined(each.value) for name, each in estimates.items()}


def uncertainty_of(estimates: Mapping[str, Estimate]) -> dict[str, Uncertainty]:
    """Return metric → its uncertainty."""
    return {
        name: Uncertainty(
            n=each.num_clusters,
            rows=each.num_rows,
            standard_error=defined(each.standard_error),
            intervals=each.intervals,
            differing=each.differing,
            equal_prompts=each.equal_clusters,
        )
        for name, each in estimates.items()
    }


def defined(measured: float) -> float | None:
    """Return the number itself, or None for NaN and infinities, which JSON cannot represent."""
    return measured if isfinite(measured) else None
