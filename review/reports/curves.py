"""The learning curves of a run's training stages."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean

from vantage.review.reports.gathered import Curve, Point, StageCurves
from vantage.review.reports.ridges import is_shown, ridges_of
from vantage.review.reports.times import is_time, times_of
from vantage.runs.history import Row
from vantage.schemas.kinds import KINDS
from vantage.schemas.metric_names import INITIAL_AGREEMENT_LOW, TERM_PERCENTILES
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.records.firings import Firing
from vantage.schemas.records.metric import Metric
from vantage.schemas.records.metrics import METRICS

MOST_POINTS = 200
"""Most points that are drawn of one curve."""
TREND_POINTS = 25
"""Number of parts of the trend: a curve of more than twice as many points also shows the mean of each equal part."""
MOST_FIGURES = 90
"""Most figures on the page; with many stages, each shows fewer curves."""
MOST_OF_A_STAGE = 12
FEWEST_OF_A_STAGE = 2

ORDER = (
    *(
        "score_mean",
        "best_score_mean",
        "validation_score",
        "validation_watch_score",
        "validation_explained_variance",
        "explained_variance",
    ),
    *("loss", "validation_nll", "train_pair_accuracy", "score_gap", "reward_gap", "validation_pair_accuracy"),
    *("kl_to_reference", "entropy", "response_length_mean", "clip_fraction", "approx_kl", "truncated_share"),
    *("watch_pair_accuracy", "validation_score_drift", "reward_data_distance", "demonstration_nll_rise"),
    *("reward_disagreement", "repeated_trigrams", "demonstration_nll"),
    *(
        "value_loss",
        "return_mean",
        "nll",
        "chosen_nll",
        "critic_weight",
        "value_bias",
        "policy_loss",
        "tied_share",
    ),
    *(
        "reward_mean",
        "positive_share",
        "uniform_group_share",
        "importance_weight",
        "kl_coef",
        "grad_norm_policy",
    ),
    *("grad_norm_critic", "grad_norm", "learning_rate_policy", "learning_rate"),
)
"""Metrics whose curves are drawn, the most important first: reward, held-out score, loss, KL, entropy, length, clipping."""

_REWARDS = ORDER.index("validation_watch_score") + 1
"""Number of the first metrics of that order, after which the graded scores of a reward come."""
MEAN_OF = "score_mean_"
"""Prefix of the metric with the mean of a term's or a named score."""

MARKED_ON: Mapping[str, tuple[str, ...]] = {
    "watch_falls": ("validation_watch_score", "validation_score"),
    "watch_worse": ("validation_watch_score",),
    "watch_lost": ("validation_watch_score",),
    INITIAL_AGREEMENT_LOW: ("watch_pair_accuracy",),
}
"""Metric of a guard that counts events on other curves → those curves, which show the mark."""

_WITHOUT_NOISE = ("learning_rate", "learning_rate_policy", "kl_coef")
_TABLE: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def stage_curves(
    step: str,
    kind: str,
    measured: Mapping[str, Sequence[Row]],
    *,
    most: int,
    made_by: str | None = None,
    firings: Sequence[Firing] = (),
    rollout: Sampling | None = None,
) -> StageCurves | None:
    """Return the curves of one stage, or None if it has none.

    Args:
        measured: metric → its rows.
        most: number of curves that are drawn.
        firings: firings of the stage's guards; their metrics are drawn first, with a mark.
        rollout: the engine that samples the stage's responses; None: it samples none.
    """
    fired: dict[str, list[int]] = {}
    for firing in firings:
        for metric in MARKED_ON.get(firing.guard.metric, (firing.guard.metric,)):
            fired.setdefault(metric, []).append(firing.step)
    graded = [f"{MEAN_OF}{name}" for name in graded_scores(measured)]
    found = [
        name for name in dict.fromkeys((*fired, *ORDER[:_REWARDS], *graded, *ORDER)) if measured.get(name)
    ]
    by = KINDS[kind].curves_by if kind in KINDS else "optimiser step"
    if by == "optimiser step":  # a reward model's mean score is of little interest
        found.sort(key="score_mean".__eq__)
    curves = (_curve(name, measured, fired.get(name, ())) for name in found[:most])
    drawn = tuple(filter(None, curves))
    if not drawn:
        return None
    shown = {each.metric for each in drawn}
    shown |= {name for each in drawn if each.band for name in _quantiles_of(each.metric)}
    ridges = ridges_of(measured)
    times = times_of(measured)
    elsewhere = {name for name in measured if (ridges and is_shown(name)) or (times and is_time(name))}
    others = tuple(sorted(measured.keys() - shown - elsewhere))
    return StageCurves(
        step=step,
        kind=kind,
        by=by,
        curves=drawn,
        others=others,
        made_by=made_by,
        ridges=ridges,
        times=times,
        rollout=rollout,
    )


def most_of_each(stages: int) -> int:
    """Return the number of curves that each of ``stages`` stages shows."""
    return max(FEWEST_OF_A_STAGE, min(MOST_OF_A_STAGE, MOST_FIGURES // max(stages, 1)))


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """Return at most ``most`` points: the first, the last, and the lowest and highest of each equal part in between.

    So a spike of a single step remains visible; a mean would hide it.
    """
    if len(points) <= most:
        return tuple(points)
    inner = points[1:-1]
    parts = (most - 2) // 2
    kept = [points[0]]
    for part in range(parts):
        of_part = inner[part * len(inner) // parts : (part + 1) * len(inner) // parts]
        ends = {min(of_part, key=lambda each: each[1]), max(of_part, key=lambda each: each[1])}
        kept += sorted(ends)
    return (*kept, points[-1])


def trend(points: Sequence[Point], parts: int = TREND_POINTS) -> tuple[Point, ...]:
    """Return the mean of each equal part of a curve, at the mean of its steps; empty for a curve that is short enough to
    read."""
    if len(points) <= 2 * parts:
        return ()
    found = []
    for part in range(parts):
        of_part = points[part * len(points) // parts : (part + 1) * len(points) // parts]
        steps, values = zip(*of_part, strict=True)
        found.append((round(fmean(steps)), fmean(values)))
    return tuple(found)


def meaning_of(name: str) -> tuple[str, str]:
    """Return unit and meaning of a metric; empty if no stage of this version measures it."""
    known = _TABLE.get(name) or (_TABLE.get(f"{MEAN_OF}TERM") if name.startswith(MEAN_OF) else None)
    return (known.unit, known.meaning) if known else ("", "")


def has_curves(kind: str) -> bool:
    """Return whether a kind of step measures anything while it runs."""
    return kind in KINDS and bool(KINDS[kind].curves)


def tokens_of(measured: Mapping[str, Sequence[Row]], starts: Iterable[int]) -> float | None:
    """Estimate the number of tokens that a stage computed: the sum over steps of speed × time since the previous step.

    Args:
        measured: metric → rows of the stage.
        starts: start times of its attempts (milliseconds), since the time between attempts does not count.
    """
    rows = measured.get("tokens_per_second")
    if not rows:
        return None
    begun = sorted(starts)
    total, before = 0.0, None
    for _, time, speed in rows:
        since = max((each for each in begun if each <= time), default=time)
        since = since if before is None else max(since, before)
        total += speed * (time - since) / 1000 if isfinite(speed) else 0.0
        before = time
    return total


def graded_scores(measured: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the names of the graded scores whose percentiles are measured: ``TERM``, or ``TERM.NAME``."""
    median = f"score_p{TERM_PERCENTILES[1]}_"
    return sorted(name.removeprefix(median) for name in measured if name.startswith(median))


def _quantiles_of(metric: str) -> tuple[str, ...]:
    """Return the metrics with the percentiles of a graded score, from the one with its mean."""
    return tuple(f"score_p{percent}_{metric.removeprefix(MEAN_OF)}" for percent in TERM_PERCENTILES)


def _band(
    metric: str, measured: Mapping[str, Sequence[Row]], steps: Iterable[int]
) -> tuple[tuple[int, float, float], ...]:
    """Return step, 10th and 90th percentile of a graded score at these steps; empty for another metric."""
    if not metric.startswith(MEAN_OF):
        return ()
    low, _, high = (
        {step: value for step, _, value in measured.get(name, ())} for name in _quantiles_of(metric)
    )
    return tuple((step, low[step], high[step]) for step in steps if step in low and step in high)


def _curve(name: str, measured: Mapping[str, Sequence[Row]], fired: Sequence[int]) -> Curve | None:
    rows = measured[name]
    finite = [(step, value) for step, _, value in rows if isfinite(value)]
    if not finite:
        return None
    unit, meaning = meaning_of(name)
    points = thinned(finite)
    return Curve(
        metric=name,
        unit=unit,
        meaning=meaning,
        points=points,
        total=len(finite),
        undefined=len(rows) - len(finite),
        trend=() if name in _WITHOUT_NOISE else trend(finite),
        fired=tuple(sorted(set(fired))),
        band=_band(name, measured, (step for step, _ in points)),
    )
