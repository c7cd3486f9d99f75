"""Rules that several kinds of stage have in common."""

from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.rollout import SampledAhead
from vantage.schemas.recipe.stage import Resources


def refuse_broken_groups(batch_size: int, group: int, name: str) -> None:
    """Raise ValueError if a batch does not consist of whole groups."""
    if batch_size % group:
        near = max(batch_size // group, 1) * group
        raise ValueError(
            f"batch_size={batch_size} is not a multiple of {name}={group}; use {near} or {near + group}"
        )


def refuse_cut_reference(resources: Resources, path: str) -> None:
    """Raise ValueError if an exact KL would read a reference that no process holds whole on its device."""
    if "reference" in resources.offload:
        raise ValueError(
            f"{path}=full reads the reference in each pass of the policy, and resources.offload keeps it in host memory; leave "
            "reference out of offload, or use another kind of KL"
        )
    if resources.cuts_weights:
        raise ValueError(
            f"{path}=full reads all weights of the reference at once, and resources.distributed.strategy=fsdp2 cuts them; "
            "use strategy: ddp, or another kind of KL"
        )


def refuse_cut_sampler(rollout: SampledAhead, resources: Resources) -> None:
    """Raise ValueError if responses are sampled ahead, by a copy of the policy, and its weights are cut."""
    if rollout.ahead and not rollout.is_served and resources.cuts_weights:
        raise ValueError(
            "rollout.ahead=1 samples from a whole copy of the policy, and resources.distributed.strategy=fsdp2 cuts it; "
            "use servers (engine: vllm, and servers or url), strategy: ddp, or ahead: 0"
        )


def refuse_untrained(algorithm: Algorithm, *, fresh_critic: str | None, critic_optimizer: str) -> None:
    """Raise ValueError if a policy stage with ``freeze_critic: all`` starts from a new head, or carries an optimiser on."""
    if not algorithm.reads_critic or algorithm.trains_critic:
        return
    if fresh_critic is not None:
        raise ValueError(
            f"algorithm.freeze_critic=all keeps the critic as it starts, and fresh_critic={fresh_critic} starts with a new "
            "head that has learned nothing; name a value_pretraining stage as critic, or use freeze_critic: none"
        )
    if critic_optimizer == "carry":
        raise ValueError(
            "critic_optimizer: carry goes on with a critic's optimiser, and algorithm.freeze_critic=all has none; leave "
            "critic_optimizer out"
        )
