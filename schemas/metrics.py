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


def _of_judge(name: str, unit: str, meaning: str, judge: Literal["verifier", "reward"]) -> tuple[Metric, ...]:
    """What an evaluation says of both models in the words of its judge."""
    gain_error = f"Standard error of {name}_gain over prompts; undefined for a single prompt."
    meanings = {
        name: f"{meaning}, of the candidate.",
        f"baseline_{name}": "The same of the baseline.",
        f"{name}_gain": f"{name} − baseline_{name}.",
        f"{name}_gain_standard_error": gain_error,
        f"greedy_{name}": f"{name} of the candidate's most likely responses, one for each prompt.",
        f"baseline_greedy_{name}": "The same of the baseline.",
    }
    return tuple(
        Metric(each, unit, text, headline=("evaluation",), judge=judge) for each, text in meanings.items()
    )


METRICS: tuple[Metric, ...] = (
    # -- data
    Metric("train_rows", "rows", "Usable rows for training.", headline=("prepare_data",)),
    Metric("validation_rows", "rows", "Usable rows set apart for selection.", headline=("prepare_data",)),
    Metric("test_rows", "rows", "Usable rows set apart for gates and evaluation.", headline=("prepare_data",)),
    Metric(
        "dropped_rows", "rows", "Rows left out as unusable; report.json of the dataset has the reasons.",
        headline=("prepare_data",),
    ),
    # -- every training stage
    Metric(
        "learning_rate", "1", "Learning rate of the last optimiser step.",
        curve=("sft", "reward_model", "value_pretraining"),
    ),
    Metric(
        "tokens_per_second", "tokens/s", "Tokens of prompts and responses worked through per second.",
        curve=TRAINING,
    ),
    Metric(
        "grad_norm", "1", "L2 norm of the whole gradient before clipping, at the last optimiser step.",
        curve=("sft", "reward_model", "value_pretraining"),
    ),
    Metric(
        "loss", "nats",
        "Training loss of the minibatch. sft: negative log-likelihood per response token; reward_model: "
        "Bradley-Terry, −log σ(chosen − rejected), per pair, with the parts that centre_coef and lm_coef add.",
        curve=("sft", "reward_model"),
    ),
    Metric(
        "prompts_too_long", "rows",
        "Rows left out because their prompt exceeds generation.max_prompt_tokens: of training, or of the test "
        "prompts in an evaluation.",
        headline=(*TRAINING, "evaluation"),
    ),
    # -- sft
    Metric(
        "validation_nll", "nats/token",
        "Negative log-likelihood of the validation responses, per response token (EOS included).",
        headline=("sft",),
    ),
    Metric("test_nll", "nats/token", "The same on the test responses.", headline=("sft",)),
    # -- reward model
    Metric(
        "train_pair_accuracy", "1",
        "Share of the minibatch's pairs whose chosen response scores higher; a tie counts as wrong.",
        curve=("reward_model",),
    ),
    Metric(
        "score_gap", "reward",
        "Mean of chosen score − rejected score: over the minibatch's pairs, and at the end over the test pairs.",
        headline=("reward_model",), curve=("reward_model",),
    ),
    Metric(
        "chosen_nll", "nats/token",
        "Negative log-likelihood per token of the minibatch's chosen responses, where lm_coef is above 0.",
        curve=("reward_model",),
    ),
    Metric(
        "pair_accuracy", "1",
        "Share of the test pairs whose chosen response scores higher; a tie counts as wrong.",
        headline=("reward_model",),
    ),
    Metric(
        "preference_loss", "nats", "Bradley-Terry loss per test pair; log 2 = 0.693 is chance.",
        headline=("reward_model",),
    ),
    Metric(
        "validation_pair_accuracy", "1", "pair_accuracy on the validation pairs.", headline=("reward_model",)
    ),
    Metric("validation_score_gap", "reward", "score_gap over the validation pairs.", headline=("reward_model",)),
    Metric(
        "validation_preference_loss", "nats", "preference_loss on the validation pairs.",
        headline=("reward_model",),
    ),
    Metric(
        "score_shift", "reward",
        "Mean raw score of demonstrations (centre_on), which is subtracted from every score, so that they score 0 "
        "on average; 0 without centre_on.",
        headline=("reward_model",),
    ),
    # -- critic
    Metric(
        "value_loss", "reward²",
        "½ · mean over valid tokens of (value − target)², clipped where the recipe says so; of the iteration's "
        "last minibatch.",
        curve=("value_pretraining", "policy_optimization"),
    ),
    Metric(
        "explained_variance", "1",
        "1 − Var(G − V)/Var(G) over all valid tokens at once, against Monte-Carlo returns G. value_pretraining: "
        "on responses to validation prompts, of the critic that is kept (in the curve: of the critic so far); "
        "policy_optimization: on the rollout, before it is trained on. "
        "1 is a perfect critic, 0 a constant; undefined where returns do not vary.",
        headline=("value_pretraining",), curve=("value_pretraining", "policy_optimization"),
    ),
    Metric(
        "return_variance", "reward²", "Var(G) over the same tokens: what there is to explain.",
        headline=("value_pretraining",),
    ),
    Metric(
        "value_bias", "reward",
        "Mean of value − target, which explained variance does not see: over the validation responses (headline), "
        "or over the iteration's last minibatch (curve).",
        headline=("value_pretraining",), curve=("value_pretraining", "policy_optimization"),
    ),
    Metric(
        "value_mse", "reward²",
        "Mean of (value − target)², never clipped: over the validation responses (headline), or over the "
        "iteration's last minibatch (curve).",
        headline=("value_pretraining",), curve=("policy_optimization",),
    ),
    Metric(
        "constant_mse", "reward²",
        "Mean of (c − G)² for the constant c that is the mean of G: what value_mse has to beat.",
        headline=("value_pretraining",),
    ),
    *(
        Metric(
            f"explained_variance_position_{quarter}", "1",
            f"Explained variance over the {ordinal} quarter of every response, so that long ones do not hide "
            "what happens at the start.",
            headline=("value_pretraining",),
        )
        for quarter, ordinal in enumerate(("first", "second", "third", "last"), start=1)
    ),
    Metric(
        "value_clip_fraction", "1", "Share of valid tokens at which the clip of the value loss binds.",
        curve=("policy_optimization",),
    ),
    Metric(
        "return_mean", "reward", "Mean Monte-Carlo return over the rollout's valid tokens.",
        curve=("value_pretraining",),
    ),
    Metric(
        "best_iteration", "iterations",
        "Iteration whose weights were kept: the critic that explained most, the policy that scored best, on "
        "validation prompts.",
        headline=("value_pretraining", "policy_optimization"),
    ),
    # -- policy: the rollout
    Metric(
        "score_mean", "reward",
        "Mean score of the rollout's responses, before any KL penalty; of the minibatch's pairs in reward_model.",
        curve=("reward_model", "value_pretraining", "policy_optimization"),
    ),
    Metric(
        "score_mean_TERM", "1", "The same of one term of the reward, unweighted; TERM is its model or verifier.",
        curve=("policy_optimization",),
    ),
    Metric(
        "reward_mean", "reward", "Mean over responses of the sum of their tokens' rewards: score less KL penalty.",
        curve=("policy_optimization",),
    ),
    Metric(
        "kl_to_reference", "nats/response",
        "Mean over responses of Σ_t (log π(a_t) − log π_ref(a_t)), sampled from π: of the rollout (curve), and of "
        "the kept policy on the validation prompts (headline).",
        headline=("policy_optimization",), curve=("policy_optimization",),
    ),
    Metric(
        "response_length_mean", "tokens", "Mean length of the rollout's responses, EOS included.",
        curve=("policy_optimization",),
    ),
    Metric(
        "truncated_share", "1",
        "Share of responses cut off at max_response_tokens, without EOS: of the rollout (curve), of the kept policy "
        "or the candidate (headline).",
        headline=("policy_optimization", "evaluation"), curve=("policy_optimization",),
    ),
    Metric(
        "positive_share", "1", "Share of the rollout's responses held to be right.", curve=("policy_optimization",)
    ),
    # -- policy: the update; each of the iteration's last minibatch unless it says otherwise
    Metric(
        "policy_loss", "1",
        "What the policy's gradient is of: clipped surrogate by the recipe's aggregation, plus the weighted positive "
        "NLL, less the weighted entropy.",
        curve=("policy_optimization",),
    ),
    Metric(
        "entropy", "nats/token", "Exact entropy of the policy, mean over valid tokens.",
        curve=("policy_optimization",),
    ),
    Metric(
        "ratio", "1", "Mean over valid tokens of ρ = π/π_old.", curve=("policy_optimization",)
    ),
    Metric(
        "ratio_deviation_first", "1",
        "|mean ρ − 1| at the first optimiser step after the rollout: 0 but for rounding, or sampler and trainer "
        "disagree.",
        curve=("policy_optimization",),
    ),
    Metric(
        "approx_kl", "nats/token",
        "Mean of ρ − 1 − log ρ: how far the updates moved the policy from the one that sampled.",
        curve=("policy_optimization",),
    ),
    Metric(
        "clip_fraction", "1", "Share of valid tokens at which the clip of the ratio binds (their gradient is 0).",
        curve=("policy_optimization",),
    ),
    Metric(
        "positive_nll", "nats/token", "Negative log-likelihood per token of the responses held to be right.",
        curve=("policy_optimization",),
    ),
    Metric(
        "grad_norm_policy", "1", "L2 norm of the policy's gradient before clipping.", curve=("policy_optimization",)
    ),
    Metric(
        "grad_norm_critic", "1", "L2 norm of the critic's gradient before clipping.", curve=("policy_optimization",)
    ),
    Metric("learning_rate_policy", "1", "Learning rate of the policy.", curve=("policy_optimization",)),
    Metric("learning_rate_critic", "1", "Learning rate of the critic.", curve=("policy_optimization",)),
    Metric(
        "validation_score", "reward",
        "Mean score of responses to the validation prompts, by which the best policy is chosen.",
        headline=("policy_optimization",), curve=("policy_optimization",),
    ),
    # -- evaluation
    Metric(
        "mean_response_length", "tokens",
        "Mean length of responses, EOS included: of the kept policy to the validation prompts, or of the candidate "
        "to the test prompts.",
        headline=("policy_optimization", "evaluation"),
    ),
    Metric("baseline_mean_response_length", "tokens", "The same of the baseline.", headline=("evaluation",)),
    Metric(
        "win_rate", "1",
        "Share of test prompts, sample by sample, at which the candidate's response is judged better than the "
        "baseline's; a tie counts one half.",
        headline=("evaluation",),
    ),
    *_of_judge("accuracy", "1", "Share of sampled responses to test prompts that the verifier holds to be right", "verifier"),
    *_of_judge("score", "reward", "Mean score of sampled responses to test prompts", "reward"),
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
