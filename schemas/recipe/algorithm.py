"""The switches of policy optimisation, one for each technique; ``presets`` has sets of values of them.

No other module reads a preset's name: stages read switches. So combining two papers takes an override, and an
ablation is a list of overrides.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.critic_head import ONE_VALUE, CriticHead, refuse_frozen, refuse_head
from vantage.schemas.recipe.fields import (
    MAX_COUNT,
    AboveOne,
    CountOrZero,
    Fraction,
    NonNegative,
    Number,
    Positive,
    Probability,
    Switch,
    is_default,
    is_off,
    is_unset,
)
from vantage.schemas.recipe.losses import (
    Losses,
    check_covariance,
    check_entropy,
    check_kl_gradient,
    check_surrogate,
)
from vantage.schemas.recipe.presets import PRESETS, PresetName
from vantage.schemas.recipe.rollout_correction import RolloutCorrection

Aggregation = Literal["token", "sequence", "sequence_sum", "constant"]
KLKind = Literal["k1", "abs", "k2", "k3", "full"]
AdvantageKind = Literal[
    "gae",
    "returns_to_go",
    "leave_one_out",
    "group_mean",
    "group_normalised",
    "greedy_baseline",
    "reference_mean",
    "optimal_value",
    "tracked_mean",
]


_Count = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)]

GROUPED: tuple[AdvantageKind, ...] = ("leave_one_out", "group_mean", "group_normalised")
"""Advantages that compare the responses to the same prompt."""
COLLECTED: tuple[AdvantageKind, ...] = ("reference_mean", "optimal_value", "tracked_mean")
"""Advantages whose baseline begins with responses that a ``rollout_collection`` stage sampled beforehand."""


class Returns(Frozen):
    """The switches that determine the return, which a critic has to predict."""

    gamma: Probability = 1.0
    """Discount per response token."""
    kl_coef: NonNegative = 0.0
    """β of the penalty −β·KL(π‖ref) in every response token's reward, in reward per nat."""
    kl_kind: KLKind = "k1"
    """Estimator of the KL on a token in that penalty; only the penalty with ``k1`` has the gradient of KL(π‖ref)."""
    reward_scaling: Literal["none", "scale", "normalise"] = "none"
    """Scaling by the running moments of all scores so far: ``scale`` is R/σ, ``normalise`` is (R − μ)/σ."""
    reward_clip: Positive | None = None
    """±δ to which the score is clipped after scaling (arXiv 2307.04964: 0.3 or 0.8)."""
    overlong_buffer: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] | None = None
    """Share of ``max_response_tokens`` at its end over which the score loses up to 1 (DAPO eq. 13: 0.2)."""


class Algorithm(Losses, Returns):
    """The switches of one policy-optimisation method; the defaults are those of most methods.

    A recipe gives a preset's name, or a mapping of ``preset`` and the switches that differ from it.
    """

    preset: PresetName
    """The method whose switches are the starting point."""

    # -- advantages
    advantage: AdvantageKind = "gae"
    """Only ``gae`` reads a critic; with λ = 1 it is the return minus the state's value. The methods that compare a
    group compare whole responses: the score minus the KL penalties of all tokens. The last three read the stage's
    ``rollouts``: ``reference_mean`` is that less the mean score of the reference's responses to the prompt (PVPO, arXiv
    2508.21104); ``optimal_value`` less their β·log mean exp(score/β) (A*-PO, arXiv 2505.20686); ``tracked_mean`` less a
    running mean of the prompt's scores (SPO, arXiv 2509.13232)."""
    optimal_value_beta: Positive = Field(0.5, exclude_if=is_default(0.5))
    """β of ``advantage: optimal_value``, in units of the scaled score: towards 0 the best response, large the mean
    (A*-PO's β1, 1/2)."""
    tracker_kl_half_life: Positive = Field(0.06, exclude_if=is_default(0.06))
    """KL in nats per token by which the policy has moved when a prompt's past scores count half, for ``tracked_mean``
    (SPO's D_half)."""
    tracker_memory_low: Fraction = Field(0.875, exclude_if=is_default(0.875))
    """Least share of their weight that past scores keep when a prompt comes again, for ``tracked_mean`` (SPO: 0.875)."""
    tracker_memory_high: Fraction = Field(0.96, exclude_if=is_default(0.96))
    """Largest share of their weight that past scores keep; they then count as at most 1/(1 − share) scores."""
    lambda_policy: Probability = 0.95
    """λ of the policy's advantages; not read where ``length_adaptive_alpha`` is set."""
    length_adaptive_alpha: Positive | None = None
    """α of λ_policy(l) = 1 − 1/(α·l) for a response of l tokens (VAPO, arXiv 2504.05118 eq. 4-5)."""
    lambda_value: Probability = 0.95
    """λ of the critic's targets; 1 makes them Monte-Carlo returns (VC-PPO's decoupled GAE)."""
    gae_horizon: _Count | None = None
    """Number of tokens after which GAE's sum stops and adds the critic's value (PPO, arXiv 1707.06347 eq. 10-11), for
    the policy's advantages and the critic's targets; with λ = 1 these are n-step returns. None: the whole response."""
    bootstrap_truncated: Switch = False
    """Continue a truncated response with the critic's value instead of 0, in the policy's advantages and the critic's
    targets. Value pretraining and explained variance still use Monte-Carlo returns, which end at the cut: a target
    that contains the critic's own prediction cannot measure the critic."""
    critic_ev_threshold: Number | None = Field(None, exclude_if=is_unset)
    """The critic's advantages count only in iterations in which its explained variance, on the whole fresh rollout and
    before any update on it, is above this; in the others the advantage is the return minus the rollout's mean return
    (EVPO, arXiv 2604.19485: 0). None: always."""
    critic_ev_hysteresis: Positive | None = Field(None, exclude_if=is_unset)
    """Ours: a critic that does not count any more counts again only above ``critic_ev_threshold`` plus this. None: 0."""
    critic_blend: Switch = Field(False, exclude_if=is_off)
    """Ours, EVPO without a step: values are drawn towards the rollout's mean return m, to m + k·(V − m), where k is the
    explained variance, at least 0."""
    normalise_each_score: Switch = Field(False, exclude_if=is_off)
    """Normalise each score of the reward, named ones apart, within its group before the weighted sum, and the sum over the
    rollout's tokens in the policy's loss (GDPO, arXiv 2601.05242); for ``advantage: group_normalised``. With False the sum
    is normalised."""
    whiten_advantages: Switch = False
    """Shift and scale the advantages of a rollout to mean 0 and standard deviation 1, over the tokens in the policy's
    loss (those removed by ``overlong_filter`` do not count)."""
    normalise_advantages: Switch = False
    """Shift and scale the advantages to mean 0 and standard deviation 1 within each minibatch."""
    advantage_clip: Positive | None = None
    """±δ to which advantages are clipped, after whitening or normalisation (arXiv 2307.04964: 0.12, 0.5 or 0.8)."""
    samples_per_prompt: _Count = 1
    """Responses sampled for each prompt of a rollout."""
    drop_uniform_groups: Switch = False
    """Replace prompts whose responses all have the same score, before any shaping, by other prompts (DAPO)."""
    max_sampling_rounds: _Count = 10
    """Most rollouts sampled to fill one; groups that are still missing are filled with dropped ones."""

    # -- the surrogate
    importance_ratio: Switch = True
    """Whether the loss contains the ratio ρ. False: −log π · A instead of −ρ·A, for one optimiser step on each rollout."""
    clip_range_low: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] | None = 0.2
    """How far below 1 the ratio may fall; None: no limit."""
    clip_range_high: Positive | None = 0.2
    """The ratio is clipped to [1 − low, 1 + high]; None: no limit on that side. high > low is clip-higher."""
    dual_clip: AboveOne | None = None
    """Bound c: where A < 0, a token's loss is at most −c·A (arXiv 1912.09729: 3)."""
    old_logprobs: Literal["policy", "sampler"] = Field("policy", exclude_if=is_default("policy"))
    """Source of the log-probabilities from which the ratio (and the KL in the reward) starts: ``policy`` computes them in
    an extra pass before the update; ``sampler`` takes those from sampling, and saves that pass (SAO, arXiv
    2607.07508)."""
    rollout_correction: RolloutCorrection | None = Field(None, exclude_if=is_unset)
    """Rule by which w = π_old/π_sampler weighs responses that another policy, or other arithmetic, has sampled: ``tis``,
    ``icepop``, or bounds. None: w is not applied, except where ``rollout.ahead`` caps it by ``importance_cap``."""
    ratio_mask: Switch = Field(False, exclude_if=is_off)
    """Instead of clipping, leave tokens with a ratio outside the clip range out of the gradient, whatever the sign of their
    advantage: −f(ρ)·A·log π, with f(ρ) = ρ strictly inside and 0 elsewhere. They still count in the denominator (SAO,
    arXiv 2607.07508 eq. 1 and 3; its ranges are 0.3 and 5, for code 0.8 and 3)."""
    ratio_mask_gradient: Switch = Field(False, exclude_if=is_off)
    """Let the gradient flow through the weight f(ρ) too; in SAO it is a constant."""
    aggregation: Aggregation = "token"
    """Unit over which the policy loss is averaged."""
    overlong_filter: Switch = False
    """Exclude truncated responses from the policy's loss (DAPO)."""

    # -- KL as a controller, as a loss, as a bound
    kl_target: Positive | None = None
    """Target of KL(π‖ref) in nats per response, to which ``kl_coef`` adapts (Ziegler, arXiv 1909.08593 §2.2); None:
    ``kl_coef`` is fixed."""
    kl_horizon: _Count = 10_000
    """Number of responses over which ``kl_coef`` adapts."""
    kl_loss_coef: NonNegative = 0.0
    """Weight of KL(π‖ref) in the loss, in loss per nat."""
    kl_loss_kind: KLKind = "k2"
    """Estimator of the KL in the loss: ``k2`` and ``full`` have the gradient of KL(π‖ref), ``k3`` that of KL(ref‖π)."""
    kl_penalty_coef: NonNegative = 0.0
    """β of the loss β·KL(old‖new), which limits the updates on a rollout (PPO, arXiv 1707.06347 §4)."""
    kl_penalty_kind: Literal["k1", "k3"] = "k3"
    """Estimator of KL(old‖new), with ℓ = log π − log π_old: −ℓ, or e^ℓ − 1 − ℓ."""
    kl_penalty_target: Positive | None = None
    """Target of KL(old‖new) in nats per token: β doubles above 1.5 times it and halves below two thirds of it. None: β is
    fixed."""
    trust_region_kl: Positive | None = None
    """Undo an optimiser step and take half of it, if afterwards KL(old‖new) on its minibatch exceeds this many nats
    per token, or the surrogate is worse than before; None: never."""
    trust_region_halvings: Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)] = 3
    """Halvings after which the step is skipped and the epoch ends."""
    epoch_kl_target: Positive | None = Field(None, exclude_if=is_default(None))
    """End an epoch of a rollout's updates after a minibatch whose KL(old‖new), as ``approx_kl`` measures it before the step, exceeds
    1.5 times this many nats per token; None: never."""

    # -- other terms of the loss
    value_clip_range: Positive | None = None
    """How far, in units of reward, a new value may move from the rollout's value before its loss is clipped."""
    freeze_critic: Literal["none", "attention", "all"] = Field("none", exclude_if=is_default("none"))
    """Parts of the critic that keep the weights that it starts from (SAO, arXiv 2607.07508 §3.2: its attention). ``all``: it
    was pretrained, and learns no more (DVPO, arXiv 2502.16944): no update, no optimiser."""
    critic_head: CriticHead = Field(ONE_VALUE, exclude_if=is_default(ONE_VALUE))
    """The prediction of the critic: one value, ``{quantiles: N}`` of the return, or ``{ensemble: K}`` values. A value stage
    pretrains the head of the policy stages that start from it."""
    mask_agreed_share: Fraction | None = Field(None, exclude_if=is_unset)
    """Share of a rollout's tokens on which the ensemble's values agree most, whose advantages are set to 0; they still count in
    the denominator (AsyPPO, arXiv 2510.01656, where agreement marks states with little to learn). None: none."""
    policy_starts_at: CountOrZero = Field(0, exclude_if=is_default(0))
    """Iterations at the beginning in which only the critic learns (SAO, arXiv 2607.07508 §4.1: 10 without pretraining)."""
    critic_steps: _Count = Field(1, exclude_if=is_default(1))
    """Optimiser steps of the critic on each minibatch, for one of the policy (SAO, arXiv 2607.07508 §3.2: 2)."""
    critic_first: Switch = Field(False, exclude_if=is_off)
    """The critic learns from the whole rollout, on fixed targets, before the policy does; the advantages are then computed
    from its new values (SAO, arXiv 2607.07508 §3.2). Explained variance is still measured before."""
    shared_trunk: Switch = False
    """One network: the critic is a new head on the policy's trunk, and one optimiser minimises the joint loss."""
    value_coef: Positive = 0.5
    """Weight of the value loss in the joint loss of ``shared_trunk`` (c1 of PPO, eq. 9)."""
    entropy_coef: NonNegative = 0.0
    """Weight of the exact entropy bonus, in loss per nat."""
    positive_nll_coef: NonNegative = 0.0
    """μ of the NLL on positive responses (VAPO eq. 9-10)."""
    positive_threshold: Number | None = None
    """A response is positive above this score (before KL); used where no verifier is named."""
    positive_verifier: str | None = None
    """A response is positive if this verifier judges it right."""
    ptx_coef: NonNegative = 0.0
    """Weight of the NLL per token on the demonstrations that the stage names as ``ptx`` (InstructGPT's PPO-ptx)."""

    @property
    def reads_critic(self) -> bool:
        """Return whether a separate critic is trained with the policy, or only read if it is frozen."""
        return self.advantage == "gae" and not self.shared_trunk

    @property
    def trains_critic(self) -> bool:
        """Return whether a separate critic learns beside the policy."""
        return self.reads_critic and self.freeze_critic != "all"

    @property
    def reads_rollouts(self) -> bool:
        """Return whether the baseline begins with responses that were sampled beforehand."""
        return self.advantage in COLLECTED

    @property
    def weighs_critic(self) -> bool:
        """Return whether a rollout's advantages may be the critic's in part, or not at all."""
        return self.critic_ev_threshold is not None or self.critic_blend

    @property
    def returns(self) -> Returns:
        """The switches that the critic's pretraining must share."""
        return Returns(**{name: getattr(self, name) for name in Returns.model_fields})

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"preset": data}
        if not isinstance(data, dict):
            return data
        preset = data.get("preset")  # an unknown one is refused by its field
        return {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **data}

    @rule
    def _positive_nll_needs_a_rule(self) -> None:
        if self.positive_nll_coef and self.positive_threshold is None and self.positive_verifier is None:
            raise ValueError(
                f"positive_nll_coef={self.positive_nll_coef} needs to know which responses are right; "
                "set positive_verifier or positive_threshold, or positive_nll_coef: 0"
            )

    @rule
    def _k1_is_not_a_loss(self) -> None:
        if self.kl_loss_coef and self.kl_loss_kind == "k1" and self.kl_loss_gradient == "estimate":
            raise ValueError(
                "kl_loss_kind=k1 has an expected gradient of 0, so as a loss it does nothing but add noise; "
                "use k2 or full (KL(π‖ref)) or k3 (KL(ref‖π)), or kl_coef, where k1 belongs"
            )

    @rule
    def _scores_that_are_normalised_each_have_nothing_added(self) -> None:
        if not self.normalise_each_score:
            return
        if self.advantage != "group_normalised":
            raise ValueError(
                f"normalise_each_score is a form of advantage=group_normalised, and advantage is {self.advantage}; use "
                "advantage: group_normalised, or normalise_each_score: false"
            )
        for name, is_on, remedy in (
            ("kl_coef", bool(self.kl_coef), "use kl_loss_coef in its place"),
            ("reward_scaling", self.reward_scaling != "none", "leave it out"),
            (
                "reward_clip",
                self.reward_clip is not None,
                "give clip to the terms or named scores of the reward",
            ),
            ("overlong_buffer", self.overlong_buffer is not None, "use overlong_filter, or a named score"),
            ("whiten_advantages", self.whiten_advantages, "leave it out: the sum is whitened already"),
        ):
            if is_on:
                raise ValueError(
                    f"{name}={getattr(self, name)} changes the sum of the scores, which normalise_each_score does not read; "
                    f"{remedy}"
                )

    @rule
    def _kl_targets_need_coefficients(self) -> None:
        for target, coef in (("kl_target", "kl_coef"), ("kl_penalty_target", "kl_penalty_coef")):
            if getattr(self, target) is not None and not getattr(self, coef):
                raise ValueError(
                    f"{target}={getattr(self, target):g} multiplies {coef}, which is 0 and would stay so; "
                    f"set {coef}, or {target}: null"
                )

    @rule
    def _uniform_groups_need_several_samples(self) -> None:
        if self.drop_uniform_groups and self.samples_per_prompt == 1:
            raise ValueError(
                "drop_uniform_groups drops every group of samples_per_prompt=1; raise samples_per_prompt"
            )

    @rule
    def _critic_switches_need_gae(self) -> None:
        if self.advantage == "gae":
            return
        for name, asked, off in (
            ("gae_horizon", self.gae_horizon is not None, "null"),
            ("bootstrap_truncated", self.bootstrap_truncated, "false"),
        ):
            if asked:
                raise ValueError(
                    f"{name}={str(getattr(self, name)).lower()} bootstraps from a critic's value, and "
                    f"advantage={self.advantage} has no critic; use advantage: gae, or {name}: {off}"
                )
        for name, asked, off in (
            ("critic_ev_threshold", self.critic_ev_threshold is not None, "null"),
            ("critic_blend", self.critic_blend, "false"),
        ):
            if asked:
                raise ValueError(
                    f"{name}={str(getattr(self, name)).lower()} asks how far a critic is trusted, and "
                    f"advantage={self.advantage} has none; use advantage: gae, or {name}: {off}"
                )

    @rule
    def _memory_has_a_range(self) -> None:
        if self.tracker_memory_low > self.tracker_memory_high:
            raise ValueError(
                f"tracker_memory_low={self.tracker_memory_low:g} is above tracker_memory_high="
                f"{self.tracker_memory_high:g}; lower it"
            )

    @rule
    def _tracked_scores_have_one_unit(self) -> None:
        if self.advantage == "tracked_mean" and self.reward_scaling != "none":
            raise ValueError(
                f"advantage=tracked_mean averages scores of many iterations, and reward_scaling={self.reward_scaling} gives "
                "each iteration another unit; set reward_scaling: none"
            )

    @rule
    def _a_critic_of_its_own_is_frozen_or_learns_apart(self) -> None:
        if self.reads_critic:
            return
        why = "shared_trunk: true has none" if self.shared_trunk else f"advantage={self.advantage} has none"
        for name, value, off in (
            ("freeze_critic", self.freeze_critic, "none"),
            ("policy_starts_at", self.policy_starts_at, 0),
            ("critic_steps", self.critic_steps, 1),
            ("critic_first", self.critic_first, False),
        ):
            if value != off:
                shown = str(value).lower()
                raise ValueError(f"{name}={shown} is about a critic of its own, and {why}; leave {name} out")

    @rule
    def _the_head_fits_the_critic(self) -> None:
        refuse_head(self)

    @rule
    def _a_frozen_critic_does_not_learn(self) -> None:
        refuse_frozen(self)

    @rule
    def _the_critic_is_switched_or_blended(self) -> None:
        if self.critic_blend and self.critic_ev_threshold is not None:
            raise ValueError(
                f"critic_blend weighs the critic by its explained variance, and critic_ev_threshold="
                f"{self.critic_ev_threshold:g} takes all or nothing of it; set one of them"
            )

    @rule
    def _what_is_corrected_is_measured(self) -> None:
        if self.rollout_correction is not None and self.old_logprobs == "sampler":
            raise ValueError(
                "rollout_correction bounds π_old/π_sampler, which is 1 with old_logprobs=sampler; leave it out, or set "
                "old_logprobs: policy"
            )

    @rule
    def _the_surrogate_has_what_it_bounds(self) -> None:
        check_surrogate(self)

    @rule
    def _covariances_select_from_the_clipped_surrogate(self) -> None:
        check_covariance(self)

    @rule
    def _the_kl_has_an_unbiased_gradient(self) -> None:
        check_kl_gradient(self)

    @rule
    def _the_entropy_coefficient_begins_in_its_range(self) -> None:
        check_entropy(self)

    @rule
    def _shared_trunk_needs_gae(self) -> None:
        if self.shared_trunk and self.advantage != "gae":
            raise ValueError(
                f"shared_trunk trains a value head, which advantage={self.advantage} does not read; "
                "use advantage: gae, or shared_trunk: false"
            )
