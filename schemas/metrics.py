"""Every number that a stage reports: its name, its unit and what exactly it is.

``docs/metrics.md`` is this table, printed by ``docs_page``.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "prepare_data", "sft", "reward_model", "value_pretraining", "policy_optimization", "evaluation"
]

TRAINING = ("sft", "reward_model", "value_pretraining", "policy_optimization")


@dataclass(frozen=True)
class Metric:
    """One number that one or several stages report."""

    name: str
    unit: str
    """``1`` for a plain number, a share or a probability; ``reward`` is the unit of the recipe's reward."""
    meaning: str
    headline: tuple[str, ...] = ()
    """Kinds of stage that report it once, at their end; a gate can ask for it."""
    curve: tuple[str, ...] = ()
    """Kinds of stage that report it against the optimiser step (the iteration, in policy optimisation)."""
    judge: Literal["verifier", "reward"] | None = None
    """An evaluation reports it only with this kind of judge; None: with either."""


METRICS: tuple[Metric, ...] = (
    # -- data
    Metric("train_rows", "rows", "Usable rows for training.", headline=("prepare_data",)),
    Metric("validation_rows", "rows", "Usable rows set apart for selection.", headline=("prepare_data",)),
    Metric("test_rows", "rows", "Usable rows set apart for gates and evaluation.", headline=("prepare_data",)),
    Metric("dropped_rows", "rows", "Rows left out as unusable; report.json has the reasons.", headline=("prepare_data",)),
    # -- every training stage
    Metric("learning_rate", "1", "Learning rate of the step (of the policy, in policy optimisation).", curve=TRAINING),
    Metric("tokens_per_second", "tokens/s", "Tokens trained or sampled since the last report, per second.", curve=TRAINING),
    Metric(
        "grad_norm", "1", "L2 norm of the whole gradient before clipping.",
        curve=("sft", "reward_model", "value_pretraining"),
    ),
    Metric(
        "loss", "nats",
        "Training loss of the minibatch. sft: negative log-likelihood per response token; reward_model: "
        "Bradley-Terry, −log σ(chosen − rejected), per pair.",
        curve=("sft", "reward_model"),
    ),
    # -- sft
    Metric(
        "validation_nll", "nats/token",
        "Negative log-likelihood of the validation responses, per response token (EOS included).",
        headline=("sft",), curve=("sft",),
    ),
    Metric("test_nll", "nats/token", "The same on the test responses.", headline=("sft",)),
    # -- reward model
    Metric(
        "train_pair_accuracy", "1", "Share of the minibatch's pairs whose chosen response scores higher.",
        curve=("reward_model",),
    ),
    Metric(
        "pair_accuracy", "1",
        "Share of the test pairs whose chosen response scores higher; a tie counts one half.",
        headline=("reward_model",),
    ),
    Metric(
        "validation_pair_accuracy", "1", "The same on the validation pairs, by which the best weights are chosen.",
        headline=("reward_model",), curve=("reward_model",),
    ),
    Metric(
        "validation_loss", "nats", "Bradley-Terry loss per pair of the validation pairs.",
        headline=("reward_model",), curve=("reward_model",),
    ),
    Metric(
        "mean_score_margin", "reward", "Mean of chosen score − rejected score over the test pairs.",
        headline=("reward_model",),
    ),
    Metric(
        "score_shift", "reward",
        "What was added to every score after training so that demonstrations (centre_on) score 0 on average; "
        "0 without centre_on.",
        headline=("reward_model",),
    ),
    # -- critic
    Metric(
        "value_loss", "reward²", "½ · mean over valid tokens of (value − target)², clipped where the recipe says so.",
        curve=("value_pretraining", "policy_optimization"),
    ),
    Metric(
        "explained_variance", "1",
        "1 − Var(G − V)/Var(G) over all valid tokens at once, against Monte-Carlo returns G. value_pretraining: "
        "on responses to validation prompts; policy_optimization: on the rollout, before it is trained on. "
        "1 is a perfect critic, 0 a constant; undefined where returns do not vary.",
        headline=("value_pretraining",), curve=("value_pretraining", "policy_optimization"),
    ),
    Metric(
        "return_variance", "reward²", "Var(G) over the same tokens: what there is to explain.",
        headline=("value_pretraining",), curve=("value_pretraining",),
    ),
    Metric(
        "value_bias", "reward", "Mean of V − G, which explained variance does not see.",
        headline=("value_pretraining",), curve=("value_pretraining",),
    ),
    Metric(
        "value_mse", "reward²", "Mean of (V − G)².",
        headline=("value_pretraining",), curve=("value_pretraining",),
    ),
    Metric(
        "constant_mse", "reward²",
        "Mean of (c − G)² for the constant c that is the mean of G: what value_mse has to beat.",
        headline=("value_pretraining",), curve=("value_pretraining",),
    ),
    *(
        Metric(
            f"explained_variance_position_{quarter}", "1",
            f"Explained variance over the {ordinal} quarter of every response, so that long ones do not hide "
            "what happens at the start.",
            headline=("value_pretraining",), curve=("value_pretraining",),
        )
        for quarter, ordinal in enumerate(("first", "second", "third", "last"), start=1)
    ),
    Metric(
        "best_step", "steps", "Optimiser step whose critic explained most and was kept.",
        headline=("value_pretraining",),
    ),
    # -- policy
    Metric(
        "score_mean", "reward", "Mean score of the rollout's responses, before any KL penalty.",
        curve=("value_pretraining", "policy_optimization"),
    ),
    Metric(
        "reward_mean", "reward", "Mean over responses of the sum of their tokens' rewards: score less KL penalty.",
        curve=("policy_optimization",),
    ),
    Metric(
        "kl_to_reference", "nats/response",
        "Mean over responses of Σ_t (log π(a_t) − log π_ref(a_t)), sampled from π: of the rollout, and at the end "
        "of the kept policy on the validation prompts.",
        headline=("policy_optimization",), curve=("policy_optimization",),
    ),
    Metric("entropy", "nats/token", "Exact entropy of the policy at the rollout's tokens.", curve=("policy_optimization",)),
    Metric(
        "approx_kl", "nats/token",
        "Mean of ρ − 1 − log ρ, ρ = π/π_old: how far the updates moved the policy from the one that sampled.",
        curve=("policy_optimization",),
    ),
    Metric(
        "clip_fraction", "1", "Share of tokens at which the clip of the ratio binds (their gradient is 0).",
        curve=("policy_optimization",),
    ),
    Metric("policy_loss", "1", "Clipped surrogate, mean by the recipe's aggregation.", curve=("policy_optimization",)),
    Metric(
        "positive_nll", "nats/token", "Negative log-likelihood per token of the responses held to be right.",
        curve=("policy_optimization",),
    ),
    Metric("positive_share", "1", "Share of the rollout's responses held to be right.", curve=("policy_optimization",)),
    Metric(
        "ratio_deviation_first", "1",
        "Largest |ρ − 1| at the first optimiser step after the rollout: 0 but for rounding, or sampler and trainer "
        "disagree.",
        curve=("policy_optimization",),
    ),
    Metric(
        "response_length_mean", "tokens", "Mean length of the rollout's responses, EOS included.",
        curve=("value_pretraining", "policy_optimization"),
    ),
    Metric(
        "truncated_share", "1", "Share of responses cut off at max_response_tokens, without EOS.",
        headline=("evaluation",), curve=("value_pretraining", "policy_optimization"),
    ),
    Metric("grad_norm_policy", "1", "L2 norm of the policy's gradient before clipping.", curve=("policy_optimization",)),
    Metric("grad_norm_critic", "1", "L2 norm of the critic's gradient before clipping.", curve=("policy_optimization",)),
    Metric(
        "validation_score", "reward",
        "Mean score of responses to the validation prompts, by which the best policy is chosen.",
        headline=("policy_optimization",), curve=("policy_optimization",),
    ),
    Metric(
        "best_iteration", "iterations", "Iteration whose policy scored best on the validation prompts and was kept.",
        headline=("policy_optimization",),
    ),
    # -- evaluation
    Metric(
        "mean_response_length", "tokens",
        "Mean length of responses, EOS included: of the kept policy to the validation prompts, or of the candidate "
        "to the test prompts.",
        headline=("policy_optimization", "evaluation"),
    ),
    Metric(
        "baseline_mean_response_length", "tokens", "The same of the baseline.", headline=("evaluation",)
    ),
    Metric(
        "accuracy", "1", "Share of the candidate's responses to test prompts that the verifier holds to be right.",
        headline=("evaluation",), judge="verifier",
    ),
    Metric("baseline_accuracy", "1", "The same of the baseline.", headline=("evaluation",), judge="verifier"),
    Metric(
        "accuracy_gain", "1", "accuracy − baseline_accuracy.", headline=("evaluation",), judge="verifier"
    ),
    Metric(
        "win_rate", "1",
        "Share of test prompts, sample by sample, at which the candidate's response scores higher than the "
        "baseline's; a tie counts one half.",
        headline=("evaluation",), judge="reward",
    ),
    Metric("score", "reward", "Mean score of the candidate's responses to test prompts.", headline=("evaluation",), judge="reward"),
    Metric("baseline_score", "reward", "The same of the baseline.", headline=("evaluation",), judge="reward"),
    Metric("score_gain", "reward", "score − baseline_score.", headline=("evaluation",), judge="reward"),
)  # fmt: skip


def measured_by(kind: str, *, judge: str | None = None) -> frozenset[str]:
    """Names of the headline metrics of a kind of stage: what its gate can ask for.

    ``judge`` (``verifier`` or ``reward``) narrows an evaluation's down to those of its judge.
    """
    return frozenset(
        metric.name
        for metric in METRICS
        if kind in metric.headline and judge in (None, metric.judge or judge)
    )


def curves_of(kind: str) -> frozenset[str]:
    """Names of the metrics that a kind of stage reports while it runs."""
    return frozenset(metric.name for metric in METRICS if kind in metric.curve)


def docs_page() -> str:
    """The page ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "Every number that a stage reports. *Headline*: reported once, at the stage's end; a gate can ask for it.",
        "*Curve*: reported against the optimiser step (the iteration, in policy optimisation).",
        "Unit `1` is a plain number; `reward` is the unit of the recipe's reward.",
        "This page is printed from `schemas/metrics.py`.",
        "",
        "| name | unit | meaning | headline of | curve of |",
        "|---|---|---|---|---|",
    ]
    for metric in METRICS:
        meaning = metric.meaning.replace("|", "\\|")
        if metric.judge:
            meaning += f" With a {metric.judge} as judge."
        kinds = f"{', '.join(metric.headline) or '–'} | {', '.join(metric.curve) or '–'}"
        lines.append(f"| `{metric.name}` | {metric.unit} | {meaning} | {kinds} |")
    return "\n".join(lines) + "\n"
