"""Whether the policy that trains is, token by token, the one that sampled."""

from torch import Tensor

from vantage.algorithms.diagnostics import sampler_gap
from vantage.tasks.rollout.rollouts import Sampled
from vantage.tasks.training.optimization import Precision

MAX_SAMPLER_GAP: dict[Precision, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats per token of mean |Δ| that rounding may explain, and as much of a mean |ρ − 1|.

Measured on CPU: 2e-7 to 8e-6 in float32, 4e-5 to 0.03 in bfloat16 (docs/LOG.md). A trainer at temperature 1 of what
was sampled at 0.7 is off by 0.16 to 0.33 on the same models.
"""

_REMEDY: dict[Precision, str] = {
    "float32": "this model computes otherwise with a cache than without one: use another model, or another version of "
    "transformers",
    "bfloat16": "set precision: float32, or use another model",
}


class SamplerDisagrees(ValueError):
    """The log-probabilities that train are not those of the distribution that was sampled."""


def compare_with_sampler(logprobs: Tensor, sampled: Sampled, *, precision: Precision) -> dict[str, float]:
    """Return the metrics of the trainer's ``logprobs`` (B,T) of sampled tokens against the sampler's own; before any update.

    Raises:
        SamplerDisagrees: the mean |Δ| is above what rounding allows, or no number.
    """
    found = gap_to_sampler(logprobs, sampled, "sampler_gap")
    (metric, mean), *others = found.items()
    more = ", ".join(f"{name}={value:.3g}" for name, value in others)
    check_gap(metric, mean, precision, more=f" ({more})")
    return found


def gap_to_sampler(logprobs: Tensor, sampled: Sampled, name: str) -> dict[str, float]:
    """Return mean, k3 and worst of that gap as metrics, whatever they are; the mean is called ``name``, and comes first."""
    gap = sampler_gap(logprobs, sampled.sampler_logprobs, sampled.sequences.response_mask)
    return {name: gap.mean, f"{name}_k3": gap.k3, f"{name}_worst": gap.worst}


def check_gap(metric: str, measured: float, precision: Precision, *, more: str = "") -> None:
    """Refuse a mean |Δ|, or a mean |ρ − 1| before any update, that rounding does not explain."""
    bound = MAX_SAMPLER_GAP[precision]
    if not measured <= bound:  # NaN is refused too
        raise SamplerDisagrees(
            f"{metric}={measured:.3g}{more} is above {bound:g}, all that rounding explains under precision={precision}: "
            f"the policy that trains is not the one that sampled; nothing was updated; {_REMEDY[precision]}"
        )
