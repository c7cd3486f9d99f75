"""Adapters (LoRA) in an estimate: how many weights they have, and which networks of a stage share one base model."""

from dataclasses import replace

from vantage.estimates.model_shape import ModelShape
from vantage.estimates.workload import Network
from vantage.schemas.checks.adapters import lora_of
from vantage.schemas.recipe.inputs import MODEL
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Training
from vantage.schemas.steps import dependencies, trains_adapters


def adapter_weights(shape: ModelShape, lora: Lora) -> int:
    """Return r · (rows + columns), summed over the matrices with an adapter, in all layers.

    Names that the family here does not have are counted as the widest of its matrices.
    """
    layers = shape.linear_layers
    if lora.targets == "all_linear":
        return lora.rank * shape.num_layers * sum(layers.values())
    return lora.rank * shape.num_layers * sum(layers.get(name, max(layers.values())) for name in lora.targets)


def with_adapters(recipe: Recipe, name: str, networks: list[Network]) -> list[Network]:
    """Return the networks of a stage, with adapters if it or earlier stages trained them.

    Networks with the same base in the same type hold it once: the first of them does, the others only their own
    weights.
    """
    lora = lora_of(recipe.stages[name])
    held: set[bool] = set()
    found = []
    for network in networks:
        of_it = lora if network.is_trained else _frozen_on(recipe, name, network.role)
        stands_on_base = of_it is not None or (
            not network.is_trained and _is_whole_base(recipe, name, network.role)
        )
        if of_it is not None:
            own = adapter_weights(network.shape, of_it) + (
                network.shape.hidden_size if network.is_scalar else 0
            )
            network = replace(network, adapter_weights=own)
        if stands_on_base and network.is_bfloat16 in held:
            network = replace(network, shares_base=True)
        if stands_on_base:
            network = replace(network, is_in_4_bits=_is_in_4_bits(recipe))
            held.add(network.is_bfloat16)
        found.append(network)
    return found


def _is_in_4_bits(recipe: Recipe) -> bool:
    """Return whether the adapters' base is in 4 bits: the imported, rounded model, unless a stage trains all
    weights."""
    trains_all = any(isinstance(stage, Training) and not stage.lora for stage in recipe.stages.values())
    return recipe.model.quantization is not None and not trains_all


def _step_of(recipe: Recipe, name: str, role: str) -> str | None:
    """Return the step that made a frozen network; a reward model is identified by the name of its stage."""
    if role in recipe.stages:
        return role
    read = dependencies(recipe)[name]
    return next((read[each] for each in _roles(role) if each in read), None)


def _roles(role: str) -> tuple[str, ...]:
    return ("policy", "candidate", "init") if role == "policy" else (role,)


def _frozen_on(recipe: Recipe, name: str, role: str) -> Lora | None:
    step = _step_of(recipe, name, role)
    return lora_of(recipe.stages.get(step)) if step is not None and trains_adapters(recipe, step) else None


def _is_whole_base(recipe: Recipe, name: str, role: str) -> bool:
    """Return whether the network is the recipe's own model, the base of its adapters."""
    return _step_of(recipe, name, role) == MODEL and recipe.model.lora is not None
