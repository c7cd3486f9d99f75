"""The metrics of stages that train a policy on its own responses: rows of the table of metrics."""

from vantage.schemas.metric_names import LENGTH_PERCENTILES, TERM_QUANTILES
from vantage.schemas.records.distillation_metrics import DISTILLATION_METRICS
from vantage.schemas.records.metric import Metric
from vantage.schemas.records.monitor_metrics import MONITOR_METRICS

POLICY_METRICS: tuple[Metric, ...] = (
    # -- the rollout
    Metric(
        "prompts_too_easy", "prompts",
        "Training prompts all of whose responses in the last groups (difficulty.after) passed: so far (curve), or at the end. "
        "Groups that drop_uniform_groups leaves out count too. Only with difficulty.",
    ),
    Metric(
        "prompts_impossible", "prompts",
        "Training prompts of which no response has passed yet, after difficulty.after groups or more. Only with difficulty.",
    ),
    Metric(
        "score_mean", "reward",
        "Mean score of the rollout's responses, before any KL penalty; in reward_model: of the minibatch's pairs or "
        "ranked responses.",
    ),
    Metric(
        "score_mean_TERM", "1",
        "The same of one term of the reward, unclipped and unweighted. TERM is the term's model, verifier or `name` (`judge`, `http`), or "
        "`length_KIND`; of a term with several named scores it is TERM.NAME for each.",
    ),
    *(
        Metric(
            name, "1",
            "10th, 50th and 90th percentile of the same scores. Only of a verifier that returns numbers or "
            "scores steps, and of a judge or reward server.",
            family="`score_p10_TERM`, `score_p50_TERM`, `score_p90_TERM`",
        )
        for name in TERM_QUANTILES
    ),
    Metric("best_score_mean", "reward", "Mean score of the kept responses: each prompt's best."),
    Metric(
        "reward_disagreement", "reward",
        "Mean over the rollout's responses of the standard deviation of the scores of the reward's models. Only with an ensemble.",
    ),
    Metric(
        "scaled_score_mean", "1",
        "Mean score of the rollout's responses after scaling, clipping and overlong shaping, as used in the tokens' "
        "rewards.",
    ),
    Metric(
        "reward_moments_mean", "reward",
        "Running mean of all scores so far, this rollout's included, where reward_scaling is on.",
    ),
    Metric(
        "reward_moments_std", "reward",
        "Running standard deviation of the same scores, by which they are divided.",
    ),
    Metric("kl_coef", "reward/nat", "β of the penalty −β·KL(π‖ref) in the rewards of this iteration's tokens."),
    Metric(
        "reward_mean", "reward",
        "Mean over responses of the sum of their tokens' rewards: score less KL penalty.",
    ),
    Metric(
        "kl_to_reference", "nats/response",
        "Mean over responses of Σ_t (log π(a_t) − log π_ref(a_t)), sampled from π: of the rollout (curve), and of "
        "the kept policy on the validation prompts (headline).",
    ),
    Metric(
        "kl_to_reference_per_token", "nats/token",
        "kl_to_reference of the rollout / its mean response length.",
    ),
    Metric("response_length_mean", "tokens", "Mean length of the rollout's responses, EOS included."),
    *(
        Metric(f"response_length_p{percent}", "tokens", f"{percent} % of the rollout's responses are no longer than this.")
        for percent in LENGTH_PERCENTILES
    ),
    Metric(
        "repeated_trigrams", "1",
        "Share of a response's 3-grams that occur earlier in the same response, mean over the rollout's responses of three "
        "tokens or more: near 1 where responses are loops.",
    ),
    Metric(
        "distinct_bigrams", "1",
        "Distinct 2-grams / 2-grams over all responses of the rollout (distinct-2): near 0 where all responses are alike.",
    ),
    Metric(
        "truncated_share", "1",
        "Share of responses cut off at max_response_tokens, without EOS: of the rollout (curve), of the kept policy "
        "or the candidate (headline).",
    ),
    Metric("positive_share", "1", "Share of positive responses in the rollout."),
    Metric(
        "uniform_group_share", "1",
        "Share of the sampled groups (responses to one prompt) whose responses all have the same score, before any "
        "shaping; groups that drop_uniform_groups replaced count too. 1 if a prompt has one response.",
    ),
    Metric(
        "sampling_rounds", "rollouts",
        "Rollouts sampled to fill this iteration's: 1 without drop_uniform_groups.",
    ),
    Metric(
        "greedy_score_mean", "reward",
        "Mean score of the most likely response to each prompt of the rollout, where it is the baseline.",
    ),
    Metric(
        "baseline_mean", "reward",
        "Mean over the rollout's responses of the baseline that began with collected responses: reference_mean, "
        "optimal_value or tracked_mean, before this rollout's scores are added to it.",
    ),
    Metric(
        "advantage_mean", "reward",
        "Mean of the advantages over the rollout's tokens in the policy's loss: after whitening, before normalisation "
        "within minibatches. Advantages that are whitened or normalised by groups have no unit. Undefined if "
        "overlong_filter removes all tokens.",
    ),
    Metric("advantage_std", "reward", "Standard deviation of the same advantages."),
    Metric(
        "sampler_gap", "nats/token",
        "Mean over valid tokens of |Δ|, Δ = the trainer's − the sampler's log-probability of the sampled token, before "
        "any update: 0 except for rounding. Of the rollout; in best_of_n of the first minibatch. Above 0.001 in float32, "
        "or 0.1 in bfloat16, the stage stops. Not with old_logprobs: sampler, where ratio_deviation_first tells it, nor of what was sampled ahead by an earlier policy.",
    ),
    Metric(
        "sampler_gap_k3", "nats/token",
        "Mean of e^(−Δ) − 1 + Δ over the same tokens: KL(trainer‖sampler) to second order in Δ (the samples are the "
        "sampler's).",
    ),
    Metric("sampler_gap_worst", "nats", "The largest |Δ| among the same tokens."),
    Metric(
        "importance_weight", "1",
        "Mean over the tokens that are learnt from of π_old/π_sampler within its bounds, by which advantages are weighted; 1 "
        "but for rounding where no update came between. Only with algorithm.rollout_correction, or with rollout.ahead and "
        "old_logprobs: policy.",
    ),
    Metric(
        "importance_capped", "1",
        "Share of the response tokens whose ratio is out of bounds: truncated, or left out by a mask. Where importance_weight is.",
    ),
    Metric(
        "importance_gap", "nats/token",
        "As sampler_gap, also of what an earlier policy sampled, where it may be anything. Where importance_weight is.",
    ),
    Metric("importance_gap_k3", "nats/token", "As sampler_gap_k3, of the same."),
    Metric("importance_gap_worst", "nats", "As sampler_gap_worst, of the same."),
    Metric(
        "importance_effective_share", "1",
        "(Σw)²/(n·Σw²) of the n ratios w = π_old/π_sampler before the bounds, of tokens or, with ratio_of: sequence, of responses: "
        "the effective sample size as a share (arXiv 2602.17616). Where importance_weight is.",
    ),
    # -- the update; in policy_optimization, means over the iteration's minibatches unless stated otherwise
    Metric(
        "policy_loss", "1",
        "The policy's loss: the surrogate plus the weighted positive NLL and KL terms, minus the weighted entropy; "
        "without ptx and a shared trunk's value loss.",
    ),
    Metric(
        "surrogate_loss", "1",
        "The surrogate alone (−ρ·A, clipped as the recipe says, or −log π · A), by the recipe's aggregation.",
    ),
    Metric("entropy", "nats/token", "Exact entropy of the policy, mean over valid tokens."),
    Metric("ratio", "1", "Mean over valid tokens of ρ = π/π_old."),
    Metric("ratio_deviation", "1", "Mean over valid tokens of |ρ − 1|."),
    Metric(
        "effective_sample_share", "1",
        "(mean ρ)² / mean ρ² over valid tokens: the effective sample size of the ratios as a share of the tokens. 1 where all "
        "are equal, near 0 where a few tokens have all the weight.",
    ),
    Metric(
        "ratio_deviation_first", "1",
        "The same at the first optimiser step after the rollout: 0 except for rounding. Above 0.001 in float32, or 0.1 "
        "in bfloat16, the stage stops before that step. Not of a rollout that was sampled ahead, with old_logprobs: sampler.",
    ),
    Metric(
        "approx_kl", "nats/token",
        "Mean of ρ − 1 − log ρ: KL between the policy that sampled and the updated one.",
    ),
    Metric(
        "clip_fraction", "1",
        "Share of valid tokens at which the clip of the ratio binds (their gradient is 0); with ratio_level: sequence all tokens "
        "of a response. 0 with surrogate: clipped_weight or soft_gate, which take no gradient away.",
    ),
    Metric("dual_clip_fraction", "1", "Share of valid tokens at which the bound −c·A of dual_clip binds."),
    Metric(
        "weight_clip_fraction", "1",
        "Share of valid tokens whose weight clipped_weight has clipped; they keep their gradient.",
    ),
    Metric(
        "gate_slope", "1",
        "Mean over valid tokens of the slope 4·σ·(1 − σ) of soft_gate: 1 where all ratios are 1, near 0 where they are far from 1.",
    ),
    Metric("covariance_fraction", "1", "Share of valid tokens that covariance has selected."),
    Metric("covariance_kl", "nats/token", "Mean of |log ρ| over the tokens that covariance: kl has selected, unweighted."),
    Metric(
        "entropy_coef", "1/nat",
        "Weight of the entropy bonus during this iteration, where it adapts: 0 while the entropy was not below entropy_target.",
    ),
    Metric("kl_loss", "nats/token", "KL to the reference as estimated in the loss (kl_loss_kind), unweighted."),
    Metric(
        "old_kl", "nats/token",
        "KL(old‖new), from the policy that sampled to the updated one, as estimated by kl_penalty_kind, unweighted.",
    ),
    Metric("kl_penalty_coef", "1/nat", "β of the loss β·KL(old‖new) during this iteration."),
    Metric("trust_region_undone", "steps", "Optimiser steps of this iteration that the trust region undid."),
    Metric(
        "nll", "nats/token",
        "Negative log-likelihood per token of the kept responses, under the distribution that sampled them; mean over "
        "the iteration's optimiser steps.",
    ),
    Metric("positive_nll", "nats/token", "Negative log-likelihood per token of the positive responses."),
    Metric("ptx_nll", "nats/token", "Negative log-likelihood per response token of the ptx demonstrations."),
    Metric("grad_norm_policy", "1", "L2 norm of the policy's gradient before clipping."),
    Metric("grad_norm_critic", "1", "L2 norm of the critic's gradient before clipping."),
    Metric("learning_rate_policy", "1", "Learning rate of the policy."),
    Metric("learning_rate_critic", "1", "Learning rate of the critic."),
    Metric(
        "validation_score", "reward",
        "Mean score of responses to the validation prompts, which selects the kept policy; gates cannot use it.",
    ),
    *MONITOR_METRICS,
    Metric(
        "reference_nll", "nats/token",
        "Negative log-likelihood of the rollout's responses under the reference, per response token; its exponential is their "
        "perplexity. Only where the reference's log-probabilities are computed.",
    ),
    Metric(
        "watch_pair_accuracy", "1",
        "Share of all pairs of watched responses, of any prompts, that the watch's judge scores differently in which the one that it scores "
        "higher has the higher reward (ties count half): 0.5 is chance. Not with a model as the judge.",
    ),
    Metric(
        "watch_initial_pair_accuracy", "1",
        "The same of the policy before the first iteration: the same number at each measurement. Not with a model as the judge.",
    ),
    Metric(
        "watch_initial_pair_accuracy_low", "1",
        "Low end of its 95 % interval, clustered by prompt. Below 0.5 the reward and the judge are not shown to agree: one of them may be "
        "wrong, and this number cannot show which.",
    ),
    Metric("watch_initial_pair_accuracy_high", "1", "High end of the same interval."),
    Metric("watch_right_length", "tokens", "Mean length of the validation responses that the watch's verifier finds right."),
    Metric("watch_wrong_length", "tokens", "The same of the wrong ones."),
    Metric(
        "validation_watch_score", "1",
        "Mean score of the same responses (with watch.prompts, of those to these prompts) by the watch's judge: the share that a verifier "
        "finds right, another reward's mean, or the win rate against init that a model finds; with keep.by=watch it selects the kept "
        "policy. Only with watch; gates cannot use it.",
    ),
    Metric(
        "watch_change", "1",
        "Mean difference of the judge's scores to those at the measurement that it liked best, on the same prompts. Only with watch.",
    ),
    Metric(
        "watch_falls", "measurements",
        "Measurements in a row at which the reward had risen since the one that the judge liked best, and the judge's score fallen, "
        "each by more than its 95 % interval, clustered by prompt. At 2 the watch acts. Only with watch.",
    ),
    Metric(
        "watch_worse", "measurements",
        "Measurements in a row at which the judge's score had fallen since the one that it liked best, by more than its 99.9 % interval, "
        "whatever the reward did. Only with watch.",
    ),
    Metric(
        "watch_lost", "1",
        "How much of the judge's best score is lost: as a share of it, or of a reward as the judge in standard deviations of its scores. 0 "
        "unless the score has fallen by more than its 99.9 % interval. Only with watch.",
    ),
    Metric(
        "watch_reward", "reward",
        "Mean reward of the responses to the watch's own prompts. Only with watch.prompts.",
    ),
    Metric(
        "watch_win_rate", "1",
        "Share of the watched responses that the watch's judge prefers to the response of the policy that the stage started from, to the "
        "same prompt with the same random numbers; a tie counts half. A reward prefers the higher score, a model the same response in "
        "both orders. Not with a verifier as the judge.",
    ),
    Metric(
        "watch_length_controlled_win_rate", "1",
        "The same at equal lengths (arXiv 2404.04475), as length_controlled_win_rate of an evaluation.",
    ),
    Metric(
        "watch_order_disagreement", "1",
        "Share of the pairs of different responses on which the watch's judge prefers another one in the other order; they are ties. Near "
        "1 the judge sees nothing. Only with a model as the judge.",
    ),
    *DISTILLATION_METRICS,
    Metric("test_score", "reward", "Mean score of the kept policy's responses to the test prompts."),
    Metric(
        "reward_spread", "reward",
        "Highest − lowest score of the responses to the test prompts, of the kept policy, or of both models of an "
        "evaluation (a verifier scores 1 and 0, a model as judge 1, ½ and 0); 0 if all are equal.",
    ),
)  # fmt: skip
