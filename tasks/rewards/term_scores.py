"""What every kind of reward term is given, and what it makes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.records.job import StageJob


@dataclass(frozen=True)
class Source:
    """What a term is loaded from."""

    job: StageJob
    role: str
    """Of the term in ``job.inputs``, where it reads an artifact."""
    path: str
    """Of the term in the recipe, for messages: ``rewards.main.terms.0``."""
    tokenizers_of: tuple[str, ...]
    """The roles of the policies whose ids a model will be given."""
    device: torch.device
    dtype: torch.dtype
    """Of a model's trunk."""


@dataclass(frozen=True)
class Responses:
    """B responses to be scored, as ids and as texts."""

    sequences: Sequences
    prompts: Sequence[str]
    responses: Sequence[str]
    answers: Sequence[str | None]
    device: torch.device
    """Where the scores are wanted."""
    limits: PassLimits


TermScores = Callable[[Responses], Tensor]
"""Responses → scores (B,), unweighted."""
