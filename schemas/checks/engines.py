"""Check stages that sample with an inference engine: settings that it does not support, and warnings."""

from collections.abc import Iterator

from vantage.schemas.checks.adapters import lora_of
from vantage.schemas.problems import Problem
from vantage.schemas.recipe.distillation import Distillation
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization, Rollouts
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection, RolloutCollection
from vantage.schemas.recipe.work import Work

_FIXED = ("policy", "candidate", "baseline")
"""Fields that name a policy which a stage samples from and does not train."""


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM keeps room (``--max-lora-rank``); an adapter of another rank takes the next larger one."""


VLLM_TEMPERATURES = (0.01, 2.0)
"""Least and largest temperature of vLLM: it raises smaller ones to the least without an error, and refuses larger ones."""


def sampling_of(stage: Work) -> Sampling | None:
    """Return the settings by which the stage's responses are sampled; None: it samples none."""
    if isinstance(stage, Rollouts | RolloutCollection | PreferenceCollection | PolicyEvaluation):
        return stage.rollout
    return None


def server_processes_of(stage: Stage) -> int:
    """Return the processes of the servers that the stage starts on each of its machines; each has a GPU if the stage has any."""
    sampling = sampling_of(stage)
    return 0 if sampling is None else sampling.server_processes


def runs_vllm(stage: Stage) -> bool:
    """Return whether vLLM runs on the stage's machine, in its process or beside it."""
    sampling = sampling_of(stage)
    return sampling is not None and sampling.engine == "vllm" and sampling.url is None


def engine_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of a temperature that vLLM does not support, and of weights that it cannot take: quantised ones,
    and adapters of a rank for which it has no room.

    Args:
        recipe: the recipe, with inherited adapters filled in.
    """
    for name, stage in recipe.stages.items():
        sampling = sampling_of(stage)
        if sampling is None or sampling.engine != "vllm":
            continue
        path = ("stages", name, "rollout", "engine")
        least, most = VLLM_TEMPERATURES
        if not least <= recipe.generation.temperature <= most:
            message = f"vllm samples at temperatures from {least:g} to {most:g}, and generation.temperature={recipe.generation.temperature:g}"
            yield Problem(path, message, "use a temperature in that range, or engine: loop")
        if recipe.model.quantization is not None:
            message = f"vllm samples from whole weights, and model.quantization={recipe.model.quantization} rounds them"
            yield Problem(path, message, "use engine: loop, or leave quantization out")
            continue
        for field, lora in _adapters_of(recipe, stage):
            if lora.rank > VLLM_RANKS[-1]:
                message = f"vllm applies adapters of rank {VLLM_RANKS[-1]} at most, and the policy of {field} has rank={lora.rank}"
                yield Problem(
                    path,
                    message,
                    "use a smaller rank, engine: loop, or lora: false in the stage that trains it",
                )


def engine_warnings(name: str, stage: Stage) -> Iterator[str]:
    """Yield a warning if the same recipe may give other responses; it names the place where the engine samples."""
    sampling = sampling_of(stage)
    if sampling is not None and sampling.engine == "vllm":
        place = "in the stage's process"
        if sampling.servers is not None:
            place = f"on servers that the stage starts: {sampling.servers}"
            if sampling.tensor_parallel > 1:
                place += f", each in {sampling.tensor_parallel} parts (tensor parallel)"
            if stage.resources.nodes is not None:
                place += " for each of its nodes, where Ray places them"
        elif sampling.url is not None:
            place = f"on {', '.join(sampling.url)}"
        yield (
            f"stages.{name}.rollout.engine: vllm is not bitwise reproducible: batches and machines change the last bits of its "
            f"log-probabilities, and so some responses; engine: loop is. It samples {place}"
        )


def _adapters_of(recipe: Recipe, stage: Stage) -> Iterator[tuple[str, Lora]]:
    """Yield each field whose policy is sampled from with adapters on it, and these adapters."""
    if isinstance(stage, PolicyOptimization | BestOfN | Distillation):
        found = {"init": lora_of(stage)}
    else:
        named = {field: getattr(stage, field, None) for field in _FIXED}
        found = {field: lora_of(recipe.stages.get(step or "")) for field, step in named.items()}
    yield from ((field, lora) for field, lora in found.items() if lora is not None)
