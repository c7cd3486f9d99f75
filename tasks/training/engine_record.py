"""Record, for each step, from which weights an engine beside the trainer sampled, and what went wrong meanwhile."""

from dataclasses import dataclass

import torch

from vantage.tasks.training import ranks


@dataclass
class _Step:
    """Records since the last call of ``engine_metrics``."""

    digest: str | None = None
    gap: float = 0.0
    stale: int = 0
    failures: int = 0


_now = _Step()


def note_sampled(*, digest: str, gap: float) -> None:
    """Record the weights that sample responses from now on; the first of a step are those of its rollout, and are kept.

    Args:
        digest: of the weights, at most 13 hexadecimal digits.
        gap: mean |Δ| of the engine to the policy on fixed rows, in nats per token; 0 on ranks that did not measure it.
    """
    if _now.digest is None:
        _now.digest, _now.gap = digest, gap


def note_stale(count: int) -> None:
    """Record responses that other weights sampled; they were dropped."""
    _now.stale += count


def note_failure() -> None:
    """Record that an engine broke, or did not answer."""
    _now.failures += 1


def engine_metrics() -> dict[str, float]:
    """Return the metrics since the last call, counts over all ranks; empty if no engine sampled, and the counts are then those of the
    next step. All ranks call this."""
    global _now
    step = _now
    if step.digest is None:
        return {}
    _now = _Step()
    stale, failures = ranks.total(torch.tensor([float(step.stale), float(step.failures)])).tolist()
    return {
        "sampled_weights": float(int(step.digest, 16)),
        "engine_gap": step.gap,
        "stale_responses": stale,
        "engine_failures": failures,
    }
