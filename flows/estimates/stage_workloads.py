"""The workload of each kind of stage: which networks it holds, and what goes through them how often.

The numbers of passes follow ``tasks/<kind>.py``; what depends on how training goes (early stops, rounds of
``drop_uniform_groups``) is counted once, as if it never happened.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flows.estimates.model_shape import ModelShape
from flows.estimates.token_counts import DataCount, Lengths
from flows.estimates.workload import Network, Pass, Sampling, Sequences, Workload
from schemas.recipe.recipe import ResolvedRecipe
from schemas.recipe.resolved import (
    ResolvedBestOfN,
    ResolvedDirectPreferenceOptimization,
    ResolvedPolicyOptimization,
    ResolvedPreferenceCollection,
    ResolvedRewardModelling,
    ResolvedSupervisedFineTuning,
    ResolvedValuePretraining,
)
from schemas.recipe.stages import PolicyEvaluation, Rollouts, Stage, Training
from schemas.recipe.terms import ModelTerm
from schemas.steps import reward_of

CENTRE_ROWS = 1024
"""``tasks.reward_model.CENTRE_ROWS``."""


@dataclass(frozen=True)
class Subject:
    """A stage with all that its workload depends on."""

    recipe: ResolvedRecipe
    name: str
    shape: ModelShape
    data_of: Callable[[str], DataCount]
    """By the name of a dataset, or of the stage that makes it."""
    sampled: Lengths
    """Tokens of a sampled response."""

    @property
    def stage(self) -> Stage:
        """The stage itself."""
        return self.recipe.stages[self.name]


def workload_of(subject: Subject) -> Workload:
    """What the stage holds and computes.

    Raises:
        ValueError: the rows of a dataset cannot be counted, or the kind is not known here.
    """
    build = _BUILDERS.get(subject.stage.kind)
    if build is None:
        raise ValueError(f"stages.{subject.name}: a {subject.stage.kind} stage cannot be estimated yet")
    return build(subject)


# -- stages that train on rows


def _sft(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedSupervisedFineTuning)
    data = subject.data_of(work.data)
    steps = _steps(work.epochs, data.train, work.batch_size)
    micro = work.microbatch_size or work.batch_size
    batch = _rows(data, work.batch_size, micro, grouped=work.group_by_length, columns=1, with_logits=1.0)
    held_out = _rows(data, data.validation + data.test, micro, grouped=False, columns=1, with_logits=1.0)
    policy = _language(subject, "policy", trained=True)
    return _workload(
        subject,
        networks=[policy],
        passes=[
            Pass(role="policy", does="train", times=steps, sequences=batch),
            _plain("policy", 1, held_out),
        ],
        at_once=micro,
        counts={
            "train_rows": data.train,
            "optimizer_steps": steps,
            "tokens": steps * batch.count * batch.tokens,
        },
        data=[work.data],
    )


def _reward_model(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedRewardModelling)
    name = work.data or work.rankings or ""
    data = subject.data_of(name)
    steps = _steps(work.epochs, data.train, work.batch_size)
    micro = work.microbatch_size or work.batch_size
    share = 0.5 if work.lm_coef else 0.0
    columns = data.responses_per_row
    grouped = work.group_by_length
    batch = _rows(data, work.batch_size, micro, grouped=grouped, columns=columns, with_logits=share)
    held_out = _rows(
        data, data.validation + data.test, micro, grouped=False, columns=columns, with_logits=0.0
    )
    passes = [
        Pass(role="reward", does="train", times=steps, sequences=batch),
        _plain("reward", 1, held_out),
    ]
    read = [name]
    if work.centre_on is not None:
        centre = subject.data_of(work.centre_on)
        rows = min(CENTRE_ROWS, centre.train)
        sequences = _rows(centre, rows, 2 * micro, grouped=False, columns=1, with_logits=0.0)
        passes.append(_plain("reward", 1, sequences))
        read.append(work.centre_on)
    return _workload(
        subject,
        networks=[Network(role="reward", shape=subject.shape, is_scalar=True, is_trained=True)],
        passes=passes,
        at_once=micro,
        counts={
            "train_rows": data.train,
            "optimizer_steps": steps,
            "tokens": steps * batch.count * batch.tokens,
        },
        data=read,
    )


def _dpo(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedDirectPreferenceOptimization)
    data = subject.data_of(work.data)
    steps = _steps(work.epochs, data.train, work.batch_size)
    micro = work.microbatch_size or work.batch_size
    batch = _rows(data, work.batch_size, micro, grouped=work.group_by_length, columns=2, with_logits=1.0)
    held_out = _rows(data, data.validation + data.test, micro, grouped=False, columns=2, with_logits=1.0)
    return _workload(
        subject,
        networks=[_language(subject, "policy", trained=True), _language(subject, "reference")],
        passes=[
            Pass(role="policy", does="train", times=steps, sequences=batch),
            _plain("reference", steps, batch),
            _plain("policy", 1, held_out),
            _plain("reference", 1, held_out),
        ],
        at_once=micro,
        counts={
            "train_rows": data.train,
            "optimizer_steps": steps,
            "tokens": steps * batch.count * batch.tokens,
        },
        data=[work.data],
    )


# -- stages that sample


def _value(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedValuePretraining)
    rollouts = _Responses(subject, work.prompts, work.microbatch_size)
    has_reference = bool(work.returns.kl_coef)
    minibatch = rollouts.trained(work, logits=0.0)
    whole = rollouts.scored(work.batch_size, logits=0.0)
    steps = work.iterations * work.epochs * (work.batch_size // work.minibatch_size)
    passes = [Pass(role="critic", does="train", times=steps, sequences=minibatch)]
    samplings = []
    held_out = work.validation_samples, work.test_samples or work.validation_samples
    drawn = [(float(work.iterations), work.batch_size), *((1.0, count) for count in held_out)]
    if work.returns.reward_scaling != "none":
        drawn.append((1.0, work.batch_size))
    for times, count in drawn:
        samplings.append(rollouts.sampling("policy", times, count))
        passes += rollouts.rewards(times, count)
        passes += rollouts.logprobs(times, count, reference=has_reference)
    validations = 1 + work.iterations / work.validate_every
    passes.append(_plain("critic", validations, rollouts.scored(held_out[0], logits=0.0)))
    passes.append(_plain("critic", 2, rollouts.scored(held_out[1], logits=0.0)))
    critic = Network(role="critic", shape=subject.shape, is_scalar=True, is_trained=True)
    return _workload(
        subject,
        networks=[
            _language(subject, "policy"),
            *([_language(subject, "reference")] if has_reference else []),
            critic,
            *_reward_networks(subject),
        ],
        passes=passes,
        samplings=samplings,
        at_once=work.microbatch_size or work.minibatch_size,
        counts=_rollout_counts(work, steps, work.iterations, whole),
        data=[work.prompts],
    )


def _policy(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedPolicyOptimization)
    algorithm = work.algorithm
    rollouts = _Responses(subject, work.prompts, work.microbatch_size)
    steps = work.iterations * work.epochs * (work.batch_size // work.minibatch_size)
    of_iteration = steps // work.iterations
    policy_steps = max(0, work.iterations - algorithm.policy_starts_at) * of_iteration
    minibatch = rollouts.trained(work, logits=1.0)
    passes = [Pass(role="policy", does="train", times=policy_steps, sequences=minibatch)]
    read = [work.prompts]
    if algorithm.kl_loss_kind == "full" and algorithm.kl_loss_coef:
        passes.append(_plain("reference", policy_steps, minibatch))
    if algorithm.ptx_coef and work.ptx is not None:
        demonstrations = subject.data_of(work.ptx)
        micro = work.microbatch_size or work.minibatch_size
        sequences = _rows(
            demonstrations, work.minibatch_size, micro, grouped=False, columns=1, with_logits=1.0
        )
        passes.append(
            Pass(role="policy", does="train", times=policy_steps, sequences=sequences, takes_step=False)
        )
        read.append(work.ptx)
    if algorithm.reads_critic:
        critic_batch, critic_steps = rollouts.trained(work, logits=0.0), steps * algorithm.critic_steps
        passes.append(Pass(role="critic", does="train", times=critic_steps, sequences=critic_batch))
        looks = work.iterations + (policy_steps // of_iteration if algorithm.critic_first else 0)
        passes.append(_plain("critic", looks, rollouts.scored(work.batch_size, logits=0.0)))
    samplings = [rollouts.sampling("policy", work.iterations, work.batch_size)]
    passes += rollouts.rewards(work.iterations, work.batch_size)
    scored = rollouts.logprobs(work.iterations, work.batch_size, reference=True)
    has_exact_kl = algorithm.kl_coef and algorithm.kl_kind == "full"
    is_read = algorithm.old_logprobs == "policy" or algorithm.shared_trunk or has_exact_kl
    passes += [each for each in scored if each.role != "policy" or is_read]
    if algorithm.advantage == "greedy_baseline":
        greedy = work.batch_size // algorithm.samples_per_prompt
        samplings.append(rollouts.sampling("policy", work.iterations, greedy))
        passes += rollouts.rewards(work.iterations, greedy)
    more_samplings, more_passes = _selection(work, rollouts, reference=True)
    networks = [_language(subject, "policy", trained=True), _language(subject, "reference")]
    if algorithm.reads_critic:
        networks.append(Network(role="critic", shape=subject.shape, is_scalar=True, is_trained=True))
    return _workload(
        subject,
        networks=[*networks, *_reward_networks(subject)],
        passes=[*passes, *more_passes],
        samplings=[*samplings, *more_samplings],
        at_once=work.microbatch_size or work.minibatch_size,
        counts=_rollout_counts(work, steps, work.iterations, minibatch),
        data=read,
    )


def _best_of_n(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedBestOfN)
    rollouts = _Responses(subject, work.prompts, work.microbatch_size)
    kept = work.batch_size // work.samples_per_prompt
    steps = work.iterations * work.epochs * (kept // work.minibatch_size)
    minibatch = rollouts.trained(work, logits=1.0)
    samplings, passes = _selection(work, rollouts, reference=False)
    return _workload(
        subject,
        networks=[_language(subject, "policy", trained=True), *_reward_networks(subject)],
        passes=[
            Pass(role="policy", does="train", times=steps, sequences=minibatch),
            *rollouts.rewards(work.iterations, work.batch_size),
            *passes,
        ],
        samplings=[rollouts.sampling("policy", work.iterations, work.batch_size), *samplings],
        at_once=work.microbatch_size or work.minibatch_size,
        counts=_rollout_counts(work, steps, work.iterations, minibatch),
        data=[work.prompts],
    )


def _preference_collection(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedPreferenceCollection)
    prompts = work.prompts or work.demonstrations or ""
    data = subject.data_of(prompts)
    responses = (data.train + data.validation + data.test) * work.samples_per_prompt
    rollouts = _Responses(subject, prompts, work.microbatch_size or work.batch_size)
    batches = math.ceil(responses / work.batch_size)
    count = min(work.batch_size, responses)
    return _workload(
        subject,
        networks=[_language(subject, "policy"), *_reward_networks(subject)],
        passes=rollouts.rewards(batches, count),
        samplings=[rollouts.sampling("policy", batches, count)],
        at_once=work.microbatch_size or work.batch_size,
        counts={"responses": responses},
        data=[prompts],
    )


def _evaluation(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, PolicyEvaluation)
    tests = subject.data_of(work.prompts).test
    sampled = tests * work.samples_per_prompt
    rollouts = _Responses(subject, work.prompts, work.microbatch_size)
    return _workload(
        subject,
        networks=[_language(subject, "policy"), *_reward_networks(subject)],  # one of the two at a time
        passes=[*rollouts.rewards(2, sampled), *rollouts.rewards(2, tests)],
        samplings=[rollouts.sampling("policy", 2, sampled), rollouts.sampling("policy", 2, tests)],
        at_once=work.microbatch_size or sampled,
        counts={"responses": 2 * (sampled + tests)},
        data=[work.prompts],
    )


_BUILDERS: Mapping[str, Callable[[Subject], Workload]] = {
    "sft": _sft,
    "reward_model": _reward_model,
    "dpo": _dpo,
    "value_pretraining": _value,
    "policy_optimization": _policy,
    "best_of_n": _best_of_n,
    "preference_collection": _preference_collection,
    "evaluation": _evaluation,
}


# -- parts of them


@dataclass(frozen=True)
class _Responses:
    """Responses to the prompts of one dataset: how they are sampled and what goes through the networks then."""

    subject: Subject
    prompts: str
    microbatch_size: int | None

    def sampling(self, role: str, times: float, count: float) -> Sampling:
        """``count`` responses, so many times."""
        prompt, response = self.subject.data_of(self.prompts).prompt, self.subject.sampled
        at_once = min(count, self.microbatch_size or count)
        return Sampling(
            role=role,
            times=times,
            count=count,
            at_once=at_once,
            prompt=prompt.longest_of(at_once),
            response=response.mean,
            steps=response.longest_of(at_once),
            longest=prompt.longest + response.longest,
        )

    def scored(self, count: float, *, logits: float, at_once: float | None = None) -> Sequences:
        """``count`` prompts with their responses; ``logits``: the share of response tokens whose logits are computed."""
        prompt, response = self.subject.data_of(self.prompts).prompt, self.subject.sampled
        micro = min(count, at_once or self.microbatch_size or count)
        longest = prompt.longest + response.longest
        return Sequences(
            count=count,
            at_once=micro,
            tokens=min(longest, prompt.mean + response.longest_of(micro)),
            longest=longest,
            logit_tokens=logits * response.mean,
        )

    def trained(self, work: Rollouts, *, logits: float) -> Sequences:
        """The sequences of one optimiser step."""
        return self.scored(
            work.minibatch_size, logits=logits, at_once=work.microbatch_size or work.minibatch_size
        )

    def rewards(self, times: float, count: float) -> list[Pass]:
        """The passes of the reward's models over ``count`` responses."""
        scored = self.scored(count, logits=0.0)
        return [
            Pass(role=each.role, does="score", times=times, sequences=scored, has_precision=False)
            for each in _reward_networks(self.subject)
        ]

    def logprobs(self, times: float, count: float, *, reference: bool) -> list[Pass]:
        """The log-probabilities of ``count`` responses under the policy, and under its reference."""
        scored = self.scored(count, logits=1.0)
        return [_plain(role, times, scored) for role in ("policy", *(["reference"] if reference else []))]


def _selection(
    work: ResolvedPolicyOptimization | ResolvedBestOfN, rollouts: _Responses, *, reference: bool
) -> tuple[list[Sampling], list[Pass]]:
    """The measurements on held-out prompts: before the first iteration, every few iterations, and at the end."""
    measured = 1 + work.iterations / work.validate_every
    tests = work.test_samples or work.validation_samples
    samplings = [
        rollouts.sampling("policy", measured, work.validation_samples),
        rollouts.sampling("policy", 1, tests),
    ]
    passes = [*rollouts.rewards(measured, work.validation_samples), *rollouts.rewards(1, tests)]
    if reference:
        passes += rollouts.logprobs(1, tests, reference=True)
    return samplings, passes


def _rows(
    data: DataCount, rows: float, micro: float, *, grouped: bool, columns: float, with_logits: float
) -> Sequences:
    """``rows`` rows with ``columns`` responses each, in micro-batches of ``micro`` rows."""
    at_once = min(rows, micro)
    mean = sum(each.mean for each in data.responses) / len(data.responses)
    return Sequences(
        count=rows * columns,
        at_once=at_once * columns,
        tokens=data.whole.mean if grouped else data.whole.longest_of(at_once),
        longest=data.whole.longest,
        logit_tokens=with_logits * mean,
    )


def _steps(epochs: float, rows: int, batch_size: int) -> int:
    return max(1, math.ceil(round(epochs * rows) / batch_size))


def _plain(role: str, times: float, sequences: Sequences) -> Pass:
    """A forward pass without gradients."""
    return Pass(role=role, does="score", times=times, sequences=sequences)


def _language(subject: Subject, role: str, *, trained: bool = False) -> Network:
    return Network(role=role, shape=subject.shape, is_trained=trained)


def _reward_networks(subject: Subject) -> list[Network]:
    """The models of the stage's reward or judge."""
    reward = reward_of(subject.stage)
    if reward is None:
        return []
    return [
        Network(
            role=term.stage,
            shape=subject.shape,
            is_scalar=True,
            is_bfloat16=getattr(subject.stage, "precision", "float32") == "bfloat16",
        )
        for term in subject.recipe.rewards[reward].terms
        if isinstance(term, ModelTerm)
    ]


def _rollout_counts(work: Rollouts, steps: int, iterations: int, sequences: Sequences) -> dict[str, float]:
    return {
        "responses": iterations * work.batch_size,
        "optimizer_steps": steps,
        "tokens": iterations * work.batch_size * sequences.tokens,
    }


def _workload(
    subject: Subject,
    *,
    networks: list[Network],
    passes: list[Pass],
    at_once: int,
    counts: dict[str, float],
    data: list[str],
    samplings: list[Sampling] | None = None,
) -> Workload:
    stage = subject.stage
    return Workload(
        networks=tuple(networks),
        passes=tuple(passes),
        samplings=tuple(samplings or ()),
        is_bfloat16=isinstance(stage, Training) and stage.precision == "bfloat16",
        at_once=at_once,
        recipe_at_once=at_once,
        counts=counts,
        basis=tuple(f"{name}: {subject.data_of(name).basis}" for name in dict.fromkeys(data)),
    )
