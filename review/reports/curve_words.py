"""Titles of the learning curves, and hints what to look for, for a reader who does not know the metrics' names."""

from vantage.schemas.kinds import KINDS

_TITLES = {
    "score_mean": ("Reward", "of the responses that were sampled"),
    "best_score_mean": ("Reward of the best responses", "that are trained on; good: rises"),
    "validation_score": ("Held-out score", "reward on held-out prompts; good: rises"),
    "validation_watch_score": ("Held-out score by the watch", "of a judge that the reward does not know; good: rises"),
    "watch_pair_accuracy": ("Reward against the watch", "share of pairs that the reward orders as the judge; 0.5 is chance"),
    "validation_score_drift": ("Drift of the held-out scores", "since before the first iteration, in standard deviations"),
    "reward_data_distance": (
        "Distance from the reward's own data", "of the held-out scores, in standard deviations; watch for growth"
    ),
    "demonstration_nll": ("Loss on held-out demonstrations", "good: does not rise"),
    "demonstration_nll_rise": ("Forgotten demonstrations", "loss on held-out ones less the reference's; good: near 0"),
    "reward_disagreement": ("Disagreement of the reward models", "watch for growth"),
    "repeated_trigrams": ("Repetition", "share of repeated 3-grams in a response; good: does not rise"),
    "validation_explained_variance": ("Held-out explained variance", "of the critic; 1 is perfect, 0 a constant"),
    "explained_variance": ("Explained variance", "of the critic; 1 is perfect, 0 is no better than a constant; good: above 0, and not falling"),
    "loss": ("Loss", "good: falls"),
    "validation_nll": ("Held-out loss", "on held-out rows; good: falls"),
    "train_pair_accuracy": ("Pair accuracy in training", "share of pairs in the right order; good: rises"),
    "score_gap": ("Gap between chosen and rejected", "mean difference in score; good: rises"),
    "reward_gap": ("Gap between chosen and rejected", "mean difference in implicit reward; good: rises"),
    "validation_pair_accuracy": ("Held-out pair accuracy", "share of held-out pairs in the right order; good: rises"),
    "kl_to_reference": ("KL to the reference", "how far the policy has moved from where it started"),
    "entropy": ("Entropy", "how undecided the policy is; good: does not collapse to 0"),
    "response_length_mean": ("Response length", "watch for steady growth"),
    "clip_fraction": ("Clip fraction", "share of tokens whose update was clipped"),
    "approx_kl": ("KL of one update", "from the policy that sampled to the updated one"),
    "truncated_share": ("Truncated responses", "share that was cut off at the longest length; good: near 0"),
    "value_loss": ("Value loss", "squared error of the critic; good: falls"),
    "return_mean": ("Return", "what the critic has to predict, on average"),
    "nll": ("Loss", "negative log-likelihood; good: falls"),
    "chosen_nll": ("Loss on chosen responses", "negative log-likelihood"),
    "critic_weight": ("Weight of the critic", "in the advantages; 1: the critic alone"),
    "value_bias": ("Bias of the critic", "mean of predictions minus returns; good: near 0"),
    "policy_loss": ("Policy loss", "its size means little; watch for jumps"),
    "tied_share": ("Tied prompts", "share of prompts that gave no pair"),
    "reward_mean": ("Reward after penalties", "of the responses that were sampled, KL penalty included"),
    "positive_share": ("Positive responses", "share of the responses that were sampled"),
    "uniform_group_share": ("Groups without contrast", "share of prompts all of whose responses score the same"),
    "importance_weight": ("Importance weight", "trainer against sampler; good: near 1"),
    "kl_coef": ("KL coefficient", "weight of the KL penalty"),
    "grad_norm_policy": ("Gradient norm of the policy", "before clipping; watch for jumps"),
    "grad_norm_critic": ("Gradient norm of the critic", "before clipping; watch for jumps"),
    "grad_norm": ("Gradient norm", "before clipping; watch for jumps"),
    "learning_rate_policy": ("Learning rate of the policy", "as scheduled"),
    "learning_rate": ("Learning rate", "as scheduled"),
}  # fmt: skip


def title_and_note(metric: str, kind: str) -> tuple[str, str]:
    """Return title and hint for a curve of a kind of stage."""
    title, note = _TITLES.get(metric, (metric, ""))
    if metric.startswith("score_mean_"):
        title, note = f"Score {metric.removeprefix('score_mean_')}", "mean, unweighted"
    row = KINDS.get(kind)
    if metric == "score_mean" and row is not None and row.learns_from_samples:
        note += "; good: rises"
    if metric == "score_mean" and row is not None and row.makes == "reward_model":
        title, note = "Mean score", "of the pairs' responses; means little"
    return title, note
