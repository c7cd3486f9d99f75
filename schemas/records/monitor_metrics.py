"""The metrics by which a policy stage is watched at each validation, beside its score: rows of the table of metrics."""

from vantage.schemas.metric_names import SCORE_PERCENTILES, VALIDATION_TERMS
from vantage.schemas.records.metric import Metric


def _percentiles(name: str, meaning: str) -> tuple[Metric, ...]:
    """Return the percentiles of one set of scores."""
    first, *others = SCORE_PERCENTILES
    family = ", ".join([f"`{name}_p{first}`", *(f"`_p{percent}`" for percent in others)])
    return tuple(
        Metric(f"{name}_p{percent}", "reward", meaning, family=family) for percent in SCORE_PERCENTILES
    )


MONITOR_METRICS: tuple[Metric, ...] = (
    *_percentiles(
        "validation_score", "Percentiles of the scores of the responses to the validation prompts: N % score no more than this."
    ),
    *_percentiles(
        "initial_score", "The same of the policy before the first iteration: the same number at each validation."
    ),
    Metric(
        "validation_score_drift", "1",
        "How far the distribution of the validation responses' scores has moved since before the first iteration: Wasserstein-1 distance in standard "
        "deviations of the scores then.",
    ),
    *(
        Metric(
            name, "1",
            "Mean, 10th, 50th and 90th percentile of one score of the validation responses, unclipped and unweighted; TERM as in "
            "`score_mean_TERM`. Only of numbers that a verifier, a judge or a reward server returns.",
            family="`validation_score_mean_TERM`, `validation_score_p10_TERM`, `_p50_TERM`, `_p90_TERM`",
        )
        for name in VALIDATION_TERMS
    ),
    *_percentiles(
        "reward_data_score",
        "Percentiles of the scores that the reward's models, weighted as in the reward, give to the chosen and rejected responses of "
        "`preferences`, from its training and validation rows: the same number at each validation. Only where the reward has no other terms.",
    ),
    Metric(
        "reward_data_distance", "1",
        "Wasserstein-1 distance between the scores that the reward's models, weighted as in the reward, give to the responses to the "
        "validation prompts and to the responses of `preferences`, in standard deviations of the latter. Only with `preferences`.",
    ),
    Metric(
        "reward_preference_accuracy", "1",
        "Share of held-out (validation) pairs of `preferences` whose chosen response scores higher by the reward's models (ties count half): the "
        "same number at each validation.",
    ),
    Metric(
        "watch_preference_accuracy", "1",
        "The same by the models of the reward that judges in the watch. Where the two disagree, the one that is near 0.5 here is the doubtful one, "
        "if the preferences are right.",
    ),
    Metric(
        "demonstration_nll", "nats/token",
        "Negative log-likelihood of held-out (validation) demonstrations under the policy at temperature 1, per token that is learnt. "
        "Only with `demonstrations`.",
    ),
    Metric(
        "demonstration_nll_rise", "nats/token",
        "The same less that of the reference: what the policy has forgotten (alignment tax).",
    ),
)  # fmt: skip
