"""The gradient of policy stages whose responses another policy sampled equals one computed by response in float64.

The expected gradient uses only what the stage was given: the ids, the sampler's log-probabilities as the engine
returned them, and the scores.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tasks import oracle_networks as nets
from tests.tasks import oracle_surrogates as surrogates
from tests.tasks.oracle_rollouts import discounted, token_rewards
from tests.tasks.oracle_sums import gae, standardised
from tests.tasks.test_presets_run import BATCH, Case, job_of, preset
from tests.tasks.test_rollout_correction import sampled_by_another, updates_behind
from vantage.models.sampling import Samples
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout.engine import LocalEngine
from vantage.tasks.stages import run_stage
from vantage.tasks.updates import gathering, policy_update

pytestmark = pytest.mark.slow

TEMPERATURE, ITERATIONS = 0.7, 3
LIMIT = 12
"""Most tokens of a response in ``job_of``."""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "returns to go, every token truncated": (
        preset(
            "reinforce_pp",
            gamma=0.9,
            kl_coef=0.1,
            samples_per_prompt=2,
            rollout_correction="tis",
            aggregation="sequence",
        ),
        {"minibatch_size": 4, "microbatch_size": 3},
    ),
    "returns to go, tokens masked on both sides": (
        preset(
            "reinforce_pp",
            gamma=0.9,
            kl_coef=0.1,
            samples_per_prompt=2,
            rollout_correction={"action": "mask", "low": 0.9, "high": 1.1},
            aggregation="token",
        ),
        {"minibatch_size": 4, "microbatch_size": 3},
    ),
    "groups, whole responses masked and cut-off ones filtered": (
        preset(
            "grpo",
            kl_loss_coef=0.0,
            overlong_filter=True,
            rollout_correction={"action": "mask", "ratio_of": "sequence", "low": 0.85, "high": 1.15},
            aggregation="sequence",
        ),
        {"minibatch_size": 8, "microbatch_size": 3},
    ),
    "groups, geometric means truncated, over all tokens that there could be": (
        preset(
            "dr_grpo",
            rollout_correction={
                "action": "truncate",
                "ratio_of": "sequence_mean",
                "low": 0.99,
                "high": 1.01,
            },
        ),
        {"minibatch_size": 4, "microbatch_size": 1},
    ),
    "a critic, tokens masked": (
        preset(
            "ppo",
            gamma=0.95,
            lambda_policy=0.8,
            kl_coef=0.1,
            samples_per_prompt=2,
            clip_range_low=0.001,
            clip_range_high=0.002,
            rollout_correction={"action": "mask", "low": 0.92, "high": 1.1},
        ),
        {"minibatch_size": 4, "microbatch_size": 3},
    ),
    "a weight that is clipped": (
        preset("cispo", drop_uniform_groups=False, rollout_correction={"action": "mask", "high": 1.05}),
        {"minibatch_size": 4, "microbatch_size": 3},
    ),
    "a ratio of whole responses": (
        preset("gspo", rollout_correction={"action": "mask", "low": 0.9, "high": 1.1}),
        {"minibatch_size": 4, "microbatch_size": 3},
    ),
    "a soft gate": (
        preset(
            "sapo", kl_loss_coef=0.0, rollout_correction={"action": "truncate", "low": 0.99, "high": 1.005}
        ),
        {"minibatch_size": 4, "microbatch_size": 3},
    ),
}


@dataclass
class Step:
    """One optimiser step as the stage took it, with what it was computed from."""

    now: nn.Module
    old: nn.Module
    rows: list[int]
    gradients: dict[str, Tensor]
    rollout: Any
    values: Tensor | None


def two_updates_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled_by_another(monkeypatch, updates_behind(2))


def rounded_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let training rollouts be sampled from logits that are rounded to bfloat16."""
    generate = LocalEngine.generate

    def rounded(self: LocalEngine, *args: Any, **named: Any) -> Samples:
        head = self.policy.causal_lm.get_output_embeddings()
        hook = head.register_forward_hook(lambda _, __, logits: logits.bfloat16().float())
        try:
            return generate(self, *args, **named)
        finally:
            hook.remove()

    monkeypatch.setattr(LocalEngine, "generate", rounded)


SAMPLERS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "two updates behind": two_updates_behind,
    "logits in bfloat16": rounded_logits,
}


def recorded(
    job: StageJob[Any], sampler: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Step], list[Samples]]:
    """Return the stage's optimiser steps, and what its engine returned for each rollout."""
    steps: list[Step] = []
    drawn: list[Samples] = []
    SAMPLERS[sampler](monkeypatch)
    monkeypatch.setattr(gathering, "compare_with_sampler", lambda *_, **__: {})
    generate, step_all, update = LocalEngine.generate, policy_update.step_all, policy_update.update
    before: list[nn.Module] = []

    def generated(self: LocalEngine, *args: Any, **named: Any) -> Samples:
        drawn.append(generate(self, *args, **named))
        return drawn[-1]

    def double(model: nn.Module) -> nn.Module:
        return copy.deepcopy(model).double().requires_grad_(True)

    def updated(networks: Any, rollout: Any, estimates: Any, *args: Any, **named: Any) -> Any:
        before[:] = [double(networks.policy.causal_lm)]
        return update(networks, rollout, estimates, *args, **named)

    def stepped(networks: Any, learning: Any, minibatch: Any, *args: Any, **named: Any) -> Any:
        model = networks.policy.causal_lm
        steps.append(
            Step(
                double(model),
                before[0],
                minibatch.rows.tolist(),
                {name: each.grad.double().clone() for name, each in model.named_parameters()},
                minibatch.rollout,
                minibatch.estimates.old_values,
            )
        )
        return step_all(networks, learning, minibatch, *args, **named)

    monkeypatch.setattr(LocalEngine, "generate", generated)
    monkeypatch.setattr("vantage.tasks.policy_optimization.update", updated)
    monkeypatch.setattr(policy_update, "step_all", stepped)
    run_stage(job)
    return steps, drawn


def weights_and_kept(ratios: Sequence[Tensor], correction: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weight of each token, and whether it is learnt from."""
    low, high = correction.low or 0.0, correction.high or float("inf")
    weights, kept = [], []
    for ratio in ratios:
        w = ratio
        if correction.ratio_of == "sequence":
            w = torch.full_like(ratio, ratio.prod().item())
        if correction.ratio_of == "sequence_mean":
            w = torch.full_like(ratio, ratio.prod().item() ** (1 / len(ratio)))
        inside = (w >= low) & (w <= high)
        is_mask = correction.action == "mask"
        weights.append(w if is_mask else w.clamp(low, high))
        kept.append(inside if is_mask else torch.ones_like(inside))
    return weights, kept


def of_each(scores: Sequence[float], group: int, a: Algorithm) -> list[float]:
    found: list[float] = []
    for start in range(0, len(scores), group):
        own = torch.tensor(scores[start : start + group], dtype=torch.float64)
        better = own - own.mean()
        found += (better if a.advantage == "group_mean" else better / (own.std() + 1e-6)).tolist()
    return found


def responses_of(step: Step) -> list[list[int]]:
    read = step.rollout.sequences
    return [
        row[:length] for row, length in zip(read.response_ids.tolist(), read.lengths.tolist(), strict=True)
    ]


@dataclass
class Exact:
    gradients: dict[str, Tensor]
    left_out: int
    """Tokens of the step that the correction leaves out."""
    gap: float
    """Largest |Δ| of a token's log-probability to the sampler's."""


def exact(step: Step, samples: Samples, reference: nn.Module, a: Algorithm) -> Exact:
    """Return the gradient of the step's loss in float64."""
    read, responses, ended = step.rollout.sequences, samples.responses, samples.ended
    prompts = [
        ids[:length]
        for ids, length in zip(read.input_ids.tolist(), read.prompt_lengths.tolist(), strict=True)
    ]

    def said(model: Any) -> list[Tensor]:
        return nets.of_tokens(nets.distributions(model, prompts, responses, TEMPERATURE), responses)

    with torch.no_grad():
        old, of_reference = said(step.old), said(reference)
    sampler = [torch.tensor(row, dtype=torch.float64) for row in samples.logprobs]
    weights, kept = weights_and_kept(
        [(p - q).exp() for p, q in zip(old, sampler, strict=True)], a.rollout_correction
    )
    learns = [k & torch.tensor(end or not a.overlong_filter) for k, end in zip(kept, ended, strict=True)]
    scores = step.rollout.scaled_scores.double().tolist()
    rewards = token_rewards(scores, [p - q for p, q in zip(old, of_reference, strict=True)], a.kl_coef)
    if a.advantage == "returns_to_go":
        advantages = [discounted(each, a.gamma) for each in rewards]
    elif a.advantage == "gae":
        own = [row[: len(ids)].double() for row, ids in zip(step.values, responses, strict=True)]  # type: ignore[arg-type]
        advantages = [gae(r, v, a.gamma, a.lambda_policy) for r, v in zip(rewards, own, strict=True)]
    else:
        totals = of_each([each.sum().item() for each in rewards], a.samples_per_prompt, a)
        advantages = [torch.full_like(p, each) for p, each in zip(old, totals, strict=True)]
    if a.whiten_advantages:
        learnt = torch.cat([each[mask] for each, mask in zip(advantages, learns, strict=True)])
        advantages = standardised(advantages, learnt)

    new, losses = said(step.now), []
    for row in step.rows:
        mask = learns[row]
        if mask.any():
            weighted = (advantages[row] * weights[row])[mask]
            losses.append(surrogates.of_response(new[row][mask], old[row][mask], weighted, a))
    total = (
        {
            "token": lambda: torch.cat(losses).mean(),
            "sequence": lambda: torch.stack([each.mean() for each in losses]).mean(),
            "constant": lambda: torch.cat(losses).sum() / (LIMIT * len(step.rows)),
        }[a.aggregation]()
        if losses
        else new[0].sum() * 0
    )
    names = dict(step.now.named_parameters())
    found = torch.autograd.grad(total, list(names.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(each) if grad is None else grad
        for (name, each), grad in zip(names.items(), found, strict=True)
    }
    left_out = sum(int((~kept[row]).sum()) for row in step.rows)
    gap = max(float((p - q).abs().max()) for p, q in zip(old, sampler, strict=True))
    return Exact(gradients, left_out, gap)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_every_step_is_the_exact_one(
    name: str, sampler: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, work = CASES[name]
    work = {"iterations": ITERATIONS, "learning_rate": 5e-4, "validate_every": 100, **work}
    job = job_of(Case(algorithm, work), pipeline, tmp_path)
    job = job.model_copy(
        update={"generation": job.generation.model_copy(update={"temperature": TEMPERATURE})}
    )
    steps, drawn = recorded(job, sampler, monkeypatch)
    assert len(steps) == ITERATIONS * BATCH // work["minibatch_size"]
    a, left_out, gaps = job.work.algorithm, 0, []
    reference = nets.language_model(job.inputs["reference"])
    for number, step in enumerate(steps):
        [samples] = [each for each in drawn if each.responses == responses_of(step)]
        found = exact(step, samples, reference, a)
        left_out += found.left_out
        gaps.append(found.gap)
        size = torch.cat([each.flatten() for each in found.gradients.values()]).norm()
        difference = [(step.gradients[key] - each).flatten() for key, each in found.gradients.items()]
        error = torch.cat(difference).norm()
        print(number, found.left_out, found.gap, float(size), float(error / size))
        assert error <= 1e-4 * size + 1e-7, number
    assert max(gaps) > 1e-4, "another policy sampled"
    if sampler == "two updates behind":
        assert bool(left_out) == (a.rollout_correction.action == "mask")
