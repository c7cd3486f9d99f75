"""Run a small pipeline stage by stage in this process, for the tests of the stages."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.tasks.small_model import write_small_model
from vantage.schemas.recipe.algorithm import Returns
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.inputs import (
    Data,
    Generation,
    Model,
    Shares,
    Split,
)
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.rewards import (
    Judge,
    MissingEos,
    Reward,
)
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.stages import PolicyOptimization, ValuePretraining
from vantage.schemas.recipe.stages_on_data import RewardModelling, SupervisedFineTuning
from vantage.schemas.recipe.stages_that_collect import RolloutCollection
from vantage.schemas.recipe.terms import ModelTerm
from vantage.schemas.recipe.work import ImportModel, PrepareData, Work
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.stages import run_stage

GENERATION = Generation(max_prompt_tokens=48, max_response_tokens=24)
REWARDS = {"main": Reward(terms=(ModelTerm(model="reward"),), missing_eos=MissingEos(subtract=1.0))}
SHARES = Shares(validation=0.1, test=0.1)

WORK: dict[str, Work] = {
    "demonstrations": PrepareData(
        content="demonstrations",
        data=Data(source="builtin:arithmetic/demonstrations", rows=200),
        shares=SHARES,
    ),
    "preferences": PrepareData(
        content="preferences",
        data=Data(source="builtin:arithmetic/preferences", rows=200),
        shares=SHARES,
    ),
    "prompts": PrepareData(
        content="prompts",
        data=Data(source="builtin:arithmetic/prompts", rows=64, split=Split(validation=16, test=8)),
        shares=SHARES,
    ),
    "sft": SupervisedFineTuning(
        kind="sft", data="demonstrations", batch_size=16, epochs=0.5, learning_rate=1e-2, checkpoint_every=2
    ),
    "reward": RewardModelling(
        kind="reward_model",
        init="sft",
        data="preferences",
        batch_size=8,
        epochs=0.25,
        learning_rate=1e-3,
        centre_on="demonstrations",
        centre_coef=0.02,
        lm_coef=0.3,
        checkpoint_every=2,
    ),
    "collected": RolloutCollection(
        kind="rollout_collection",
        policy="sft",
        prompts="prompts",
        reward="main",
        samples_per_prompt=4,
        held_out_samples_per_prompt=3,
        batch_size=36,
    ),
    "value": ValuePretraining(
        kind="value_pretraining",
        policy="sft",
        init="reward",
        reference="sft",
        reward="main",
        prompts="prompts",
        returns=Returns(kl_coef=0.05),
        iterations=4,
        batch_size=16,
        minibatch_size=8,
        validate_every=1,
        patience=9,
        validation_samples=16,
        learning_rate=1e-3,
        checkpoint_every=2,
    ),
    "policy": PolicyOptimization.model_validate(
        {
            "kind": "policy_optimization",
            "algorithm": {
                "preset": "vapo",
                "length_adaptive_alpha": 1.0,
                "samples_per_prompt": 4,
                "kl_coef": 0.05,
                "entropy_coef": 0.01,
            },
            "init": "sft",
            "reference": "sft",
            "critic": "value",
            "reward": "main",
            "prompts": "prompts",
            "iterations": 4,
            "batch_size": 16,
            "minibatch_size": 8,
            "epochs": 2,
            "validate_every": 2,
            "validation_samples": 16,
            "learning_rate": 1e-4,
            "critic_learning_rate": 1e-4,
            "checkpoint_every": 2,
        }
    ),
    "evaluation": PolicyEvaluation(
        kind="evaluation",
        candidate="policy",
        baseline="sft",
        judge=Judge(verifier="arithmetic"),
        prompts="prompts",
        samples_per_prompt=2,
    ),
}
INPUTS: dict[str, dict[str, str]] = {
    "sft": {"init": "model", "data": "demonstrations"},
    "reward": {"init": "sft", "data": "preferences", "centre_on": "demonstrations"},
    "collected": {"policy": "sft", "prompts": "prompts", "reward.main.0": "reward"},
    "value": {
        "policy": "sft",
        "init": "reward",
        "reference": "sft",
        "prompts": "prompts",
        "reward.main.0": "reward",
    },
    "policy": {
        "init": "sft",
        "reference": "sft",
        "critic": "value",
        "prompts": "prompts",
        "reward.main.0": "reward",
    },
    "evaluation": {"candidate": "policy", "baseline": "sft", "prompts": "prompts"},
}


class Pipeline:
    """Runs stages into one folder, each at most once, with whatever they need before them."""

    def __init__(self, root: Path, *, width: int = 32, **changes: object) -> None:
        """Make the pipeline. ``width`` is the model's; ``changes`` are to the configuration of every stage that trains."""
        self.root = root
        self.changes = changes
        self.results: dict[str, StageResult] = {}
        self.source = root / "source"
        write_small_model(self.source, width=width)

    def job(self, name: str, *, folder: Path | None = None, **changes: object) -> StageJob:
        """Return a job of one stage in a folder of its own, its inputs made first; ``changes`` are to its configuration."""
        inputs = self.inputs(INPUTS.get(name, {}))
        work = self.work(name)
        of_all = self.changes if isinstance(work, Training) else {}
        folder = folder or Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.root))
        (folder / "scratch").mkdir(parents=True, exist_ok=True)
        output = folder / "output"
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        return StageJob(
            run_id="0001-test",
            name=name,
            attempt=1,
            stage_key="0" * 64,
            seed=5,
            work=work.model_copy(update=of_all | changes),
            generation=GENERATION,
            rewards=REWARDS if name in ("value", "policy", "collected") else {},
            inputs=inputs,
            digests=self.digests(inputs),
            scratch=folder / "scratch",
            output=output,
        )

    def work(self, name: str) -> Work:
        """Return what a stage does, before any changes."""
        return ImportModel(model=Model(source=str(self.source))) if name == "model" else WORK[name]

    def inputs(self, sources: Mapping[str, str]) -> dict[str, Path]:
        """Return role → folder of the stage that makes it, and of the model beneath it where that made adapters."""
        found = {role: self.folder(source) for role, source in sources.items()}
        adapters = [role for role, folder in found.items() if (folder / "adapter_config.json").is_file()]
        return found | {f"{role}.base": self.folder("model") for role in adapters}

    def digests(self, inputs: Mapping[str, Path]) -> dict[str, str]:
        """Return role → what replaces the digest of its folder."""
        return {role: f"{hash(str(folder)) % 16**8:064x}" for role, folder in inputs.items()}

    def folder(self, name: str) -> Path:
        """Return the output of a stage that has run."""
        if name not in self.results:
            self.results[name] = run_stage(self.job(name, folder=self.root / name))
        return self.root / name / "output"

    def metrics(self, name: str) -> dict[str, float | None]:
        """Return the headline metrics of a stage that has run."""
        return self.result(name).metrics

    def result(self, name: str) -> StageResult:
        """Return what a stage that has run handed back."""
        self.folder(name)
        return self.results[name]


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Return the small pipeline, shared by all tests of the stages."""
    torch.set_num_threads(1)
    return Pipeline(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="session")
def lora_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Return the pipeline in which every stage trains adapters on the one model."""
    torch.set_num_threads(1)
    return Pipeline(tmp_path_factory.mktemp("lora"), lora=Lora(rank=4, alpha=8.0))


@pytest.fixture(scope="session")
def few_prompts(pipeline: Pipeline) -> Path:
    """Return twelve prompts, of which eight train, for tests of how a stage samples."""
    data = Data(source="builtin:arithmetic/prompts", rows=12, split=Split(validation=2, test=2))
    folder = pipeline.root / "few-prompts"
    run_stage(pipeline.job("prompts", folder=folder, data=data))
    return folder / "output"


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Return every file below a folder with its bytes."""

    def read(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }

    return read
