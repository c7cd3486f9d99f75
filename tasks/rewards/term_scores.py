"""Inputs and outputs that all kinds of reward terms share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.models.sequences import Sequences
from vantage.schemas.conversations import Message, Prompt
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.score_rules import ScoreRule
from vantage.schemas.records.job import StageJob


@dataclass(frozen=True)
class Source:
    """Everything that a term is loaded from."""

    job: StageJob
    role: str
    """Role of the term's artifact in ``job.inputs``, for a term that reads one."""
    path: str
    """Path of the term in the recipe, for messages: ``rewards.main.terms.0``."""
    tokenizers_of: tuple[str, ...]
    """Roles of the policies whose ids a model will read."""
    device: torch.device
    dtype: torch.dtype
    """Type of a model's trunk."""


@dataclass(frozen=True)
class Responses:
    """B responses to be scored, as ids and as texts."""

    sequences: Sequences
    prompts: Sequence[str]
    responses: Sequence[str]
    answers: Sequence[str | None]
    device: torch.device
    """Device on which the scores are returned."""
    limits: PassLimits
    ended_rows: Tensor | None = None
    """(B,) True where the response ended and was not truncated; None: all of them."""
    conversations: Sequence[list[Message] | None] | None = None
    """Turns of prompts that are conversations; None: no prompt is one."""

    @property
    def turns(self) -> list[Prompt]:
        """Return each prompt as a chat template reads it: its turns, or the text of one user's turn."""
        if self.conversations is None:
            return list(self.prompts)
        return [
            prompt if turns is None else turns
            for prompt, turns in zip(self.prompts, self.conversations, strict=True)
        ]

    @property
    def ended(self) -> Tensor:
        """Return (B,) True where the response ended and was not truncated."""
        if self.ended_rows is not None:
            return self.ended_rows
        return torch.ones(len(self.sequences), dtype=torch.bool)

    def cases(self) -> Tensor:
        """Return a number for each response's prompt and answer (B,); equal prompts and answers have the same
        number."""
        numbers: dict[tuple[str, str | None], int] = {}
        of_rows = zip(self.prompts, self.answers, strict=True)
        found = [numbers.setdefault(case, len(numbers)) for case in of_rows]
        return torch.tensor(found, device=self.device)


class UnknownScore(ValueError):
    """A recipe names a score that its reward does not have."""


def refuse_unknown_score(name: str, names: Sequence[str], *, path: str, of: str) -> None:
    """Raise UnknownScore unless ``name``, which the recipe has at ``path``, is one of the names of scores in curves.

    Args:
        of: the owner of these scores, for the message.
    """
    if name not in names:
        raise UnknownScore(f"{path}={name!r} is no score of {of}; use one of: {', '.join(names)}")


def counted_scores(scores: Tensor, rule: ScoreRule) -> Tensor:
    """Return scores of any shape clipped and moved by their rule."""
    if rule.clip is not None:
        scores = scores.clamp(rule.clip.low, rule.clip.high)
    return scores + rule.offset if rule.offset else scores


TermScores = Callable[[Responses], Tensor]
"""Function from responses to scores (B,), unweighted."""


@dataclass(frozen=True)
class NamedScores:
    """The scores of a term that has several named ones."""

    names: tuple[str, ...]
    scores: Callable[[Responses], Tensor]
    """Function from responses to scores (B,N), unclipped and unweighted, in the order of the names."""
