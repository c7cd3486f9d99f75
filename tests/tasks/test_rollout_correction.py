"""In policy stages whose responses another policy drew, each token has its weight, and the right tokens count."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tasks.test_presets_run import BATCH, Case, job_of, preset
from vantage.ledger.journal import read
from vantage.models.sampling import Samples
from vantage.tasks.rollout.engine import LocalEngine
from vantage.tasks.rollout.sampler_check import SamplerDisagrees
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.updates import gathering, policy_update
from vantage.tasks.updates.estimates import minibatch_advantages

ITERATIONS = 4


def updates_behind(count: int) -> Callable[[LocalEngine, list[dict[str, Any]]], dict[str, Any]]:
    """Sample from the weights of ``count`` updates ago."""
    return lambda engine, history: history[max(0, len(history) - 1 - count)]


def rounded_to_bfloat16(engine: LocalEngine, history: list[dict[str, Any]]) -> dict[str, Any]:
    """Sample from weights in bfloat16."""
    return {name: weight.bfloat16().float() for name, weight in history[-1].items()}


def sampled_by_another(monkeypatch: pytest.MonkeyPatch, choose: Callable[..., dict[str, Any]]) -> None:
    """Let the training rollouts of a stage be sampled by other weights than those that train."""
    generate, history = LocalEngine.generate, []

    def other(self: LocalEngine, *args: Any, greedy: bool = False, **named: Any) -> Samples:
        model = self.policy.causal_lm
        own = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
        history.append(own)
        model.load_state_dict(choose(self, history))
        try:
            return generate(self, *args, greedy=greedy, **named)
        finally:
            model.load_state_dict(own)

    monkeypatch.setattr(LocalEngine, "generate", other)


SAMPLERS = {
    "one update behind": updates_behind(1),
    "two updates behind": updates_behind(2),
    "bfloat16": rounded_to_bfloat16,
}
CORRECTIONS: dict[str, Any] = {
    "icepop": ("icepop", lambda w, lengths: (w, (w >= 0.5) & (w <= 2))),
    "tis": ("tis", lambda w, lengths: (np.minimum(w, 2), w > 0)),
    "narrow mask": (
        {"action": "mask", "low": 0.9995, "high": 1.0005},
        lambda w, lengths: (w, (w >= 0.9995) & (w <= 1.0005)),
    ),
    "sequence": (
        {"action": "truncate", "ratio_of": "sequence", "low": 0.9, "high": 1.05},
        lambda w, lengths: (np.clip(w.prod(1, keepdims=True), 0.9, 1.05) * np.ones_like(w), w > 0),
    ),
    "sequence mean, masked": (
        {"action": "mask", "ratio_of": "sequence_mean", "low": 0.9999, "high": 1.0001},
        lambda w, lengths: (
            (whole := w.prod(1, keepdims=True) ** (1 / lengths[:, None])) * np.ones_like(w),
            ((whole >= 0.9999) & (whole <= 1.0001)) * np.ones_like(w) > 0,
        ),
    ),
}


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_advantages_and_denominators_are_those_of_the_correction(
    sampler: str, correction: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputed in float64 from both log-probabilities of each sampled token, for every minibatch of the run.

    The clip bounds advantages, and not advantages times weights.
    """
    given, expected_of = CORRECTIONS[correction]
    case = Case(
        preset("ppo", rollout_correction=given, samples_per_prompt=2, gamma=0.97, advantage_clip=0.8),
        {
            "iterations": ITERATIONS,
            "learning_rate": 3e-3,
            "minibatch_size": BATCH // 2,
            "validate_every": 100,
        },
    )
    sampled_by_another(monkeypatch, SAMPLERS[sampler])
    monkeypatch.setattr(gathering, "compare_with_sampler", lambda *_, **__: {})
    minibatch_of, seen = policy_update.minibatch_of, []

    def checked(rollout: Any, estimates: Any, rows: Any, work: Any, **named: Any) -> Any:
        found = minibatch_of(rollout, estimates, rows, work, **named)
        mask = rollout.sequences.response_mask.numpy()
        ratios = np.exp((rollout.logprobs - rollout.sampled.sampler_logprobs).double().numpy())
        weights, is_in = expected_of(np.where(mask, ratios, 1.0), mask.sum(1))
        kept = mask & is_in
        assert (estimates.policy_mask.numpy() == kept).all()
        plain = minibatch_advantages(estimates.advantages[rows], estimates.policy_mask[rows], work.algorithm)
        picked = rows.numpy()
        np.testing.assert_allclose(
            found.advantages.numpy(), plain.numpy() * (weights * kept)[picked], rtol=1e-4, atol=1e-6
        )
        assert found.policy_denominator == max(kept[picked].sum(), 1)
        seen.append((np.abs(ratios[mask] - 1).max(), kept.sum() < mask.sum()))
        return found

    monkeypatch.setattr(policy_update, "minibatch_of", checked)
    run_stage(job := job_of(case, pipeline, tmp_path))
    assert max(furthest for furthest, _ in seen) > 1e-4, "another policy sampled"
    assert any(drops for _, drops in seen) or "mask" not in correction
    shares = [entry.metrics["importance_effective_share"] for entry in read(job.scratch / JOURNAL)]
    assert all(0 < share <= 1 + 1e-9 for share in shares) and min(shares) < 1 - 1e-9


def test_a_sampler_with_other_weights_is_still_refused(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correction is no excuse for weights that never arrived."""
    case = Case(preset("grpo", rollout_correction="icepop"), {"iterations": 3, "learning_rate": 3e-3})
    sampled_by_another(monkeypatch, updates_behind(1))
    with pytest.raises(SamplerDisagrees, match="sampler_gap="):
        run_stage(job_of(case, pipeline, tmp_path))


@pytest.mark.slow
def test_where_the_policy_itself_sampled_nothing_is_left_out(pipeline: Any, tmp_path: Path) -> None:
    """Ratios are 1 but for rounding, so the weights are those of a run without a correction."""
    plain = Case(preset("ppo"), {"iterations": 2})
    icepop = replace(plain, algorithm=preset("ppo", rollout_correction="icepop"))
    curves = []
    for name, case in (("plain", plain), ("icepop", icepop)):
        (tmp_path / name).mkdir()
        job = job_of(case, pipeline, tmp_path / name)
        run_stage(job)
        curves.append([entry.metrics for entry in read(job.scratch / JOURNAL)])
    for before, after in zip(*curves, strict=True):
        assert after["importance_capped"] == 0
        for name in ("policy_loss", "grad_norm_policy", "score_mean"):
            assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6)
