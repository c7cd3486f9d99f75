"""Derive randomness as a pure function of (seed, kind of stage, stream, indices).

So a resumed stage needs no generator's state, and a critic never meets the draws of the policy that starts from it.
Which streams stages share, and why: docs/decisions/0008.
"""

import hashlib

import torch

from vantage.schemas.records.job import StageJob


def stage_seed(job: StageJob) -> int:
    """Return the seed from which all streams of a stage derive, from the recipe's (or its own) seed and the kind of stage."""
    return derive_seed(job.seed, job.work.kind)


def derive_seed(seed: int, stream: str, *indices: int) -> int:
    """Return a 63-bit seed for one named stream (``init``, ``order``, ``sampling`` …) at the given indices."""
    text = ":".join([str(seed), stream, *map(str, indices)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, stream: str, *indices: int) -> torch.Generator:
    """Return a CPU generator at the start of the named stream."""
    return torch.Generator().manual_seed(derive_seed(seed, stream, *indices))
