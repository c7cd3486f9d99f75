"""Gather what a person needs who decides: the verdict, the model, the task, who, when, and what was loosened or approved."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from vantage.review.reports.gathered import Decision, ModelFact
from vantage.runs.history import RunHistory
from vantage.runs.record import RunRecord, StageRecord
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.records.alarms import Alarm, alarms_of
from vantage.schemas.records.conclusions import Judged, conclude
from vantage.schemas.records.effects import effects_of
from vantage.schemas.records.uncertainty import Uncertainty, interval_among

CONFIDENCE = 0.95
"""Confidence of the intervals of headline metrics."""
Uncertain = Callable[[StageRecord], Mapping[str, Uncertainty]]
"""Stage → uncertainty of its metrics; empty if its artifact is gone."""


def decision_of(record: RunRecord, status: str, history: RunHistory, uncertain: Uncertain) -> Decision:
    """Return the facts of the first screen.

    Args:
        record: the run.
        status: the run's status now; ``resumable`` if its process died.
        history: the run's outbox.
        uncertain: reads the uncertainty of a stage's metrics.
    """
    judged = judged_of(record, uncertain)
    alarms = alarms_in(record)
    return Decision(
        conclusion=conclude(status, judged, alarms),
        judged=judged,
        alarms=alarms,
        models=_models(record, judged),
        task=tuple(_tasks(record.recipe)) or ("No evaluation of the recipe compares two models.",),
        author=history.origin.get("mlflow.user", "unknown"),
        began=_in_utc(history.began),
        ended=_in_utc(history.finished) if status != "running" else "not yet",
        approvals=tuple((each.question.subject, str(each)) for each in record.approvals),
        waiting=tuple(sorted(record.open_questions)),
    )


def judged_of(record: RunRecord, uncertain: Uncertain) -> tuple[Judged, ...]:
    """Return the evaluations that compared two models, in the order of the run, with their effects."""
    found = []
    for name, done in record.stages.items():
        stage = record.recipe.stages.get(name)
        if not isinstance(stage, PolicyEvaluation) or not done.metrics:
            continue
        known = uncertain(done)
        computed = {
            metric: interval_among(metric, done.metrics, known, confidence=CONFIDENCE) for metric in known
        }
        intervals = {metric: each for metric, each in computed.items() if each is not None} | done.intervals
        prompts = {metric: each.n for metric, each in known.items()}
        prompts |= {each.metric: each.n for each in done.verdicts if each.n is not None}
        effects = effects_of(done.metrics, intervals, prompts)
        found.append(Judged(name, stage.candidate, stage.baseline, effects))
    return tuple(found)


def alarms_in(record: RunRecord) -> tuple[Alarm, ...]:
    """Return the alarms of all stages, the gravest first."""
    found = (
        alarm
        for name, done in record.stages.items()
        for alarm in alarms_of(name, remark=done.remark, warnings=done.warnings, firings=done.firings)
    )
    return tuple(sorted(found, key=lambda alarm: alarm.rank))


def _models(record: RunRecord, judged: tuple[Judged, ...]) -> tuple[ModelFact, ...]:
    """Return the published models, or else the model that the run is about."""
    published = [
        ModelFact(each.stage, each.registered_model, copy.version, copy.digest)
        for each in record.recipe.publish
        if (copy := record.copies.get(each.registered_model)) is not None
    ]
    if published:
        return tuple(published)
    names = [each.candidate for each in judged]
    names += [name for name, stage in record.recipe.stages.items() if KINDS[stage.kind].makes == "policy"]
    made = [name for name in names if name in record.stages and record.stages[name].digest]
    return tuple(ModelFact(name, None, None, record.stages[name].digest) for name in made[-1:])


def _tasks(recipe: ResolvedRecipe) -> list[str]:
    """Return what the evaluations ask, a sentence each."""
    return [
        f"{name} compares {stage.candidate} with {stage.baseline} on the test prompts of {_prompts(recipe, stage)}; "
        f"{_judges_in_words(stage)} the responses."
        for name, stage in recipe.stages.items()
        if isinstance(stage, PolicyEvaluation)
    ]


def _prompts(recipe: ResolvedRecipe, stage: PolicyEvaluation) -> str:
    data = recipe.data.get(stage.prompts)
    source = getattr(data, "source", None)
    return f"{stage.prompts} ({source})" if source else stage.prompts


def _judges_in_words(stage: PolicyEvaluation) -> str:
    """Return ``the verifier sums judges``, or of two judges ``the verifier sums and the reward main judge``."""
    if stage.also is None:
        return f"{_judge_in_words(stage.judge)} judges"
    return f"{_judge_in_words(stage.judge)} and {_judge_in_words(stage.also)} judge"


def _judge_in_words(judge: Judge) -> str:
    named = {"verifier": judge.verifier, "reward": judge.reward, "model": judge.model}
    return f"the {judge.kind} {named[judge.kind]}"


def _in_utc(time: int | None) -> str:
    """Return ``2026-11-27 21:53 UTC``: the reader may be elsewhere."""
    if time is None:
        return "unknown"
    return datetime.fromtimestamp(time / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
