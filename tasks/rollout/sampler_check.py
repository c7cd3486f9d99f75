"""Check, token by token, that the policy in training is the one from which responses were sampled."""

from torch import Tensor

from vantage.algorithms.diagnostics import sampler_gap
from vantage.tasks.rollout.rollouts import Sampled
from vantage.tasks.training.optimization import Precision

MAX_SAMPLER_GAP: dict[Precision, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean |Δ| in nats per token that rounding may cause; also the largest mean |ρ − 1|.

Measured on CPU: 2e-7 to 8e-6 in float32, 4e-5 to 0.03 in bfloat16 (docs/LOG.md). If the trainer uses temperature 1 for
responses sampled at 0.7, the difference is 0.16 to 0.33 on the same models.
"""

_REMEDY: dict[Precision, str] = {
    "float32": "this model computes otherwise with a cache than without one: use another model, or another version of "
    "transformers",
    "bfloat16": "set precision: float32, or use another model",
}


class SamplerDisagrees(ValueError):
    """The trainer's log-probabilities are not those of the distribution that was sampled."""


def compare_with_sampler(logprobs: Tensor, sampled: Sampled, *, precision: Precision) -> dict[str, float]:
    """Return metrics that compare the trainer's ``logprobs`` (B,T) of sampled tokens with the sampler's; call it before
    any update.

    Raises:
        SamplerDisagrees: the mean |Δ| is above what rounding allows, or not a number.
    """
    found = gap_to_sampler(logprobs, sampled, "sampler_gap")
    (metric, mean), *others = found.items()
    more = ", ".join(f"{name}={value:.3g}" for name, value in others)
    check_gap(metric, mean, precision, more=f" ({more})")
    return found


def gap_to_sampler(logprobs: Tensor, sampled: Sampled, name: str) -> dict[str, float]:
    """Return mean, k3 and worst of this gap as metrics, whatever their size; first the mean, which is called
    ``name``."""
    gap = sampler_gap(logprobs, sampled.sampler_logprobs, sampled.sequences.response_mask)
    return {name: gap.mean, f"{name}_k3": gap.k3, f"{name}_worst": gap.worst}


def check_gap(metric: str, measured: float, precision: Precision, *, more: str = "") -> None:
    """Refuse a mean |Δ|, or a mean |ρ − 1| before any update, that is too large for rounding."""
    bound = MAX_SAMPLER_GAP[precision]
    if not measured <= bound:  # NaN is refused too
        raise SamplerDisagrees(
            f"{metric}={measured:.3g}{more} is above {bound:g}, all that rounding explains under precision={precision}: "
            f"the policy that trains is not the one that sampled; nothing was updated; {_REMEDY[precision]}"
        )
