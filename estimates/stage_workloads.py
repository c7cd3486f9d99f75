"""Workloads of the kinds of stage: the networks that each holds, and how often sequences go through them.

The numbers of passes follow ``tasks/<kind>.py``; events that depend on the course of training (early stops,
rounds of ``drop_uniform_groups``) are left out.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from vantage.estimates.asked_servers import Asked
from vantage.estimates.workload import Network, Pass, Sampling, Workload
from vantage.estimates.workload_parts import (
    Responses,
    Subject,
    forward,
    language_model,
    monitors,
    packed_rows_of,
    reward_networks,
    rollout_counts,
    rows_at_once,
    rows_of,
    selection,
    steps_of,
    watch_networks,
    whole_workload,
)
from vantage.schemas.checks.adapters import lora_of
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.evaluations import PolicyEvaluation, RewardEvaluation
from vantage.schemas.recipe.resolved import (
    ResolvedBestOfN,
    ResolvedDirectPreferenceOptimization,
    ResolvedKahnemanTverskyOptimization,
    ResolvedPolicyOptimization,
    ResolvedPreferenceCollection,
    ResolvedRewardModelling,
    ResolvedRolloutCollection,
    ResolvedSupervisedFineTuning,
    ResolvedValuePretraining,
)
from vantage.schemas.steps import judges_of

CENTRE_ROWS = 1024
"""Equal to ``vantage.tasks.reward_model.CENTRE_ROWS``."""
DEMONSTRATIONS_AT_ONCE = 64
"""Equal to ``vantage.tasks.evaluation.DEMONSTRATIONS_AT_ONCE``."""
SHOWN_BY_TOKEN = 12
"""Equal to ``vantage.tasks.rollout.token_texts.NUM_BY_TOKEN``."""

COMPARED = ("candidate", "baseline")
"""Equal to ``vantage.tasks.evaluation.ROLES``."""


def workload_of(subject: Subject) -> Workload:
    """Return the workload of a stage.

    Raises:
        ValueError: the rows of a dataset cannot be counted, or the kind has no workload.
    """
    named = KINDS[subject.stage.kind].workload
    if named is None:
        raise ValueError(
            f"stages.{subject.name}: a {subject.stage.kind} stage cannot be estimated yet; leave it out"
        )
    module, _, function = named.rpartition(".")
    build: Callable[[Subject], Workload] = getattr(import_module(module), function)
    return build(subject)


# -- stages that train on rows


def sft(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedSupervisedFineTuning)
    data = subject.data_of(work.data)
    steps = steps_of(work.epochs, data.train, work.batch_size)
    micro = rows_at_once(work.pass_limits, data.whole.longest, work.batch_size)
    batch = rows_of(data, work.batch_size, micro, grouped=work.group_by_length, columns=1, with_logits=1.0)
    if work.packing and not work.group_by_length:  # rows of similar length leave nothing to fill
        batch = packed_rows_of(data, work.batch_size, micro)
    held_out = rows_of(data, data.validation + data.test, micro, grouped=False, columns=1, with_logits=1.0)
    policy = language_model(subject, "policy", trained=True)
    return whole_workload(
        subject,
        networks=[policy],
        passes=[
            Pass(role="policy", does="train", times=steps, sequences=batch),
            forward("policy", 1, held_out),
        ],
        at_once=int(min(micro, max(batch.at_once, 1))) if work.packing else micro,
        counts={
            "train_rows": data.train,
            "optimizer_steps": steps,
            "tokens": steps * batch.count * batch.tokens,
        },
        data=[work.data],
    )


def reward_model(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedRewardModelling)
    name = work.data or work.rankings or ""
    data = subject.data_of(name)
    train = data.train if work.half is None else math.ceil(data.train / 2)
    steps = steps_of(work.epochs, train, work.batch_size)
    columns = data.responses_per_row
    micro = rows_at_once(work.pass_limits, columns * data.whole.longest, work.batch_size)
    share = 0.5 if work.lm_coef else 0.0
    grouped = work.group_by_length
    batch = rows_of(data, work.batch_size, micro, grouped=grouped, columns=columns, with_logits=share)
    held_out = rows_of(
        data, data.validation + data.test, micro, grouped=False, columns=columns, with_logits=0.0
    )
    passes = [
        Pass(role="reward", does="train", times=steps, sequences=batch),
        forward("reward", 1, held_out),
    ]
    read = [name]
    if work.centre_on is not None:
        centre = subject.data_of(work.centre_on)
        rows = min(CENTRE_ROWS, centre.train)
        sequences = rows_of(centre, rows, 2 * micro, grouped=False, columns=1, with_logits=0.0)
        passes.append(forward("reward", 1, sequences))
        read.append(work.centre_on)
    return whole_workload(
        subject,
        networks=[Network(role="reward", shape=subject.shape_of("init"), is_scalar=True, is_trained=True)],
        passes=passes,
        at_once=micro,
        counts={
            "train_rows": train,
            "optimizer_steps": steps,
            "tokens": steps * batch.count * batch.tokens,
        },
        data=read,
    )


def dpo(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedDirectPreferenceOptimization)
    name = work.data or work.rollouts or ""
    data = subject.data_of(name)
    steps = steps_of(work.epochs, data.train, work.batch_size)
    micro = rows_at_once(work.pass_limits, 2 * data.whole.longest, work.batch_size)
    batch = rows_of(data, work.batch_size, micro, grouped=work.group_by_length, columns=2, with_logits=1.0)
    held_out = rows_of(data, data.validation + data.test, micro, grouped=False, columns=2, with_logits=1.0)
    reference = ["reference"] if work.reads_reference else []
    return whole_workload(
        subject,
        networks=[
            language_model(subject, "policy", trained=True),
            *(language_model(subject, role) for role in reference),
        ],
        passes=[
            Pass(role="policy", does="train", times=steps, sequences=batch),
            *(forward(role, steps, batch) for role in reference),
            *(forward(role, 1, held_out) for role in ("policy", *reference)),
        ],
        at_once=micro,
        counts={
            "train_rows": data.train,
            "optimizer_steps": steps,
            "tokens": steps * batch.count * batch.tokens,
        },
        data=[name],
    )


def kto(subject: Subject) -> Workload:
    """Return the work of KTO; the mismatched responses, by which the KL is estimated, are assumed to be as long as the
    batch's own."""
    work = subject.stage
    assert isinstance(work, ResolvedKahnemanTverskyOptimization)
    data = subject.data_of(work.data)
    steps = steps_of(work.epochs, data.train, work.batch_size)
    micro = rows_at_once(work.pass_limits, data.whole.longest, work.batch_size)
    batch = rows_of(data, work.batch_size, micro, grouped=work.group_by_length, columns=1, with_logits=1.0)
    held_out = rows_of(data, data.validation + data.test, micro, grouped=False, columns=1, with_logits=1.0)
    return whole_workload(
        subject,
        networks=[language_model(subject, "policy", trained=True), language_model(subject, "reference")],
        passes=[
            Pass(role="policy", does="train", times=steps, sequences=batch),
            forward("policy", steps, batch),
            forward("reference", 2 * steps, batch),
            forward("policy", 2, held_out),
            forward("reference", 2, held_out),
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


def value(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedValuePretraining)
    rollouts = Responses(subject, work.prompts, work.pass_limits, work.rollout)
    has_reference = bool(work.returns.kl_coef)
    minibatch = rollouts.trained(work, logits=0.0)
    whole = rollouts.scored(work.batch_size, logits=0.0)
    steps = work.iterations * work.epochs * (work.batch_size // work.minibatch_size)
    passes: list[Pass | Asked] = [
        Pass(role="critic", does="train", times=steps, sequences=minibatch, in_update=True)
    ]
    samplings: list[Sampling] = []
    held_out = work.validation_samples, work.test_samples or work.validation_samples
    drawn = [(float(work.iterations), work.fresh_responses)]
    if work.rollouts is None:
        drawn += [(1.0, count) for count in held_out]
        drawn += [(1.0, work.batch_size)] if work.returns.reward_scaling != "none" else []
    for times, count in drawn if work.fresh_responses else []:
        is_rollout = not samplings
        samplings.append(replace(rollouts.sampling("policy", times, count), is_rollout=is_rollout))
        passes += rollouts.rewards(times, count)
    read = [(float(work.iterations), work.batch_size), *((1.0, count) for count in held_out)]
    if work.rollouts is None and work.returns.reward_scaling != "none":
        read.append((1.0, work.batch_size))
    for times, count in read:
        is_known = (
            not work.fresh_responses and times == work.iterations
        )  # the sampler's log-probabilities are read
        found = rollouts.logprobs(times, count, reference=has_reference)
        passes += [each for each in found if each.role != "policy" or not is_known]
    validations = 1 + math.ceil(work.iterations / work.validate_every)
    passes.append(forward("critic", validations, rollouts.scored(held_out[0], logits=0.0)))
    passes.append(forward("critic", 2, rollouts.scored(held_out[1], logits=0.0)))
    critic = Network(role="critic", shape=subject.shape, is_scalar=True, is_trained=True)
    return whole_workload(
        subject,
        networks=[
            language_model(subject, "policy"),
            *([language_model(subject, "reference")] if has_reference else []),
            critic,
            *(reward_networks(subject) if work.fresh_responses else []),
        ],
        passes=passes,
        samplings=samplings,
        at_once=rows_at_once(work.pass_limits, minibatch.longest, work.minibatch_size),
        counts=rollout_counts(work, steps, work.iterations, whole),
        data=[work.prompts],
    )


def policy(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedPolicyOptimization)
    algorithm = work.algorithm
    rollouts = Responses(subject, work.prompts, work.pass_limits, work.rollout)
    steps = work.iterations * work.epochs * (work.batch_size // work.minibatch_size)
    of_iteration = steps // work.iterations
    policy_steps = max(0, work.iterations - algorithm.policy_starts_at) * of_iteration
    minibatch = rollouts.trained(work, logits=1.0)
    passes: list[Pass | Asked] = [
        Pass(role="policy", does="train", times=policy_steps, sequences=minibatch, in_update=True)
    ]
    read = [work.prompts, *([work.watch_prompts] if work.watch_prompts else [])]
    if algorithm.kl_loss_kind == "full" and algorithm.kl_loss_coef:
        passes.append(forward("reference", policy_steps, minibatch, in_update=True))
    if algorithm.ptx_coef and work.ptx is not None:
        demonstrations = subject.data_of(work.ptx)
        micro = rows_at_once(work.pass_limits, demonstrations.whole.longest, work.minibatch_size)
        sequences = rows_of(
            demonstrations, work.minibatch_size, micro, grouped=False, columns=1, with_logits=1.0
        )
        passes.append(
            Pass(
                role="policy",
                does="train",
                times=policy_steps,
                sequences=sequences,
                takes_step=False,
                in_update=True,
            )
        )
        read.append(work.ptx)
    if algorithm.reads_critic:
        if algorithm.trains_critic:
            critic_batch, critic_steps = rollouts.trained(work, logits=0.0), steps * algorithm.critic_steps
            passes.append(
                Pass(role="critic", does="train", times=critic_steps, sequences=critic_batch, in_update=True)
            )
        whole = rollouts.scored(work.batch_size, logits=0.0)
        passes.append(forward("critic", work.iterations, whole))
        if algorithm.critic_first:
            passes.append(forward("critic", policy_steps // of_iteration, whole, in_update=True))
    rollout = rollouts.sampling("policy", work.iterations, work.batch_size)
    samplings = [replace(rollout, is_rollout=True)]
    passes += rollouts.rewards(work.iterations, work.batch_size)
    scored = rollouts.logprobs(work.iterations, work.batch_size, reference=True)
    has_exact_kl = algorithm.kl_coef and algorithm.kl_kind == "full"
    is_read = algorithm.old_logprobs == "policy" or algorithm.shared_trunk or has_exact_kl
    passes += [each for each in scored if each.role != "policy" or is_read]
    if algorithm.advantage == "tracked_mean" or algorithm.kl_penalty_target is not None:
        # how far each update moved the policy
        whole = rollouts.scored(work.batch_size, logits=1.0)
        passes.append(forward("policy", work.iterations, whole, in_update=True))
    looks_again = (algorithm.trust_region_kl is not None, algorithm.covariance != "none")
    if any(looks_again):
        passes.append(forward("policy", sum(looks_again) * policy_steps, minibatch, in_update=True))
    if algorithm.advantage == "greedy_baseline":
        greedy = work.batch_size // algorithm.samples_per_prompt
        samplings.append(rollouts.sampling("policy", work.iterations, greedy))
        passes += rollouts.rewards(work.iterations, greedy)
    more_samplings, more_passes = selection(work, rollouts, reference=True)
    monitored, monitored_data = monitors(subject, work)
    networks = [language_model(subject, "policy", trained=True), language_model(subject, "reference")]
    if algorithm.reads_critic:
        trains = algorithm.trains_critic
        networks.append(Network(role="critic", shape=subject.shape, is_scalar=True, is_trained=trains))
    copies = work.rollout.ahead and not work.rollout.is_served
    if copies and lora_of(work) is None:  # with adapters, only the adapters are copied
        networks.append(Network(role="copy", shape=subject.shape))
    return whole_workload(
        subject,
        networks=[*networks, *reward_networks(subject), *watch_networks(subject)],
        passes=[*passes, *more_passes, *monitored],
        samplings=[*samplings, *more_samplings],
        at_once=rows_at_once(work.pass_limits, minibatch.longest, work.minibatch_size),
        counts=rollout_counts(work, steps, work.iterations, minibatch),
        data=[*read, *monitored_data],
    )


def best_of_n(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedBestOfN)
    rollouts = Responses(subject, work.prompts, work.pass_limits, work.rollout)
    kept = work.batch_size // work.samples_per_prompt
    steps = work.iterations * work.epochs * (kept // work.minibatch_size)
    minibatch = rollouts.trained(work, logits=1.0)
    samplings, passes = selection(work, rollouts, reference=False)
    if work.rollouts is None:
        samplings = [rollouts.sampling("policy", work.iterations, work.batch_size), *samplings]
        passes = [*rollouts.rewards(work.iterations, work.batch_size), *passes]
    return whole_workload(
        subject,
        networks=[
            language_model(subject, "policy", trained=True),
            *reward_networks(subject),
            *watch_networks(subject),
        ],
        passes=[
            Pass(role="policy", does="train", times=steps, sequences=minibatch),
            *passes,
        ],
        samplings=samplings,
        at_once=rows_at_once(work.pass_limits, minibatch.longest, work.minibatch_size),
        counts=rollout_counts(work, steps, work.iterations, minibatch),
        data=[work.prompts, *([work.watch_prompts] if work.watch_prompts else [])],
    )


def preference_collection(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedPreferenceCollection)
    prompts = work.prompts or work.demonstrations or ""
    data = subject.data_of(prompts)
    responses = (data.train + data.validation + data.test) * work.samples_per_prompt
    rollouts = Responses(subject, prompts, work.pass_limits.or_rows(work.batch_size), work.rollout)
    batches = math.ceil(responses / work.batch_size)
    count = min(work.batch_size, responses)
    networks, passes = (
        [language_model(subject, "policy"), *reward_networks(subject)],
        rollouts.rewards(batches, count),
    )
    if work.judge is not None and work.judge.kind == "model":
        networks.append(language_model(subject, "judge"))
        passes.append(forward("judge", batches, rollouts.asked(count / 2, work.judge.template)))
    sampling = rollouts.sampling("policy", batches, count)
    return whole_workload(
        subject,
        networks=networks,
        passes=passes,
        samplings=[sampling],
        at_once=rows_at_once(work.pass_limits, sampling.longest, work.batch_size),
        counts={"responses": responses},
        data=[prompts],
    )


def rollout_collection(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, ResolvedRolloutCollection)
    data = subject.data_of(work.prompts)
    held_out = (data.validation + data.test) * work.held_out_samples_per_prompt
    responses = data.train * work.samples_per_prompt + held_out
    rollouts = Responses(subject, work.prompts, work.pass_limits.or_rows(work.batch_size), work.rollout)
    batches, count = math.ceil(responses / work.batch_size), min(work.batch_size, responses)
    sampling = rollouts.sampling("policy", batches, count)
    return whole_workload(
        subject,
        networks=[language_model(subject, "policy"), *reward_networks(subject)],
        passes=rollouts.rewards(batches, count),
        samplings=[sampling],
        at_once=rows_at_once(work.pass_limits, sampling.longest, work.batch_size),
        counts={"responses": responses},
        data=[work.prompts],
    )


def evaluation(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, PolicyEvaluation)
    tests = subject.data_of(work.prompts).test
    sampled = tests * work.samples_per_prompt
    rollouts = Responses(subject, work.prompts, work.pass_limits, work.rollout)
    passes = [*rollouts.rewards(2, sampled), *rollouts.rewards(2, tests)]
    networks = [replace(language_model(subject, role), is_held_in_turn=True) for role in COMPARED]
    for role in COMPARED:
        passes.append(forward(role, 1, rollouts.scored(sampled, logits=1.0)))  # this pass is for the KL
        if work.demonstrations is not None:
            data = subject.data_of(work.demonstrations)
            micro = rows_at_once(work.pass_limits, data.whole.longest, DEMONSTRATIONS_AT_ONCE)
            rows = rows_of(data, data.test, micro, grouped=False, columns=1, with_logits=1.0)
            passes.append(forward(role, 1, rows))
    judges = judges_of(work)
    for role, judge in judges.items():
        if judge.kind == "model":  # the judge is loaded after both policies were freed
            networks.append(replace(language_model(subject, role), is_held_in_turn=True))
            passes.append(forward(role, 1, rollouts.asked(sampled, judge.template)))
    # the critic reads the responses of each model that the report shows token by token
    if work.critic is not None:
        networks.append(Network(role="critic", shape=subject.shape, is_scalar=True, is_held_in_turn=True))
        passes.append(forward("critic", 2, rollouts.scored(min(SHOWN_BY_TOKEN, tests), logits=0.0)))
    samplings = [rollouts.sampling(role, 1, sampled) for role in COMPARED]
    if any(judge.kind != "model" for judge in judges.values()):
        samplings += [rollouts.sampling(role, 1, tests) for role in COMPARED]
    else:
        tests = 0
    return whole_workload(
        subject,
        networks=[*networks, *reward_networks(subject)],
        passes=passes,
        samplings=samplings,
        at_once=rows_at_once(work.pass_limits, samplings[0].longest, sampled),
        counts={"responses": 2 * (sampled + tests)},
        data=[work.prompts, *([work.demonstrations] if work.demonstrations is not None else [])],
    )


def reward_evaluation(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, RewardEvaluation)
    data = subject.data_of(work.data)
    micro = rows_at_once(work.pass_limits, 2 * data.whole.longest, work.batch_size)
    pairs = rows_of(data, data.test, micro, grouped=False, columns=2, with_logits=0.0)
    return whole_workload(
        subject,
        networks=[Network(role="reward", shape=subject.shape_of("reward_model"), is_scalar=True)],
        passes=[forward("reward", 1, pairs)],
        at_once=micro,
        counts={"test_rows": data.test},
        data=[work.data],
    )
