"""A judge other than the reward, asked about the responses of a policy while it trains."""

from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from vantage.algorithms.divergence_of_judges import Change, change_of, deviations_lost, share_lost
from vantage.models.folders import tokenizer_digest
from vantage.schemas.recipe.guards import WATCH_FALLS
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.resolved import (
    ResolvedBestOfN,
    ResolvedDistillation,
    ResolvedPolicyOptimization,
)
from vantage.schemas.recipe.watch import Watch
from vantage.schemas.records.job import StageJob
from vantage.schemas.steps import WATCH_PROMPTS
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.examples import Codec, Prompts, read_prompts
from vantage.tasks.rewards.scoring import Scorer
from vantage.tasks.rollout.against_init import (
    first_responses,
    order_disagreement,
    verdicts_of_model,
    win_rates,
    wins_by_score,
    with_scores,
)
from vantage.tasks.rollout.judge_agreement import agreement_with_interval, initial_metrics, pair_accuracy
from vantage.tasks.rollout.judging import Judgement, RewardJudge, judge_within, load_judge
from vantage.tasks.rollout.prompted_judge import PromptedJudge, load_prompted_judge, refuse_long_responses
from vantage.tasks.rollout.rollouts import Sampled, Scored
from vantage.tasks.training import ranks
from vantage.tasks.training.measured import clusters_of
from vantage.tasks.training.stage_state import WatchedSoFar

WATCH_SCORE, WATCH_CHANGE, WATCH_WORSE = "validation_watch_score", "watch_change", "watch_worse"
WATCH_LOST, WATCH_REWARD = "watch_lost", "watch_reward"
_OF_CHANGE = (WATCH_CHANGE, WATCH_FALLS, WATCH_WORSE, WATCH_LOST)
"""Curves that compare with the measurement that the judge scored best; they are 0 at the first measurement."""

WatchedJob = StageJob[ResolvedPolicyOptimization] | StageJob[ResolvedBestOfN] | StageJob[ResolvedDistillation]


@dataclass(frozen=True)
class Watching:
    """The judge of a watch, loaded."""

    judge: Judgement | PromptedJudge
    is_verifier: bool = False
    """Whether the judge is a verifier, which scores 1 (right) or 0 (wrong)."""
    prompts: Prompts | None = None
    """The watch's own prompts; None: the validation prompts of the stage."""
    num_samples: int = 0
    """Number of responses to its own prompts in one measurement."""

    @property
    def scorer(self) -> Scorer | None:
        """The reward that judges; None: a verifier or a model judges."""
        return self.judge.scorer if isinstance(self.judge, RewardJudge) else None

    def within(self, limits: PassLimits) -> "Watching":
        """Return the watch with passes of its models within ``limits``."""
        return replace(self, judge=judge_within(self.judge, limits))

    def look(self, scored: Scored, before: WatchedSoFar) -> tuple[WatchedSoFar, dict[str, float]]:
        """Return the watch's observations including these responses, and its metrics.

        Args:
            scored: responses to the watched prompts, always to the same ones in the same order, with their rewards.
            before: the observations before.

        Raises:
            UnusableJudge: a question with its answer is longer than the model reads.
        """
        before, judged, monitors = self._judge(scored.sampled, before)
        rewards = scored.scores.total.cpu().double()
        if not isinstance(self.judge, PromptedJudge):  # such a judge does not score single responses
            if not before.judged:
                clusters = clusters_of(scored.sampled.prompts)
                before = replace(before, agreement=agreement_with_interval(rewards, judged, clusters))
            monitors |= pair_accuracy(rewards, judged) | initial_metrics(before.agreement)
        if self.is_verifier:
            monitors |= _lengths(scored, judged)
        if self.prompts is not None:
            monitors |= {WATCH_REWARD: ranks.agreed(rewards.mean().item())}
        seen, metrics = self._compare(scored, judged, rewards, before)
        return seen, metrics | monitors

    def _judge(self, sampled: Sampled, before: WatchedSoFar) -> tuple[WatchedSoFar, Tensor, dict[str, float]]:
        """Return the observations before (with the first responses, if these are the first), the judgements (B,), and
        win rates."""
        is_first = not before.judged
        if isinstance(self.judge, PromptedJudge):
            if is_first:
                before = replace(before, first=first_responses(sampled))
            first = before.first
            verdicts = verdicts_of_model(self.judge, sampled, first)
            rates = win_rates(verdicts.wins, sampled, first) | order_disagreement(verdicts, sampled, first)
            return before, verdicts.wins, rates
        judged = self.judge(sampled).cpu().double()
        if not isinstance(self.judge, RewardJudge):
            return before, judged, {}
        if is_first:
            before = replace(before, first=with_scores(first_responses(sampled), judged))
        if not before.first.scores:  # an earlier version began the stage
            return before, judged, {}
        return before, judged, win_rates(wins_by_score(judged, sampled, before.first), sampled, before.first)

    def _compare(
        self, scored: Scored, judged: Tensor, rewards: Tensor, before: WatchedSoFar
    ) -> tuple[WatchedSoFar, dict[str, float]]:
        """Compare with the measurement that the judge scored best."""
        mean = ranks.agreed(judged.mean().item())
        if not before.judged:
            seen = _best(judged, rewards, before)
            return seen, {WATCH_SCORE: mean, **dict.fromkeys(_OF_CHANGE, 0.0)}
        best = torch.tensor(before.judged, dtype=torch.float64)
        change = change_of(
            rewards,
            judged,
            rewards_before=torch.tensor(before.rewards, dtype=torch.float64),
            judged_before=best,
            clusters=clusters_of(scored.sampled.prompts),
        )
        is_better = mean > best.mean().item()
        falls = before.falls + 1 if change.is_fall else 0
        worse = before.worse + 1 if change.is_worse else 0
        seen = _best(judged, rewards, before) if is_better else replace(before, falls=falls, worse=worse)
        lost = self._lost(change, judged, best)
        return seen, {
            WATCH_SCORE: mean,
            WATCH_CHANGE: change.judge.value,
            WATCH_FALLS: float(seen.falls),
            WATCH_WORSE: float(seen.worse),
            **({WATCH_LOST: lost} if isfinite(lost) else {}),
        }

    def _lost(self, change: Change, judged: Tensor, best: Tensor) -> float:
        """Return how much of the judge's best score is lost."""
        if isinstance(self.judge, RewardJudge):  # scores of a reward have no fixed zero
            return deviations_lost(change, judged=judged, judged_before=best)
        return share_lost(change, judged_before=best)


def _lengths(scored: Scored, judged: Tensor) -> dict[str, float]:
    """Return the mean lengths of right and of wrong responses, if there are any."""
    is_right, lengths = judged > 0.5, scored.sampled.sequences.lengths.cpu().double()
    found = {
        "watch_right_length": lengths[is_right].mean().item(),
        "watch_wrong_length": lengths[~is_right].mean().item(),
    }
    return {name: value for name, value in found.items() if value == value}


def _best(judged: Tensor, rewards: Tensor, before: WatchedSoFar) -> WatchedSoFar:
    return replace(before, judged=tuple(judged.tolist()), rewards=tuple(rewards.tolist()), falls=0, worse=0)


def load_watching(
    job: WatchedJob,
    validation: Prompts,
    codec: Codec,
    *,
    device: torch.device,
) -> Watching | None:
    """Return the judge of the stage's watch, loaded, with its own prompts; None: it has none.

    Args:
        validation: validation prompts of the stage.

    Raises:
        TokenizersDiffer, BrokenVerifier, MissingAnswers: see ``load_judge``.
        UnusableJudge: see ``load_prompted_judge`` and ``refuse_long_responses``.
    """
    watch = job.work.watch
    if watch is None:
        return None
    prompts = _own_prompts(job, watch, codec)
    judge: Judgement | PromptedJudge
    limits = job.work.pass_limits
    if watch.judge.kind == "model":
        judge = load_prompted_judge(job, watch.judge, role="watch", device=device, limits=limits)
        if tokenizer_digest(job.inputs["watch"]) == tokenizer_digest(job.inputs["init"]):
            refuse_long_responses(judge, (prompts or validation).texts, job.generation.max_response_tokens)
    else:
        judge = load_judge(job, watch.judge, role="watch", policies=("init",), device=device, limits=limits)
    asked = None if watch.prompts is None else watch.prompts.samples
    return Watching(
        judge,
        is_verifier=watch.judge.kind == "verifier",
        prompts=prompts,
        num_samples=asked or job.work.validation_samples,
    )


def _own_prompts(job: WatchedJob, watch: Watch, codec: Codec) -> Prompts | None:
    if watch.prompts is None:
        return None
    prompts = read_prompts(job.inputs[WATCH_PROMPTS], watch.prompts.split, codec)
    encoding_metrics(
        job, WATCH_PROMPTS, [prompts], name=f"{job.name}.watch.prompts"
    )  # this refuses data in which too many prompts do not fit
    return prompts
