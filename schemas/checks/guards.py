"""Check the guards of a stage: their metrics must be curves of the stage, and the stage must support their actions."""

from collections.abc import Iterator, Mapping

from vantage.schemas.kinds import KINDS
from vantage.schemas.metric_names import (
    CRITIC_ENSEMBLE,
    DEMONSTRATED,
    DIFFICULTY,
    ENSEMBLE,
    INITIAL_AGREEMENT,
    JUDGE_OF_PREFERENCES,
    LEARNED_VALUES,
    MOVED_BY_CRITIC,
    OF_MACHINE,
    REWARD_DATA,
    VALUES,
    WATCHED,
)
from vantage.schemas.problems import Path, Problem, quote, suggest
from vantage.schemas.recipe.guards import OFF, Guard
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.stage import Stage, Training
from vantage.schemas.recipe.stages import PolicyOptimization, WatchedRollouts
from vantage.schemas.records.metrics import curve_metric_names

_NEEDED = {"demonstrations": DEMONSTRATED, "preferences": REWARD_DATA}
"""Field of a policy stage → curves that it reports only with that field."""
SELECTS = "best_iteration"
"""The headline metric of kinds that return the weights that measured best."""


_OF_TERM = "TERM"
"""End of the names of curves that exist once for each term of a reward."""


def guard_problems(name: str, stage: Stage, rewards: Mapping[str, Reward]) -> Iterator[Problem]:
    """Yield a problem for each guard on a curve that the stage does not report, or with an action that it cannot take."""
    if not isinstance(stage, Training) or stage.guards is None or stage.guards == OFF:
        return
    seen: set[Guard] = set()
    for number, guard in enumerate(stage.guards):
        path: Path = ("stages", name, "guards", number)
        yield from _metric_problems(path, guard, stage, rewards)
        yield from _action_problems(path, guard, stage)
        if guard in seen:
            yield Problem(path, f"this guard is written twice: {guard}", "leave one of them out")
        seen.add(guard)


def _metric_problems(
    path: Path, guard: Guard, stage: Training, rewards: Mapping[str, Reward]
) -> Iterator[Problem]:
    if guard.metric in OF_MACHINE:
        message = f"{guard.metric} depends on the machine, so another one would end the stage elsewhere"
        yield Problem(
            (*path, "metric"), message, "name another curve, or bound the stage by resources.max_seconds"
        )
        return
    if (lacking := _lacking(guard.metric, stage, rewards)) is not None:
        yield Problem((*path, "metric"), f"{guard.metric} is measured only where {lacking[0]}", lacking[1])
        return
    curves = curve_metric_names(stage.kind)
    of_terms = {name for name in curves if name.endswith(_OF_TERM)}
    if guard.metric in curves - of_terms:
        return
    if any(_is_of_family(guard.metric, name.removesuffix(_OF_TERM)) for name in of_terms):
        return
    message = f"a {stage.kind} stage has no curve {quote(guard.metric)}"
    yield Problem((*path, "metric"), message, suggest(guard.metric, sorted(curves - set(OF_MACHINE))))


def _is_of_family(metric: str, beginning: str) -> bool:
    """Return whether a metric has this beginning, and the name of a term after it."""
    return metric.startswith(beginning) and metric != beginning


def _lacking(metric: str, stage: Training, rewards: Mapping[str, Reward]) -> tuple[str, str] | None:
    """Return the setting that the stage lacks to report a curve of its kind, and the remedy; None: it lacks none.

    A guard on a curve that is never reported would have no effect.
    """
    if isinstance(stage, PolicyOptimization):
        for field, metrics in _NEEDED.items():
            if metric in metrics and getattr(stage, field) is None:
                return f"the stage names {field}", f"name a dataset as {field}, or leave the guard out"
        if metric in (*VALUES, "grad_norm_critic") and not stage.algorithm.reads_critic:
            return (
                "a critic learns, and this algorithm reads none",
                "use an algorithm with a critic, or leave the guard out",
            )
        if metric in DIFFICULTY and stage.difficulty is None:
            return "the stage has difficulty", "add difficulty: {}, or leave the guard out"
        if metric in LEARNED_VALUES and stage.algorithm.reads_critic and not stage.algorithm.trains_critic:
            return "the critic learns, and freeze_critic=all lets none learn", "leave the guard out"
        if metric in CRITIC_ENSEMBLE and stage.algorithm.critic_head.ensemble is None:
            return (
                "the critic is an ensemble",
                "set algorithm.critic_head: {ensemble: 2}, or leave the guard out",
            )
    if isinstance(stage, WatchedRollouts) and metric in WATCHED and stage.watch is None:
        return "the stage has a watch", "add a watch, or leave the guard out"
    watch = stage.watch if isinstance(stage, WatchedRollouts) else None
    if metric == JUDGE_OF_PREFERENCES and (watch is None or watch.judge.kind != "reward"):
        return (
            "the stage has a watch whose judge is a reward",
            "use a reward as the judge, or leave the guard out",
        )
    if metric in INITIAL_AGREEMENT and watch is not None and watch.judge.kind == "model":
        return (
            "the watch's judge scores each response by itself, and a model compares two policies",
            "use a verifier or a reward as the judge, or leave the guard out",
        )
    if isinstance(stage, WatchedRollouts) and metric in ENSEMBLE:
        reward = rewards.get(stage.reward)
        if reward is not None and reward.ensemble is None:
            return (
                "the reward has an ensemble",
                f"give rewards.{stage.reward} an ensemble, or leave the guard out",
            )
    return None


def _action_problems(path: Path, guard: Guard, stage: Training) -> Iterator[Problem]:
    if guard.action == "restore_best" and SELECTS not in KINDS[stage.kind].numbers:
        message = (
            f"a {stage.kind} stage measures no best weights while it trains, so there are none to restore"
        )
        yield Problem((*path, "action"), message, "use finish, stop or warn")
    if guard.action == "freeze_policy" and not _has_own_critic(stage):
        message = (
            "freeze_policy lets the critic learn alone, and this stage has no critic of its own that learns"
        )
        yield Problem((*path, "action"), message, "use stop, restore_best, finish or warn")
    elif guard.action == "freeze_policy" and guard.metric not in MOVED_BY_CRITIC:
        message = (
            f"freeze_policy lasts until the metric is within its bound again, and {guard.metric} does not change while only "
            "the critic learns, or is not reported then"
        )
        remedy = f"use stop, restore_best, finish or warn, or one of {', '.join(MOVED_BY_CRITIC)}"
        yield Problem((*path, "action"), message, remedy)


def _has_own_critic(stage: Training) -> bool:
    return isinstance(stage, PolicyOptimization) and stage.algorithm.trains_critic
