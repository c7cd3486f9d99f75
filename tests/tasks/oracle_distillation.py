"""Compute a whole distillation in float64, written from the formulas alone: see ``oracle_stages``."""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.tasks import oracle_networks as nets
from tests.tasks import oracle_rollouts as rolls
from tests.tasks.oracle_networks import Optimizer
from tests.tasks.oracle_rollouts import Batch, mean
from tests.tasks.oracle_stages import Metrics, Outcome
from vantage.schemas.recipe.resolved import ResolvedDistillation
from vantage.schemas.records.job import StageJob


def distillation(job: StageJob[ResolvedDistillation]) -> Outcome:
    work, student = job.work, nets.language_model(job.inputs["init"])
    teacher = nets.language_model(job.inputs["teacher"])
    optimizer = Optimizer(student, work.weight_decay, work.max_grad_norm)
    before = nets.state_of(student)
    train, validation, test = (rolls.questions(job, split) for split in ("train", "validation", "test"))

    def asked(model: LlamaForCausalLM, questions: rolls.Questions, count: int, stream: str) -> Batch:
        indices = rolls.asked_again(questions, count)
        return rolls.sample_and_score(job, model, questions, indices, seed=nets.stream(job, stream))

    def validated() -> float:
        return mean(asked(student, validation, work.validation_samples, "validation sampling").scores)

    tests = work.test_samples or work.validation_samples
    initial, taught = (asked(model, test, tests, "test sampling") for model in (student, teacher))
    best, best_iteration, weights = validated(), 0, before
    journal: list[Metrics] = []
    for iteration in range(work.iterations):
        indices = rolls.prompts_of_iteration(
            job, iteration, group=work.samples_per_prompt, count=len(train.ids)
        )
        seed = nets.stream(job, "sampling", iteration)
        batch = rolls.sample_and_score(job, student, train, indices, seed=seed)
        with torch.no_grad():
            old = rolls.logprobs_of(student, batch, job.generation.temperature)
        cut = [rows for epoch in rolls.minibatches(job, iteration, len(batch)) for rows in epoch]
        steps = []
        for number, rows in enumerate(cut):
            kl, entropy = per_token(job, student, teacher, batch, rows)
            loss = kl.mean()
            if work.kl == "sampled":
                log_ratio, logprobs = sampled_log_ratio(job, student, teacher, batch, rows)
                weighted = (logprobs.detach() - torch.cat([old[row] for row in rows])).exp() * log_ratio
                loss = weighted.mean()
                (weighted * logprobs).mean().backward()  # the score function's gradient of the KL
            else:
                loss.backward()
            step, total = iteration * len(cut) + number, work.iterations * len(cut)
            rate = nets.learning_rate(work, step, total)
            norm = optimizer.step(optimizer.gradients(), rate)
            steps.append({"reverse_kl": loss.item(), "entropy": entropy.mean().item(), "grad_norm": norm})
        metrics = {name: mean([each[name] for each in steps]) for name in steps[0]}
        metrics |= {"learning_rate": rate, "score_mean": mean(batch.scores)}
        if (iteration + 1) % work.validate_every == 0 or iteration + 1 == work.iterations:
            metrics["validation_score"] = validated()
            if metrics["validation_score"] > best:
                best, best_iteration = metrics["validation_score"], iteration + 1
                weights = nets.state_of(student)
        journal.append(metrics)
    last = nets.state_of(student)
    student.load_state_dict(weights)
    final = asked(student, test, tests, "test sampling")
    with torch.no_grad():
        kl, _ = per_token(job, student, teacher, final, range(len(final)))
        if work.kl == "sampled":
            kl, _ = sampled_log_ratio(job, student, teacher, final, range(len(final)))
    lead = mean(taught.scores) - mean(initial.scores)
    measured = {
        "validation_score": best,
        "test_score": mean(final.scores),
        "initial_score": mean(initial.scores),
        "teacher_score": mean(taught.scores),
        "teacher_lead_share": (mean(final.scores) - mean(initial.scores)) / lead,
        "kl_to_teacher": kl.mean().item(),
        "best_iteration": best_iteration,
    }
    return Outcome(weights, before, journal, measured, last)


def per_token(
    job: StageJob, student: LlamaForCausalLM, teacher: LlamaForCausalLM, batch: Batch, rows: range | list[int]
) -> tuple[Tensor, Tensor]:
    """Return KL(student‖teacher) and the student's entropy at every token of some rows, one after another."""
    prompts, responses = [batch.prompts[i] for i in rows], [batch.responses[i] for i in rows]
    said = torch.cat(nets.distributions(student, prompts, responses, job.generation.temperature))
    with torch.no_grad():
        taught = torch.cat(nets.distributions(teacher, prompts, responses, job.generation.temperature))
    return (said.exp() * (said - taught)).sum(-1), -(said.exp() * said).sum(-1).detach()


def sampled_log_ratio(
    job: StageJob, student: LlamaForCausalLM, teacher: LlamaForCausalLM, batch: Batch, rows: range | list[int]
) -> tuple[Tensor, Tensor]:
    """Return, for the sampled tokens of some rows one after another, log π − log π_T without a gradient, and log π."""
    prompts, responses = [batch.prompts[i] for i in rows], [batch.responses[i] for i in rows]
    said = [
        torch.cat(
            nets.of_tokens(
                nets.distributions(model, prompts, responses, job.generation.temperature), responses
            )
        )
        for model in (student, teacher)
    ]
    return (said[0] - said[1]).detach(), said[0]
