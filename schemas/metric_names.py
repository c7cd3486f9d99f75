"""Names of the metrics that kinds of work report, where several kinds share them or they are many."""

from collections.abc import Iterable

PROMPTS_READ = ("prompts_too_long", "prompts_too_long_share", "unknown_token_share", "single_byte_share")
RESPONSES_READ = ("responses_cut", "responses_cut_share")
ROWS = ("train_rows", "validation_rows", "test_rows")
SELECTED = ("rows_too_easy", "rows_too_hard", "rows_never_right", "rows_always_right", "mean_pass_rate")
DIFFICULTY = ("prompts_too_easy", "prompts_impossible")
"""Metrics of a policy stage that counts the passes of its prompts (``difficulty``)."""
PAIRS = ("pair_accuracy", "preference_loss", "validation_pair_accuracy", "validation_preference_loss")
MARGINS = tuple(
    f"{split}{name}"
    for split in ("", "validation_")
    for name in ("desirable_margin", "undesirable_margin", "kto_loss")
)
"""Estimates of a stage that learns labelled responses."""
PASSES = ("forward_passes", "padding_share", "logits_again_share")
PHASES = ("sampling", "waiting", "scoring", "reading", "updating", "measuring", "other")
"""Groups of phases of an iteration that samples, in their order."""
TIMES = (*(f"seconds_{phase}" for phase in PHASES), "seconds_beside", "waiting_share")
"""Metrics of the seconds of each phase of such an iteration."""
GRAPHS = ("graphs_captured", "graph_replays", "graph_fallbacks")
"""Metrics of the sampler on a GPU."""
ENGINE = ("sampled_weights", "sampled_iteration", "engine_gap", "stale_responses", "engine_failures")
"""Metrics of an engine that holds a copy of the policy's weights."""
OF_SERVERS = ("judge_asked", "judge_failed_calls")
"""Metrics of requests to judges and reward servers: a stage that is resumed or run again has fewer of them."""
UNREADABLE_SHARE = "judge_unreadable_share"
ANSWERS = (
    *(
        "judge_answers",
        "judge_unreadable",
        UNREADABLE_SHARE,
        "judge_tokens",
        "judge_cost",
        "judge_probability",
    ),
    *OF_SERVERS,
)
"""Metrics of a reward with a judge or a reward server."""
SAMPLING = ("prompt_reads", "ended_rows_share", *GRAPHS, *ENGINE, *ANSWERS, *TIMES)
SPEED = ("tokens_per_second", "peak_memory")
OF_MACHINE = (*SPEED, *TIMES, *OF_SERVERS)
"""Metrics that depend on the machine, and differ between runs that are otherwise equal."""
COMPILED = ("graphs_compiled",)
UNCOMPILED = ("uncompiled_share",)
"""Metrics of a stage with ``compile: true``: the first of its steps, the second at its end."""
NONFINITE = ("nonfinite_steps",)
"""Metrics of steps whose loss or gradient was not finite."""
STEP = ("learning_rate", *SPEED, *PASSES, *COMPILED, "grad_norm", *NONFINITE)
IMPORTANCE = (
    *("importance_weight", "importance_capped", "importance_effective_share"),
    *("importance_gap", "importance_gap_k3", "importance_gap_worst"),
)
SAMPLER = ("sampler_gap", "sampler_gap_k3", "sampler_gap_worst")
LEAD_SHARE = "teacher_lead_share"
DISTILLED = ("initial_score", "teacher_score", LEAD_SHARE, "kl_to_teacher")
"""Estimates of a stage that distils a teacher."""
SAMPLED_POLICY = ("test_score", "mean_response_length", "truncated_share")
CHOSEN_POLICY = ("best_iteration", "validation_score", "reward_spread")

LENGTH_PERCENTILES = (10, 50, 90)
"""Percentiles of the response length that a rollout reports."""
SCORE_PERCENTILES = (5, 10, 25, 50, 75, 90, 95)
"""Percentiles of scores that a measurement reports: of the validation responses, and of what they are compared with."""
TERM_PERCENTILES = (10, 50, 90)
"""Percentiles of a graded or named score that a rollout reports."""
TERM_QUANTILES = tuple(f"score_p{percent}_TERM" for percent in TERM_PERCENTILES)
VALIDATION_PERCENTILES = tuple(f"validation_score_p{percent}" for percent in SCORE_PERCENTILES)
INITIAL_PERCENTILES = tuple(f"initial_score_p{percent}" for percent in SCORE_PERCENTILES)
"""Percentiles of the scores of the validation responses before the first iteration."""
REWARD_DATA_PERCENTILES = tuple(f"reward_data_score_p{percent}" for percent in SCORE_PERCENTILES)
"""Percentiles of the scores of the responses that the reward's models were trained on."""
ROLLOUT = (
    *("score_mean", "score_mean_TERM", *TERM_QUANTILES),
    *("response_length_mean", "truncated_share", "validation_score"),
)
VALIDATION_TERMS = tuple(f"validation_{name}" for name in ("score_mean_TERM", *TERM_QUANTILES))
"""Mean and percentiles of a graded or named score of the validation responses."""
MONITORS = (*VALIDATION_PERCENTILES, *INITIAL_PERCENTILES, "validation_score_drift", *VALIDATION_TERMS)
REWARD_OF_PREFERENCES, JUDGE_OF_PREFERENCES = "reward_preference_accuracy", "watch_preference_accuracy"
OF_PREFERENCES = (REWARD_OF_PREFERENCES, JUDGE_OF_PREFERENCES)
"""How often the reward's models, and those of a reward that judges, prefer the chosen response of a held-out pair."""
REWARD_DATA = (*REWARD_DATA_PERCENTILES, "reward_data_distance", *OF_PREFERENCES)
"""Curves of a policy stage that names ``preferences``."""
DEMONSTRATED = ("demonstration_nll", "demonstration_nll_rise")
"""Curves of a policy stage that names ``demonstrations``."""
ENSEMBLE = ("reward_disagreement",)
LOSSES_OF_SWITCHES = (
    *("weight_clip_fraction", "gate_slope", "covariance_fraction", "covariance_kl", "entropy_coef"),
)
"""Curves of a policy stage with one of the switches of ``vantage.schemas.recipe.losses``."""
INITIAL_AGREEMENT_LOW = "watch_initial_pair_accuracy_low"
INITIAL_AGREEMENT = (
    *("watch_initial_pair_accuracy", INITIAL_AGREEMENT_LOW, "watch_initial_pair_accuracy_high"),
)
"""How far reward and watch agree before training: value, and the ends of its 95 % interval."""
WATCHED = (
    *("validation_watch_score", "watch_change", "watch_falls", "watch_worse", "watch_lost", "watch_reward"),
    *("watch_win_rate", "watch_length_controlled_win_rate", "watch_order_disagreement"),
    *("watch_pair_accuracy", *INITIAL_AGREEMENT, "watch_right_length", "watch_wrong_length"),
)
VALUES = (
    "value_loss",
    "explained_variance",
    "critic_weight",
    "value_bias",
    "value_mse",
    "value_clip_fraction",
)
"""Curves of a policy stage with a critic."""
LEARNED_VALUES = ("value_loss", "value_bias", "value_mse", "value_clip_fraction", "grad_norm_critic")
"""Curves of a policy stage whose critic learns."""
CRITIC_ENSEMBLE = ("critic_disagreement",)
"""Curves of a policy stage whose critic has several heads."""
MOVED_BY_CRITIC = (*VALUES, "grad_norm_critic", "advantage_mean", "advantage_std")
"""Curves that can change while only the critic learns."""
RESPONSE_SHAPE = (
    *(f"response_length_p{percent}" for percent in LENGTH_PERCENTILES),
    *("repeated_trigrams", "distinct_bigrams"),
)
LEARNED_SAMPLES = (*STEP, *ROLLOUT, *RESPONSE_SHAPE, *MONITORS, *WATCHED, *SAMPLER, *SAMPLING)
"""Curves of a stage that trains a policy by a likelihood or KL of its own responses."""


DOUBLING_TOKENS = ("1", *(f"{2**low}_{2 ** (low + 1) - 1}" for low in range(1, 16)), f"{2**16}")
"""Ranges of numbers of tokens by which a critic is measured: 1, 2 to 3, 4 to 7 …, and 65,536 or more."""
CRITIC_FORMS = ("quantile_calibration_error", *CRITIC_ENSEMBLE)
"""Headline metrics of a critic that predicts quantiles, or is an ensemble."""
CRITIC_SLICES = (
    *(f"tenth_{tenth}" for tenth in range(1, 11)),
    *(f"tokens_left_{tokens}" for tokens in DOUBLING_TOKENS),
    *(f"length_{tokens}" for tokens in DOUBLING_TOKENS),
    *("hardest", "middle", "easiest"),
    *("between_prompts", "within_prompts"),
)


PASS_AT = (2, 4, 8, 10, 16, 32, 64, 100, 128, 256)
"""Numbers of responses k for which an evaluation reports pass@k."""
DISTINCT = (1, 2, 3)
"""Lengths of the n-grams for which an evaluation reports distinct-n."""
LENGTH_GROUPS = (
    "chosen_longer",
    "chosen_shorter",
    *(f"length_quarter_{quarter}" for quarter in (1, 2, 3, 4)),
)
"""Groups of pairs, by the difference in length, for which a reward model's accuracy is reported."""


JUDGED = {"verifier": "accuracy", "reward": "score", "model": "preference"}
"""Kind of judge → its judgement of a response, by which its metrics are named."""
COMPARED_BY_JUDGE = ("win_rate", "tied_pairs", "length_controlled_win_rate")
"""Metrics of pairs by a judge of any kind; those of the second judge are prefixed with its name."""


def judge_metrics(name: str) -> tuple[str, ...]:
    """Return metrics of an evaluation, named by its kind of judge; each has an uncertainty."""
    return (
        *(name, f"baseline_{name}", f"{name}_gain", f"greedy_{name}", f"baseline_greedy_{name}"),
        *(f"{name}_{metric}" for metric in COMPARED_BY_JUDGE),
    )


def compared(names: Iterable[str]) -> tuple[str, ...]:
    """Return metrics of both models of an evaluation, and candidate − baseline."""
    return tuple(each for name in names for each in (name, f"baseline_{name}", f"{name}_difference"))
