"""Fields of every stage of a recipe: gates, resources, and the fields of stages that train a network."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, field_validator

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.extending import Extend, why_not_extended, why_not_extended_by
from vantage.schemas.recipe.fields import (
    MAX_NAMED,
    Confidence,
    Count,
    CountOrZero,
    NonNegative,
    Number,
    PoolName,
    Positive,
    Seed,
    Switch,
    is_default,
    is_off,
    is_unset,
)
from vantage.schemas.recipe.guards import Guards
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.work import Work


class Gate(Frozen):
    """A threshold that a metric of the stage has to meet; never part of the stage's key."""

    metric: str
    """A headline metric of the stage (docs/metrics.md)."""
    at_least: Number | None = None
    """Smallest value that passes."""
    at_most: Number | None = None
    """Largest value that passes."""
    confidence: Confidence | None = None
    """Confidence of the metric's two-sided interval, for example 0.95, whose lower bound is compared with ``at_least`` or whose
    upper bound with ``at_most``. None: the measured number is compared."""
    on_fail: Literal["stop", "continue", "approve", "extend"] = "stop"
    """``stop``: stages that depend on this one do not start. ``continue``: the verdict is only recorded. ``approve``: they
    start when a person has approved of it (``vantage approve``). ``extend``: the stage is trained further by the amount in
    ``extend``, and judged again; it needs ``keep_state`` (docs/extending.md)."""
    extend: Extend | None = Field(None, exclude_if=is_unset)
    """Bounds of how far and how often ``on_fail: extend`` trains the stage further."""

    @rule
    def _one_bound(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a gate has either at_least or at_most; give exactly one of them")

    @rule
    def _extends_by_an_amount(self) -> None:
        if self.on_fail == "extend" and self.extend is None:
            raise ValueError(
                "on_fail=extend trains the stage further, by an amount that is not given; add extend: {by: 30, at_most: 2}"
            )
        if self.on_fail != "extend" and self.extend is not None:
            raise ValueError(
                f"extend is read only with on_fail: extend, and on_fail={self.on_fail}; leave extend out, or use on_fail: extend"
            )

    @property
    def bound(self) -> float:
        """The threshold, a lower or an upper bound."""
        return self.at_least if self.at_least is not None else self.at_most  # type: ignore[return-value]

    @property
    def relation(self) -> str:
        """``>=`` or ``<=``, as it is printed."""
        return ">=" if self.at_least is not None else "<="


class Distributed(Frozen):
    """Distribution of a stage's work over processes (ranks)."""

    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """``ddp``: every rank has all weights. ``fsdp2``: each has a part of them and of the optimisers' state, for models
    that one GPU cannot hold; slower, above all in sampling if all gathered weights do not fit on a GPU."""
    ranks: Count | None = None
    """Processes on each node; None: one for each GPU, one without GPUs. A number without ``gpus`` takes as many GPUs, or
    where the machine has fewer, only CPUs."""


def _is_default(distributed: Distributed) -> bool:
    """Return whether the field has its default. It is then left out of the JSON, so that older recipes keep theirs."""
    return distributed == Distributed()


class NodeRange(Frozen):
    """Number of nodes that may compute a stage together."""

    least: Annotated[int, Field(ge=1, le=4096)]
    """Fewest nodes; the stage waits for them."""
    most: Annotated[int, Field(ge=2, le=4096)]
    """Most nodes; they are used if they are available within a minute."""

    @rule
    def _in_order(self) -> None:
        if self.least >= self.most:
            raise ValueError(
                f"least={self.least} is not below most={self.most}; give a smaller least, or one number: nodes: {self.most}"
            )


NodesOrRange = Annotated[
    Annotated[int, Field(ge=2, le=4096), Tag("number")] | Annotated[NodeRange, Tag("range")],
    Discriminator(lambda given: "range" if isinstance(given, dict | NodeRange) else "number"),
]


GRACE_SECONDS = 20.0
"""Default of ``resources.grace_seconds``."""


class Resources(Frozen):
    """Place of a stage (pool, nodes, CPUs, GPUs) and its time limit; never part of its key."""

    pool: PoolName | None = Field(None, exclude_if=is_unset)
    """Prefect work pool whose workers compute the stage. None: the recipe's ``workers``, or else the process that
    orders the run."""
    nodes: NodesOrRange | None = Field(None, exclude_if=is_unset)
    """Machines of a Ray cluster that do the stage together; ``gpus``, ``cpus``, ``distributed.ranks`` and ``rollout.servers`` are those of
    each. A number, or
    ``{least: 1, most: 2}``: fewer go on where no more are there. The last bits of the weights depend on how many did which
    steps. None: the machine that runs the attempt does it."""
    gpus: CountOrZero | None = None
    """Number of GPUs. None: one if the machine has one; with ``nodes``: none."""
    cpus: Count | None = None
    """Number of CPUs. None: all of the machine, so that stages run one after the other; with ``nodes``: one for each rank and
    each server of the stage."""
    hang_seconds: Positive | None = 21600.0
    """Seconds without a progress report after which the stage counts as hung: it is killed and started again once.
    Every optimiser step, sampled token and micro-batch is a report. None: never."""
    grace_seconds: Positive = Field(GRACE_SECONDS, exclude_if=is_default(GRACE_SECONDS))
    """Seconds that an attempt has to save its state after it was asked to stop; then it is killed, and the next attempt goes on
    from the last complete checkpoint. Deployed workers need as much more time to end (deploy/README.md)."""
    max_seconds: Positive | None = Field(None, exclude_if=is_unset)
    """Seconds of one attempt, from the start of its computation, after which the stage saves its state and ends with exit code
    75; the same command goes on from there. None: no limit."""
    max_gpu_hours: Positive | None = Field(None, exclude_if=is_unset)
    """Limit like ``max_seconds``, in GPU hours: with 8 GPUs, 4 are half an hour. Without GPUs it is no limit."""
    memory: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)$")] | None = Field(
        None, exclude_if=is_unset
    )
    """Memory that a container of the pool asks for: ``64Gi``."""
    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = Field(
        None, exclude_if=is_unset
    )
    """Image of a container of the pool; None: the pool's own."""
    node_selector: dict[str, str] = Field(default_factory=dict, exclude_if=is_unset)
    """Labels of the Kubernetes nodes that the pool may use for the stage."""
    offload: tuple[Literal["reference", "reward", "optimizer"], ...] = Field((), exclude_if=is_default(()))
    """Parts that lie in host memory in place of the GPU's. ``reference``, ``reward`` (its models): frozen weights, which visit the GPU for
    their passes, once for each rollout (DPO: for each micro-batch); no bit changes. ``optimizer``: the moments of AdamW, whose
    updates are computed on CPUs then, and differ by rounding from a GPU's."""
    distributed: Distributed = Field(Distributed(), exclude_if=_is_default)
    """How several processes share the work."""

    @rule
    def _one_gpu_for_each_rank(self) -> None:
        asked = self.distributed.ranks
        if asked is not None and self.gpus and self.gpus != asked:
            raise ValueError(
                f"gpus={self.gpus} and distributed.ranks={asked} differ, but each rank has one GPU; leave out one of them"
            )

    @rule
    def _what_is_cut_is_not_offloaded(self) -> None:
        if self.offload and self.cuts_weights:
            raise ValueError(
                f"offload={','.join(self.offload)} moves whole weights, and distributed.strategy=fsdp2 spreads them over the GPUs "
                "already; use strategy: ddp, or leave offload out"
            )

    @property
    def least_nodes(self) -> int:
        """Fewest machines that do the stage."""
        return self.nodes.least if isinstance(self.nodes, NodeRange) else self.nodes or 1

    @property
    def most_nodes(self) -> int:
        """Most machines that do the stage."""
        return self.nodes.most if isinstance(self.nodes, NodeRange) else self.nodes or 1

    @property
    def is_one_process(self) -> bool:
        """Return whether one process does the stage."""
        return self.nodes is None and (self.distributed.ranks or self.gpus or 1) == 1

    @property
    def cuts_weights(self) -> bool:
        """Return whether several processes hold a part of each weight."""
        return self.distributed.strategy == "fsdp2" and not self.is_one_process


Precision = Literal["float32", "bfloat16", "auto"]
OptimizerStates = Literal["float32", "8bit"]


class Stage(Work):
    """Fields of every stage."""

    gate: Annotated[tuple[Gate, ...], Field(max_length=MAX_NAMED)] = ()
    """One gate, or a list."""
    seed: Seed | None = None
    """Seed of the stage's random numbers. None: the recipe's."""
    resources: Resources = Resources()
    """CPUs and GPUs that it needs, and its time limit."""
    microbatch_size: Count | None = None
    """Most sequences in one forward pass; where a stage reads pairs or rankings, most pairs or prompts. It bounds what is sampled side by
    side only where neither ``rollout.max_rows`` nor the memory of a GPU does: on a CPU, or with ``microbatch_tokens``. Changes memory,
    never a gradient or a response. None: any number in training and evaluation, else ``batch_size``. A pass holds rows of like length,
    so that it may have fewer."""
    microbatch_tokens: Count | None = Field(None, exclude_if=is_unset)
    """Most positions of one forward pass, padding included: its sequences times the longest of them; in sampling, times the
    longest prompt and ``generation.max_response_tokens``. Of what cannot be divided (one sequence, a pair, the responses of a
    ranking) a pass may have more. With ``microbatch_size`` both hold. No gradient or response changes. None: on a GPU the largest
    number that fits, found before the first step; on a CPU, and in ``reward_evaluation`` and ``benchmark_evaluation``, any number."""

    precision: Precision = Field("float32", exclude_if=is_default("float32"))
    """Type of the arithmetic (autocast) of everything that the stage computes; weights stay in float32. ``auto``: bfloat16 where
    ``resources.gpus`` is 1 or more, else float32."""

    @property
    def arithmetic(self) -> Literal["float32", "bfloat16"]:
        """The type of the arithmetic. It depends on the recipe alone and not on the machine, so that it is part of the stage's key."""
        if self.precision == "auto":
            return "bfloat16" if self.resources.gpus else "float32"
        return self.precision

    @property
    def pass_limits(self) -> PassLimits:
        """The bounds of a forward pass."""
        return PassLimits(rows=self.microbatch_size, tokens=self.microbatch_tokens)

    @property
    def extend(self) -> Extend | None:
        """Return how far a closed gate trains the stage further; None: no gate does."""
        return next((gate.extend for gate in self.gate if gate.extend is not None), None)

    @rule
    def _a_gate_extends_what_trains(self) -> None:
        if self.extend is not None:
            raise ValueError(
                "gate.on_fail=extend trains a stage further, and this one trains nothing; put the gate on the stage that trains, "
                "or use on_fail: stop"
            )

    @field_validator("gate", mode="before")
    @classmethod
    def _one_gate_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, (dict, Gate)) else value


LoraOrNot = Annotated[
    Annotated[Lora, Tag("adapters")] | Annotated[Literal[False], Tag("none")],
    Discriminator(lambda given: "none" if given is False else "adapters"),
]


class Training(Stage):
    """Fields of every stage that trains a network."""

    learning_rate: Positive | None = None
    """Learning rate of AdamW after the warm-up. None: set from the width of the recipe's model before anything runs."""
    warmup_steps: CountOrZero = 0
    """Optimiser steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine end at 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of AdamW."""
    optimizer_states: OptimizerStates = Field("float32", exclude_if=is_default("float32"))
    """Type of AdamW's two moments. ``8bit``: 2 bytes a weight in place of 8, in blocks with a scale each; the weights stay in
    float32, and end a little different. It needs the package bitsandbytes (docs/gpus.md)."""
    max_grad_norm: Positive = 1.0
    """Gradients of a larger norm are scaled down to it."""
    precision: Precision = "float32"
    """Type of the arithmetic (autocast) in training, in sampling from the trained policy, and of its reference; also
    the type of a reward's models. All other weights, and the optimiser's state, stay in float32. ``auto``: bfloat16 where
    ``resources.gpus`` is 1 or more, else float32."""
    checkpoint_every: Count = 50
    """Optimiser steps (iterations in policy optimisation) between two in-stage checkpoints."""
    lora: LoraOrNot | None = Field(None, exclude_if=is_unset)
    """Train adapters on frozen weights: the artifact contains the adapters, and the digest of their base model. ``false``:
    train all weights; adapters that the stage starts from are merged first. None: ``model.lora``."""
    guards: Guards | None = Field(None, exclude_if=is_unset)
    """Bounds on the stage's curves, and what happens when a curve leaves them; one guard, or a list. None: the defaults of
    the stage's kind, which only warn (docs/guards.md). A list comes in addition to the defaults of the metrics that it does
    not name. ``off``: no guard at all."""
    keep_state: Switch = Field(False, exclude_if=is_off)
    """Keep the complete training state (optimisers, last and best weights, counters, curves) beside the artifact, so that the
    stage can be trained further: by ``on_fail: extend``, or by a recipe with more ``iterations`` or ``epochs``
    (docs/extending.md). It takes about four times the size of the weights that train. Not in the stage's key."""
    gradient_checkpointing: Switch = Field(False, exclude_if=is_off)
    """Keep only the inputs of each layer for the backward pass, and compute the rest again there: less memory, a third
    more time, the same gradients. Prompts that several responses have are read once for each of them then."""

    compile: Switch = Field(False, exclude_if=is_off)
    """Compile the layers of the networks that train, and of a reference, by ``torch.compile``. Passes become faster, and
    are rounded differently, after a wait at the start of each attempt (half a minute on a CPU, less once torch has its
    cache). It needs a C++ compiler (on a CPU) or Triton (on a GPU). Layers that cannot be compiled run uncompiled, with a
    warning. Passes with a key-value cache, in sampling and where several responses share a prompt, are not compiled."""

    @property
    def pass_limits(self) -> PassLimits:
        """The bounds of a forward pass."""
        return replace(super().pass_limits, share_prompts=not self.gradient_checkpointing)

    @rule
    def _a_kept_state_can_be_trained_further(self) -> None:
        if self.keep_state and (why := why_not_extended(self)):
            raise ValueError(
                f"keep_state=true keeps what a longer stage goes on from; {why}, or leave keep_state out"
            )

    @rule
    def _a_gate_extends_what_trains(self) -> None:
        """Replace the rule of ``Stage``: this kind trains."""
        if self.extend is None:
            return
        if not self.keep_state:
            raise ValueError(
                "gate.on_fail=extend goes on from the stage's training state, and keep_state=false keeps none; set keep_state: "
                "true, or use on_fail: stop"
            )
        if any(gate.extend not in (None, self.extend) for gate in self.gate):
            raise ValueError("two gates extend the stage by different amounts; give both the same extend")
        if why := why_not_extended_by(self, self.extend):
            raise ValueError(f"gate.{why}")

    @rule
    def _compiled_layers_stay(self) -> None:
        if self.compile and "reference" in self.resources.offload:
            raise ValueError(
                "compile: true has not been tried with a reference that visits the GPU; leave reference out of resources.offload, "
                "or leave compile out"
            )

    @rule
    def _eight_bit_states_stay(self) -> None:
        if self.optimizer_states == "8bit" and "optimizer" in self.resources.offload:
            raise ValueError(
                "optimizer_states=8bit are computed on the GPU, and resources.offload has the optimizer in host memory; leave one of "
                "them out"
            )

    @rule
    def _eight_bit_states_are_whole(self) -> None:
        if self.optimizer_states == "8bit" and self.resources.cuts_weights:
            raise ValueError(
                "optimizer_states=8bit holds moments in blocks, and resources.distributed.strategy=fsdp2 cuts a weight between them; "
                "use strategy: ddp, or leave optimizer_states out (fsdp2 spreads the moments over the GPUs already)"
            )

    @rule
    def _compiled_layers_are_whole(self) -> None:
        if self.compile and self.resources.cuts_weights:
            raise ValueError(
                "compile: true has not been tried with weights that resources.distributed.strategy=fsdp2 cuts; "
                "use strategy: ddp, or leave compile out"
            )
