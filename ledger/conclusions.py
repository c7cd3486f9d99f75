"""The conclusion of a run as its ledger records it: effects of evaluations, alarms, and the numbers by which runs compare."""

from collections.abc import Iterable

from vantage.ledger.entries import RunEntry, StageEntry
from vantage.ledger.remarks import remark_on
from vantage.schemas.records.alarms import Alarm, alarms_of
from vantage.schemas.records.conclusions import Judged, conclude
from vantage.schemas.records.effects import effects_of
from vantage.schemas.records.estimate_warnings import warnings_about
from vantage.schemas.records.uncertainty import interval_among
from vantage.schemas.records.verdicts import DEFAULT_CONFIDENCE

_MOST_HEADLINES = 4
"""Most numbers of a run that MLflow's list shows in columns."""


def conclusion_of(entry: RunEntry, outcome: str) -> str:
    """Return the verdict on the run in one line."""
    return conclude(outcome, judged_in(entry), alarms_in(entry)).text


def judged_in(entry: RunEntry) -> tuple[Judged, ...]:
    """Return the run's evaluations that compared two models, with their effects."""
    found = []
    for stage in entry.stages.values():
        sides = [stage.inputs.get(role) for role in ("candidate", "baseline")]
        if stage.artifact is None or stage.kind != "evaluation" or None in sides:
            continue
        metrics, known = stage.artifact.metrics, stage.artifact.uncertainty
        intervals = {
            metric: interval
            for metric in known
            if (interval := interval_among(metric, metrics, known, confidence=DEFAULT_CONFIDENCE)) is not None
        }
        effects = effects_of(metrics, intervals, {metric: each.n for metric, each in known.items()})
        candidate, baseline = (given.stage for given in sides if given is not None)
        found.append(Judged(stage.name, candidate, baseline, effects))
    return tuple(found)


def alarms_in(entry: RunEntry) -> tuple[Alarm, ...]:
    """Return the alarms of the run's stages."""
    return tuple(alarm for stage in entry.stages.values() for alarm in _alarms_of(stage))


def headlines(entry: RunEntry) -> tuple[str, ...]:
    """Return the metrics of the parent run by which runs are compared: effects of evaluations, then what gates ask for."""
    effects = (f"{each.step}.{effect.metric}" for each in judged_in(entry) for effect in each.effects)
    gated = (
        f"{stage.name}.{verdict.metric}" for stage in entry.stages.values() for verdict in stage.verdicts
    )
    return tuple(_first([*effects, *gated], _MOST_HEADLINES))


def _alarms_of(stage: StageEntry) -> tuple[Alarm, ...]:
    if stage.artifact is None:
        return ()
    return alarms_of(
        stage.name,
        remark=remark_on(stage.artifact, stage.inputs),
        warnings=warnings_about(stage.artifact),
        firings=stage.artifact.firings,
    )


def _first(names: Iterable[str], most: int) -> list[str]:
    return list(dict.fromkeys(names))[:most]
