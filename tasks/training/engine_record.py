"""Record, for each step, from which weights an engine beside the trainer sampled, and what went wrong meanwhile."""

from dataclasses import dataclass

import torch

from vantage.tasks.training import ranks


@dataclass
class _Step:
    """Records since the last call of ``engine_metrics``."""

    digest: str | None = None
    iteration: int | None = None
    gap: float = 0.0
    stale: int = 0
    failures: int = 0


_now = _Step()
_ended = 0


def note_ended(iterations: int) -> None:
    """Record how many iterations of the stage have ended; a resumed stage continues the count."""
    global _ended
    _ended = iterations


def ended_iterations() -> int:
    """Return how many iterations of the stage have ended, from which the policy's weights come."""
    return _ended


def note_sampled(*, digest: str, gap: float, iteration: int | None) -> None:
    """Record the weights that sample responses from now on; the first of a step are those of its rollout, and are kept.

    Args:
        digest: digest of the weights, at most 13 hexadecimal digits.
        gap: mean |Δ| of the engine to the policy on fixed rows, in nats per token; 0 on ranks that did not measure it.
        iteration: number of iterations that had ended when the policy had these weights; None: it is not known.
    """
    if _now.digest is None:
        _now.digest, _now.gap, _now.iteration = digest, gap, iteration


def note_stale(count: int) -> None:
    """Record responses that were dropped because they were sampled from other weights."""
    _now.stale += count


def note_failure() -> None:
    """Record that an engine broke, or did not answer."""
    _now.failures += 1


def engine_metrics() -> dict[str, float]:
    """Return the metrics since the last call, with counts over all ranks. Without sampled responses they are empty, and
    the counts are kept for the next step. All ranks call this."""
    global _now
    step = _now
    if step.digest is None:
        return {}
    _now = _Step()
    stale, failures = ranks.total(torch.tensor([float(step.stale), float(step.failures)])).tolist()
    iteration = {} if step.iteration is None else {"sampled_iteration": float(step.iteration)}
    return {
        "sampled_weights": float(int(step.digest, 16)),
        **iteration,
        "engine_gap": step.gap,
        "stale_responses": stale,
        "engine_failures": failures,
    }
