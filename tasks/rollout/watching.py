"""A judge other than the reward, asked about the same responses while a policy trains."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vantage.algorithms.divergence_of_judges import change_of
from vantage.schemas.recipe.guards import WATCH_FALLS
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout.judging import Judgement, load_judge
from vantage.tasks.rollout.rollouts import Scored
from vantage.tasks.training import ranks
from vantage.tasks.training.measured import clusters_of
from vantage.tasks.training.stage_state import WatchedSoFar

WATCH_SCORE, WATCH_CHANGE = "validation_watch_score", "watch_change"


@dataclass(frozen=True)
class Watching:
    """The judge of a watch, loaded."""

    judge: Judgement

    def look(self, scored: Scored, before: WatchedSoFar) -> tuple[WatchedSoFar, dict[str, float]]:
        """Return what the watch has seen with these responses, and its metrics.

        Args:
            scored: responses to the validation prompts, always to the same ones in the same order, with their rewards.
            before: what it had seen before.
        """
        judged, rewards = self.judge(scored.sampled).cpu().double(), scored.scores.total.cpu().double()
        mean = ranks.agreed(judged.mean().item())
        if not before.judged:
            return _best(judged, rewards), {WATCH_SCORE: mean, WATCH_CHANGE: 0.0, WATCH_FALLS: 0.0}
        best = torch.tensor(before.judged, dtype=torch.float64)
        change = change_of(
            rewards,
            judged,
            rewards_before=torch.tensor(before.rewards, dtype=torch.float64),
            judged_before=best,
            clusters=clusters_of(scored.sampled.prompts),
        )
        is_better = mean > best.mean().item()
        falls = 0 if is_better or not change.is_fall else before.falls + 1
        seen = _best(judged, rewards) if is_better else replace(before, falls=falls)
        return seen, {WATCH_SCORE: mean, WATCH_CHANGE: change.judge.value, WATCH_FALLS: float(falls)}


def _best(judged: Tensor, rewards: Tensor) -> WatchedSoFar:
    return WatchedSoFar(judged=tuple(judged.tolist()), rewards=tuple(rewards.tolist()))


def load_watching(job: StageJob[ResolvedPolicyOptimization], *, device: torch.device) -> Watching | None:
    """Return the judge of the stage's watch, loaded; None: it has none.

    Raises:
        TokenizersDiffer, BrokenVerifier, MissingAnswers: see ``load_judge``.
    """
    watch = job.work.watch
    if watch is None:
        return None
    limits = job.work.pass_limits
    return Watching(
        load_judge(job, watch.judge, role="watch", policies=("init",), device=device, limits=limits)
    )
