"""Warnings about estimates, from the interval of one headline metric, or of two together."""

from vantage.schemas.records.artifacts import StoredArtifact
from vantage.schemas.records.firings import in_words
from vantage.schemas.records.metric_warnings import warnings_of
from vantage.schemas.records.uncertainty import bracketed, interval_among
from vantage.schemas.records.verdicts import DEFAULT_CONFIDENCE

_CHANCE = 0.5


def warnings_about(artifact: StoredArtifact, *, of_estimates: bool = True) -> tuple[str, ...]:
    """Return all warnings about an artifact: about the stage's course, its single metrics, then its estimates.

    Args:
        of_estimates: whether to include warnings about estimates; earlier versions did not.
    """
    found = (judges_by_chance(artifact), score_against_accuracy(artifact)) if of_estimates else ()
    return (
        *(() if artifact.ended_early is None else (str(artifact.ended_early),)),
        *in_words(artifact.firings),
        *warnings_of(artifact.metrics),
        *(text for text in found if text is not None),
    )


def judges_by_chance(artifact: StoredArtifact) -> str | None:
    """Return a warning if a reward model is perhaps no better than a coin on held-out pairs, else None."""
    accuracy = artifact.metrics.get("pair_accuracy")
    interval = _interval(artifact, "pair_accuracy")
    if accuracy is None or interval is None or interval[0] > _CHANCE or not _measures_a_reward(artifact):
        return None
    shown = f"pair_accuracy is {accuracy:.3f}{bracketed(interval)}"
    if interval[1] < _CHANCE:
        return (
            f"{shown}: the reward model prefers rejected responses, and a policy trained on it gets worse; look at which "
            "column of the data is the chosen one"
        )
    return (
        f"{shown}: the 95 % interval contains 0.5, so the reward model may be no better than a coin, and a policy "
        "trained on it may follow noise; train it on more pairs, or measure it on more"
    )


def score_against_accuracy(artifact: StoredArtifact) -> str | None:
    """Return a warning if the score rose and the accuracy fell, each by more than its 95 % interval, else None."""
    metrics, gain = artifact.metrics, artifact.uncertainty.get("accuracy_gain")
    if gain is None or gain.differing is None:  # earlier versions' intervals near zero are too narrow
        return None
    score, accuracy = _interval(artifact, "score_gain"), _interval(artifact, "accuracy_gain")
    if score is None or accuracy is None or score[0] <= 0 or accuracy[1] >= 0:
        return None
    divergence = metrics.get("kl_to_baseline")
    away = "" if divergence is None else f", {divergence:.3g} nats per response away from the baseline (KL)"
    return (
        f"the score rose by {metrics['score_gain']:.3f}{bracketed(score)} and the accuracy fell by "
        f"{-(metrics['accuracy_gain'] or 0.0):.3f}{bracketed((-accuracy[1], -accuracy[0]))}{away}: the policy was trained "
        "towards what the reward model likes and not towards right answers"
    )


def _measures_a_reward(artifact: StoredArtifact) -> bool:
    """Return whether the pairs were ranked by a reward model, and not by a policy's implicit rewards (``reward_gap``)."""
    return "reward_gap" not in artifact.metrics


def _interval(artifact: StoredArtifact, metric: str) -> tuple[float, float] | None:
    if metric not in artifact.uncertainty:
        return None
    return interval_among(metric, artifact.metrics, artifact.uncertainty, confidence=DEFAULT_CONFIDENCE)
