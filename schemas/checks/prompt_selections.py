"""Check that a selection of prompts and the collection that it counts agree."""

from collections.abc import Iterator

from vantage.schemas.problems import Problem, quote
from vantage.schemas.recipe.prompt_selection import PromptSelection
from vantage.schemas.recipe.recipe import Recipe
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
    reward = recipe.rewards.get(collected.reward)
    terms = [] if reward is None else [term.name for term in reward.terms]
    if stage.term is not None and terms and stage.term not in terms:
        message = f"{quote(stage.term)} is no term of '{collected.reward}', the reward of '{stage.rollouts}'"
        yield Problem(("stages", name, "term"), message, f"use one of: {', '.join(terms)}")
