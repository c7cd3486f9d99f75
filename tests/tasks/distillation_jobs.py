"""Make jobs of on-policy distillation for tests, in which the trained model teaches the one that it came from."""

from pathlib import Path
from typing import Any

from tests.tasks.conftest import Pipeline
from vantage.schemas.recipe.distillation import Distillation
from vantage.schemas.recipe.rewards import MissingEos, Reward
from vantage.schemas.recipe.terms import ModelTerm, VerifierTerm

WORK = Distillation(
    kind="distillation",
    init="model",
    teacher="sft",
    reward="main",
    prompts="prompts",
    batch_size=16,
    minibatch_size=8,
    iterations=4,
    validate_every=2,
    validation_samples=16,
    learning_rate=1e-3,
    checkpoint_every=2,
)
VERIFIER = Reward(terms=(VerifierTerm(verifier="arithmetic"),))
MODEL = Reward(terms=(ModelTerm(model="reward"),), missing_eos=MissingEos(subtract=1.0))


def job_in(pipeline: Pipeline, folder: Path, *, reward: Reward = MODEL, **changes: Any) -> Any:
    """Return the job of a distillation in this folder; ``changes`` are to its configuration."""
    work = WORK.model_copy(update=changes)
    assert work.teacher is not None
    scored = {"reward.main.0": "reward"} if reward is MODEL else {}
    inputs = pipeline.inputs({"init": work.init, "teacher": work.teacher, "prompts": "prompts"} | scored)
    changes_of_job = {
        "name": "student",
        "work": work,
        "inputs": inputs,
        "digests": pipeline.digests(inputs),
        "rewards": {"main": reward},
    }
    return pipeline.job("sft", folder=folder).model_copy(update=changes_of_job)
