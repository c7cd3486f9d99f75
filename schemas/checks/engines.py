"""Stages that sample with an inference engine: what it cannot sample yet, and what the author should know."""

from collections.abc import Iterator

from vantage.schemas.checks.adapters import lora_of
from vantage.schemas.problems import Problem
from vantage.schemas.recipe.distillation import Distillation
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization, Rollouts
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection, RolloutCollection

_FIXED = ("policy", "candidate", "baseline")
"""Fields that name a policy which a stage samples from and does not train."""


def sampling_of(stage: Stage) -> Sampling | None:
    """Return the settings of what samples the stage's responses; None: it samples none."""
    if isinstance(stage, Rollouts | RolloutCollection | PreferenceCollection | PolicyEvaluation):
        return stage.rollout
    return None


def runs_vllm(stage: Stage) -> bool:
    """Return whether vLLM runs where the stage does, in its process or beside it."""
    sampling = sampling_of(stage)
    return sampling is not None and sampling.engine == "vllm" and sampling.url is None


def engine_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of weights that vLLM is not given yet: adapters, and quantised ones.

    Args:
        recipe: inherited adapters are filled in.
    """
    for name, stage in recipe.stages.items():
        sampling = sampling_of(stage)
        if sampling is None or sampling.engine != "vllm":
            continue
        path = ("stages", name, "rollout", "engine")
        if recipe.model.quantization is not None:
            message = f"vllm samples from whole weights, and model.quantization={recipe.model.quantization} rounds them"
            yield Problem(path, message, "use engine: loop, or leave quantization out")
        elif (field := _with_adapters(recipe, stage)) is not None:
            message = f"vllm samples from whole weights, and the policy of {field} has adapters (lora)"
            yield Problem(
                path, message, "use engine: loop, or lora: false in the stage that trains this policy"
            )


def engine_warnings(name: str, stage: Stage) -> Iterator[str]:
    """Yield a warning where the same recipe may give other responses; it names the place where the engine samples."""
    sampling = sampling_of(stage)
    if sampling is not None and sampling.engine == "vllm":
        place = "in the stage's process"
        if sampling.servers is not None:
            place = f"on servers that the stage starts: {sampling.servers}"
        elif sampling.url is not None:
            place = f"on {', '.join(sampling.url)}"
        yield (
            f"stages.{name}.rollout.engine: vllm is not bitwise reproducible: batches and machines change the last bits of its "
            f"log-probabilities, and so some responses; engine: loop is. It samples {place}"
        )


def _with_adapters(recipe: Recipe, stage: Stage) -> str | None:
    """Return the field whose policy is sampled from with adapters on it."""
    if isinstance(stage, PolicyOptimization | BestOfN | Distillation):
        return "init" if lora_of(stage) is not None else None
    named = ((field, getattr(stage, field, None)) for field in _FIXED)
    return next((field for field, step in named if lora_of(recipe.stages.get(step or "")) is not None), None)
