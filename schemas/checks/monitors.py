"""Check a policy stage's further measurements: its reward must have models to compare with the data that it names."""

from collections.abc import Iterator

from vantage.schemas.problems import Problem, quote
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import PolicyOptimization


def monitor_problems(recipe: Recipe, name: str, stage: Stage) -> Iterator[Problem]:
    """Yield a problem if the stage names the data of reward models, and its reward has none."""
    if not isinstance(stage, PolicyOptimization) or stage.preferences is None:
        return
    terms = recipe.rewards[stage.reward].terms
    if all(term.stage is None or getattr(term, "step_ends", None) is not None for term in terms):
        message = f"the scores of reward models are compared with those of {quote(stage.preferences)}, and the reward {quote(stage.reward)} has no model that scores whole responses"
        yield Problem(
            ("stages", name, "preferences"), message, "leave preferences out, or name a reward with a model"
        )
