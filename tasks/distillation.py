"""On-policy distillation (GKD): sample from the student, minimise its KL to a teacher on the samples, and repeat."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from vantage.algorithms.uncertainty import Estimate, clustered_mean
from vantage.models.folders import tokenizer_digest
from vantage.models.logprobs import LogProbs
from vantage.models.sequences import Sequences
from vantage.schemas.metric_names import LEAD_SHARE
from vantage.schemas.recipe.resolved import ResolvedDistillation
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.examples import Codec, Prompts, read_prompts
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.rollout.engine import LocalEngine
from vantage.tasks.rollout.fitting_engine import fit_to_memory
from vantage.tasks.rollout.rollout_models import load_rollout_models
from vantage.tasks.rollout.rollouts import Sampled, Scored
from vantage.tasks.rollout.selection import Measured, Selection, kept_by
from vantage.tasks.rollout.watching import load_watching
from vantage.tasks.training import progress
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.found_limits import Taken, longest_response, taken_by_reading
from vantage.tasks.training.lead_share import lead_share
from vantage.tasks.training.measured import clusters_of, uncertainty_of, values_of
from vantage.tasks.training.networks import Written, trained_policy, write_policy
from vantage.tasks.training.optimization import optimizer_of, training_device
from vantage.tasks.training.seeds import stage_seed
from vantage.tasks.training.stage_state import BestSoFar
from vantage.tasks.updates.own_responses import (
    Accumulated,
    describe_responses,
    sample_iteration,
    take_steps,
)
from vantage.tasks.updates.sampled_kl import accumulate_sampled_kl, measure_sampled_kl, teacher_logprobs
from vantage.tasks.updates.teacher import Pair, accumulate_reverse_kl, load_teacher, measure_reverse_kl
from vantage.tasks.updates.teacher_server import ServedTeacher

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DistillationState(BestSoFar):
    """State of a distillation: the best student, and the scores by which the teacher's lead is measured."""

    initial_scores: tuple[float, ...] = ()
    """Scores of the responses to the test prompts of the student before the first iteration."""
    teacher_scores: tuple[float, ...] = ()
    """Scores of the teacher, on the same prompts with the same random numbers."""


def run(job: StageJob[ResolvedDistillation]) -> StageResult:
    """Distil ``teacher`` into ``init`` on ``prompts``; the artifact is the best student by validation score."""
    work = job.work

    # 1. Student, teacher, reward and prompts
    student = trained_policy(job, training_device())
    pair = Pair(student, load_teacher(job, student), job.generation.temperature, work.arithmetic)
    models = load_rollout_models(job, work, student, role="init", with_reference=False)
    codec = models.codec
    optimizer = optimizer_of(student, work)
    train, validation, test = (read_prompts(job.inputs["prompts"], split, codec) for split in SPLITS)
    encoding = encoding_metrics(job, "prompts", [train, validation, test])
    taken = Taken(
        longest_response(train, job.generation),
        [lambda batch: _read(pair, batch, job).logprobs],
        work.arithmetic,
        [optimizer],
        models.sampler,
    )
    watching = load_watching(job, validation, codec, device=student.device)
    asked = job
    models, job = models.ready(asked, taken)
    teacher = engine_of_teacher(asked, pair, codec, train)
    work = job.work
    selection = Selection(
        models,
        validation,
        num_samples=work.validation_samples,
        seed=stage_seed(job),
        watching=watching and watching.within(work.pass_limits),
        keeps_by_watch=work.keeps_by_watch,
    )
    num_tests = work.test_samples or work.validation_samples

    with (
        Attempt(
            job,
            total=work.iterations,
            modules={"policy": student.causal_lm},
            optimizers={"policy": optimizer},
            state=DistillationState(),
            keeps_best=True,
        ) as attempt,
        models.sampling(),
    ):
        if not attempt.best:
            selection.keep_if_best(attempt, iteration=0)
            attempt.state = with_lead(attempt.state, selection, teacher, job, test)
        for iteration in attempt.remaining():
            # 2. The student's own responses, scored; the score is only watched
            with attempt.unmoved():
                scored = sample_iteration(job, models, train, iteration)

            # 3. Minimise the KL to the teacher on them
            metrics = update(pair, optimizer, scored.sampled, job, iteration=iteration)
            metrics |= describe_responses(scored)
            models.sync_engine()

            # 4. Keep the student that scores best on validation prompts
            if any(map(attempt.is_due, work.validations)):
                metrics |= selection.keep_if_best(attempt, iteration=iteration + 1)
            attempt.finish_step(
                metrics,
                num_tokens=int(scored.sampled.sequences.attention_mask.sum()),
                headline="reverse_kl",
            )
        selection.put_back_best(attempt)

    # 5. Measure the best student against its beginning and its teacher
    scored = selection.respond(test, num_samples=num_tests)
    measured = selection.describe(scored)
    compared = compare(pair, scored, attempt.state, job)
    written = write_policy(job, student.causal_lm, codec.tokenizer)
    return _result(job, measured, compared, attempt.state, written, encoding)


def _result(
    job: StageJob[ResolvedDistillation],
    measured: Measured,
    compared: Mapping[str, Estimate],
    state: DistillationState,
    written: Written,
    encoding: Mapping[str, float],
) -> StageResult:
    estimates = {**measured.estimates, **compared}
    return StageResult(
        metrics={
            **values_of(estimates),
            "reward_spread": measured.reward_spread,
            **kept_by(state, keeps_by_watch=job.work.keeps_by_watch),
            "best_iteration": state.best_iteration,
            **encoding,
        },
        uncertainty=uncertainty_of(estimates),
        tokenizer_digest=tokenizer_digest(job.output),
        base=written.base,
        same_as_base=written.same_as_base,
    )


def engine_of_teacher(
    job: StageJob[ResolvedDistillation], pair: Pair, codec: Codec, prompts: Prompts
) -> LocalEngine | ServedTeacher | None:
    """Return the engine of the teacher: a loop with as many responses at once as fit into memory, or its server.

    None: the recipe does not let the server sample.
    """
    if isinstance(pair.teacher, ServedTeacher):
        return pair.teacher.sampling_for(codec) if is_scored(job.work) else None
    work, policy = job.work, pair.held_teacher
    engine, _ = fit_to_memory(
        LocalEngine(policy, codec, work.rollout.limits(work.pass_limits), work.arithmetic),
        job,
        taken_by_reading(policy, codec, [prompts], work),
        device=policy.device,
        other="teacher",
    )
    return engine


def with_lead(
    state: DistillationState,
    selection: Selection,
    teacher: LocalEngine | ServedTeacher | None,
    job: StageJob[ResolvedDistillation],
    test: Prompts,
) -> DistillationState:
    """Return the state with the test scores of the student as it is, and of the teacher.

    Args:
        teacher: engine of the teacher; None: its server is not asked to sample, so the teacher has no scores.
    """
    work = job.work
    num_tests = work.test_samples or work.validation_samples
    initial = selection.respond(test, num_samples=num_tests)
    state = replace(state, initial_scores=tuple(initial.scores.total.double().tolist()))
    if teacher is None:
        return state
    policy = teacher.policy if isinstance(teacher, LocalEngine) else selection.models.policy
    of_teacher = replace(selection, models=replace(selection.models, policy=policy, engine=teacher))
    with progress.within("teacher"):
        best = of_teacher.respond(test, num_samples=num_tests)
    before, after = initial.scores.total.mean().item(), best.scores.total.mean().item()
    log.info("test score: student %.4g, teacher %.4g", before, after)
    if not after > before:
        log.warning(
            "the teacher scores no higher than the student before training: %s is undefined", LEAD_SHARE
        )
    return replace(state, teacher_scores=tuple(best.scores.total.double().tolist()))


def is_scored(work: ResolvedDistillation) -> bool:
    """Return whether the teacher's own responses to the test prompts are scored."""
    return work.teacher_server is None or work.teacher_server.sampled


def update(
    pair: Pair,
    optimizer: torch.optim.Optimizer,
    sampled: Sampled,
    job: StageJob[ResolvedDistillation],
    *,
    iteration: int,
) -> dict[str, float]:
    """Minimise the KL to the teacher, by all optimiser steps of one iteration; returns the means of their metrics."""
    limits = job.work.pass_limits
    taught = None if job.work.kl == "full" else teacher_logprobs(pair, sampled.sequences, limits)

    def accumulate(minibatch: Sampled, rows: list[int]) -> Accumulated:
        if taught is None:
            found = accumulate_reverse_kl(pair, minibatch.sequences, limits)
        else:
            found = accumulate_sampled_kl(pair, minibatch, taught[rows], limits)
        return Accumulated(found.logprobs, {"reverse_kl": found.reverse_kl, "entropy": found.entropy})

    return take_steps(pair.student, optimizer, sampled, job, iteration=iteration, accumulate=accumulate)


def compare(
    pair: Pair, scored: Scored, state: DistillationState, job: StageJob[ResolvedDistillation]
) -> dict[str, Estimate]:
    """Return the test scores before training and of the teacher, the share of its lead, and the KL to it (nats/token).

    The scores of a teacher behind a server that does not sample are unknown.
    """
    clusters = clusters_of(scored.sampled.prompts)
    initial, teacher = (
        torch.tensor(scores, dtype=torch.float64) for scores in (state.initial_scores, state.teacher_scores)
    )
    measure = measure_reverse_kl if job.work.kl == "full" else measure_sampled_kl
    of_teacher: dict[str, Estimate] = {}
    if is_scored(job.work):
        of_teacher = {
            "teacher_score": clustered_mean(teacher, clusters),
            LEAD_SHARE: lead_share(scored.scores.total, initial, teacher, clusters),
        }
    return {
        "initial_score": clustered_mean(initial, clusters),
        **of_teacher,
        "kl_to_teacher": measure(pair, scored.sampled.sequences, clusters, job.work.pass_limits),
    }


def _read(pair: Pair, batch: Sequences, job: StageJob[ResolvedDistillation]) -> LogProbs:
    """Return what one pass of the student computes, with a teacher beside it where the KL is exact."""
    if job.work.kl == "full":
        return pair.student.logprobs(batch, temperature=1.0, reference=pair.held_teacher)
    return pair.student.logprobs(batch, temperature=1.0, with_entropy=True)
