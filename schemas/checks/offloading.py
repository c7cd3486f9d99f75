"""Check ``resources.offload``: the stage must have the offloaded networks, and these must not share weights."""

from collections.abc import Iterator

from vantage.schemas.problems import Problem
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.terms import JudgingModelTerm, ModelTerm
from vantage.schemas.steps import dependencies, rewards_read

_WITHOUT = {
    "reference": "reads no reference",
    "reward": "has no reward that is a model",
    "optimizer": "trains nothing",
}


def offload_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for parts that a stage offloads but does not have, and for networks that share weights.

    Args:
        recipe: the recipe, with references and adapters filled in.
    """
    offloading = {name: stage for name, stage in recipe.stages.items() if stage.resources.offload}
    read = dependencies(recipe) if offloading else {}
    for name, stage in offloading.items():
        path = ("stages", name, "resources", "offload")
        has = {
            "reference": "reference" in read[name],
            "reward": any(
                isinstance(term, ModelTerm | JudgingModelTerm)
                for reward in rewards_read(stage)
                for term in recipe.rewards[reward].terms
            ),
            "optimizer": isinstance(stage, Training),
        }
        for role in stage.resources.offload:
            if not has[role]:
                yield Problem(path, f"this stage {_WITHOUT[role]}", f"leave {role} out")
        if (
            {"reference", "reward"} & {*stage.resources.offload}
            and isinstance(stage, Training)
            and stage.lora
        ):
            message = "with adapters (lora), the frozen networks share the policy's base and take no memory of their own"
            yield Problem(path, message, "leave them out, or set lora: false")
