"""Check the other models that a recipe reads as reward models: what they are imported from, and that nothing samples from them."""

from collections.abc import Iterator

from vantage.schemas.problems import Problem
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.sources import Hub, LocalPath, Registered, StageOfRun
from vantage.schemas.steps import OTHER_MODEL_PREFIX, dependencies, reward_imports


def reward_import_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each reward model that cannot be imported, or that is read as a policy too."""
    imports = reward_imports(recipe) if recipe.models else frozenset()
    if not imports:
        return
    readers = dependencies(recipe)
    for name, model in recipe.models.items():
        step = f"{OTHER_MODEL_PREFIX}{name}"
        if step not in imports:
            continue
        path = ("models", name)
        if model.base is not None:
            message = "is the model beneath an adapter, and a reward model is imported whole"
            yield Problem((*path, "base"), message, "merge the adapter into it, and name that folder")
        elif model.otherwise is not None:
            message = f"'{model.otherwise}' replaces a missing policy, and a reward reads this model"
            yield Problem((*path, "otherwise"), message, "leave it out")
        elif not isinstance(model.origin, LocalPath | Hub | Registered | StageOfRun):
            message = (
                f"'{model.source}' is read as a reward model, which is a sequence classifier with one label"
            )
            yield Problem(
                (*path, "source"),
                message,
                "name its folder, hub:ORGANISATION/NAME@REVISION, models:/NAME@ALIAS or RUN/STAGE",
            )
        for reward, number in _judged_by(recipe, name):
            message = f"rewards.{reward}.terms.{number}.judge reads it as a policy, and a reward reads it as a reward model"
            yield Problem(path, message, "give the policy another name under models")
        for reader, inputs in readers.items():
            for role, read in inputs.items():
                if read == step and not role.startswith("reward"):
                    message = f"stages.{reader}.{role} reads it as a policy, and a reward reads it as a reward model"
                    yield Problem(path, message, "give the policy another name under models")


def _judged_by(recipe: Recipe, model: str) -> Iterator[tuple[str, int]]:
    """Yield the reward and the number of each term that another model scores as a judge."""
    for name, reward in recipe.rewards.items():
        for number, term in enumerate(reward.terms):
            if term.judging_model is not None and term.judging_model.model == model:
                yield name, number
