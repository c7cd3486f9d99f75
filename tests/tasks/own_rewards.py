"""Make stages of the small pipeline with a reward of verifiers that a test writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.recipe.verifiers import Right, Verifier
from vantage.schemas.recipe.work import ImportVerifier
from vantage.schemas.records.job import StageJob
from vantage.tasks import policy_optimization
from vantage.tasks.stages import run_stage


@pytest.fixture(scope="module")
def verifiers(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the artifact of a verifier with this text, imported and tried on the prompts once."""
    made: dict[tuple[str, Right | None], Path] = {}

    def artifact(text: str, right: Right | None = None) -> Path:
        if (text, right) not in made:
            folder = tmp_path_factory.mktemp("verifier")
            (folder / "mine.py").write_text(text)
            (folder / "output").mkdir()
            work = ImportVerifier(verifier=Verifier(source=str(folder / "mine.py"), right=right))
            job = pipeline.job("model").model_copy(
                update={
                    "name": "verifiers.mine",
                    "work": work,
                    "inputs": {"prompts.0": pipeline.folder("prompts")},
                    "scratch": folder,
                    "output": folder / "output",
                }
            )
            run_stage(job)
            made[text, right] = folder / "output"
        return made[text, right]

    return artifact


def with_reward(job: StageJob, terms: list[dict[str, Any]], *artifacts: Path) -> StageJob:
    inputs = {role: folder for role, folder in job.inputs.items() if not role.startswith("reward.")}
    inputs |= {f"reward.main.{index}": folder for index, folder in enumerate(artifacts)}
    return job.model_copy(
        update={"rewards": {"main": Reward.model_validate({"terms": terms})}, "inputs": inputs}
    )


def policy_job(pipeline: Any, folder: Path, algorithm: dict[str, Any]) -> StageJob:
    work = PolicyOptimization.model_validate(
        {
            "kind": "policy_optimization",
            "algorithm": algorithm,
            "init": "sft",
            "reward": "main",
            "prompts": "prompts",
            "iterations": 2,
            "batch_size": 16,
            "minibatch_size": 16,
            "validation_samples": 4,
            "learning_rate": 1e-6,
        }
    )
    sft = pipeline.folder("sft")
    inputs = {"init": sft, "reference": sft, "prompts": pipeline.folder("prompts")}
    job: StageJob = pipeline.job("sft", folder=folder).model_copy(update={"work": work, "inputs": inputs})
    return job


def rollouts_of(job: StageJob, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Return the stage's rollouts with their estimates, as its updates are given them; nothing is learnt."""
    seen: list[tuple[Any, Any]] = []

    def remember(networks: Any, rollout: Any, estimates: Any, *_: Any, **__: Any) -> Any:
        seen.append((rollout, estimates))
        return {}

    monkeypatch.setattr(policy_optimization, "update", remember)
    run_stage(job)
    return seen
