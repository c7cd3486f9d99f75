"""Adapters (LoRA) in a recipe: what stages inherit from the model, and which of them can continue from one another."""

from collections.abc import Iterator

from vantage.schemas.problems import Problem
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Stage, Training
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.steps import dependencies

_STARTS_FROM = ("init", "critic", "fresh_critic")
"""Fields that name the model that a stage continues to train."""


def with_lora(lora: Lora | None, stage: Stage) -> Stage:
    """Return the stage with the adapters that it inherits; ``lora`` are those of the recipe's model."""
    if isinstance(stage, Training) and stage.lora is None and lora is not None:
        return stage.model_copy(update={"lora": lora})
    return stage


def lora_of(stage: Stage | None) -> Lora | None:
    """Return the adapters that a stage trains, once inherited ones are filled in; None: it trains all weights, or nothing."""
    return (stage.lora or None) if isinstance(stage, Training) else None


def adapter_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of adapters that are missing, cannot continue those of another stage, or have a base that cannot
    be sharded.

    Args:
        recipe: the recipe, with inherited adapters filled in.
    """
    if recipe.model.quantization is not None and recipe.model.lora is None:
        message = f"{recipe.model.quantization} without lora rounds the weights, and then trains all of them"
        yield Problem(("model", "quantization"), message, "add model.lora: {}, or leave quantization out")
    read = dependencies(recipe)
    for name, stage in recipe.stages.items():
        own = lora_of(stage)
        for field in _STARTS_FROM:
            start = getattr(stage, field, None)
            theirs = lora_of(recipe.stages.get(start or ""))
            if own is not None and theirs is not None and own != theirs:
                message = f"{_shown(own)} cannot go on from {field}={start}, which has {_shown(theirs)}"
                remedy = f"give both the same lora, or set stages.{start}.lora: false"
                yield Problem(("stages", name, "lora"), message, remedy)
        if isinstance(stage, PolicyOptimization) and stage.critic_optimizer == "carry":
            yield from _other_weights(name, stage, recipe)
        adapted = own is not None or any(lora_of(recipe.stages.get(step)) for step in read[name].values())
        if adapted and stage.resources.cuts_weights and recipe.model.quantization is not None:
            message = f"fsdp2 cuts weights by rows, and those of a base in 4 bits ({recipe.model.quantization}) are packed without rows"
            remedy = "use strategy: ddp, or leave model.quantization out"
            yield Problem(("stages", name, "resources", "distributed", "strategy"), message, remedy)


def _other_weights(name: str, stage: PolicyOptimization, recipe: Recipe) -> Iterator[Problem]:
    """Yield the problem of an optimiser state that is carried over from a critic with other trained weights."""
    critic = recipe.stages.get(stage.critic or "")
    own, theirs = lora_of(stage), lora_of(critic)
    if isinstance(critic, Training) and (own is None) != (theirs is None):
        message = (
            f"carry goes on with the optimiser of '{stage.critic}', which trains {_trained(theirs)}, "
            f"and this stage trains {_trained(own)}"
        )
        remedy = f"give {name} and {stage.critic} the same lora, or set critic_optimizer: fresh"
        yield Problem(("stages", name, "critic_optimizer"), message, remedy)


def _trained(lora: Lora | None) -> str:
    return "all weights" if lora is None else _shown(lora)


def _shown(lora: Lora) -> str:
    targets = lora.targets if isinstance(lora.targets, str) else " ".join(lora.targets)
    return f"lora of rank={lora.rank} alpha={lora.alpha:g} targets={targets}"
