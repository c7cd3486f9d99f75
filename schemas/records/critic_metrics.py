"""The metrics of critics, headlines and curves: rows of the table of metrics."""

from vantage.schemas.metric_names import DOUBLING_TOKENS
from vantage.schemas.records.metric import Metric


def _by_tokens(name: str, of: str) -> tuple[Metric, ...]:
    """Return the metrics of explained variance by a number of tokens, in bins that double."""
    meaning = (
        f"explained_variance {of}: 1, 2 to 3, 4 to 7, 8 to 15 … tokens, both ends included; 65536: that many or more. "
        "Undefined, so that a gate is closed, where no response to a test prompt has such tokens."
    )
    family = f"`{name}_1`, `_2_3`, `_4_7` … `_32768_65535`, `_65536`"
    return tuple(Metric(f"{name}_{tokens}", "1", meaning, family=family) for tokens in DOUBLING_TOKENS)


CRITIC_METRICS: tuple[Metric, ...] = (
    Metric(
        "value_loss", "reward²",
        "½ · mean over valid tokens of (value − target)², clipped if the recipe says so; of the iteration's last "
        "minibatch; in policy_optimization the mean over its minibatches. With critic_head: {quantiles: N} the quantile "
        "Huber loss; with an ensemble the values are those of the head that learns from the prompt.",
    ),
    Metric(
        "explained_variance", "1",
        "1 − Var(G − V)/Var(G) over all valid tokens at once, with Monte-Carlo returns G. value_pretraining: the kept "
        "critic on responses to test prompts; policy_optimization: on the rollout, before the update. Returns of "
        "truncated responses end at the cut, also with bootstrap_truncated. "
        "1 is a perfect critic, 0 a constant; undefined if returns do not vary.",
    ),
    Metric(
        "critic_weight", "1",
        "How far the rollout's advantages are the critic's: 1 all, 0 not at all (the return less the rollout's mean "
        "return); with critic_blend the share between. Only with critic_ev_threshold or critic_blend.",
    ),
    Metric(
        "validation_explained_variance", "1",
        "The same on responses to validation prompts, which selects the kept critic; gates cannot use it. "
        "Curve: of the current critic.",
    ),
    Metric("return_variance", "reward²", "Var(G) over the same tokens: what there is to explain."),
    Metric(
        "value_bias", "reward",
        "Mean of value − target, which explained variance does not measure: over the responses to test prompts "
        "(headline); over the iteration's last minibatch, in policy_optimization over all of them (curve).",
    ),
    Metric(
        "value_mse", "reward²",
        "Mean of (value − target)², never clipped: over the responses to test prompts (headline), or over the "
        "iteration's minibatches (curve).",
    ),
    Metric(
        "constant_mse", "reward²",
        "Mean of (c − G)² for the constant c = mean of G: the baseline of value_mse.",
    ),
    *(
        Metric(
            f"explained_variance_position_{quarter}", "1",
            f"Explained variance over the {ordinal} quarter of every response, so that each part of a response counts "
            "on its own.",
        )
        for quarter, ordinal in enumerate(("first", "second", "third", "last"), start=1)
    ),
    *(
        Metric(
            f"explained_variance_tenth_{tenth}", "1",
            "explained_variance of the first, second … last tenth of every response.",
            family="`explained_variance_tenth_1` … `_10`",
        )
        for tenth in range(1, 11)
    ),
    *_by_tokens("explained_variance_tokens_left", "by the tokens from a token to the response's end, itself included"),
    *_by_tokens("explained_variance_length", "by the response's length"),
    *(
        Metric(
            f"explained_variance_{third}", "1",
            "explained_variance by thirds of the responses, in the order of the mean return of the other responses to the "
            "same prompt. Undefined where each test prompt has one response: test_samples asks for more.",
            family="`explained_variance_hardest`, `_middle`, `_easiest`",
        )
        for third in ("hardest", "middle", "easiest")
    ),
    Metric(
        "explained_variance_between_prompts", "1",
        "explained_variance of the prompts' mean returns: whether the critic knows which prompts go well.",
    ),
    Metric(
        "explained_variance_within_prompts", "1",
        "explained_variance of the differences to the prompt's mean: whether the critic knows which responses to a prompt "
        "go well. Undefined where each test prompt has one response: test_samples asks for more.",
    ),
    Metric(
        "rank_correlation", "1",
        "(Pairs that the critic puts in the right order − pairs in the wrong one) / pairs of responses to one test prompt "
        "whose returns differ, half-way through each response (Kendall's τ). 1: always right, 0: as good as chance. "
        "Undefined where there is no such pair: test_samples asks for more responses.",
    ),
    Metric(
        "squared_advantage_ratio", "1",
        "value_mse / constant_mse: the mean squared advantage with the critic as baseline, relative to that with the batch's "
        "mean. Below 1 the critic makes advantages smaller. Its standard error leaves the mean's own out, which has no "
        "first-order effect.",
    ),
    Metric(
        "others_mean_mse", "reward²",
        "The mean squared advantage with the mean return of the other responses to the prompt as baseline (RLOO's). "
        "Undefined where a test prompt has one response: test_samples asks for more.",
    ),
    Metric(
        "calibration_error", "reward",
        "Mean over tokens of |mean value − mean return| of their part, by tenths of the tokens in the order of their values. "
        "Noise alone makes it positive.",
    ),
    Metric(
        "quantile_calibration_error", "1",
        "Mean over at most nine bounds of |share of returns up to the bound − mean predicted share up to it|, where a "
        "critic with quantiles predicts the share of its quantiles up to the bound. The bounds lie between different "
        "returns, near their tenths. On responses to test prompts; noise alone makes it positive. Only with critic_head: "
        "{quantiles: N}.",
    ),
    Metric(
        "critic_disagreement", "reward",
        "Mean over valid tokens of the standard deviation over the values of an ensemble. value_pretraining: the kept "
        "critic on responses to test prompts; policy_optimization: on the rollout, before the update. Only with "
        "critic_head: {ensemble: K}.",
    ),
    Metric("value_clip_fraction", "1", "Share of valid tokens at which the clip of the value loss binds."),
    Metric("return_mean", "reward", "Mean Monte-Carlo return over the rollout's valid tokens."),
    Metric(
        "best_iteration", "iterations",
        "Iteration whose weights were kept: the critic with the best explained variance, or the policy with the best "
        "score, on validation prompts.",
    ),
    Metric(
        "critic_weight_mean", "1",
        "Mean of critic_weight over the iterations: 1 where all advantages were the critic's. Only with "
        "critic_ev_threshold or critic_blend.",
    ),
)  # fmt: skip
