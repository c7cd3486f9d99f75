"""Load the models of a rollout for a test on the CPU, by what the job's inputs hold."""

from pathlib import Path

import torch

from vantage.models.folders import load_policy
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.pass_limits import UNLIMITED
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import codec_of
from vantage.tasks.rewards.scoring import Scorer, load_scorer
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.rollout_models import RolloutModels

CPU = torch.device("cpu")


def load(folder: Path) -> PolicyModel:
    """Return a policy on the CPU."""
    return PolicyModel(load_policy(folder))


def models_of(
    job: StageJob, *, role: str = "init", reference: Path | None = None, rewarded: bool = True
) -> RolloutModels:
    """Return the policy in ``role``, scored by the reward ``main`` where ``rewarded``, all of a minibatch at once."""
    policy, codec = load(job.inputs[role]), codec_of(job, role)
    scorer = load_scorer(job, "main", tokenizers_of=[role], device=CPU) if rewarded else Scorer((), None)
    return RolloutModels(
        policy=policy,
        engine=load_engine(policy, codec, limits=UNLIMITED),
        reference=None if reference is None else load(reference),
        scorer=scorer,
        codec=codec,
        limits=UNLIMITED,
        precision="float32",
    )
