"""The networks that policy optimisation trains: a policy, and a critic beside it, on its trunk, or none."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.folders import load_policy
from models.heads import ScalarModel, fresh_value_head, load_critic
from schemas.recipe.stages import PolicyOptimization
from schemas.records.job import StageJob
from tasks.rollout.rollouts import (
    Actors,
    Rollout,
    rollout_values,
    rollout_values_and_final,
)
from tasks.training.optimization import make_optimizer
from tasks.training.seeds import derive_seed, stage_seed


@dataclass(frozen=True)
class ActorCritic:
    """What is trained, by what, and how fast. ``critic`` and ``value_head`` are never both there."""

    policy: PreTrainedModel
    critic: ScalarModel | None
    """A network of its own."""
    value_head: nn.Linear | None
    """On the policy's trunk: then both learn from one joint loss."""
    modules: dict[str, nn.Module]
    """What each optimiser steps."""
    optimizers: dict[str, torch.optim.AdamW]
    learning_rates: dict[str, float]

    def values(self, rollout: Rollout, actors: Actors) -> Tensor | None:
        """Values (B,T) of the prefixes that chose each token; on a shared trunk those that ``shape`` read in its pass."""
        if self.critic is None:
            return rollout.values
        return rollout_values(self.critic, rollout.sequences, actors)

    def values_and_final(self, rollout: Rollout, actors: Actors) -> tuple[Tensor | None, Tensor | None]:
        """The same, and the value (B,) of each whole response, of which that of one that was cut off goes on."""
        if self.critic is None:
            return rollout.values, rollout.final_values
        return rollout_values_and_final(self.critic, rollout.sequences, actors)


def load_actor_critic(job: StageJob, work: PolicyOptimization, device: torch.device) -> ActorCritic:
    """The policy of ``init`` and the critic that the switches ask for, with their optimisers."""
    seed = derive_seed(stage_seed(job), "init")
    policy = load_policy(job.inputs["init"], device=device)
    critic, value_head = None, None
    modules: dict[str, nn.Module] = {"policy": policy}
    assert work.learning_rate is not None, "a recipe's learning rates are written out before it runs"
    learning_rates = {"policy": work.learning_rate}
    if work.algorithm.shared_trunk:
        value_head = fresh_value_head(policy, seed=seed).to(device)
        modules = {"policy": nn.ModuleDict({"policy": policy, "value_head": value_head})}
    elif work.algorithm.reads_critic:
        critic = load_critic(critic_folder(job), seed=seed).to(device)
        modules["critic"] = critic
        assert work.critic_learning_rate is not None
        learning_rates["critic"] = work.critic_learning_rate
    return ActorCritic(
        policy=policy,
        critic=critic,
        value_head=value_head,
        modules=modules,
        optimizers={
            name: make_optimizer(module, weight_decay=work.weight_decay) for name, module in modules.items()
        },
        learning_rates=learning_rates,
    )


def critic_folder(job: StageJob) -> Path:
    """What the critic starts from: a value or reward model, or a policy for a fresh head."""
    return job.inputs.get("critic") or job.inputs["fresh_critic"]
