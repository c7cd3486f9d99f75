"""Check that a selection of prompts and the collection that it counts agree."""

from collections.abc import Iterator, Mapping

from vantage.schemas.metric_names import DIFFICULTY
from vantage.schemas.problems import Path, Problem, quote
from vantage.schemas.recipe.prompt_selection import PromptSelection
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.recipe.stages_that_collect import RolloutCollection


def selection_problems(recipe: Recipe, name: str, stage: Stage) -> Iterator[Problem]:
    """Yield the problems of a ``prompt_selection`` stage, and of a curriculum on prompts without pass rates."""
    ordered = stage if isinstance(stage, PolicyOptimization) and stage.curriculum != "none" else None
    if ordered is not None and not isinstance(recipe.stages.get(ordered.prompts), PromptSelection):
        message = f"{ordered.curriculum} orders prompts by their pass rate, and '{ordered.prompts}' has none"
        remedy = (
            "name data selected by {from: COLLECTION, pass_rate: [0, 1]} as prompts, or leave curriculum out"
        )
        yield Problem(("stages", name, "curriculum"), message, remedy)
    if isinstance(stage, PolicyOptimization):
        yield from _difficulty_problems(recipe.rewards, name, stage)
    collected = recipe.stages.get(getattr(stage, "rollouts", None) or "")
    if not isinstance(stage, PromptSelection) or not isinstance(collected, RolloutCollection):
        return
    if stage.prompts != collected.prompts:
        message = f"'{stage.prompts}' is not the dataset whose prompts '{stage.rollouts}' has responses to ('{collected.prompts}')"
        yield Problem(("stages", name, "prompts"), message, f"set prompts: {collected.prompts}")
    if collected.samples_per_prompt == 1:
        message = (
            f"'{stage.rollouts}' has one response to each training prompt, so that every pass rate is 0 or 1"
        )
        yield Problem(
            ("stages", name, "rollouts"), message, f"raise samples_per_prompt of '{stage.rollouts}'"
        )
    yield from _term_problems(recipe.rewards, ("stages", name, "term"), stage.term, collected.reward)


def _difficulty_problems(
    rewards: Mapping[str, Reward], name: str, stage: PolicyOptimization
) -> Iterator[Problem]:
    """Yield problems of a stage's counts of passes, and of gates on metrics that are not counted."""
    if stage.difficulty is not None:
        path = ("stages", name, "difficulty", "term")
        yield from _term_problems(rewards, path, stage.difficulty.term, stage.reward)
        return
    for number, gate in enumerate(stage.gate):
        if gate.metric in DIFFICULTY:
            index = (number,) if len(stage.gate) > 1 else ()
            message = f"{quote(gate.metric)} is measured only where the passes of prompts are counted"
            path = ("stages", name, "gate", *index, "metric")
            yield Problem(path, message, "add difficulty: {} to the stage, or leave the gate out")


def _term_problems(
    rewards: Mapping[str, Reward], path: Path, term: str | None, reward_name: str
) -> Iterator[Problem]:
    """Yield a problem if no score of the reward can have the name that decides what passes."""
    reward = rewards.get(reward_name)
    if term is None or reward is None or any(each.may_have_score(term) for each in reward.terms):
        return
    names = [name for each in reward.terms for name in each.score_names]
    yield Problem(path, f"{quote(term)} is no score of '{reward_name}'", f"use one of: {', '.join(names)}")
