"""Load networks onto the device of this rank: whole, or with only the rank's own rows of each weight."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vantage.models.adapters import (
    Adaptation,
    added_later,
    change_nothing,
    has_adapters,
    kept_tensors,
    write_adapters,
)
from vantage.models.folders import save_policy, save_tokenizer
from vantage.models.gradient_checkpointing import checkpoint_gradients
from vantage.models.heads import ScalarModel, load_critic
from vantage.models.policy import PolicyModel
from vantage.models.sharding import hold_frozen_in, like, local, read_own_rows, shard, without_weights
from vantage.models.stored_models import Training, load_stored_policy, whole_folder
from vantage.schemas.recipe import stage
from vantage.schemas.recipe.resolved import ResolvedValuePretraining
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.model_files import ModelFiles
from vantage.tasks.training import ranks
from vantage.tasks.training.compiling import compiled
from vantage.tasks.training.offloading import offloaded
from vantage.tasks.training.optimization import Precision
from vantage.tasks.training.seeds import derive_seed, stage_seed

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class Written:
    """Facts about a written policy that its artifact records."""

    base: str | None
    """Content digest of the base model of the adapters; None: the whole policy was written."""
    same_as_base: bool
    """Whether the adapters change nothing."""


def placed(
    build: Callable[[], Network],
    files: ModelFiles | Path,
    device: torch.device,
    *,
    precision: Precision = "float32",
    offload: bool = False,
) -> Network:
    """Return the network that ``build`` loads from the files; with sharded ranks, no rank ever holds it whole.

    Args:
        precision: arithmetic of the network's passes; sharded float32 weights are gathered in this type.
        offload: whether the weights stay in host memory and are copied to the device inside ``on_device``; only for a
            frozen network.
    """
    if offload:
        return offloaded(build(), device)
    if not ranks.are_sharded():
        return build().to(device)
    with without_weights():
        network = build()
    model = next(part for part in network.modules() if isinstance(part, PreTrainedModel))
    gathered = torch.bfloat16 if precision == "bfloat16" and model.dtype == torch.float32 else None
    is_saved_whole = not has_adapters(network) and any(each.requires_grad for each in network.parameters())
    if gathered is not None and not is_saved_whole:  # only then are frozen weights in no saved file
        hold_frozen_in(model, gathered)
    methods = ("next_logits",) if isinstance(network, PolicyModel) else ()
    shard(network, device=device, methods=methods, gathered=gathered)
    folder = whole_folder(files if isinstance(files, ModelFiles) else ModelFiles(files))
    read_own_rows(network, model, folder, added=added_later)
    return network


def training_of(job: StageJob[stage.Training]) -> Training:
    """Return which weights of the stage's networks are trained: all, or adapters alone."""
    lora = job.work.lora
    if not lora:
        return "all"
    return Adaptation(lora, seed=derive_seed(stage_seed(job), "lora"))


def trained(
    job: StageJob[stage.Training],
    build: Callable[[Training], Network],
    files: ModelFiles,
    device: torch.device,
) -> Network:
    """Return a network that the stage trains, loaded by ``placed``; ``build`` receives which weights are trained."""
    network = placed(lambda: build(training_of(job)), files, device, precision=job.work.arithmetic)
    if job.work.gradient_checkpointing:
        checkpoint_gradients(network)
    return compiled(job, network)


def trained_policy(job: StageJob[stage.Training], device: torch.device) -> PolicyModel:
    """Return the policy from ``init``, to be trained."""
    return trained(
        job,
        lambda training: PolicyModel(load_stored_policy(job.model("init"), training=training)),
        job.model("init"),
        device,
    )


def trained_critic(job: StageJob[ResolvedValuePretraining], device: torch.device) -> ScalarModel:
    """Return the critic from ``init``, to be trained; if ``init`` is a policy, the critic has a new head."""
    seed = derive_seed(stage_seed(job), "init")
    return trained(
        job,
        lambda training: load_critic(
            job.model("init"), seed=seed, training=training, form=job.work.critic_head
        ),
        job.model("init"),
        device,
    )


def fixed_policy(
    job: StageJob, role: str, device: torch.device, *, kept_as: str | None = None
) -> PolicyModel:
    """Return a policy that is not trained.

    Args:
        kept_as: name of the policy in ``resources.offload``; None: the role.
    """
    policy = placed(
        lambda: PolicyModel(load_stored_policy(job.model(role), training="nothing")),
        job.model(role),
        device,
        precision=job.work.arithmetic if isinstance(job.work, stage.Stage) else "float32",
        offload=is_offloaded(job, kept_as or role),
    )
    return compiled(job, policy)


def is_offloaded(job: StageJob, role: str) -> bool:
    """Return whether the recipe keeps the stage's networks in a role (``reference``, ``reward``) in host memory."""
    return isinstance(job.work, stage.Stage) and role in job.work.resources.offload


def write_policy(job: StageJob, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Written:
    """Write the policy that was trained from ``init``: whole, or its adapters alone."""
    if not has_adapters(model):
        save_policy(model, tokenizer, job.output)
        return Written(base=None, same_as_base=False)
    base = job.base_digest("init")
    write_adapters(model, job.output, base=base)
    save_tokenizer(tokenizer, job.output)
    return Written(base=base, same_as_base=change_nothing(model))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of this rank's weights on the CPU, to be restored later; frozen weights beside adapters are left out."""
    return {
        name: local(tensor.detach()).to("cpu", copy=True) for name, tensor in kept_tensors(module).items()
    }


@torch.no_grad()
def put_back(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Restore weights from ``weights_of``."""
    module.load_state_dict(
        {
            name: like(tensor, weights[name].to(local(tensor).device))
            for name, tensor in kept_tensors(module).items()
        },
        strict=not has_adapters(module),
    )
