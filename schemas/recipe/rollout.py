"""How a stage samples responses: how many side by side, and whether beside the update of a policy."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import Count, Positive, is_unset
from vantage.schemas.recipe.pass_limits import PassLimits


class Sampling(Frozen):
    """How many responses a stage samples side by side."""

    max_rows: Count | None = Field(None, exclude_if=is_unset)
    """Most responses that are sampled side by side. It changes memory and speed, and no response. None: in a stage that trains on a
    GPU without ``microbatch_tokens``, as many as memory has room for, found before the first step; else ``microbatch_size``."""

    def limits(self, passes: PassLimits) -> PassLimits:
        """Return the bounds of what is sampled side by side, where no more is found; ``passes``: those of the stage's other passes."""
        return replace(passes, rows=self.max_rows or passes.rows)


class SampledAhead(Sampling):
    """When a rollout is sampled, beside the update of the one before or after it."""

    ahead: Literal[0, 1] = 0
    """1: while one rollout trains, the next is sampled, from a copy of a policy that trains as it was before that update: one
    step off-policy. A fixed policy has no such step. 0: when the update is done."""


class Ahead(SampledAhead):
    """The same of a policy that trains, which learns from responses of an earlier one."""

    importance_cap: Positive = 2.0
    """C: what is sampled ahead has its advantages weighted, token by token, by min(π_old/π_sampler, C) (truncated importance
    sampling, arXiv 2510.18855). With ``old_logprobs: sampler`` the loss's own ratio is to the sampler, and nothing else is
    weighted (arXiv 2607.07508)."""
