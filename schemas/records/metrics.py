"""The table of metrics: name, unit and definition; the rows of critics, policies and evaluations have files of their own.

``vantage.schemas.kinds`` has the metrics of each kind of stage.
``vantage.schemas.records.metrics_page`` prints this table as ``docs/metrics.md``.
"""

from collections.abc import Iterable

from vantage.schemas.kinds import KINDS
from vantage.schemas.records.critic_metrics import CRITIC_METRICS
from vantage.schemas.records.evaluation_metrics import BENCHMARK_METRICS, EVALUATION_METRICS, REWARD_METRICS
from vantage.schemas.records.metric import NEEDS, Metric, Settings
from vantage.schemas.records.policy_metrics import POLICY_METRICS

METRICS: tuple[Metric, ...] = (
    # -- data
    Metric("train_rows", "rows", "Usable rows for training."),
    Metric("validation_rows", "rows", "Usable rows set apart for selection."),
    Metric("test_rows", "rows", "Usable rows set apart for gates and evaluation."),
    Metric("rows_too_easy", "rows", "Training prompts that a selection leaves out since they pass more often than pass_rate allows."),
    Metric("rows_too_hard", "rows", "Training prompts that a selection leaves out since they pass less often than pass_rate allows."),
    Metric("rows_never_right", "rows", "Training prompts without any response that passes; report.json has the rows by tenth of the pass rate."),
    Metric("rows_always_right", "rows", "Training prompts all of whose responses pass."),
    Metric("mean_pass_rate", "1", "Mean over the training prompts of the share of their collected responses that pass."),
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
        "Time in which it waited for responses that another process or thread samples, or for verifiers and judges.",
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
        "sampled_iteration", "iterations",
        "Iterations of the stage that had ended when the policy had the weights that sampled the step's rollout: one less than the step "
        "(curves count from 1), and two less for what was sampled ahead; the stages that only collect have 0. Only with `engine: vllm`.",
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
    Metric("judge_asked", "questions", "Questions that judges, reward servers and a `teacher_server` were asked; the other answers were stored already."),
    Metric("judge_failed_calls", "requests", "Requests to them that failed, and were repeated."),
    Metric("judge_answers", "answers", "Answers of these servers that the step read, new or stored."),
    Metric(
        "judge_unreadable", "answers",
        "Those of them from which no scores could be read; the question was asked again, or `unreadable` of the recipe applied.",
    ),
    Metric(
        "judge_unreadable_share", "1",
        "judge_unreadable / judge_answers. Near 1 nearly all scores are the number that the recipe gives for `unreadable`.",
    ),
    Metric("judge_tokens", "tokens", "Tokens of the questions to judges and teachers, and of these answers, as the servers count them."),
    Metric("judge_cost", "price", "Cost of these tokens by the recipe's `price`; 0 without one."),
    Metric(
        "judge_probability", "1",
        "Mean probability, over these answers, that a judge of the run gives one of the numbers of its scale (or one of both letters); near "
        "0 it would answer something else. Only with a model of the run as a judge.",
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
        "(of rankings: mean over prompts of each one's mean over its untied pairs); dpo: by its switch loss, per pair, for example "
        "−log σ(β·[(log π − log π_ref)(chosen) − (log π − log π_ref)(rejected)]), with the part of orpo that is the negative "
        "log-likelihood of the chosen response; kto: weight·(1 − σ(margin)) per response.",
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
    # -- pairs: a reward model's scores, or the rewards that a dpo stage's loss compares
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
        "Mean of the chosen response's implicit reward − the rejected one's, each β·(log π − log π_ref) (of length_normalised per "
        "token; simpo: β·log π per token; orpo: the log odds): over the minibatch's pairs, and at the end over the test pairs.",
    ),
    Metric(
        "chosen_nll", "nats/token",
        "Negative log-likelihood per token of the minibatch's chosen responses; in reward_model where lm_coef is "
        "above 0. In dpo it is trained on with loss: orpo alone, and rises where chosen responses become less likely too.",
    ),
    Metric(
        "pair_accuracy", "1",
        "Share of the test pairs (of rankings: all untied pairs, each counted once) whose chosen response scores higher "
        "(dpo: has the higher implicit reward), margins left out; equal scores count as wrong.",
    ),
    Metric(
        "preference_loss", "nats",
        "Bradley-Terry loss per test pair, margins left out; of rankings: mean over prompts of each one's "
        "mean over its untied pairs. log 2 = 0.693 is chance. dpo: the stage's own loss; of orpo the part that compares.",
    ),
    Metric("validation_pair_accuracy", "1", "pair_accuracy on the validation pairs."),
    Metric("validation_score_gap", "reward", "score_gap over the validation pairs."),
    Metric("validation_reward_gap", "1", "reward_gap over the validation pairs."),
    Metric("validation_preference_loss", "nats", "preference_loss on the validation pairs."),
    # -- labelled responses
    Metric(
        "desirable_margin", "1",
        "Mean of β·(log π/π_ref − z) over the desirable responses, z the reference_point: of the minibatch, and at the end over "
        "the test rows. Above 0 the policy favours them more than responses to other prompts.",
    ),
    Metric(
        "undesirable_margin", "1",
        "Mean of β·(z − log π/π_ref) over the undesirable responses: of the minibatch, and at the end over the test rows. Above 0 "
        "the policy disfavours them.",
    ),
    Metric(
        "reference_point", "nats/response",
        "z of kto: the mean of log π/π_ref over the rows' prompts, each with a response to another prompt, or 0 if that is "
        "negative; of the minibatch, and at the end over all test rows.",
    ),
    Metric("kto_loss", "1", "Loss per test row, weight·(1 − σ(margin)); one half of the weights is chance."),
    Metric("validation_desirable_margin", "1", "desirable_margin over the validation rows."),
    Metric("validation_undesirable_margin", "1", "undesirable_margin over the validation rows."),
    Metric("validation_reference_point", "nats/response", "reference_point over the validation rows."),
    Metric("validation_kto_loss", "1", "kto_loss over the validation rows."),
    Metric(
        "label_weight_ratio", "1",
        "desirable_weight·(desirable rows) / (undesirable_weight·(undesirable rows)) in training. 1 to 4/3 is recommended "
        "(arXiv 2402.01306); beyond, the stage's log and its remark name the weights.",
    ),
    Metric(
        "score_shift", "reward",
        "Mean raw score of demonstrations (centre_on), which is subtracted from every score, so that they score 0 "
        "on average; 0 without centre_on.",
    ),
    *CRITIC_METRICS,
    *POLICY_METRICS,
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


_UNITS = {metric.name: metric.unit for metric in METRICS}


def unit_of(name: str) -> str:
    """Return the unit of a metric; empty for a pure number, and for a metric that this version does not know."""
    unit = _UNITS.get(name, "")
    return "" if unit == "1" else unit


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
    """Return the setting with which a stage with these settings reports the metric; None: it does already, or no
    setting does that."""
    metric = next((metric for metric in METRICS if metric.name == name), None)
    missing = sorted(set(metric.needs) - set(has)) if metric is not None else []
    return " and ".join(NEEDS[each].remedy for each in missing) or None


def _with_settings(names: tuple[str, ...], has: Settings | None) -> frozenset[str]:
    if has is None:
        return frozenset(names)
    return frozenset(names) - {metric.name for metric in METRICS if not set(metric.needs) <= set(has)}
