"""The table of metrics that only evaluations report; ``vantage.schemas.records.metrics`` has all."""

from collections.abc import Iterator
from typing import Literal

from vantage.schemas.metric_names import COMPARED_BY_JUDGE, DISTINCT, LENGTH_GROUPS, PASS_AT
from vantage.schemas.records.metric import Metric


def _of_judge(name: str, unit: str, meaning: str, judge: Literal["verifier", "reward"]) -> Iterator[Metric]:
    """Yield metrics of an evaluation that are named by its kind of judge."""
    meanings = {
        name: f"{meaning}, of the candidate (with k samples_per_prompt, mean@k).",
        f"baseline_{name}": "The same of the baseline.",
        f"{name}_gain": f"{name} − baseline_{name}.",
        f"{name}_gain_standard_error": f"Standard error of {name}_gain over prompts; undefined for a single prompt.",
        f"greedy_{name}": f"{name} of the candidate's most likely responses, one for each prompt.",
        f"baseline_greedy_{name}": "The same of the baseline.",
    }
    yield from (Metric(each, unit, text, needs=(judge,)) for each, text in meanings.items())
    yield from _of_second_judge(name, judge)


def _of_second_judge(name: str, judge: str) -> Iterator[Metric]:
    """Yield the metrics of pairs by the judge of the field ``also``."""
    for metric in COMPARED_BY_JUDGE:
        yield Metric(f"{name}_{metric}", "1", f"{metric} by the second judge.", needs=(f"also.{judge}",))


def _of_both(name: str, unit: str, meaning: str, *, needs: tuple[str, ...] = ()) -> Iterator[Metric]:
    """Yield a metric of both models, and the difference."""
    yield Metric(name, unit, f"{meaning}, of the candidate.", needs=needs)
    yield from _beside(name, unit, needs=needs)


def _beside(name: str, unit: str, *, needs: tuple[str, ...] = ()) -> Iterator[Metric]:
    """Yield the baseline's metric and the difference, beside the candidate's."""
    yield Metric(f"baseline_{name}", unit, f"{name} of the baseline.", needs=needs)
    yield Metric(f"{name}_difference", unit, f"{name} − baseline_{name}.", needs=needs)


def _pass_at() -> Iterator[Metric]:
    """Yield pass@k of both models and the difference, each a family over k."""
    listed = ", ".join(map(str, PASS_AT))
    meanings = {
        "pass_at_{}": "Chance that the verifier accepts at least one of K of the candidate's responses to a test prompt, "
        f"unbiased from all of them (arXiv 2107.03374 eq. 1); K of {listed}, up to samples_per_prompt.",
        "baseline_pass_at_{}": "The same of the baseline.",
        "pass_at_{}_difference": "Candidate − baseline.",
    }
    for name, meaning in meanings.items():
        for k in PASS_AT:
            needs = ("verifier", f"samples.{k}")
            yield Metric(name.format(k), "1", meaning, needs=needs, family=f"`{name.format('K')}`")


_ACCURACY_OF = {
    "chosen_longer": "pairs whose chosen response has more tokens than the rejected one",
    "chosen_shorter": "pairs whose chosen response has fewer tokens",
}

REWARD_METRICS: tuple[Metric, ...] = (
    Metric(
        "expected_calibration_error", "1",
        "Mean over test pairs, by ten bins of the confidence max(σ(m), 1 − σ(m)), of |share of the bin's pairs that are right "
        "− mean confidence|; m = chosen score − rejected score (arXiv 1706.04599 eq. 3). Noise alone makes it positive.",
    ),
    Metric(
        "brier_score", "1",
        "Mean of (1 − σ(m))² over test pairs: 0 is certain and right, 0.25 is a coin's, 1 is certain and wrong.",
    ),
    *(
        Metric(
            f"pair_accuracy_{group}", "1",
            f"pair_accuracy of {_ACCURACY_OF[group]}."
            if group in _ACCURACY_OF
            else "pair_accuracy by quarters of the test pairs in the order of the difference in length (chosen − rejected, "
            "tokens): 1 is where the chosen response is shortest beside the other. Equal differences are never separated, "
            "so quarters may differ in size, or be empty and undefined.",
            family=None if group in _ACCURACY_OF else "`pair_accuracy_length_quarter_1` … `_4`",
        )
        for group in LENGTH_GROUPS
    ),
    Metric("num_subgroups", "subgroups", "Values of the column subgroup among the test pairs; 0 without the column."),
    Metric(
        "worst_subgroup_accuracy", "1",
        "The lowest pair_accuracy of a subgroup with 10 prompts or more: the lowest of many noisy numbers is too low. "
        "subgroups.json of the artifact has all with their intervals. Undefined without such a subgroup.",
    ),
)  # fmt: skip
"""Metrics of ``reward_evaluation``."""

BENCHMARK_METRICS: tuple[Metric, ...] = (
    Metric(
        "benchmark_score", "1",
        "What the task's metric (`metric`) is, with lm-eval's own standard error and number of examples; results.json of the "
        "artifact has all metrics of all tasks.",
    ),
)  # fmt: skip
"""Metrics of ``benchmark_evaluation``."""

EVALUATION_METRICS: tuple[Metric, ...] = (
    Metric(
        "win_rate", "1",
        "Share of test prompts, sample by sample, where the candidate's response is judged better than the baseline's; "
        "a tie counts one half.",
    ),
    Metric("tied_pairs", "1", "Share of the same pairs whose two responses are judged the same."),
    Metric(
        "length_controlled_win_rate", "1",
        "The win rate that a logistic regression on the difference in length predicts for responses of equal length "
        "(arXiv 2404.04475; docs/evaluation.md has the formula).",
    ),
    *_of_judge("accuracy", "1", "Share of sampled responses to test prompts that the verifier accepts", "verifier"),
    *_of_judge("score", "reward", "Mean score of sampled responses to test prompts", "reward"),
    *_of_second_judge("preference", "model"),
    Metric(
        "order_disagreement", "1",
        "Share of pairs of different responses that the model prefers otherwise when they are shown in the other order: its "
        "position bias. Such pairs are ties. Undefined where all pairs are equal.",
        needs=("model",),
    ),
    *_pass_at(),
    *_beside("truncated_share", "1"),
    *_beside("mean_response_length", "tokens"),
    *(
        metric
        for n in DISTINCT
        for metric in _of_both(
            f"distinct_{n}", "1",
            f"distinct-{n} (arXiv 1510.03055 §5.3, by prompt; it falls with length and samples_per_prompt): distinct n-grams "
            f"of {n} tokens / all of them in the sampled responses to a test prompt, mean over prompts",
        )
    ),
    Metric(
        "kl_to_baseline", "nats/response",
        "KL(candidate‖baseline): mean over the candidate's sampled responses of Σ_t e^(−Δ) − 1 + Δ (k3), "
        "Δ = log π − log π_baseline of the sampled token, at the sampling temperature. Undefined where the two have "
        "different tokenizers.",
    ),
    Metric("kl_to_baseline_per_token", "nats/token", "The same, divided by the mean length."),
    Metric(
        "perplexity", "1",
        "e^(NLL per response token) of the candidate on the test demonstrations (EOS included).",
        needs=("demonstrations",),
    ),
    Metric("baseline_perplexity", "1", "The same of the baseline.", needs=("demonstrations",)),
    Metric(
        "perplexity_ratio", "1",
        "perplexity / baseline_perplexity: below 1, the candidate predicts demonstrations better. Undefined where the two "
        "have different tokenizers.",
        needs=("demonstrations",),
    ),
    *_of_both(
        "response_nll", "nats/response",
        "Mean negative log-likelihood of a whole test demonstration",
        needs=("demonstrations",),
    ),
)  # fmt: skip
