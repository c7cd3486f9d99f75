"""Check distillations whose teacher is behind a server."""

from collections.abc import Iterator

from vantage.schemas.problems import Problem
from vantage.schemas.recipe.distillation import Distillation
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Stage


def teacher_problems(recipe: Recipe, name: str, stage: Stage) -> Iterator[Problem]:
    """Yield a problem if the student's temperature differs from that of the server's log-probabilities, or if its stop
    strings are unknown to the server."""
    if not isinstance(stage, Distillation) or stage.teacher_server is None:
        return
    temperature, stop = recipe.generation.temperature, recipe.generation.stop
    if temperature != 1.0:
        message = f"the server returns log-probabilities at temperature 1, and generation.temperature={temperature:g}"
        remedy = "set generation.temperature: 1.0, or name a folder or a stage as teacher"
        yield Problem(("stages", name, "teacher_server"), message, remedy)
    if stage.teacher_server.sampled and stop:
        message = f"the server's responses end at tokens alone, and generation.stop={list(stop)} ends the student's at a text"
        remedy = (
            "leave generation.stop out, or teacher_server.sampled, or name a folder or a stage as teacher"
        )
        yield Problem(("stages", name, "teacher_server", "sampled"), message, remedy)
