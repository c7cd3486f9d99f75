"""Recipe classes of the stages that train on responses which they sample, with the rules within one stage."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vantage.schemas.frozen import rule
from vantage.schemas.recipe.algorithm import Algorithm, Returns
from vantage.schemas.recipe.critic_head import ONE_VALUE, CriticHead
from vantage.schemas.recipe.fields import (
    MAX_COUNT,
    Count,
    Name,
    Positive,
    Probability,
    Switch,
    is_default,
    is_off,
    is_unset,
)
from vantage.schemas.recipe.guards import OFF
from vantage.schemas.recipe.prompt_selection import DifficultyReport
from vantage.schemas.recipe.rollout import Ahead, SampledAhead, Sampling, refuse_misplaced_engine
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.stage_rules import (
    refuse_broken_groups,
    refuse_cut_reference,
    refuse_cut_sampler,
    refuse_untrained,
)
from vantage.schemas.recipe.watch import Keep, Watch


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
    rollout: Sampling = Field(Sampling(), exclude_if=is_default(Sampling()))
    """Settings of sampling."""
    checkpoint_every: Count = 10
    """Iterations between two in-stage checkpoints."""

    @rule
    def _one_process_samples_with_vllm(self) -> None:
        refuse_misplaced_engine(self.rollout, self.resources)

    @rule
    def _minibatches_divide_the_batch(self) -> None:
        if self.batch_size % self.minibatch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of minibatch_size={self.minibatch_size}; "
                f"use minibatch_size: {self.batch_size} or a divisor of it"
            )


class WatchedRollouts(Rollouts):
    """Fields of the stages that train a policy on its own responses: the policy that they return, and its watch."""

    if TYPE_CHECKING:  # each kind has a default of its own
        validate_every: Count
    watch: Watch | None = Field(None, exclude_if=is_unset)
    """A judge other than the reward, which looks at the policy while it trains."""
    keep: Keep | None = Field(None, exclude_if=is_unset)
    """Policy that the stage returns. None: the one that ``watch`` scores best, or without a watch the best by
    ``validation``."""

    @property
    def watch_prompts(self) -> str | None:
        """Return the dataset of the watch's own prompts."""
        return None if self.watch is None or self.watch.prompts is None else self.watch.prompts.data

    @property
    def validations(self) -> tuple[int, ...]:
        """Return the intervals, in iterations, at which the policy is measured on validation prompts."""
        return (
            (self.validate_every,) if self.watch is None else self.watch.measured_beside(self.validate_every)
        )

    @property
    def keeps_by_watch(self) -> bool:
        """Return whether the stage returns the policy that the watch's judge scores best."""
        return self.watch is not None and (self.keep is None or self.keep.is_by_watch)

    @rule
    def _the_watch_is_independent(self) -> None:
        if self.watch is None:
            if self.keep is not None and self.keep.is_by_watch:
                raise ValueError("keep.by=watch, and the stage has no watch; add watch, or leave keep out")
            return
        if self.watch.judge.reward == self.reward:
            raise ValueError(
                f"watch.judge.reward={self.reward} is the reward that trains the policy, so it would see what that sees; "
                "name a verifier or another reward"
            )
        if self.guards == OFF:
            raise ValueError(
                "guards=off has no guard act, and a watch acts by one; leave guards out, or remove watch"
            )
        if self.watch.on_fall == "restore_best" and not self.keeps_by_watch:
            raise ValueError(
                "watch.on_fall=restore_best restores the best policy by the judge, and keep.by=validation keeps another; "
                "leave keep out, or use on_fall: stop, finish or warn"
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
    head: CriticHead | None = Field(None, exclude_if=lambda head: head in (None, ONE_VALUE))
    """The prediction of the critic; None: ``critic_head`` of the policy stages that start from this critic, else one value."""
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
    rollouts: Name | None = Field(None, exclude_if=is_unset)
    """A ``rollout_collection`` stage of the same policy, prompts and reward, whose responses are read instead of sampled,
    in another order in each pass over them; the held-out ones too. None: all responses are sampled here."""
    keep_optimizer: Switch = Field(False, exclude_if=is_off)
    """Write the state of AdamW, as it was when the kept critic was measured, beside the critic: twice the size of its
    weights. On by itself where a policy stage that starts from this critic has ``critic_optimizer: carry``."""
    fresh_share: Probability = Field(0.0, exclude_if=is_default(0.0))
    """Share of each training rollout that is sampled here even with ``rollouts``: 0 reads all of it, 0.5 half."""
    rollout: SampledAhead = Field(SampledAhead(), exclude_if=is_default(SampledAhead()))
    """How responses are sampled, and whether while another rollout trains."""

    @rule
    def _groups_divide_the_batch(self) -> None:
        refuse_broken_groups(self.batch_size, self.samples_per_prompt, "samples_per_prompt")

    @rule
    def _fresh_responses_are_whole_groups(self) -> None:
        if self.rollouts is None and self.fresh_share:
            raise ValueError(
                f"fresh_share={self.fresh_share:g} is a share beside collected responses, and none are named; "
                "add rollouts, or leave fresh_share out"
            )
        if self.rollouts is not None and self.samples_per_prompt > 1 and not self.fresh_share:
            raise ValueError(
                f"samples_per_prompt={self.samples_per_prompt} is about responses that are sampled here, and "
                "fresh_share: 0 reads all of them; leave samples_per_prompt out, or set fresh_share"
            )
        fresh = round(self.fresh_share * self.batch_size)
        if fresh % self.samples_per_prompt:
            raise ValueError(
                f"fresh_share={self.fresh_share:g} of batch_size={self.batch_size} is {fresh} responses, "
                f"not a multiple of samples_per_prompt={self.samples_per_prompt}; use another share"
            )

    @rule
    def _what_is_sampled_ahead_is_sampled_here(self) -> None:
        refuse_cut_sampler(self.rollout, self.resources)
        if self.rollout.ahead and self.rollouts is not None and not round(self.fresh_share * self.batch_size):
            raise ValueError(
                f"rollout.ahead=1 samples the next rollout meanwhile, and fresh_share={self.fresh_share:g} reads all responses from "
                f"rollouts={self.rollouts}; set a larger fresh_share, or leave rollout out"
            )

    @rule
    def _a_kept_optimizer_is_plain(self) -> None:
        if self.keep_optimizer and self.optimizer_states != "float32":
            raise ValueError(
                f"keep_optimizer writes the optimiser's state in float32, and optimizer_states={self.optimizer_states}; leave one of "
                "them out"
            )

    @rule
    def _an_optimizer_is_kept_whole(self) -> None:
        if self.keep_optimizer and self.resources.cuts_weights:
            raise ValueError(
                "keep_optimizer writes the optimiser's state whole, and resources.distributed.strategy=fsdp2 cuts it; "
                "use strategy: ddp, or leave keep_optimizer out"
            )

    @rule
    def _the_exact_kl_reads_whole_weights(self) -> None:
        if self.returns is not None and self.returns.kl_coef and self.returns.kl_kind == "full":
            refuse_cut_reference(self.resources, "returns.kl_kind")


def _reader_of_kl_to_old(algorithm: Algorithm) -> str | None:
    """Return the switch by which KL(old‖new) of one rollout's updates decides something."""
    if algorithm.trust_region_kl is not None:
        return f"trust_region_kl={algorithm.trust_region_kl}"
    if algorithm.epoch_kl_target is not None:
        return f"epoch_kl_target={algorithm.epoch_kl_target}"
    if algorithm.kl_penalty_coef:
        return f"kl_penalty_coef={algorithm.kl_penalty_coef}"
    return "advantage=tracked_mean" if algorithm.advantage == "tracked_mean" else None


def threads_for_each(work: object, cpus: int) -> int:
    """Return the threads of each part that a stage computes side by side on its CPUs: half of them where it samples beside its training."""
    return max(1, cpus // 2) if samples_ahead(work) else max(1, cpus)


def samples_ahead(work: object) -> bool:
    """Return whether a stage samples one rollout while another trains."""
    return isinstance(work, ValuePretraining | PolicyOptimization) and work.rollout.ahead > 0


class PolicyOptimization(WatchedRollouts):
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
    rollouts: Name | None = Field(None, exclude_if=is_unset)
    """A ``rollout_collection`` stage of the same prompts and reward, which the baselines ``reference_mean``,
    ``optimal_value`` and ``tracked_mean`` begin with."""
    curriculum: Literal["none", "easy_first"] = Field("none", exclude_if=is_default("none"))
    """``easy_first``: in each pass over the prompts, those with the highest pass rate come first, equal ones in random order. The
    prompts are then those of a ``prompt_selection``. ``none``: random order."""
    difficulty: DifficultyReport | None = Field(None, exclude_if=is_unset)
    """Count the passes of each training prompt, and write ``prompt_difficulty.json`` with those that have become too easy or stay
    impossible into the artifact. ``{}``: after two groups, by scores above 0. None: nothing is counted."""
    ptx: Name | None = None
    """A dataset of demonstrations, for ``ptx_coef``; each minibatch has as many of them as responses."""
    iterations: Count = 50
    """Number of iterations: sample a rollout, score it, update."""
    rollout: Ahead = Field(Ahead(), exclude_if=is_default(Ahead()))
    """How responses are sampled, and whether while another rollout trains."""
    critic_learning_rate: Positive | None = None
    """Learning rate of the critic's AdamW; read if ``algorithm`` has a critic that learns."""
    critic_optimizer: Literal["fresh", "carry"] = Field("fresh", exclude_if=is_default("fresh"))
    """``carry``: the critic's AdamW goes on with the moments and the number of steps of its pretraining, and has no warm-up
    again; rate, decay and schedule are this stage's. ``fresh``: its moments begin at 0."""
    validate_every: Count = 10
    """Iterations between two measurements of the mean score on the validation prompts; the best policy is kept."""
    validation_samples: Count = 256
    """Responses to validation prompts in one such measurement."""
    test_samples: Count | None = None
    """Responses to test prompts, for the gates on the kept policy. None: as many as to validation prompts."""
    demonstrations: Name | None = Field(None, exclude_if=is_unset)
    """A dataset of demonstrations. At each validation, the policy's NLL of its validation rows is measured, and how far that has
    risen above the reference's: what the policy forgets (alignment tax). At most ``validation_samples`` rows."""
    preferences: Name | None = Field(None, exclude_if=is_unset)
    """The preference pairs that the reward's models were trained on: a dataset, or a ``preference_collection`` stage. At each
    validation, the distribution of the models' scores is compared with that of the scores which they give to these pairs'
    responses. At most ``validation_samples`` pairs of the training rows, and of the validation rows."""

    @property
    def weighs_by_sampler(self) -> bool:
        """Return whether advantages are weighted by π_old/π_sampler."""
        is_ahead = self.rollout.ahead > 0 and self.algorithm.old_logprobs == "policy"
        return is_ahead or self.algorithm.rollout_correction is not None

    @rule
    def _groups_divide_the_batch(self) -> None:
        group = self.algorithm.samples_per_prompt
        refuse_broken_groups(self.batch_size, group, "algorithm.samples_per_prompt")

    @rule
    def _what_is_sampled_ahead_is_corrected(self) -> None:
        if not self.rollout.ahead:
            if self.rollout.importance_cap != Ahead().importance_cap:
                raise ValueError(
                    f"rollout.importance_cap={self.rollout.importance_cap} is read only where responses are sampled ahead; "
                    "set rollout.ahead: 1, or leave it out"
                )
            return
        if self.algorithm.old_logprobs == "sampler":
            if not self.algorithm.importance_ratio:
                raise ValueError(
                    "rollout.ahead=1 needs a ratio to the policy that sampled, and with algorithm.old_logprobs=sampler and "
                    "importance_ratio=false there is none; set old_logprobs: policy, or ahead: 0"
                )
            if reader := _reader_of_kl_to_old(self.algorithm):
                raise ValueError(
                    f"rollout.ahead=1 with algorithm.old_logprobs=sampler measures KL(old‖new) over two updates, and {reader} "
                    "is about the last update alone; set old_logprobs: policy, or ahead: 0"
                )
            if self.rollout.importance_cap != Ahead().importance_cap:
                raise ValueError(
                    f"rollout.importance_cap={self.rollout.importance_cap} bounds π_old/π_sampler, which is 1 with "
                    "algorithm.old_logprobs=sampler; leave it out, or set old_logprobs: policy"
                )
        if (
            self.algorithm.rollout_correction is not None
            and self.rollout.importance_cap != Ahead().importance_cap
        ):
            raise ValueError(
                f"rollout.importance_cap={self.rollout.importance_cap} and algorithm.rollout_correction both bound "
                "π_old/π_sampler; leave one of them out"
            )
        refuse_cut_sampler(self.rollout, self.resources)

    @rule
    def _no_rollout_ahead_of_a_kept_state(self) -> None:
        if self.keep_state and self.rollout.ahead:
            raise ValueError(
                "keep_state=true keeps what a longer stage goes on from, and rollout.ahead=1 samples each rollout beside the "
                "update before it, but none beside the last one; use ahead: 0, or leave keep_state out"
            )

    @rule
    def _the_exact_kl_reads_whole_weights(self) -> None:
        switches = self.algorithm
        if switches.kl_coef and switches.kl_kind == "full":
            refuse_cut_reference(self.resources, "algorithm.kl_kind")
        if switches.kl_loss_coef and switches.kl_loss_kind == "full":
            refuse_cut_reference(self.resources, "algorithm.kl_loss_kind")

    @rule
    def _the_policy_learns(self) -> None:
        if self.algorithm.policy_starts_at >= self.iterations:
            raise ValueError(
                f"algorithm.policy_starts_at={self.algorithm.policy_starts_at} leaves the policy none of "
                f"iterations={self.iterations} to learn in; raise iterations, or lower policy_starts_at"
            )

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
    def _a_frozen_critic_was_trained(self) -> None:
        refuse_untrained(
            self.algorithm, fresh_critic=self.fresh_critic, critic_optimizer=self.critic_optimizer
        )

    @rule
    def _only_a_pretrained_critic_has_an_optimizer(self) -> None:
        if self.critic_optimizer == "fresh":
            return
        if not self.algorithm.reads_critic or self.critic is None:
            raise ValueError(
                "critic_optimizer: carry is about a critic that was pretrained, and this stage starts from none; "
                "name a value_pretraining stage as critic, or leave critic_optimizer out"
            )
        if self.resources.cuts_weights:
            raise ValueError(
                "critic_optimizer: carry reads the optimiser's state whole, and resources.distributed.strategy=fsdp2 "
                "cuts it; use strategy: ddp, or critic_optimizer: fresh"
            )
        if self.optimizer_states != "float32":
            raise ValueError(
                "critic_optimizer: carry goes on with moments in float32, and this stage has "
                f"optimizer_states={self.optimizer_states}; leave one of them out"
            )

    @rule
    def _baselines_made_beforehand_are_named(self) -> None:
        if self.algorithm.reads_rollouts and self.rollouts is None:
            raise ValueError(
                f"algorithm.advantage={self.algorithm.advantage} begins with responses that were sampled beforehand; "
                "name a rollout_collection stage as rollouts"
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


class BestOfN(WatchedRollouts):
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
    rollouts: Name | None = Field(None, exclude_if=is_unset)
    """A ``rollout_collection`` stage of the same prompts and reward, whose training responses the best are taken from,
    instead of sampling in each iteration (rejection sampling once, then fine-tuning). None: all are sampled here."""

    @rule
    def _minibatches_divide_the_batch(self) -> None:
        """Replace the rule of ``Rollouts``: minibatches consist of kept responses."""
        refuse_broken_groups(self.batch_size, self.samples_per_prompt, "samples_per_prompt")
        kept = self.batch_size // self.samples_per_prompt
        if kept % self.minibatch_size:
            raise ValueError(
                f"batch_size={self.batch_size} keeps {kept} responses of samples_per_prompt={self.samples_per_prompt}, "
                f"not a multiple of minibatch_size={self.minibatch_size}; use minibatch_size: {kept} or a divisor of it"
            )
