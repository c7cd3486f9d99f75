"""Every technique of policy optimisation as a switch of its own, and the presets, which are only values.

Nothing outside this page asks for a preset's name: stages read switches. A mixture of two papers is
therefore a recipe override, and an ablation is a list of overrides.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from schemas.frozen import Frozen

Aggregation = Literal["token", "sequence", "sequence_sum", "constant"]
PresetName = Literal["ppo", "vc_ppo", "vapo"]

# Strict: `true` is not 1.0 and "0.2" is not 0.2. A whole number is a number all the same.
Number = Annotated[float, Field(strict=True)]
Probability = Annotated[float, Field(ge=0.0, le=1.0, strict=True)]
NonNegative = Annotated[float, Field(ge=0.0, strict=True)]
Positive = Annotated[float, Field(gt=0.0, strict=True)]


class Algorithm(Frozen):
    """The switches of one policy-optimisation method.

    A recipe writes a preset's name, or a mapping with ``preset`` and the switches that differ from it.
    """

    preset: PresetName

    gamma: Probability
    """Discount per response token; 1 in everything about language models unless a recipe says otherwise."""
    lambda_policy: Probability
    """λ of the policy's advantages; not read where ``length_adaptive_alpha`` is set."""
    length_adaptive_alpha: Positive | None
    """α of λ_policy(l) = 1 − 1/(α·l) for a response of l tokens (VAPO, arXiv 2504.05118 eq. 4-5)."""
    lambda_value: Probability
    """λ of the critic's targets; 1 makes them Monte-Carlo returns (VC-PPO's decoupled GAE)."""
    whiten_advantages: bool
    """Shift and scale the advantages of a rollout to mean 0 and standard deviation 1 over its valid tokens."""

    clip_range_low: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] | None
    clip_range_high: Positive | None
    """The ratio is clipped to [1 − low, 1 + high]; None leaves that side open. high > low is clip-higher."""
    aggregation: Aggregation
    """What the policy loss is a mean over."""
    value_clip_range: Positive | None
    """How far, in units of reward, a new value may move from the rollout's before its loss is clipped."""

    kl_coef: NonNegative
    """β of the penalty −β·k1 that every response token's reward carries, in reward per nat."""
    entropy_coef: NonNegative
    """Weight of the exact entropy bonus, in loss per nat."""

    positive_nll_coef: NonNegative
    """μ of the NLL on responses held to be right (VAPO eq. 9-10)."""
    positive_threshold: Number | None
    """A response is held to be right from this score on (before KL); read where no verifier is named."""
    positive_verifier: str | None
    """A response is held to be right when this verifier says so."""

    samples_per_prompt: Annotated[int, Field(ge=1, strict=True)]
    """Responses sampled for each prompt of a rollout."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"preset": data}
        if not isinstance(data, dict):
            return data
        # An unknown preset is refused by its field; any switches keep that the only complaint.
        preset = data.get("preset")
        switches = PRESETS.get(preset, _PPO) if isinstance(preset, str) else _PPO
        return {**switches, **data}

    @model_validator(mode="after")
    def _positive_examples_need_a_rule(self) -> "Algorithm":
        if self.positive_nll_coef and self.positive_threshold is None and self.positive_verifier is None:
            raise ValueError(
                f"positive_nll_coef={self.positive_nll_coef} needs to know which responses are right; "
                "set positive_verifier or positive_threshold, or positive_nll_coef: 0"
            )
        return self


_PPO: dict[str, Any] = {
    "gamma": 1.0,
    "lambda_policy": 0.95,
    "length_adaptive_alpha": None,
    "lambda_value": 0.95,
    "whiten_advantages": True,
    "clip_range_low": 0.2,
    "clip_range_high": 0.2,
    "aggregation": "token",
    "value_clip_range": 0.2,
    "kl_coef": 0.05,
    "entropy_coef": 0.0,
    "positive_nll_coef": 0.0,
    "positive_threshold": None,
    "positive_verifier": None,
    "samples_per_prompt": 1,
}

_VC_PPO: dict[str, Any] = {
    **_PPO,
    "lambda_value": 1.0,
    "whiten_advantages": False,
    "aggregation": "sequence",  # inferred: the paper does not say
    "value_clip_range": None,
    "kl_coef": 0.0,
}

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 1707.06347 with InstructGPT's reward (arXiv 2203.02155)
    "ppo": _PPO,
    # arXiv 2503.01491: decoupled GAE and a pretrained critic
    "vc_ppo": _VC_PPO,
    # arXiv 2504.05118: VC-PPO, length-adaptive λ, clip-higher, token loss, positive examples, groups of 16
    "vapo": {
        **_VC_PPO,
        "length_adaptive_alpha": 0.05,
        "clip_range_high": 0.28,
        "aggregation": "token",
        "positive_nll_coef": 0.1,
        "positive_threshold": 0.0,  # inferred: the paper has a verifier; our scores are centred on 0
        "samples_per_prompt": 16,
    },
}
