"""Workload of on-policy distillation: the student trains, the teacher scores rollouts, and both are measured."""

from vantage.estimates.workload import Pass, Workload
from vantage.estimates.workload_parts import (
    Responses,
    Subject,
    forward,
    language_model,
    reward_networks,
    rollout_counts,
    rows_at_once,
    selection,
    watch_networks,
    whole_workload,
)
from vantage.schemas.recipe.resolved import ResolvedDistillation


def distillation(subject: Subject) -> Workload:
    """Return the workload of a ``distillation`` stage."""
    work = subject.stage
    assert isinstance(work, ResolvedDistillation)
    rollouts = Responses(subject, work.prompts, work.pass_limits, work.rollout)
    steps = work.iterations * work.epochs * (work.batch_size // work.minibatch_size)
    minibatch = rollouts.trained(work, logits=1.0)
    samplings, passes = selection(work, rollouts, reference=False)
    tests = work.test_samples or work.validation_samples
    tested = rollouts.scored(tests, logits=1.0)
    held = () if work.teacher is None else ("teacher",)
    server = work.teacher_server
    num_scored = 2 if server is None or server.sampled else 1  # the student before training, and the teacher
    sampled = tests if server is not None and server.sampled else 0
    if work.kl == "full":
        reads = [forward(role, steps, minibatch) for role in held]
    else:  # the teacher reads each rollout once, for all of its steps
        rollout = rollouts.scored(work.batch_size, logits=1.0)
        reads = [forward(role, work.iterations, rollout) for role in held]
    return whole_workload(
        subject,
        networks=[
            language_model(subject, "policy", trained=True),
            *(language_model(subject, role) for role in held),
            *reward_networks(subject),
            *watch_networks(subject),
        ],
        passes=[
            Pass(role="policy", does="train", times=steps, sequences=minibatch),
            *reads,
            *rollouts.taught(server, work.iterations * work.batch_size + tests + sampled),
            *rollouts.rewards(work.iterations, work.batch_size),
            *passes,
            *rollouts.rewards(num_scored, tests),
            *(forward(role, 1, tested) for role in ("policy", *held)),
        ],
        samplings=[
            rollouts.sampling("policy", work.iterations, work.batch_size),
            *samplings,
            *(rollouts.sampling(role, 1, tests) for role in ("policy", *held)),
        ],
        at_once=rows_at_once(work.pass_limits, minibatch.longest, work.minibatch_size),
        counts=rollout_counts(work, steps, work.iterations, minibatch),
        data=[work.prompts, *([work.watch_prompts] if work.watch_prompts else [])],
    )
