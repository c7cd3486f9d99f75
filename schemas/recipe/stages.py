"""The kinds of stage in a recipe, with the rules within one stage."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from schemas.frozen import Frozen, rule
from schemas.recipe.algorithm import Algorithm, Returns
from schemas.recipe.fields import (
    MAX_COUNT,
    MAX_NAMED,
    Confidence,
    Count,
    CountOrZero,
    Name,
    NonNegative,
    Number,
    PoolName,
    Positive,
    Seed,
    Switch,
    is_unset,
)
from schemas.recipe.inputs import MODEL
from schemas.recipe.rewards import Judge
from schemas.recipe.work import Work


class Gate(Frozen):
    """A threshold that a metric of the stage has to meet; never part of the stage's key."""

    metric: str
    """A headline metric of the stage (docs/metrics.md)."""
    at_least: Number | None = None
    """Smallest value that passes."""
    at_most: Number | None = None
    """Largest value that passes."""
    confidence: Confidence | None = None
    """None: the measured number is compared. Else a bound of its two-sided interval at this confidence, for example
    0.95, is compared: the lower bound for ``at_least``, the upper one for ``at_most``."""
    on_fail: Literal["stop", "continue"] = "stop"
    """``stop``: stages that depend on this one do not start. ``continue``: the verdict is only recorded."""

    @rule
    def _one_bound(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a gate has either at_least or at_most; give exactly one of them")

    @property
    def bound(self) -> float:
        """The threshold, a lower or an upper bound."""
        return self.at_least if self.at_least is not None else self.at_most  # type: ignore[return-value]

    @property
    def relation(self) -> str:
        """``>=`` or ``<=``, as it is printed."""
        return ">=" if self.at_least is not None else "<="


class Distributed(Frozen):
    """How the processes (ranks) of a stage share its work."""

    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """``ddp``: every rank has all weights. ``fsdp2``: each has a part of them and of the optimisers' state, for models
    that one GPU cannot hold; slower, above all in sampling."""
    ranks: Count | None = None
    """Processes on each node; None: one for each GPU, one without GPUs. A number without ``gpus`` takes as many GPUs, or
    where the machine has fewer, only CPUs."""


def _is_default(distributed: Distributed) -> bool:
    """As ``is_unset``: the field changes the JSON of no recipe that does not set it."""
    return distributed == Distributed()


class Resources(Frozen):
    """Where a stage runs, on how many CPUs and GPUs, and its time limit; never part of its key."""

    pool: PoolName | None = Field(None, exclude_if=is_unset)
    """Prefect work pool whose workers compute the stage. None: the recipe's ``workers``, or else the process that
    orders the run."""
    nodes: Annotated[int, Field(ge=2, le=4096)] | None = Field(None, exclude_if=is_unset)
    """Machines of a Ray cluster that do the stage together; ``gpus``, ``cpus`` and ``distributed.ranks`` are those of each.
    None: the machine that runs the attempt does it."""
    gpus: CountOrZero | None = None
    """None: one if the machine has one; with ``nodes``: none."""
    cpus: Count | None = None
    """None: all CPUs of the machine, so that stages run one after the other; with ``nodes``: one for each rank."""
    hang_seconds: Positive | None = 21600.0
    """Seconds without a progress report after which the stage counts as hung: it is killed and started again once.
    Every optimiser step, sampled token and micro-batch is a report. None: never."""
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
    distributed: Distributed = Field(Distributed(), exclude_if=_is_default)
    """How several processes share the work."""

    @rule
    def _one_gpu_for_each_rank(self) -> None:
        asked = self.distributed.ranks
        if asked is not None and self.gpus and self.gpus != asked:
            raise ValueError(
                f"gpus={self.gpus} and distributed.ranks={asked} differ, but each rank has one GPU; leave out one of them"
            )

    @property
    def cuts_weights(self) -> bool:
        """Whether several processes hold a part of each weight."""
        is_alone = self.nodes is None and (self.distributed.ranks or self.gpus or 1) == 1
        return self.distributed.strategy == "fsdp2" and not is_alone


class Stage(Work):
    """Fields of every stage."""

    gate: Annotated[tuple[Gate, ...], Field(max_length=MAX_NAMED)] = ()
    """One gate, or a list."""
    seed: Seed | None = None
    """None: the recipe's."""
    resources: Resources = Resources()
    """CPUs and GPUs that it needs, and its time limit."""

    @field_validator("gate", mode="before")
    @classmethod
    def _one_gate_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, (dict, Gate)) else value


class Training(Stage):
    """Fields of every stage that trains a network."""

    learning_rate: Positive | None = None
    """Of AdamW, after the warm-up. None: set from the width of the recipe's model before anything runs."""
    warmup_steps: CountOrZero = 0
    """Optimiser steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine end at 0."""
    weight_decay: NonNegative = 0.0
    """Of AdamW, decoupled."""
    max_grad_norm: Positive = 1.0
    """Gradients of a larger norm are scaled down to it."""
    microbatch_size: Count | None = None
    """Sequences in one forward pass; changes memory, never the gradient. None: the whole minibatch in training, the
    whole rollout in sampling and scoring."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the arithmetic (autocast) in training, in sampling from the trained policy, and of its reference; also
    the type of a reward's models. All other weights, and the optimiser's state, stay in float32."""
    checkpoint_every: Count = 50
    """Optimiser steps (iterations in policy optimisation) between two in-stage checkpoints."""


class SupervisedFineTuning(Training):
    """Next-token training on demonstrations."""

    kind: Literal["sft"]
    init: Name = MODEL
    """The policy that training starts from: a stage, or ``model``."""
    data: Name
    """A dataset of demonstrations."""
    epochs: Positive = 1.0
    """Passes over the data; may be a fraction."""
    batch_size: Count = 64
    """Demonstrations in one optimiser step."""
    group_by_length: Switch = True
    """Batches of demonstrations of like length, in random order: less padding."""


class RewardModelling(Training):
    """Bradley-Terry training of a scalar head on preference pairs, or on rankings of several responses."""

    kind: Literal["reward_model"]
    init: Name
    """The policy whose trunk training starts from: a stage, or ``model``."""
    data: Name | None = None
    """Preference pairs: a dataset, or a ``preference_collection`` stage."""
    rankings: Name | None = None
    """Instead of ``data``: a dataset of prompts with several ranked responses each."""
    epochs: Positive = 1.0
    """Passes over the data; may be a fraction."""
    batch_size: Count = 64
    """Pairs (prompts, of rankings) in one optimiser step."""
    centre_coef: NonNegative = 0.0
    """Weight of (chosen + rejected)², which keeps scores around 0 (arXiv 2312.09244)."""
    lm_coef: NonNegative = 0.0
    """Weight of the NLL of chosen responses, which preserves language modelling (MOSS, arXiv 2401.06080 eq. 2)."""
    group_by_length: Switch = True
    """Batches of pairs of like length, in random order: less padding."""
    centre_on: Name | None = None
    """A dataset of demonstrations; after training, scores are shifted so that their mean on it is 0."""

    @rule
    def _pairs_or_rankings(self) -> None:
        if (self.data is None) == (self.rankings is None):
            raise ValueError(
                "a reward model learns either data (pairs) or rankings; give exactly one of them"
            )
        if self.rankings is not None and (self.lm_coef or self.centre_coef):
            raise ValueError(
                f"lm_coef={self.lm_coef:g} and centre_coef={self.centre_coef:g} are about pairs; "
                "with rankings set both to 0"
            )


class DirectPreferenceOptimization(Training):
    """DPO: trains the policy on preference pairs, without a reward model (arXiv 2305.18290)."""

    kind: Literal["dpo"]
    init: Name
    """The policy that training starts from: a stage, or ``model``."""
    reference: Name | None = None
    """The policy that KL is measured against; None: ``init``."""
    data: Name
    """Preferences: a dataset, or a ``preference_collection`` stage."""
    beta: Positive = 0.1
    """β: strength of the KL constraint, per nat."""
    epochs: Positive = 1.0
    """Passes over the data; may be a fraction."""
    batch_size: Count = 64
    """Pairs in one optimiser step."""
    group_by_length: Switch = True
    """Batches of pairs of like length, in random order: less padding."""


class Rollouts(Training):
    """Fields of every stage that samples from a policy and scores with a reward."""

    reward: Name
    """The reward that scores the responses."""
    prompts: Name
    """The dataset of prompts."""
    batch_size: Count = 256
    """Responses in one rollout; each iteration samples one rollout."""
    minibatch_size: Count = 128
    """Responses in one optimiser step; a divisor of ``batch_size``."""
    epochs: Count = 1
    """Passes over each rollout."""
    checkpoint_every: Count = 10
    """Iterations between two in-stage checkpoints."""

    @rule
    def _minibatches_divide_the_batch(self) -> None:
        if self.batch_size % self.minibatch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of minibatch_size={self.minibatch_size}; "
                f"use minibatch_size: {self.batch_size} or a divisor of it"
            )


def _refuse_broken_groups(batch_size: int, group: int, name: str) -> None:
    if batch_size % group:
        near = max(batch_size // group, 1) * group
        raise ValueError(
            f"batch_size={batch_size} is not a multiple of {name}={group}; use {near} or {near + group}"
        )


def _refuse_cut_reference(resources: Resources, path: str) -> None:
    if resources.cuts_weights:
        raise ValueError(
            f"{path}=full reads all weights of the reference at once, and resources.distributed.strategy=fsdp2 cuts them; "
            "use strategy: ddp, or another kind of KL"
        )


class ValuePretraining(Rollouts):
    """Training of the critic on Monte-Carlo returns of a fixed policy (VC-PPO, VAPO §4.1)."""

    kind: Literal["value_pretraining"]
    policy: Name
    """The fixed policy whose responses are sampled."""
    init: Name
    """The reward model that the critic starts from, or a policy (with a new head)."""
    reference: Name | None = None
    """The policy that the KL part of the return is measured against; None: ``policy``."""
    returns: Returns | None = None
    """The returns to predict; None: those of the policy stages that start from this critic."""
    iterations: Count = 50
    """Most rollouts; ``patience`` may end the stage earlier."""
    samples_per_prompt: Count = 1
    """Responses to each prompt of a rollout; a divisor of ``batch_size``."""
    validate_every: Count = 10
    """Iterations between two measurements on the validation prompts; the best critic is kept."""
    validation_samples: Count = 512
    """Responses to validation prompts, sampled once."""
    test_samples: Count | None = None
    """Responses to test prompts, for the gates on the kept critic. None: as many as to validation prompts."""
    patience: Count = 3
    """The stage ends after this many measurements in a row without a better explained variance."""

    @rule
    def _groups_divide_the_batch(self) -> None:
        _refuse_broken_groups(self.batch_size, self.samples_per_prompt, "samples_per_prompt")

    @rule
    def _the_exact_kl_reads_whole_weights(self) -> None:
        if self.returns is not None and self.returns.kl_coef and self.returns.kl_kind == "full":
            _refuse_cut_reference(self.resources, "returns.kl_kind")


class PolicyOptimization(Rollouts):
    """Policy optimisation with the switches in ``algorithm``: PPO and its relatives."""

    kind: Literal["policy_optimization"]
    algorithm: Algorithm
    """A preset's name, or a mapping of ``preset`` and the switches that differ from it."""
    init: Name
    """The policy that training starts from: a stage, or ``model``."""
    reference: Name | None = None
    """The policy that KL is measured against; None: ``init``."""
    critic: Name | None = None
    """A pretrained value model, or a reward model, that the critic starts from; read if ``algorithm`` has a critic."""
    fresh_critic: Name | None = None
    """Instead of ``critic``: a policy whose trunk the critic starts from, with a new head."""
    ptx: Name | None = None
    """A dataset of demonstrations, for ``ptx_coef``; each minibatch has as many of them as responses."""
    iterations: Count = 50
    """Number of iterations: sample a rollout, score it, update."""
    critic_learning_rate: Positive | None = None
    """As ``learning_rate``, for the critic; read if ``algorithm`` has one."""
    validate_every: Count = 10
    """Iterations between two measurements of the mean score on the validation prompts; the best policy is kept."""
    validation_samples: Count = 256
    """Responses to validation prompts in one such measurement."""
    test_samples: Count | None = None
    """Responses to test prompts, for the gates on the kept policy. None: as many as to validation prompts."""

    @rule
    def _groups_divide_the_batch(self) -> None:
        group = self.algorithm.samples_per_prompt
        _refuse_broken_groups(self.batch_size, group, "algorithm.samples_per_prompt")

    @rule
    def _the_exact_kl_reads_whole_weights(self) -> None:
        switches = self.algorithm
        if switches.kl_coef and switches.kl_kind == "full":
            _refuse_cut_reference(self.resources, "algorithm.kl_kind")
        if switches.kl_loss_coef and switches.kl_loss_kind == "full":
            _refuse_cut_reference(self.resources, "algorithm.kl_loss_kind")

    @rule
    def _one_critic_where_one_is_read(self) -> None:
        given = [name for name in ("critic", "fresh_critic") if getattr(self, name) is not None]
        if self.algorithm.reads_critic and not given:
            raise ValueError(
                "algorithm.advantage=gae needs a critic; name a value_pretraining or reward_model stage as critic, "
                "or a policy as fresh_critic, or set algorithm.shared_trunk: true"
            )
        if len(given) == 2:
            raise ValueError(
                f"critic={self.critic} and fresh_critic={self.fresh_critic} exclude each other; give one"
            )

    @rule
    def _one_step_without_importance_ratio(self) -> None:
        if not self.algorithm.importance_ratio and (self.epochs > 1 or self.minibatch_size < self.batch_size):
            raise ValueError(
                f"algorithm.importance_ratio=false takes one optimiser step on each rollout, but epochs={self.epochs} "
                f"and minibatch_size={self.minibatch_size} of batch_size={self.batch_size} make more; "
                f"use epochs: 1 and minibatch_size: {self.batch_size}"
            )

    @rule
    def _kl_horizon_exceeds_a_fifth_of_the_batch(self) -> None:
        if self.algorithm.kl_target is not None and self.batch_size >= 5 * self.algorithm.kl_horizon:
            raise ValueError(
                f"algorithm.kl_horizon={self.algorithm.kl_horizon} is no more than a fifth of batch_size="
                f"{self.batch_size}, so that one rollout could turn kl_coef negative; raise kl_horizon"
            )

    @rule
    def _ptx_needs_data(self) -> None:
        if self.algorithm.ptx_coef and self.ptx is None:
            raise ValueError(
                f"algorithm.ptx_coef={self.algorithm.ptx_coef:g} needs demonstrations; "
                "name a dataset as ptx, or set ptx_coef: 0"
            )


class BestOfN(Rollouts):
    """RAFT: sample, keep each prompt's best response by the reward, fine-tune on it, again (arXiv 2304.06767)."""

    kind: Literal["best_of_n"]
    init: Name
    """The policy that training starts from: a stage, or ``model``."""
    samples_per_prompt: Annotated[int, Field(ge=2, le=MAX_COUNT, strict=True)] = 8
    """Responses to each prompt, of which the best is kept."""
    minibatch_size: Count = 32
    """Kept responses in one optimiser step; a divisor of ``batch_size / samples_per_prompt``."""
    iterations: Count = 10
    """Number of iterations: sample a rollout, score it, fine-tune."""
    validate_every: Count = 2
    """Iterations between two measurements of the mean score on the validation prompts; the best policy is kept."""
    validation_samples: Count = 256
    """Responses to validation prompts in one such measurement."""
    test_samples: Count | None = None
    """Responses to test prompts, for the gates on the kept policy. None: as many as to validation prompts."""

    @rule
    def _minibatches_divide_the_batch(self) -> None:
        """Replaces the rule of ``Rollouts``: minibatches consist of kept responses."""
        _refuse_broken_groups(self.batch_size, self.samples_per_prompt, "samples_per_prompt")
        kept = self.batch_size // self.samples_per_prompt
        if kept % self.minibatch_size:
            raise ValueError(
                f"batch_size={self.batch_size} keeps {kept} responses of samples_per_prompt={self.samples_per_prompt}, "
                f"not a multiple of minibatch_size={self.minibatch_size}; use minibatch_size: {kept} or a divisor of it"
            )


class PolicyEvaluation(Stage):
    """Comparison of a candidate with a baseline on the test prompts."""

    kind: Literal["evaluation"]
    candidate: Name
    """The policy to evaluate: a stage, or ``model``."""
    baseline: Name
    """The policy to compare it with."""
    judge: Judge
    """The judge of the responses."""
    prompts: Name
    """The dataset whose test prompts are used."""
    samples_per_prompt: Count = 1
    """Responses of each policy to each prompt."""
    microbatch_size: Count | None = None
    """Responses sampled or scored at once; None: all."""


class PreferenceCollection(Stage):
    """Pairs sampled from a policy: a dataset of preferences for a reward model or DPO.

    With ``prompts``: the best of the policy's responses against the worst, as ``judge`` scores them; a prompt whose
    responses all score the same gives no pair. With ``demonstrations``: each one against the policy's own response.
    """

    kind: Literal["preference_collection"]
    policy: Name
    """The policy to sample from: a stage, or ``model``."""
    prompts: Name | None = None
    """The dataset of prompts."""
    demonstrations: Name | None = None
    """A dataset of demonstrations, each of which is preferred to the policy's response."""
    judge: Judge | None = None
    """The judge of the responses."""
    samples_per_prompt: Count | None = None
    """Responses to each prompt; None: 2 with a judge, 1 against a demonstration."""
    batch_size: Count = 256
    """Responses in one batch; a finished batch is saved."""
    microbatch_size: Count | None = None
    """Responses sampled or scored at once; changes memory, never the pairs. None: the whole batch."""

    @rule
    def _prompts_with_judge_or_demonstrations(self) -> None:
        if (self.prompts is None) == (self.demonstrations is None):
            raise ValueError("pairs are made on either prompts or demonstrations; give exactly one of them")
        if (self.prompts is None) != (self.judge is None):
            raise ValueError(
                "a judge chooses among responses to prompts, and is not asked about demonstrations; "
                + ("add judge" if self.judge is None else "remove judge")
            )
        if self.judge is not None and self.samples_per_prompt == 1:
            raise ValueError("samples_per_prompt=1 leaves a judge nothing to choose among; use 2 or more")
