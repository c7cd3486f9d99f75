"""Pin registered models and stages of other runs when a run begins, since their names may mean another model later."""

from typing import TypeVar

from vantage.runs.models_of_runs import pin_stage
from vantage.runs.registered_models import with_registered
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.inputs import SourcedModel
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.sources import StageOfRun
from vantage.schemas.steps import OTHER_MODEL_PREFIX, reward_imports

_AnyModel = TypeVar("_AnyModel", bound=SourcedModel)


def pinned(recipe: ResolvedRecipe, workspace: Workspace) -> ResolvedRecipe:
    """Return the recipe with the present content of each registered model and of each stage of another run; nothing is written.

    A run keeps this content, since its own end may move an alias, and since it becomes the latest run itself.

    Raises:
        vantage.runs.workspace.RunError: there is no such version or stage, or a recipe cannot import its model.
        vantage.ledger.to_mlflow.published_models.RegistryUnavailable: MLflow does not answer.
    """
    recipe = with_registered(recipe, workspace)
    model = _pinned("model", recipe.model, workspace)
    rewards = reward_imports(recipe) if recipe.models else frozenset()
    models = {
        name: _pinned(
            f"models.{name}", each, workspace, is_reward_model=f"{OTHER_MODEL_PREFIX}{name}" in rewards
        )
        for name, each in recipe.models.items()
    }
    if model == recipe.model and models == recipe.models:
        return recipe
    return recipe.model_copy(update={"model": model, "models": models})


def _pinned(
    place: str, model: _AnyModel, workspace: Workspace, *, is_reward_model: bool = False
) -> _AnyModel:
    origin = model.origin
    if not isinstance(origin, StageOfRun) or origin.digest is not None:
        return model
    found = pin_stage(f"{place}.source", origin, workspace, is_reward_model=is_reward_model)
    return model.model_copy(update={"source": str(found)})
