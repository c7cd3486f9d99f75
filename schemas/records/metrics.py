"""The table of metrics: name, unit and definition. ``vantage.schemas.kinds`` has the metrics of each kind of stage.

``vantage.schemas.records.metrics_page`` prints this table as ``docs/metrics.md``.
"""

from collections.abc import Iterable

from vantage.schemas.kinds import KINDS
from vantage.schemas.metric_names import DOUBLING_TOKENS, LENGTH_PERCENTILES
from vantage.schemas.records.evaluation_metrics import BENCHMARK_METRICS, EVALUATION_METRICS, REWARD_METRICS
from vantage.schemas.records.metric import NEEDS, Metric, Settings
from vantage.schemas.records.monitor_metrics import MONITOR_METRICS


def _by_tokens(name: str, of: str) -> tuple[Metric, ...]:
    """Return the metrics of explained variance by a number of tokens, in bins that double."""
    meaning = (
        f"explained_variance {of}: 1, 2 to 3, 4 to 7, 8 to 15 … tokens, both ends included; 65536: that many or more. "
        "Undefined, so that a gate is closed, where no response to a test prompt has such tokens."
    )
    family = f"`{name}_1`, `_2_3`, `_4_7` … `_32768_65535`, `_65536`"
    return tuple(Metric(f"{name}_{tokens}", "1", meaning, family=family) for tokens in DOUBLING_TOKENS)


METRICS: tuple[Metric, ...] = (
    # -- data
    Metric("train_rows", "rows", "Usable rows for training."),
    Metric("validation_rows", "rows", "Usable rows set apart for selection."),
    Metric("test_rows", "rows", "Usable rows set apart for gates and evaluation."),
    Metric("source_rows", "rows", "Rows that the source has."),
    Metric(
        "dropped_rows", "rows",
        "Rows dropped because they are unusable or repeat an earlier one; report.json of the dataset has the reasons and "
        "the first rows.",
    ),
    Metric("repeated_rows", "rows", "Dropped rows that repeat an earlier row."),
    Metric(
        "unused_rows", "rows",
        "Usable rows beyond the number that the recipe asks for, in training (rows) or in a held-out split; the latter "
        "are not trained on either. Of a mixture: rows of its parts beyond their share.",
    ),
    Metric(
        "contaminated_rows", "rows",
        "Rows left out because a test set of the recipe (split.test: all) has their prompt; report.json has the first.",
    ),
    Metric(
        "near_duplicate_rows", "rows",
        "Rows left out of training because their prompt is nearly a held-out one (near_duplicates); report.json has the first.",
    ),
    Metric(
        "rows_again", "rows",
        "Rows of a mixture's training that repeat a row of the same part, because the part has fewer rows than its share.",
    ),
    Metric(
        "tied_share", "1",
        "Share of the prompts that gave no pair: all responses score the same, both sides are the same text, or "
        "responses are empty. Of the batch (curve), of all splits (headline; report.json has the reasons).",
    ),
    Metric(
        "mean_chosen_length", "tokens",
        "Mean length of the pairs' chosen responses, EOS included, over all splits.",
    ),
    Metric("mean_rejected_length", "tokens", "The same of the rejected ones."),
    # -- every training stage
    Metric("learning_rate", "1", "Learning rate of the last optimiser step."),
    Metric("tokens_per_second", "tokens/s", "Tokens of prompts and responses processed per second."),
    Metric(
        "peak_memory", "bytes",
        "Most memory that the rank with most held: of tensors on its GPU since the step before (the first step: since the "
        "stage began); without a GPU of the whole process since it began.",
    ),
    Metric(
        "forward_passes", "passes",
        "Passes over whole texts in the step, of all networks and ranks, with and without a gradient.",
    ),
    Metric(
        "padding_share", "1",
        "Share of the positions in the step's passes that was padding, of all networks, with and without a gradient; "
        "sampling does not count.",
    ),
    Metric(
        "logits_again_share", "1",
        "Of the tokens whose logits the step needed, those whose logits were computed once more for the backward pass, "
        "because all of a pass were too many to keep.",
    ),
    Metric(
        "prompt_reads", "1",
        "Positions of prompts that the sampler computed, padding included, for each token of a distinct prompt of its "
        "batches; 1 is the least.",
    ),
    Metric(
        "ended_rows_share", "1",
        "Of the rows that the sampler computed token by token, those of responses that had ended.",
    ),
    Metric(
        "seconds_sampling", "s",
        "Time of the iteration in which the stage's process sampled responses. All times are those of the first rank; on a GPU, "
        "what a phase started last may count for the phase after it.",
    ),
    Metric(
        "seconds_waiting", "s",
        "Time in which it waited for responses that another process or thread samples, or for verifiers.",
    ),
    Metric("seconds_scoring", "s", "Time in which reward models, or a model that judges, scored responses."),
    Metric(
        "seconds_reading", "s",
        "Time in which networks read given responses without learning: log-probabilities, those of the reference, values.",
    ),
    Metric("seconds_updating", "s", "Time of the optimiser steps, forward and backward passes included."),
    Metric("seconds_measuring", "s", "Time of the validation, of a `watch`, and of what else is measured on held-out rows."),
    Metric("seconds_other", "s", "The rest of the iteration's time, checkpoints included."),
    Metric(
        "seconds_beside", "s",
        "Time in which this iteration's responses were sampled beside the training before; with `rollout.ahead: 1`.",
    ),
    Metric("waiting_share", "1", "Share of the iteration's time in which the stage's process waited: seconds_waiting over all of them."),
    Metric(
        "graphs_captured", "graphs",
        "CUDA graphs that the sampler captured: one for each number of rows and length of the cache. Only on a GPU.",
    ),
    Metric(
        "graph_replays", "passes",
        "Tokens of whole batches that the sampler drew by replaying a CUDA graph. Only on a GPU.",
    ),
    Metric(
        "graph_fallbacks", "times",
        "How often the sampler drew responses, or went on with a batch, without CUDA graphs where these were to be used; the "
        "log says why. Only on a GPU.",
    ),
    Metric(
        "sampled_weights", "1",
        "Digest of the weights that sampled the step's rollout: the first 48 bits of the sha256 of the policy's log-probabilities of "
        "fixed rows. Steps with the same number were sampled by the same weights. Only with `engine: vllm`.",
    ),
    Metric(
        "engine_gap", "nats/token",
        "Mean |Δ| of the engine's log-probabilities of the fixed rows to the policy's, before the rollout. Only with `engine: vllm`.",
    ),
    Metric(
        "stale_responses", "responses",
        "Responses that other weights had sampled; they were dropped, and sampled again. Only with `engine: vllm`.",
    ),
    Metric(
        "engine_failures", "times",
        "How often the engine broke, or a server did not answer, while it sampled. Only with `engine: vllm`.",
    ),
    Metric(
        "graphs_compiled", "graphs",
        "Graphs that torch.compile made in the step; those of all expected shapes are made before the first one, so that more than "
        "0 is time lost. Only with `compile: true`.",
    ),
    Metric(
        "uncompiled_share", "1",
        "Of the networks that `compile: true` is for, those that could not be compiled and run as they are written; the log says why.",
    ),
    Metric(
        "grad_norm", "1",
        "L2 norm of the whole gradient before clipping, at the last optimiser step; best_of_n: the mean over the "
        "iteration's steps.",
    ),
    Metric(
        "loss", "nats",
        "Training loss of the minibatch. sft: negative log-likelihood per response token; reward_model: "
        "Bradley-Terry, −log σ(chosen − rejected − margin), per pair, with the parts that centre_coef and lm_coef add "
        "(of rankings: mean over prompts of each one's mean over its untied pairs); dpo: "
        "−log σ(β·[(log π − log π_ref)(chosen) − (log π − log π_ref)(rejected)]) per pair.",
    ),
    Metric(
        "prompts_too_long", "rows",
        "Rows dropped because their prompt exceeds generation.max_prompt_tokens, in all splits that the stage reads "
        "(value_pretraining: training; evaluation: test). A share above the dataset's max_dropped is refused.",
    ),
    Metric("prompts_too_long_share", "1", "The same as a share of the rows."),
    Metric("checked_rows", "rows", "Rows that were read as training reads them, before anything trains."),
    Metric(
        "unusable_rows", "rows",
        "Those that training will drop: the prompt is too long, both responses are the same tokens, or the chat template "
        "does not write the row. report.json of the check has the reasons and the first rows.",
    ),
    Metric(
        "responses_cut", "responses",
        "Responses of the data truncated at generation.max_response_tokens, so that the model is not shown where they "
        "end; in all splits.",
    ),
    Metric("responses_cut_share", "1", "The same as a share of the responses."),
    Metric(
        "rows_alike_after_cut", "rows",
        "Pairs dropped because both sides are the same tokens, mostly after truncation, and rankings with such "
        "responses, of which only the best-ranked is compared; in all splits. They count for max_dropped.",
    ),
    Metric(
        "unknown_token_share", "1",
        "Share of the tokens of prompts and of the data's responses that stand for text unknown to the tokenizer "
        "(<unk>).",
    ),
    Metric(
        "single_byte_share", "1",
        "Share of the same tokens that are single bytes (<0x41>), which a tokenizer uses for text that it has no "
        "pieces for.",
    ),
    Metric(
        "nonfinite_steps", "steps",
        "Optimiser steps that were left out because a loss or gradient was not finite; reported only where there is one.",
    ),
    # -- sft
    Metric(
        "validation_nll", "nats/token",
        "Negative log-likelihood of the validation responses, per response token (EOS included).",
    ),
    Metric("test_nll", "nats/token", "The same on the test responses."),
    # -- pairs: a reward model's scores, or DPO's implicit rewards
    Metric(
        "train_pair_accuracy", "1",
        "Share of the minibatch's pairs (of rankings: all untied pairs, each counted once) whose chosen response scores "
        "higher, margins left out; equal scores count as wrong.",
    ),
    Metric(
        "score_gap", "reward",
        "Mean of chosen score − rejected score: over the minibatch's pairs, and at the end over the test pairs (of "
        "rankings: all untied pairs, each counted once).",
    ),
    Metric(
        "reward_gap", "1",
        "Mean of the chosen response's implicit reward − the rejected one's, each β·(log π − log π_ref): over the "
        "minibatch's pairs, and at the end over the test pairs.",
    ),
    Metric(
        "chosen_nll", "nats/token",
        "Negative log-likelihood per token of the minibatch's chosen responses; in reward_model where lm_coef is "
        "above 0. In dpo it is not trained on: it rises where chosen responses become less likely too.",
    ),
    Metric(
        "pair_accuracy", "1",
        "Share of the test pairs (of rankings: all untied pairs, each counted once) whose chosen response scores higher "
        "(dpo: has the higher implicit reward), margins left out; equal scores count as wrong.",
    ),
    Metric(
        "preference_loss", "nats",
        "Bradley-Terry (dpo: DPO) loss per test pair, margins left out; of rankings: mean over prompts of each one's "
        "mean over its untied pairs. log 2 = 0.693 is chance.",
    ),
    Metric("validation_pair_accuracy", "1", "pair_accuracy on the validation pairs."),
    Metric("validation_score_gap", "reward", "score_gap over the validation pairs."),
    Metric("validation_reward_gap", "1", "reward_gap over the validation pairs."),
    Metric("validation_preference_loss", "nats", "preference_loss on the validation pairs."),
    Metric(
        "score_shift", "reward",
        "Mean raw score of demonstrations (centre_on), which is subtracted from every score, so that they score 0 "
        "on average; 0 without centre_on.",
    ),
    # -- critic
    Metric(
        "value_loss", "reward²",
        "½ · mean over valid tokens of (value − target)², clipped if the recipe says so; of the iteration's last "
        "minibatch; in policy_optimization the mean over its minibatches.",
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
    # -- policy: the rollout
    Metric(
        "score_mean", "reward",
        "Mean score of the rollout's responses, before any KL penalty; in reward_model: of the minibatch's pairs or "
        "ranked responses.",
    ),
    Metric("score_mean_TERM", "1", "The same of one term of the reward, unweighted; TERM is its model or verifier."),
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
    # -- policy: the update; in policy_optimization, means over the iteration's minibatches unless stated otherwise
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
    Metric("clip_fraction", "1", "Share of valid tokens at which the clip of the ratio binds (their gradient is 0)."),
    Metric("dual_clip_fraction", "1", "Share of valid tokens at which the bound −c·A of dual_clip binds."),
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
        "Share of all pairs of a right and a wrong validation response, of any prompts, in which the right one has the higher reward "
        "(ties count half): 0.5 is chance. Only with a verifier as the watch's judge.",
    ),
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
    Metric("test_score", "reward", "Mean score of the kept policy's responses to the test prompts."),
    Metric(
        "reward_spread", "reward",
        "Highest − lowest score of the responses to the test prompts, of the kept policy, or of both models of an "
        "evaluation (a verifier scores 1 and 0, a model as judge 1, ½ and 0); 0 if all are equal.",
    ),
    # -- evaluation
    Metric(
        "mean_response_length", "tokens",
        "Mean length of responses to the test prompts, EOS included: of the kept policy, or of the candidate.",
    ),
    *EVALUATION_METRICS,
    *REWARD_METRICS,
    *BENCHMARK_METRICS,
)  # fmt: skip


SELECTION_PREFIX = "validation_"
"""Prefix of metrics on validation data, which selects checkpoints; gates cannot use them."""


def gate_metric_names(kind: str, *, has: Settings | None = None) -> frozenset[str]:
    """Return names of the headline metrics that a gate on this kind of stage can use."""
    return frozenset(
        name for name in headline_metric_names(kind, has=has) if not name.startswith(SELECTION_PREFIX)
    )


def headline_metric_names(kind: str, *, has: Settings | None = None) -> frozenset[str]:
    """Return names of the headline metrics of a kind of stage; with ``has``, of a stage with these settings."""
    return _with_settings(KINDS[kind].headline, has) if kind in KINDS else frozenset()


def estimated_metric_names(kind: str, *, has: Settings | None = None) -> frozenset[str]:
    """Return names of the headline metrics that are estimates over held-out prompts: each has an uncertainty."""
    return _with_settings(KINDS[kind].estimates, has) if kind in KINDS else frozenset()


def curve_metric_names(kind: str) -> frozenset[str]:
    """Return names of the metrics that a kind of stage reports while it runs."""
    return frozenset(KINDS[kind].curves) if kind in KINDS else frozenset()


def one_of_each_family(names: Iterable[str]) -> list[str]:
    """Return the names in order; only the first of a family, with dots."""
    family = {metric.name: metric.family for metric in METRICS if metric.family}
    first = {of: name for name, of in reversed(family.items())}
    listed = [name for name in sorted(names) if first.get(family.get(name, ""), name) == name]
    return [f"{name} …" if name in family else name for name in listed]


def how_to_measure(name: str, has: Settings) -> str | None:
    """Return what to set in a stage with these settings so that it reports the metric; None: it does already, or there is none."""
    metric = next((metric for metric in METRICS if metric.name == name), None)
    missing = sorted(set(metric.needs) - set(has)) if metric is not None else []
    return " and ".join(NEEDS[each].remedy for each in missing) or None


def _with_settings(names: tuple[str, ...], has: Settings | None) -> frozenset[str]:
    if has is None:
        return frozenset(names)
    return frozenset(names) - {metric.name for metric in METRICS if not set(metric.needs) <= set(has)}
