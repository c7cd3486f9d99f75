"""Settings of sampling in a stage: how many responses side by side, and whether while a policy is updated."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import Count, Positive, is_unset
from vantage.schemas.recipe.pass_limits import PassLimits


class Sampling(Frozen):
    """Limit of the responses that a stage samples side by side."""

    max_rows: Count | None = Field(None, exclude_if=is_unset)
    """Most responses that are sampled side by side. It changes memory and speed, and no response. None: in a stage that trains on a
    GPU without ``microbatch_tokens``, as many as memory has room for, found before the first step; else ``microbatch_size``."""

    def limits(self, passes: PassLimits) -> PassLimits:
        """Return the bounds of sampling if no larger ones are found; ``passes``: bounds of the stage's other passes."""
        return replace(passes, rows=self.max_rows or passes.rows)


class SampledAhead(Sampling):
    """Settings of sampling ahead: a rollout may be sampled while another one trains."""

    ahead: Literal[0, 1] = 0
    """1: while one rollout trains, the next is sampled, from a copy of the policy as it was before that update: one step
    off-policy. A policy that does not train has no such step. 0: the next rollout is sampled after the update."""


class Ahead(SampledAhead):
    """Settings of sampling ahead for a policy that trains, which then learns from responses of an earlier version of itself."""

    importance_cap: Positive = 2.0
    """Cap C. The advantages of responses that were sampled ahead are weighted, token by token, by min(π_old/π_sampler, C)
    (truncated importance sampling, arXiv 2510.18855). With ``old_logprobs: sampler`` the loss's own ratio is to the sampler,
    and nothing else is weighted (arXiv 2607.07508)."""
