"""Check distillations whose teacher is behind a server."""

from collections.abc import Iterator

from vantage.schemas.problems import Problem
from vantage.schemas.recipe.distillation import Distillation
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Stage


def teacher_problems(recipe: Recipe, name: str, stage: Stage) -> Iterator[Problem]:
    """Yield a problem if the student samples at another temperature than that of the server's log-probabilities."""
    temperature = recipe.generation.temperature
    if isinstance(stage, Distillation) and stage.teacher_server is not None and temperature != 1.0:
        message = f"the server returns log-probabilities at temperature 1, and generation.temperature={temperature:g}"
        remedy = "set generation.temperature: 1.0, or name a folder or a stage as teacher"
        yield Problem(("stages", name, "teacher_server"), message, remedy)
