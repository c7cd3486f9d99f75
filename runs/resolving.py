"""Resolve a recipe: fill in the learning rates that depend on the model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vantage.models.model_width import UnknownWidth
from vantage.runs.models_of_runs import model_width
from vantage.runs.workspace import Workspace
from vantage.schemas.loading.part_of_recipe import Part, part_of_recipe
from vantage.schemas.loading.recipe_file import load_recipe, parse_recipe
from vantage.schemas.recipe.inputs import SourcedModel
from vantage.schemas.recipe.learning_rates import unset_rates, with_learning_rates
from vantage.schemas.recipe.recipe import Recipe, ResolvedRecipe
from vantage.schemas.recipe.sources import Registered
from vantage.schemas.sweep import SweepPlan

ChosenRates = Mapping[str, Mapping[str, float]]
"""Stage → field → default learning rate, for fields that the recipe does not set."""


def load_resolved(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    part: Part | None = None,
    workspace: Workspace | None = None,
) -> tuple[ResolvedRecipe, ChosenRates]:
    """Return the recipe, or a part of it, with all learning rates filled in, and the default rates among them.

    ``workspace``: where a stage of another run is looked up, if a rate depends on its model's width.

    Raises:
        vantage.schemas.problems.RecipeError: the recipe is invalid.
        ValueError: a rate depends on the model's width, which is unknown; or the recipe has no such part.
    """
    recipe, chosen = resolve_rates(load_recipe(source, overrides), workspace)
    if part is None:
        return recipe, chosen
    recipe = part_of_recipe(recipe, part)
    return recipe, {stage: rates for stage, rates in chosen.items() if stage in recipe.stages}


def load_resolved_text(
    text: str, overrides: Sequence[str], *, workspace: Workspace | None = None
) -> tuple[ResolvedRecipe, ChosenRates]:
    """Resolve the text of a recipe as ``load_resolved`` does a file; its relative paths start at the current folder."""
    return resolve_rates(parse_recipe(text, overrides=overrides), workspace)


def resolve_rates(recipe: Recipe, workspace: Workspace | None = None) -> tuple[ResolvedRecipe, ChosenRates]:
    """Resolve a loaded recipe as ``load_resolved`` does a file."""
    unset = list(unset_rates(recipe))
    if not unset:
        return ResolvedRecipe.of(recipe), {}
    trained_from = {name: recipe.other_model_of(recipe.stages[name]) for name, _ in unset}
    others = {name: other for name, other in trained_from.items() if other is not None}
    own = [(name, field) for name, field in unset if name not in others]
    width = _width_of(recipe.model, own, workspace) if own else 0
    widths = {
        other: _width_of(recipe.models[other], [(name, "learning_rate")], workspace)
        for name, other in others.items()
    }
    resolved = with_learning_rates(recipe, width=width, widths=widths)
    chosen: dict[str, dict[str, float]] = {}
    for name, field in unset:
        chosen.setdefault(name, {})[field] = getattr(resolved.stages[name], field)
    return ResolvedRecipe.of(resolved), chosen


def _width_of(model: SourcedModel, unset: Sequence[tuple[str, str]], workspace: Workspace | None) -> int:
    """Return the hidden size of a model on which the rates in ``unset`` (stage, field) depend."""
    try:
        if isinstance(model.origin, Registered):
            raise UnknownWidth(f"MLflow is not asked about {model.whole} when a recipe is loaded")
        return model_width(model, workspace)
    except UnknownWidth as error:
        fields = ", ".join(f"stages.{name}.{field}" for name, field in unset)
        raise ValueError(
            f"{fields}: left to the model's width, but {error}; give a number with --set stages.NAME.learning_rate=…"
        ) from error


def resolve_sweep(swept: SweepPlan, workspace: Workspace | None = None) -> SweepPlan[ResolvedRecipe]:
    """Return the sweep with the learning rates of every arm filled in."""
    return SweepPlan(
        swept.sweep, {arm: resolve_rates(recipe, workspace)[0] for arm, recipe in swept.recipes.items()}
    )
