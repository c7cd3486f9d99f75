"""Randomness as a pure function of (seed, stream, indices), so that a resumed stage needs no generator's state."""

import hashlib

import torch


def derive_seed(seed: int, stream: str, *indices: int) -> int:
    """A 63-bit seed for one named stream (``init``, ``order``, ``sampling`` …) at the given indices."""
    text = ":".join([str(seed), stream, *map(str, indices)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, stream: str, *indices: int) -> torch.Generator:
    """A CPU generator at the start of the named stream."""
    return torch.Generator().manual_seed(derive_seed(seed, stream, *indices))
