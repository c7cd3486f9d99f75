"""Settings of sampling in a stage: by what, how many responses side by side, and whether while a policy is updated."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import Count, Positive, is_default, is_unset
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.stage import Resources


class Sampling(Frozen):
    """Choice of the engine that samples a stage's responses, and limit of those that are sampled side by side."""

    engine: Literal["loop", "vllm"] = Field("loop", exclude_if=is_default("loop"))
    """``loop``: Vantage's own sampler, whose responses are the same bits every time. ``vllm``: the inference engine of that name in the
    stage's process; it needs the package vllm, and the same seed may give other responses on another machine (docs/rollouts.md)."""
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

    @rule
    def _vllm_samples_when_it_is_asked(self) -> None:
        if self.ahead and self.engine == "vllm":
            raise ValueError(
                "ahead=1 samples from a copy of the policy beside its training, and engine=vllm samples only between two updates; "
                "use ahead: 0, or engine: loop"
            )


class Ahead(SampledAhead):
    """Settings of sampling ahead for a policy that trains, which then learns from responses of an earlier version of itself."""

    importance_cap: Positive = 2.0
    """Cap C. The advantages of responses that were sampled ahead are weighted, token by token, by min(π_old/π_sampler, C)
    (truncated importance sampling, arXiv 2510.18855). With ``old_logprobs: sampler`` the loss's own ratio is to the sampler,
    and nothing else is weighted (arXiv 2607.07508)."""


def refuse_several_processes(rollout: Sampling, resources: Resources) -> None:
    """Refuse an engine in the stage's process where several processes do the stage."""
    if rollout.engine == "vllm" and not resources.is_one_process:
        raise ValueError(
            "rollout.engine=vllm samples in one process, on one device; leave resources.nodes out, and set resources.gpus and "
            "resources.distributed.ranks to 1 at most, or use engine: loop"
        )
