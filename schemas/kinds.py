"""The table of kinds of work: one row per kind.

A new kind of stage is its class in ``vantage.schemas.recipe``, its module in ``tasks``, its workload in ``estimates``, its own
metrics in ``vantage.schemas.records.metrics``, and its row here. Code is given by name and not imported: ``schemas`` must load
without a tensor library.
"""

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from vantage.schemas.implicit_kinds import IMPLICIT_KINDS
from vantage.schemas.kind import ArtifactKind, Kind
from vantage.schemas.metric_names import (
    CHOSEN_POLICY,
    COMPARED_BY_JUDGE,
    COMPILED,
    CRITIC_ENSEMBLE,
    CRITIC_FORMS,
    CRITIC_SLICES,
    DEMONSTRATED,
    DIFFICULTY,
    DISTILLED,
    DISTINCT,
    ENSEMBLE,
    IMPORTANCE,
    LEARNED_SAMPLES,
    LENGTH_GROUPS,
    LOSSES_OF_SWITCHES,
    MARGINS,
    MONITORS,
    NONFINITE,
    PAIRS,
    PASS_AT,
    PASSES,
    PROMPTS_READ,
    RESPONSE_SHAPE,
    RESPONSES_READ,
    REWARD_DATA,
    ROLLOUT,
    ROWS,
    SAMPLED_POLICY,
    SAMPLER,
    SAMPLING,
    SELECTED,
    SPEED,
    STEP,
    TERM_QUANTILES,
    UNCOMPILED,
    WATCHED,
    compared,
    judge_metrics,
)
from vantage.schemas.recipe.distillation import Distillation
from vantage.schemas.recipe.evaluations import BenchmarkEvaluation, PolicyEvaluation, RewardEvaluation
from vantage.schemas.recipe.inputs import MODEL, Content
from vantage.schemas.recipe.prompt_selection import PromptSelection
from vantage.schemas.recipe.resolved import (
    ResolvedBestOfN,
    ResolvedDirectPreferenceOptimization,
    ResolvedDistillation,
    ResolvedKahnemanTverskyOptimization,
    ResolvedPolicyOptimization,
    ResolvedPreferenceCollection,
    ResolvedRewardModelling,
    ResolvedRolloutCollection,
    ResolvedSupervisedFineTuning,
    ResolvedValuePretraining,
)
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization, ValuePretraining
from vantage.schemas.recipe.stages_on_data import (
    DirectPreferenceOptimization,
    RewardModelling,
    SupervisedFineTuning,
)
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection, RolloutCollection
from vantage.schemas.recipe.unpaired import KahnemanTverskyOptimization
from vantage.schemas.recipe.work import Work

_TABLE = (
    *IMPLICIT_KINDS,
    Kind(
        work=SupervisedFineTuning,
        resolved=ResolvedSupervisedFineTuning,
        module="vantage.tasks.sft",
        workload="vantage.estimates.stage_workloads.sft",
        makes="policy",
        revision=3,
        reads={"init": ("policy",)},
        data={"data": "demonstrations"},
        learning_rate=2e-5,  # zephyr-7b-beta, alignment-handbook
        estimates=("validation_nll", "test_nll"),
        numbers=(*PROMPTS_READ, *RESPONSES_READ, *UNCOMPILED),
        curves=(*STEP, "loss"),
    ),
    Kind(
        work=RewardModelling,
        resolved=ResolvedRewardModelling,
        module="vantage.tasks.reward_model",
        workload="vantage.estimates.stage_workloads.reward_model",
        makes="reward_model",
        revision=4,
        reads={"init": ("policy",)},
        other_models=("init",),
        data={"data": "preferences", "rankings": "rankings", "centre_on": "demonstrations"},
        learning_rate=1e-5,  # 9e-6 in OpenRLHF's reward models
        estimates=(*PAIRS, "score_gap", "validation_score_gap"),
        numbers=(*PROMPTS_READ, *RESPONSES_READ, "rows_alike_after_cut", "score_shift", *UNCOMPILED),
        curves=(*STEP, "loss", "train_pair_accuracy", "score_gap", "chosen_nll", "score_mean"),
    ),
    Kind(
        work=DirectPreferenceOptimization,
        resolved=ResolvedDirectPreferenceOptimization,
        module="vantage.tasks.dpo",
        workload="vantage.estimates.stage_workloads.dpo",
        makes="policy",
        revision=4,
        reads={"init": ("policy",), "reference": ("policy",), "rollouts": ("rollouts",)},
        data={"data": "preferences"},
        reference_from="init",
        learning_rate=5e-7,  # zephyr-7b-beta
        estimates=(*PAIRS, "reward_gap", "validation_reward_gap"),
        numbers=(*PROMPTS_READ, *RESPONSES_READ, "rows_alike_after_cut", "tied_share", *UNCOMPILED),
        curves=(*STEP, "loss", "train_pair_accuracy", "reward_gap", "chosen_nll"),
    ),
    Kind(
        work=KahnemanTverskyOptimization,
        resolved=ResolvedKahnemanTverskyOptimization,
        module="vantage.tasks.kto",
        workload="vantage.estimates.stage_workloads.kto",
        makes="policy",
        revision=1,
        reads={"init": ("policy",), "reference": ("policy",)},
        data={"data": "labelled_responses"},
        reference_from="init",
        learning_rate=5e-7,  # the authors' example in Hugging Face's TRL
        estimates=MARGINS,
        numbers=(
            *(*PROMPTS_READ, *RESPONSES_READ, "reference_point", "validation_reference_point"),
            *("label_weight_ratio", *UNCOMPILED),
        ),
        curves=(*STEP, "loss", "desirable_margin", "undesirable_margin", "reference_point"),
    ),
    Kind(
        work=ValuePretraining,
        resolved=ResolvedValuePretraining,
        module="vantage.tasks.value_pretraining",
        workload="vantage.estimates.stage_workloads.value",
        curves_by="iteration",
        makes="value_model",
        revision=7,
        reads={
            "policy": ("policy",),
            "init": ("reward_model", "policy"),
            "reference": ("policy",),
            "rollouts": ("rollouts",),
        },
        data={"prompts": "prompts"},
        reference_from="policy",
        learning_rate=1e-5,  # inferred: like a reward model, a scalar head and its trunk learn fixed targets
        estimates=(
            *("explained_variance", "value_bias", "value_mse"),
            *("rank_correlation", "squared_advantage_ratio", "others_mean_mse"),
            *(f"explained_variance_{each}" for each in CRITIC_SLICES),
        ),
        numbers=(
            *PROMPTS_READ,
            "validation_explained_variance",
            "return_variance",
            "constant_mse",
            *(f"explained_variance_position_{quarter}" for quarter in (1, 2, 3, 4)),
            "calibration_error",
            *CRITIC_FORMS,
            "best_iteration",
            *UNCOMPILED,
        ),
        curves=(
            *STEP,
            *SAMPLER,
            *SAMPLING,
            "value_loss",
            "value_bias",
            "validation_explained_variance",
            "return_mean",
            *("score_mean", "score_mean_TERM", *TERM_QUANTILES),
        ),
    ),
    Kind(
        work=PolicyOptimization,
        resolved=ResolvedPolicyOptimization,
        module="vantage.tasks.policy_optimization",
        workload="vantage.estimates.stage_workloads.policy",
        curves_by="iteration",
        makes="policy",
        revision=7,
        reads={
            "init": ("policy",),
            "reference": ("policy",),
            "critic": ("value_model", "reward_model"),
            "fresh_critic": ("policy",),
            "rollouts": ("rollouts",),
        },
        data={
            "prompts": "prompts",
            "ptx": "demonstrations",
            "demonstrations": "demonstrations",
            "preferences": "preferences",
            "watch_prompts": "prompts",
        },
        reference_from="init",
        learning_rate=1e-6,  # VAPO, arXiv 2504.05118
        critic_learning_rate=2e-6,  # VAPO
        estimates=(*SAMPLED_POLICY, "kl_to_reference"),
        numbers=(
            *(*PROMPTS_READ, *CHOSEN_POLICY, "validation_watch_score", "critic_weight_mean"),
            *(*DIFFICULTY, *UNCOMPILED),
        ),
        curves=(
            *ROLLOUT,
            *DIFFICULTY,
            *RESPONSE_SHAPE,
            *MONITORS,
            *REWARD_DATA,
            *DEMONSTRATED,
            *WATCHED,
            *ENSEMBLE,
            *SAMPLER,
            *(*SPEED, *PASSES, *COMPILED, *SAMPLING),
            *IMPORTANCE,
            # the rollout
            *("scaled_score_mean", "reward_moments_mean", "reward_moments_std", "kl_coef", "reward_mean"),
            *(
                "kl_to_reference",
                "kl_to_reference_per_token",
                "positive_share",
                "uniform_group_share",
                "sampling_rounds",
                "greedy_score_mean",
                "baseline_mean",
            ),
            *("advantage_mean", "advantage_std", "explained_variance", "critic_weight", *CRITIC_ENSEMBLE),
            # the update
            *(
                "policy_loss",
                "surrogate_loss",
                "entropy",
                "ratio",
                "ratio_deviation",
                "ratio_deviation_first",
                "effective_sample_share",
            ),
            *("approx_kl", "clip_fraction", "dual_clip_fraction", "kl_loss", "old_kl", "kl_penalty_coef"),
            *(
                *NONFINITE,
                "reference_nll",
                "trust_region_undone",
                "positive_nll",
                "ptx_nll",
                "grad_norm_policy",
                "learning_rate_policy",
            ),
            *LOSSES_OF_SWITCHES,
            *("value_loss", "value_bias", "value_mse", "value_clip_fraction"),
            *("grad_norm_critic", "learning_rate_critic"),
        ),
    ),
    Kind(
        work=BestOfN,
        resolved=ResolvedBestOfN,
        module="vantage.tasks.best_of_n",
        workload="vantage.estimates.stage_workloads.best_of_n",
        curves_by="iteration",
        makes="policy",
        revision=5,
        reads={"init": ("policy",), "rollouts": ("rollouts",)},
        data={"prompts": "prompts", "watch_prompts": "prompts"},
        learning_rate=2e-5,  # the same loss as SFT
        estimates=SAMPLED_POLICY,
        numbers=(*PROMPTS_READ, *CHOSEN_POLICY, "validation_watch_score", *UNCOMPILED),
        curves=(*LEARNED_SAMPLES, "best_score_mean", "nll"),
    ),
    Kind(
        work=Distillation,
        resolved=ResolvedDistillation,
        module="vantage.tasks.distillation",
        workload="vantage.estimates.distillation_workload.distillation",
        curves_by="iteration",
        makes="policy",
        revision=1,
        reads={"init": ("policy",), "teacher": ("policy",)},
        other_models=("teacher",),
        data={"prompts": "prompts", "watch_prompts": "prompts"},
        learning_rate=5e-6,  # MiniLLM, arXiv 2306.08543
        estimates=(*SAMPLED_POLICY, *DISTILLED),
        numbers=(*PROMPTS_READ, *CHOSEN_POLICY, "validation_watch_score", *UNCOMPILED),
        curves=(*LEARNED_SAMPLES, "reverse_kl", "entropy"),
    ),
    Kind(
        work=PreferenceCollection,
        resolved=ResolvedPreferenceCollection,
        module="vantage.tasks.preference_collection",
        workload="vantage.estimates.stage_workloads.preference_collection",
        curves_by="batch",
        makes="dataset",
        content="preferences",
        revision=5,
        reads={"policy": ("policy",)},
        other_models=("policy",),
        data={"prompts": "prompts", "demonstrations": "demonstrations"},
        numbers=(*ROWS, *PROMPTS_READ, "tied_share", "mean_chosen_length", "mean_rejected_length"),
        curves=("tied_share", *SPEED, *PASSES, *SAMPLING),
    ),
    Kind(
        work=RolloutCollection,
        resolved=ResolvedRolloutCollection,
        module="vantage.tasks.rollout_collection",
        workload="vantage.estimates.stage_workloads.rollout_collection",
        curves_by="batch",
        makes="rollouts",
        revision=5,
        reads={"policy": ("policy",)},
        other_models=("policy",),
        data={"prompts": "prompts"},
        estimates=SAMPLED_POLICY,
        numbers=(*ROWS, *PROMPTS_READ, "reward_spread", "uniform_group_share"),
        curves=(
            "score_mean",
            "score_mean_TERM",
            *TERM_QUANTILES,
            "response_length_mean",
            "truncated_share",
            *SPEED,
            *PASSES,
            *SAMPLING,
        ),
    ),
    Kind(
        work=PromptSelection,
        module="vantage.tasks.prompt_selection",
        makes="dataset",
        content="prompts",
        revision=1,
        reads={"rollouts": ("rollouts",)},
        data={"prompts": "prompts"},
        numbers=(*ROWS, *SELECTED),
    ),
    Kind(
        work=RewardEvaluation,
        module="vantage.tasks.reward_evaluation",
        workload="vantage.estimates.stage_workloads.reward_evaluation",
        makes="evaluation",
        revision=4,
        reads={"reward_model": ("reward_model",)},
        other_models=("reward_model",),
        data={"data": "preferences"},
        estimates=(
            *("pair_accuracy", "score_gap", "preference_loss", "expected_calibration_error", "brier_score"),
            *(f"pair_accuracy_{each}" for each in LENGTH_GROUPS),
        ),
        numbers=(
            *PROMPTS_READ,
            *RESPONSES_READ,
            *("rows_alike_after_cut", "num_subgroups", "worst_subgroup_accuracy"),
        ),
    ),
    Kind(
        work=BenchmarkEvaluation,
        module="vantage.tasks.benchmark_evaluation",
        makes="evaluation",
        revision=2,
        reads={"policy": ("policy",)},
        other_models=("policy",),
        benchmarks=("benchmark",),
        estimates=("benchmark_score",),
    ),
    Kind(
        work=PolicyEvaluation,
        module="vantage.tasks.evaluation",
        workload="vantage.estimates.stage_workloads.evaluation",
        makes="evaluation",
        revision=7,
        reads={"candidate": ("policy",), "baseline": ("policy",), "critic": ("value_model",)},
        other_models=("candidate", "baseline"),
        data={"prompts": "prompts", "demonstrations": "demonstrations"},
        estimates=(
            *judge_metrics("accuracy"),
            *judge_metrics("score"),
            *COMPARED_BY_JUDGE,
            *(f"preference_{metric}" for metric in COMPARED_BY_JUDGE),
            "order_disagreement",
            *compared(f"pass_at_{k}" for k in PASS_AT),
            *compared(("truncated_share", "mean_response_length")),
            *compared(f"distinct_{n}" for n in DISTINCT),
            *("kl_to_baseline", "kl_to_baseline_per_token"),
            *("perplexity", "baseline_perplexity", "perplexity_ratio"),
            *compared(("response_nll",)),
        ),
        numbers=(
            *PROMPTS_READ,
            *("reward_spread", "accuracy_gain_standard_error", "score_gain_standard_error"),
        ),
    ),
)

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _TABLE}
"""Name → row, for all kinds of work."""

STAGES: Mapping[str, Kind] = {name: kind for name, kind in KINDS.items() if not kind.is_implicit}
"""Name → row, for the kinds that recipes contain."""

if TYPE_CHECKING:
    AnyStage = Stage
    AnyResolvedStage = Stage
    AnyWork = Work
else:
    AnyStage = Annotated[reduce(or_, (kind.work for kind in STAGES.values())), Field(discriminator="kind")]
    AnyResolvedStage = Annotated[
        reduce(or_, (kind.resolved_type for kind in STAGES.values())), Field(discriminator="kind")
    ]
    AnyWork = Annotated[
        reduce(or_, (kind.resolved_type for kind in KINDS.values())),
        Field(discriminator="kind"),
        BeforeValidator(lambda work: resolve_work(work) if isinstance(work, Work) else work),
    ]


def resolve_work(work: Work) -> Work:
    """Return the work as the resolved class of its kind.

    Raises:
        pydantic.ValidationError: a field is not resolved.
    """
    resolved = KINDS[work.kind].resolved_type
    return work if isinstance(work, resolved) else resolved.model_validate(dict(work))


def kinds_making(artifacts: tuple[ArtifactKind, ...]) -> tuple[str, ...]:
    """Return the kinds of stage that make one of these artifacts; ``model`` comes first if a policy is among them."""
    kinds = [name for makes in artifacts for name, kind in STAGES.items() if kind.makes == makes]
    return (*((MODEL,) if "policy" in artifacts else ()), *kinds)


def kinds_collecting(content: Content) -> tuple[str, ...]:
    """Return kinds of stage whose artifact is a dataset of this content."""
    return tuple(name for name, kind in STAGES.items() if kind.content == content)
