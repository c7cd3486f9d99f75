"""Compute every loss of the stages ``dpo`` and ``kto`` from full logits in float64, one response at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.tasks import oracle_networks as nets
from tests.tasks import oracle_rollouts as rolls
from tests.tasks.oracle_stages import Metrics, Outcome, Rows, completions, fit, nll_of
from vantage.schemas.recipe.resolved import (
    ResolvedDirectPreferenceOptimization,
    ResolvedKahnemanTverskyOptimization,
)
from vantage.schemas.records.job import StageJob


def _pairs(job: StageJob[ResolvedDirectPreferenceOptimization], split: str) -> Rows:
    if job.work.rollouts is None:
        return completions(job, "data", split, ["chosen", "rejected"])
    found = Rows([], {"chosen": [], "rejected": []}, [])
    for batch in rolls.collected(job.inputs["rollouts"], split):
        if len(set(batch.scores)) > 1:
            found.prompts.append(batch.prompts[0])
            found.margins.append(0.0)
            for side, pick in (("chosen", max), ("rejected", min)):
                found.responses[side].append(batch.responses[batch.scores.index(pick(batch.scores))])
    return found


def direct_preference(job: StageJob[ResolvedDirectPreferenceOptimization]) -> Outcome:
    work, temperature = job.work, job.generation.temperature
    policy = nets.language_model(job.inputs["init"])
    free = work.loss in ("simpo", "orpo")
    reference = None if free else nets.language_model(job.inputs["reference"])
    splits = {s: _pairs(job, s) for s in ("train", "validation", "test")}
    before = nets.state_of(policy)

    def rewards(rows: Rows, indices: Sequence[int], side: str) -> Tensor:
        """Return each response's β·(log π − log π_ref), for SimPO β·log π per token, and for ORPO the log odds."""
        found = []
        for i in indices:
            now = -nll_of(policy, rows, side, [i], temperature)
            if work.loss == "orpo":
                probability = now.mean().exp()
                found.append((probability / (1 - probability)).log())
                continue
            then = torch.zeros_like(now)
            if reference is not None:
                with torch.no_grad():
                    then = -nll_of(reference, rows, side, [i], temperature)
            is_mean = free or work.length_normalised
            found.append(work.beta * ((now - then).sum() / (len(now) if is_mean else 1)))
        return torch.stack(found)

    def losses_of(gaps: Tensor) -> Tensor:
        if work.loss == "ipo":
            return (gaps / work.beta - 1 / (2 * work.beta)) ** 2
        logits = gaps - (work.target_margin or 0.0)
        wrong = work.label_smoothing
        losses = (wrong - 1) * logsigmoid(logits) - wrong * logsigmoid(-logits)
        return work.beta * losses if work.loss == "orpo" else losses

    def loss_of(rows: Rows, indices: Sequence[int]) -> tuple[Tensor, Metrics]:
        gaps = rewards(rows, indices, "chosen") - rewards(rows, indices, "rejected")
        return losses_of(gaps).mean(), {
            "pair_accuracy": (gaps > 0).double().mean().item(),
            "reward_gap": gaps.mean().item(),
        }

    def in_training(indices: list[int]) -> tuple[Tensor, Metrics]:
        loss, metrics = loss_of(splits["train"], indices)
        nll = nll_of(policy, splits["train"], "chosen", indices, temperature).mean()
        return (loss + nll if work.loss == "orpo" else loss), {
            "train_pair_accuracy": metrics["pair_accuracy"],
            "reward_gap": metrics["reward_gap"],
            "chosen_nll": nll.item(),
        }

    journal = fit(job, policy, len(splits["train"].prompts), in_training)
    measured: Metrics = {}
    with torch.no_grad():
        for prefix, split in (("", "test"), ("validation_", "validation")):
            loss, metrics = loss_of(splits[split], range(len(splits[split].prompts)))
            found = {**metrics, "preference_loss": loss.item()}
            measured |= {prefix + name: value for name, value in found.items()}
    return Outcome(nets.state_of(policy), before, journal, measured)


def labelled_responses(job: StageJob[ResolvedKahnemanTverskyOptimization]) -> Outcome:
    """Compute KTO by the paper's sums. For z, a row takes the response of the nearest row before with another
    prompt."""
    work, temperature = job.work, job.generation.temperature
    policy, reference = (nets.language_model(job.inputs[role]) for role in ("init", "reference"))
    before = nets.state_of(policy)
    splits = {s: completions(job, "data", s, ["response"]) for s in ("train", "validation", "test")}
    labels = {s: [row["label"] for row in rolls.rows_of(job.inputs["data"], s)] for s in splits}

    def log_ratio(rows: Rows, index: int) -> Tensor:
        with torch.no_grad():
            then = -nll_of(reference, rows, "response", [index], temperature).sum()
        return -nll_of(policy, rows, "response", [index], temperature).sum() - then

    def reference_point(rows: Rows, indices: Sequence[int]) -> float:
        found = []
        for place, index in enumerate(indices):
            earlier = [indices[place - back] for back in range(1, len(indices))]
            other = next((i for i in earlier if rows.prompts[i] != rows.prompts[index]), None)
            if other is not None:
                mixed = Rows([rows.prompts[index]], {"response": [rows.responses["response"][other]]}, [0.0])
                with torch.no_grad():
                    found.append(log_ratio(mixed, 0).item())
        return max(0.0, sum(found) / len(found))

    def loss_of(split: str, indices: Sequence[int]) -> tuple[Tensor, Metrics]:
        rows, z = splits[split], reference_point(splits[split], indices)
        losses: list[Tensor] = []
        margins: dict[bool, list[float]] = {True: [], False: []}
        for index in indices:
            label = labels[split][index]
            margin = work.beta * (log_ratio(rows, index) - z) * (1 if label else -1)
            margins[label].append(margin.item())
            weight = work.desirable_weight if label else work.undesirable_weight
            losses.append(weight * (1 - torch.sigmoid(margin)))
        means = {
            name: sum(margins[label]) / len(margins[label])
            for name, label in (("desirable_margin", True), ("undesirable_margin", False))
            if margins[label]
        }
        return torch.stack(losses).mean(), {**means, "reference_point": z}

    journal = fit(job, policy, len(labels["train"]), lambda i: loss_of("train", i))
    measured: Metrics = {}
    with torch.no_grad():
        for prefix, split in (("", "test"), ("validation_", "validation")):
            loss, metrics = loss_of(split, range(len(labels[split])))
            measured |= {prefix + name: value for name, value in metrics.items()}
            measured[f"{prefix}kto_loss"] = loss.item()
    return Outcome(nets.state_of(policy), before, journal, measured)
