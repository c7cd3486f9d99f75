"""Settings of sampling in a stage: the engine, the number of responses at once, and sampling during updates."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import MAX_NAMED, Count, Positive, ServerUrl, is_default, is_unset
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.stage import Resources


class Sampling(Frozen):
    """Choice of the engine that samples a stage's responses, and limit of those that are sampled side by side."""

    engine: Literal["loop", "vllm"] = Field("loop", exclude_if=is_default("loop"))
    """``loop``: Vantage's own sampler, whose responses are the same bits every time. ``vllm``: the inference engine of that name, in the
    stage's process or behind ``url``; the same seed may give other responses on another machine (docs/rollouts.md)."""
    url: Annotated[tuple[ServerUrl, ...], Field(min_length=1, max_length=MAX_NAMED)] | None = Field(
        None, exclude_if=is_unset
    )
    """Address of a server of vLLM that samples, or a list of such servers of one model, which share the prompts. None: vLLM runs in the
    stage's process, or ``servers`` do. In no stage key."""
    servers: Annotated[int, Field(ge=1, le=MAX_NAMED, strict=True)] | None = Field(None, exclude_if=is_unset)
    """Servers of vLLM that the stage starts for itself, each on one of its GPUs (``resources.gpus``), beside those that train; without
    GPUs, on its CPUs. With ``resources.nodes``, so many for each node, where Ray places them. In no stage key."""
    tensor_parallel: Annotated[int, Field(ge=1, le=MAX_NAMED, strict=True)] = Field(
        1, exclude_if=is_default(1)
    )
    """Processes of each of ``servers``, which hold a part of each matrix: GPUs of one machine, or without GPUs shares of its CPUs. It divides
    the model's attention heads. In no stage key."""
    api_key_variable: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] | None = (
        Field(None, exclude_if=is_unset)
    )
    """Environment variable that holds the servers' API key. None: they ask for none. In no stage key."""
    weights_folder: Annotated[str, StringConstraints(pattern=r"^/", max_length=4096)] | None = Field(
        None, exclude_if=is_unset
    )
    """Absolute path of a folder for the weights, which stage and servers reach under this path. None: the stage's scratch folder, for
    servers on the same machine. In no stage key."""
    request_seconds: Positive = Field(600.0, exclude_if=is_default(600.0))
    """Most seconds of one response of a server; another server samples it then. In no stage key."""
    checksums: bool | None = Field(None, exclude_if=is_unset)
    """Whether the proof of an update also compares the sha256 of vLLM's parameters with the policy's, where vLLM computes them (0.32
    does). None: all of at most 1 GiB, of at most 32 GiB all at first and then 1 GiB after each update, in turn; hashing takes about a second for
    each GiB. In no stage key."""
    max_rows: Count | None = Field(None, exclude_if=is_unset)
    """Most responses that are sampled side by side. It changes memory and speed, and no response. None: on a GPU without
    ``microbatch_tokens``, as many as memory has room for, found before the first step; else ``microbatch_size``."""

    @field_validator("url", mode="before")
    @classmethod
    def _one_server_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @rule
    def _vllm_is_served(self) -> None:
        if self.url is not None and self.engine != "vllm":
            raise ValueError(
                f"url names servers of vllm, and engine={self.engine} samples in the stage's process; add engine: vllm"
            )
        given = [
            name
            for name in ("api_key_variable", "weights_folder", "request_seconds")
            if name in self.model_fields_set
        ]
        if self.servers is not None and (self.engine != "vllm" or self.url is not None):
            raise ValueError(
                f"servers={self.servers} run vllm and are started for this stage; add engine: vllm, and leave url out"
            )
        if self.servers is None and self.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} is of servers that the stage starts; add servers, or leave it out (servers of url have "
                "--tensor-parallel-size)"
            )
        if self.servers is not None and self.api_key_variable is not None:
            raise ValueError(
                "api_key_variable is read only with url; servers of the stage have a key of their own"
            )
        if not self.is_served and given:
            raise ValueError(f"{given[0]} is read only with url or servers; add one, or leave {given[0]} out")
        if self.checksums is not None and self.engine != "vllm":
            raise ValueError(
                f"checksums compare vllm's weights, and engine={self.engine} samples from the policy itself; leave checksums out"
            )
        if self.url is not None and len(set(self.url)) < len(self.url):
            raise ValueError("url names a server twice; name each once")

    @property
    def is_served(self) -> bool:
        """Return whether servers sample, and not the stage's process."""
        return self.url is not None or self.servers is not None

    @property
    def server_processes(self) -> int:
        """Return the processes of the servers that the stage starts on each of its machines; each has a GPU if the stage has any."""
        return (self.servers or 0) * self.tensor_parallel

    def limits(self, passes: PassLimits) -> PassLimits:
        """Return the bounds of sampling if no larger ones are found; ``passes``: bounds of the stage's other passes."""
        return replace(passes, rows=self.max_rows or passes.rows)


class SampledAhead(Sampling):
    """Settings of sampling ahead: a rollout may be sampled while another one trains."""

    ahead: Literal[0, 1] = 0
    """1: while one rollout trains, the next is sampled, from the policy as it was before that update (by a copy of it, or by servers): one
    step off-policy. A policy that does not train has no such step. 0: the next rollout is sampled after the update."""

    @rule
    def _vllm_samples_when_it_is_asked(self) -> None:
        if self.ahead and self.engine == "vllm" and not self.is_served:
            raise ValueError(
                "ahead=1 samples beside the training, and engine=vllm in the stage's process samples only between two updates; add servers "
                "(rollout.servers or rollout.url), or use ahead: 0, or engine: loop"
            )


class Ahead(SampledAhead):
    """Settings of sampling ahead for a policy that trains, which then learns from responses of an earlier version of itself."""

    importance_cap: Positive = 2.0
    """Cap C. The advantages of responses that were sampled ahead are weighted, token by token, by min(π_old/π_sampler, C)
    (truncated importance sampling, arXiv 2510.18855). With ``old_logprobs: sampler`` the loss's own ratio is to the sampler,
    and nothing else is weighted (arXiv 2607.07508)."""


def refuse_misplaced_engine(rollout: Sampling, resources: Resources) -> None:
    """Refuse an engine in the stage's processes where several machines do the stage, and servers that the stage has no place for."""
    if rollout.engine == "vllm" and not rollout.is_served and resources.nodes is not None:
        raise ValueError(
            "rollout.engine=vllm samples in the stage's processes, on one machine; leave resources.nodes out, or use engine: loop, or servers "
            "(rollout.servers or rollout.url)"
        )
    of_servers = rollout.server_processes
    if rollout.servers is not None and resources.gpus and resources.gpus <= of_servers:
        taken = "take as many"
        if rollout.tensor_parallel > 1:
            taken = f"with rollout.tensor_parallel={rollout.tensor_parallel} take {of_servers}"
        raise ValueError(
            f"rollout.servers={rollout.servers} {taken} of resources.gpus={resources.gpus}, and none is left to train; set "
            f"resources.gpus: {of_servers + 1} or more"
        )
    if rollout.servers is not None and resources.gpus and resources.distributed.ranks is not None:
        raise ValueError(
            f"rollout.servers={rollout.servers} take GPUs of resources.gpus={resources.gpus}, and "
            f"resources.distributed.ranks={resources.distributed.ranks} would train on all of them; leave resources.distributed.ranks out"
        )
