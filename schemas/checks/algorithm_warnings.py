"""Warnings about algorithm switches: combinations that a paper advises against, and switches with little effect."""

from collections.abc import Iterator

from vantage.schemas.checks.unread_switches import unread_switches
from vantage.schemas.recipe.algorithm import GROUPED, Algorithm
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stages import PolicyOptimization, ValuePretraining
from vantage.schemas.recipe.stages_on_data import RewardModelling

_KL_IN_REWARD = {
    "abs": "|Δ| is no unbiased estimate of a KL divergence",
    "k2": "½Δ² is biased, and as a reward its gradient is not that of KL(π‖ref)",
    "k3": "near the reference its penalty's gradient is almost orthogonal to that of KL(π‖ref)",
    "full": "it is the same whichever token was drawn, so it tells the current token nothing",
}
"""Kind of KL → its fault in a reward (John Schulman, "Approximating KL divergence", 2020)."""


def algorithm_warnings(recipe: Recipe, name: str, stage: PolicyOptimization) -> list[str]:
    """Return warnings about a policy stage's switches, each with its source."""
    return [
        *_critic(recipe, name, stage),
        *_zero_lambda(recipe, name, stage),
        *_horizon_too_long(recipe, name, stage),
        *_truncation_counted_twice(recipe, name, stage),
        *_uncentred_threshold(recipe, name, stage),
        *_unclipped_ratio(name, stage),
        *_never_uniform_groups(recipe, name, stage),
        *_penalty_without_gradient(name, stage),
        *(f"stages.{name}.algorithm.{found}" for found in combination_warnings(stage.algorithm)),
        *(f"stages.{name}.algorithm.{found}" for found in unread_switches(stage.algorithm)),
    ]


def combination_warnings(switches: Algorithm) -> Iterator[str]:
    """Yield warnings that depend on the switches alone: ``switch: why``."""
    if switches.kl_coef and switches.kl_kind in _KL_IN_REWARD:
        yield f"kl_kind: in the reward, {switches.kl_kind} misleads: {_KL_IN_REWARD[switches.kl_kind]}; use k1"
    if switches.kl_loss_coef and switches.kl_loss_kind == "abs":
        yield "kl_loss_kind: |Δ| is no unbiased estimate of a KL divergence; use k2, k3 or full"
    if switches.kl_coef and switches.kl_loss_coef:
        yield (
            "kl_loss_coef: KL to the reference is in the reward and in the loss; REINFORCE++ with a baseline "
            "(arXiv 2501.03262 eq. 6-8) has it in the loss alone; set one of kl_coef and kl_loss_coef to 0"
        )
    yield from _bounds_of_the_response(switches)
    if switches.reward_scaling == "scale":
        yield (
            "reward_scaling: dividing by a running σ was compared and is not recommended (arXiv 2307.04964 §5.3.1); "
            "use normalise with reward_clip"
        )
    normalises_advantages = switches.normalise_advantages or switches.advantage_clip is not None
    if (
        switches.reward_scaling == "normalise"
        and normalises_advantages
        and switches.value_clip_range is not None
        and switches.advantage == "gae"
    ):
        yield (
            "value_clip_range: together with normalised rewards and advantages; PPO-max's authors recommend not to "
            "mix the three (arXiv 2307.04964 appendix B); set value_clip_range: null"
        )
    if switches.whiten_advantages and switches.normalise_advantages:
        yield "normalise_advantages: undoes what whiten_advantages did to the whole rollout; set one of them to false"
    if switches.advantage in GROUPED and switches.samples_per_prompt == 1:
        yield (
            f"samples_per_prompt: with one response there is nothing that {switches.advantage} could compare it with: "
            "every advantage is 0 (RLOO, arXiv 2402.14740; GRPO, arXiv 2402.03300); raise it"
        )
    if switches.advantage == "group_normalised" and switches.aggregation == "constant":
        yield (
            "aggregation: constant removes GRPO's length bias but advantage=group_normalised keeps that of its standard "
            "deviation; Dr. GRPO (arXiv 2503.20783) removes both; use advantage: group_mean"
        )


def _bounds_of_the_response(switches: Algorithm) -> Iterator[str]:
    """Yield warnings about a ratio of whole responses."""
    if switches.ratio_level == "sequence" and switches.aggregation != "sequence":
        yield (
            f"aggregation: GSPO (arXiv 2507.18071) weighs responses equally, and {switches.aggregation} weighs them by their "
            "length; use aggregation: sequence"
        )
    widest = max(switches.clip_range_low or 0.0, switches.clip_range_high or 0.0)
    if switches.ratio_level == "sequence" and switches.surrogate == "clipped" and widest >= 0.1:
        yield (
            f"clip_range_high: the mean over a response is far nearer to 1 than a token's ratio, so that {widest:g} hardly ever "
            "clips; GSPO (arXiv 2507.18071) has 3e-4 and 4e-4"
        )


def _penalty_without_gradient(name: str, stage: PolicyOptimization) -> Iterator[str]:
    if stage.algorithm.kl_penalty_coef and stage.epochs * stage.batch_size == stage.minibatch_size:
        yield (
            f"stages.{name}.algorithm.kl_penalty_coef: KL(old‖new) has no gradient at the first optimiser step of a "
            "rollout, and there is only one (PPO, arXiv 1707.06347 §4); use epochs or smaller minibatches"
        )


def _never_uniform_groups(recipe: Recipe, name: str, stage: PolicyOptimization) -> Iterator[str]:
    models = [term.stage for term in recipe.rewards[stage.reward].terms if term.stage is not None]
    if stage.algorithm.drop_uniform_groups and models:
        yield (
            f"stages.{name}.algorithm.drop_uniform_groups: scores of the reward model '{models[0]}' are never all equal, "
            "so no group is dropped; DAPO (arXiv 2503.14476) scores with a verifier"
        )


def _critic(recipe: Recipe, name: str, stage: PolicyOptimization) -> Iterator[str]:
    switches = stage.algorithm
    if stage.fresh_critic is not None and switches.critic_first and not switches.policy_starts_at:
        yield (
            f"stages.{name}.fresh_critic: the policy learns from a critic that has learned nothing; pretrain one, or set "
            "policy_starts_at (SAO, arXiv 2607.07508 §4.1: 10 iterations)"
        )
    if stage.critic is None:
        return
    critic = recipe.stages[stage.critic]
    if isinstance(critic, RewardModelling):
        yield (
            f"stages.{name}.critic: a reward model scores unfinished text low, so that as a critic it favours "
            "early tokens and responses collapse in length (VC-PPO, arXiv 2503.01491); "
            "put a value_pretraining stage between them"
        )
    if isinstance(critic, ValuePretraining) and critic.policy != stage.init:
        yield (
            f"stages.{name}.init: '{stage.init}' is not the policy whose responses the critic "
            f"'{stage.critic}' was pretrained on ('{critic.policy}')"
        )


def _zero_lambda(recipe: Recipe, name: str, stage: PolicyOptimization) -> Iterator[str]:
    """Warn where λ = 1 − 1/(α·l), clamped to [0, 1], is 0: for every l ≤ 1/α."""
    alpha, longest = stage.algorithm.length_adaptive_alpha, recipe.generation.max_response_tokens
    read = stage.algorithm.advantage == "gae"
    if read and alpha is not None and 2 / alpha >= longest:
        extent = "every response" if alpha * longest <= 1 else f"responses of up to {1 / alpha:.0f} tokens"
        yield (
            f"stages.{name}.algorithm.length_adaptive_alpha: {alpha:g} makes λ = 1 − 1/(α·l) zero for {extent} "
            f"(VAPO, arXiv 2504.05118 eq. 4-5), and the longest have {longest}; short tasks need a larger α"
        )


def _horizon_too_long(recipe: Recipe, name: str, stage: PolicyOptimization) -> Iterator[str]:
    horizon, longest = stage.algorithm.gae_horizon, recipe.generation.max_response_tokens
    if horizon is not None and horizon >= longest:
        yield (
            f"stages.{name}.algorithm.gae_horizon: {horizon} cuts no sum short, since no response has more than "
            f"{longest} tokens (generation.max_response_tokens); lower it, or leave gae_horizon out"
        )


def _truncation_counted_twice(recipe: Recipe, name: str, stage: PolicyOptimization) -> Iterator[str]:
    if stage.algorithm.bootstrap_truncated and recipe.rewards[stage.reward].missing_eos is not None:
        yield (
            f"stages.{name}.algorithm.bootstrap_truncated: rewards.{stage.reward}.missing_eos makes the cut the end of a "
            "response and pays for it, and the bootstrap adds the value of going on; use one of the two"
        )


def _uncentred_threshold(recipe: Recipe, name: str, stage: PolicyOptimization) -> Iterator[str]:
    if not stage.algorithm.positive_nll_coef or stage.algorithm.positive_verifier is not None:
        return
    named = [term.stage for term in recipe.rewards[stage.reward].terms if term.stage is not None]
    uncentred = [
        model.member.of if model.member else each  # the recipe writes all members as one stage
        for each in named
        if isinstance(model := recipe.stages.get(each), RewardModelling) and model.centre_on is None
    ]
    for written in dict.fromkeys(uncentred):
        yield (
            f"stages.{name}.algorithm.positive_threshold: {stage.algorithm.positive_threshold:g} is compared "
            f"with scores of '{written}', whose zero means nothing (Bradley-Terry fixes differences only); "
            f"set stages.{written}.centre_on"
        )


def _unclipped_ratio(name: str, stage: PolicyOptimization) -> Iterator[str]:
    switches = stage.algorithm
    updates = stage.epochs * stage.batch_size // stage.minibatch_size
    bounds = (switches.trust_region_kl, switches.epoch_kl_target)
    has_kl_bound = switches.kl_penalty_coef or any(bound is not None for bound in bounds)
    if (
        switches.clip_range_low is None
        and switches.clip_range_high is None
        and switches.surrogate != "soft_gate"
        and updates > 1
        and not has_kl_bound
    ):
        yield (
            f"stages.{name}.algorithm: the ratio is not clipped, but {updates} optimiser steps are taken on each "
            "rollout; only the first of them is a policy gradient (PPO, arXiv 1707.06347 §2-3)"
        )
