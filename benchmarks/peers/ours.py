"""Our side: a stage of Vantage as `vantage run` would compute it, without Prefect and MLflow.

    python -m benchmarks.peers.ours MATERIAL CORE

Checkpoints and measurements on held-out rows come after what is timed, as saving and evaluation are off on the other side.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.peers.clock import Clock
from benchmarks.peers.workloads import EOS, LEARNING_RATE, PAD, Kind, Material, prompt_ids, read_material
from vantage.models.folders import load_policy
from vantage.models.sampling import Samples, sample
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.terms import ModelTerm
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout.engine import LocalEngine
from vantage.tasks.stages import run_stage

FOREVER = 100_000
"""Iterations, epochs: the runner ends this process."""
ALGORITHMS: dict[Kind, dict[str, Any]] = {
    "ppo": {"preset": "ppo"},
    "grpo": {"preset": "grpo"},
    "rloo": {"preset": "rloo"},
}
OPTIMIZERS: dict[Kind, int] = {"ppo": 2}
"""Number of optimisers: PPO has one each for policy and critic, and every other kind has one."""


def main(path: str, core: str) -> None:
    """Work until the runner ends this process."""
    os.sched_setaffinity(0, {int(core)})
    torch.set_num_threads(1)
    material = read_material(Path(path))
    workload = material.workload
    if workload.kind == "sampling":
        sample_again(material)
        return
    clock = Clock(workload, optimizers=OPTIMIZERS.get(workload.kind, 1))
    LocalEngine.generate = counted(LocalEngine.generate, clock)  # type: ignore[method-assign]
    with TemporaryDirectory() as folder:
        run_stage(job_of(material, Path(folder)))


def sample_again(material: Material) -> None:
    """Sample from all prompts with the stages' sampler, over and over."""
    model = load_policy(Path(material.model))
    clock = Clock(material.workload)
    prompts = [prompt_ids(prompt) for prompt in material.prompts]
    for iteration in range(FOREVER):
        samples = sample(
            model,
            prompts,
            max_new_tokens=material.workload.longest,
            temperature=1.0,
            eos_token_ids=[EOS],
            pad_token_id=PAD,
            seed=iteration,
        )
        clock.generated(sum(map(len, samples.responses)))
        clock.finish_iteration()


def counted(generate: Callable[..., Samples], clock: Clock) -> Callable[..., Samples]:
    """Return the engine's method, whose tokens the clock counts."""

    def generate_and_count(self: LocalEngine, prompts: Sequence[list[int]], **options: Any) -> Samples:
        samples = generate(self, prompts, **options)
        clock.generated(sum(map(len, samples.responses)))
        return samples

    return generate_and_count


def job_of(material: Material, folder: Path) -> StageJob:
    """Return the stage's job in an empty folder."""
    workload = material.workload
    inputs = {"init": material.model, "data": material.data}
    if workload.kind in ALGORITHMS:
        inputs = {
            "init": material.model,
            "reference": material.model,
            "prompts": material.data,
            "reward.main.0": material.reward,
            **({"critic": material.reward} if workload.kind == "ppo" else {}),
        }
    (folder / "output").mkdir()
    return StageJob(
        run_id="0001-bench",
        name="bench",
        attempt=1,
        stage_key="0" * 64,
        seed=1,
        work=work_of(material),
        generation=Generation(
            max_prompt_tokens=workload.prompt_tokens, max_response_tokens=workload.longest, temperature=1.0
        ),
        rewards={"main": Reward(terms=(ModelTerm(model="reward"),))} if "reference" in inputs else {},
        inputs={role: Path(where) for role, where in inputs.items()},
        digests={role: f"{number:064x}" for number, role in enumerate(inputs)},
        scratch=folder / "scratch",
        output=folder / "output",
        threads=1,
    )


def work_of(material: Material) -> Any:
    """Return the stage's configuration; what is not named has the default of a recipe."""
    workload = material.workload
    trained = {
        "learning_rate": LEARNING_RATE,
        "checkpoint_every": FOREVER,
        "precision": workload.precision,
        **({"packing": True} if workload.packed else {}),
        **({"compile": True} if workload.compiled else {}),
    }
    if workload.kind not in ALGORITHMS:
        kind = {"sft": "sft", "reward": "reward_model"}[workload.kind]
        return {
            "kind": kind,
            "init": "model",
            "data": "rows",
            "batch_size": workload.minibatch_rows,
            "epochs": FOREVER,
            **trained,
        }
    algorithm = ALGORITHMS[workload.kind] | {"samples_per_prompt": workload.group}
    return {
        "kind": "policy_optimization",
        "algorithm": algorithm,
        "init": "model",
        "reference": "model",
        "reward": "main",
        "prompts": "rows",
        "batch_size": workload.rows,
        "minibatch_size": workload.minibatch_rows,
        "epochs": workload.epochs,
        "iterations": FOREVER,
        "validate_every": FOREVER,
        "validation_samples": 1,
        **({"critic": "reward", "critic_learning_rate": LEARNING_RATE} if workload.kind == "ppo" else {}),
        **trained,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
