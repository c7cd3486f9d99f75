"""The networks that policy optimisation trains: a policy, and a critic beside it, on its trunk, or none."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from vantage.models.heads import ScalarModel, freeze_attention, fresh_value_head, load_critic, values
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences
from vantage.models.stored_models import Training, load_stored_policy
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.model_files import ModelFiles
from vantage.tasks.data.examples import Prompts
from vantage.tasks.rollout.critic_outputs import values_and_disagreement
from vantage.tasks.rollout.critic_tokenizer import refuse_other_tokenizer_of_critic
from vantage.tasks.rollout.rollout_models import RolloutModels, load_rollout_models
from vantage.tasks.rollout.rollouts import (
    Rollout,
    rollout_values,
    rollout_values_and_final,
)
from vantage.tasks.training.carried_optimizer import carry_over
from vantage.tasks.training.compiling import compiled
from vantage.tasks.training.found_limits import Taken, longest_response
from vantage.tasks.training.networks import placed, trained
from vantage.tasks.training.optimization import optimizer_of
from vantage.tasks.training.seeds import derive_seed, stage_seed


@dataclass(frozen=True)
class CriticReads:
    """The predictions of a critic about a rollout; None without a critic, and for predictions that were not asked
    for."""

    values: Tensor | None
    """(B,T)."""
    final_values: Tensor | None
    """(B,)."""
    disagreement: Tensor | None
    """(B,T)."""


@dataclass(frozen=True)
class ActorCritic:
    """Networks that are trained, with their optimisers and learning rates; a critic is a network, or a head on the
    policy's trunk."""

    models: RolloutModels
    """Models of the rollout, with the policy that is trained."""
    critic: ScalarModel | None
    """Critic that is a separate network; None: there is none."""
    modules: dict[str, nn.Module]
    """The module that each optimiser trains, by its name in checkpoints."""
    optimizers: dict[str, torch.optim.Optimizer]
    learning_rates: dict[str, float]

    @property
    def critic_learns(self) -> bool:
        """Return whether a critic that is a separate network is trained, and not only read."""
        return "critic" in self.modules

    @property
    def policy(self) -> PolicyModel:
        """The policy that is trained; a value head on it learns from one joint loss with it."""
        return self.models.policy

    @property
    def temperature(self) -> float:
        """Return the temperature of the distribution that is sampled and that learns."""
        return self.models.codec.generation.temperature

    def ready(
        self, job: StageJob[ResolvedPolicyOptimization], prompts: Prompts
    ) -> "tuple[ActorCritic, StageJob[ResolvedPolicyOptimization]]":
        """Return the networks and the job with the limits of ``RolloutModels.ready``, for updates on responses to these
        prompts."""
        models, job = self.models.ready(job, taken_by(self, prompts, job))
        return replace(self, models=models), job

    def values(self, rollout: Rollout) -> Tensor | None:
        """Return values (B,T) of the prefixes that chose each token; on a shared trunk, those from the pass in ``shape``."""
        if self.critic is None:
            return rollout.values
        return rollout_values(self.critic, rollout.sequences, self.models)

    def read_critic(self, rollout: Rollout, *, with_final: bool) -> CriticReads:
        """Return the critic's values, those of the whole responses if asked for, and an ensemble's disagreement."""
        disagreement = final_values = None
        is_ensemble = self.critic is not None and self.critic.form.ensemble is not None
        if self.critic is not None and is_ensemble:
            found, disagreement = values_and_disagreement(self.critic, rollout.sequences, self.models)
            old_values: Tensor | None = found
        elif not with_final:
            old_values = self.values(rollout)
        if with_final:
            old_values, final_values = self.values_and_final(rollout)
        return CriticReads(old_values, final_values, disagreement)

    def values_and_final(self, rollout: Rollout) -> tuple[Tensor | None, Tensor | None]:
        """Return the result of ``values``, and the value (B,) of each whole response, which is used for cut-off
        responses."""
        if self.critic is None:
            return rollout.values, rollout.final_values
        return rollout_values_and_final(self.critic, rollout.sequences, self.models)


def load_actor_critic(job: StageJob[ResolvedPolicyOptimization], device: torch.device) -> ActorCritic:
    """Return the policy from ``init`` with its rollout models, and the critic that the switches ask for, with their
    optimisers."""
    work = job.work
    seed = derive_seed(stage_seed(job), "init")

    def load(training: Training) -> PolicyModel:
        causal_lm = load_stored_policy(job.model("init"), training=training)
        has_value_head = work.algorithm.shared_trunk
        return PolicyModel(causal_lm, fresh_value_head(causal_lm, seed=seed) if has_value_head else None)

    policy = trained(job, load, job.model("init"), device)
    critic = None
    modules: dict[str, nn.Module] = {"policy": policy.causal_lm}
    learning_rates = {"policy": work.learning_rate}
    if policy.value_head is not None:
        modules = {"policy": nn.ModuleDict({"policy": policy.causal_lm, "value_head": policy.value_head})}
    elif work.algorithm.reads_critic:
        refuse_other_tokenizer_of_critic(job, critic_role(job), "init")
        files = job.model(critic_role(job))
        load_it = partial(load_partly_frozen, files, work.algorithm, seed)
        if work.algorithm.trains_critic:
            critic = trained(job, load_it, files, device)
            modules["critic"] = critic
            learning_rates["critic"] = work.required_critic_learning_rate
        else:
            critic = compiled(
                job, placed(partial(load_it, "nothing"), files, device, precision=work.arithmetic)
            )
    optimizers = {name: optimizer_of(module, work) for name, module in modules.items()}
    if critic is not None and work.critic_optimizer == "carry":
        carry_over(optimizers["critic"], critic, critic_folder(job))
    return ActorCritic(
        models=load_rollout_models(job, work, policy, role="init", with_reference=True),
        critic=critic,
        modules=modules,
        optimizers=optimizers,
        learning_rates=learning_rates,
    )


def taken_by(networks: ActorCritic, prompts: Prompts, job: StageJob[ResolvedPolicyOptimization]) -> Taken:
    """Return the memory needs of an update's passes, and of sampling before or beside it."""
    work, sampler = job.work, networks.models.sampler
    assert sampler is not None, "a policy is optimised on what is sampled"
    wants_full_kl = work.algorithm.kl_loss_coef and work.algorithm.kl_loss_kind == "full"

    def read(batch: Sequences) -> Tensor:
        found: dict[str, Tensor] = networks.policy(
            batch,
            temperature=networks.temperature,
            with_entropy=True,
            reference=networks.models.reference if wants_full_kl else None,
            with_values=networks.policy.value_head is not None,
        )
        return torch.stack([each.sum() for each in found.values()])

    critics = [] if networks.critic is None else [partial(values, networks.critic)]
    return Taken(
        longest_response(prompts, job.generation, shares_prompt=work.pass_limits.share_prompts),
        [read, *critics],
        work.arithmetic,
        list(networks.optimizers.values()),
        sampler,
    )


def load_partly_frozen(files: ModelFiles, algorithm: Algorithm, seed: int, training: Training) -> ScalarModel:
    """Return the critic, a part of which ``freeze_critic`` keeps unchanged."""
    critic = load_critic(files, seed=seed, training=training, form=algorithm.critic_head)
    if algorithm.freeze_critic == "attention":
        freeze_attention(critic)
    return critic


def critic_folder(job: StageJob) -> Path:
    """Return the folder that the critic starts from: a value or reward model, or a policy for a new head."""
    return job.inputs[critic_role(job)]


def critic_role(job: StageJob) -> str:
    """Return the field that names the model that the critic starts from."""
    return "critic" if "critic" in job.inputs else "fresh_critic"
