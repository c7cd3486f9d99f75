"""A judge other than the reward, asked about the same responses while a policy trains."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vantage.algorithms.divergence_of_judges import change_of
from vantage.algorithms.score_distribution import pair_accuracy
from vantage.schemas.recipe.guards import WATCH_FALLS
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout.judging import Judgement, load_judge
from vantage.tasks.rollout.rollouts import Scored
from vantage.tasks.training import ranks
from vantage.tasks.training.measured import clusters_of
from vantage.tasks.training.stage_state import WatchedSoFar

WATCH_SCORE, WATCH_CHANGE, WATCH_WORSE = "validation_watch_score", "watch_change", "watch_worse"


@dataclass(frozen=True)
class Watching:
    """The judge of a watch, loaded."""

    judge: Judgement
    is_verifier: bool = False
    """Whether the judge is a verifier, whose judgements are right (1) or wrong (0)."""

    def look(self, scored: Scored, before: WatchedSoFar) -> tuple[WatchedSoFar, dict[str, float]]:
        """Return what the watch has seen with these responses, and its metrics.

        Args:
            scored: responses to the validation prompts, always to the same ones in the same order, with their rewards.
            before: what it had seen before.
        """
        judged, rewards = self.judge(scored.sampled).cpu().double(), scored.scores.total.cpu().double()
        monitors = self._monitors(scored, judged, rewards) if self.is_verifier else {}
        seen, metrics = self._compare(scored, judged, rewards, before)
        return seen, metrics | monitors

    def _compare(
        self, scored: Scored, judged: Tensor, rewards: Tensor, before: WatchedSoFar
    ) -> tuple[WatchedSoFar, dict[str, float]]:
        """Compare with the measurement that the judge liked best."""
        mean = ranks.agreed(judged.mean().item())
        if not before.judged:
            seen = _best(judged, rewards)
            return seen, {WATCH_SCORE: mean, WATCH_CHANGE: 0.0, WATCH_FALLS: 0.0, WATCH_WORSE: 0.0}
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
        seen = _best(judged, rewards) if is_better else replace(before, falls=falls, worse=worse)
        return seen, {
            WATCH_SCORE: mean,
            WATCH_CHANGE: change.judge.value,
            WATCH_FALLS: float(seen.falls),
            WATCH_WORSE: float(seen.worse),
        }

    def _monitors(self, scored: Scored, judged: Tensor, rewards: Tensor) -> dict[str, float]:
        """Return how well the reward separates right from wrong responses, and how long they are; undefined values are
        left out."""
        is_right, lengths = judged > 0.5, scored.sampled.sequences.lengths.cpu().double()
        found = {
            "watch_pair_accuracy": pair_accuracy(rewards, is_right),
            "watch_right_length": lengths[is_right].mean().item(),
            "watch_wrong_length": lengths[~is_right].mean().item(),
        }
        return {name: value for name, value in found.items() if value == value}


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
        load_judge(job, watch.judge, role="watch", policies=("init",), device=device, limits=limits),
        is_verifier=watch.judge.verifier is not None,
    )
