"""A critic's artifact always has a diagnosis, and its numbers are right."""

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tasks.small_models import models_of
from vantage.algorithms.rewards import RunningMoments
from vantage.models.heads import load_critic
from vantage.schemas.kinds import KINDS
from vantage.schemas.metric_names import DOUBLING_TOKENS
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.critic_diagnosis import CriticDiagnosis
from vantage.schemas.records.verdicts import check_gate
from vantage.tasks.rollout.critic_diagnosis import (
    diagnose_critic,
    diagnosis_estimates,
    diagnosis_metrics,
    uncertainty_of_diagnosis,
    write_diagnosis,
)
from vantage.tasks.rollout.response_source import load_source
from vantage.tasks.rollout.returns import measured_responses
from vantage.tasks.rollout.value_measures import predict

Batch = tuple[Tensor, Tensor, Tensor, list[str]]


def batch(seed: int = 0, *, responses: int = 4) -> Batch:
    """Return four prompts, each with some responses of 1 to 12 tokens; NaN behind their ends."""
    generator = torch.Generator().manual_seed(seed)
    rows = 4 * responses
    lengths = torch.randint(1, 13, (rows,), generator=generator)
    mask = torch.arange(12) < lengths[:, None]
    values, returns = (
        torch.where(mask, torch.randn(rows, 12, generator=generator), math.nan) for _ in range(2)
    )
    return values, returns, mask, [f"prompt {row % 4}" for row in range(rows)]


def diagnosed(*of: Any) -> CriticDiagnosis:
    return diagnose_critic(*of, iterations=4, best_iteration=2)


def test_the_file_says_what_the_artifacts_metrics_say(pipeline: Any) -> None:
    diagnosis = CriticDiagnosis.model_validate_json(
        (pipeline.folder("value") / "diagnosis.json").read_bytes()
    )
    metrics, uncertainty = pipeline.metrics("value"), pipeline.result("value").uncertainty
    for name, each in diagnosis_estimates(diagnosis).items():
        assert (metrics[name] is None) is (each.value is None)
        assert metrics[name] is None or metrics[name] == pytest.approx(each.value, rel=1e-9)
        assert (uncertainty[name].n, uncertainty[name].standard_error) == (each.n, each.standard_error)
    assert (diagnosis.iterations, diagnosis.best_iteration) == (4, metrics["best_iteration"])
    assert metrics["value_mse"] / metrics["constant_mse"] == pytest.approx(metrics["squared_advantage_ratio"])


def test_it_is_that_of_the_kept_critic_on_the_test_rollout(pipeline: Any) -> None:
    """The stored diagnosis is that of the kept critic on the test rollout."""
    job = pipeline.job("value")
    models = models_of(job, role="policy", reference=job.inputs["policy"])
    held_out = measured_responses(load_source(job, models), RunningMoments(), "test")
    predicted = predict(load_critic(pipeline.folder("value"), seed=0), held_out, models).double()
    mask, returns = held_out.rollout.sequences.response_mask, held_out.returns.double()
    diagnosis = CriticDiagnosis.model_validate_json(
        (pipeline.folder("value") / "diagnosis.json").read_bytes()
    )
    assert (diagnosis.responses, diagnosis.tokens) == (len(mask), int(mask.sum()))
    assert diagnosis.prompts == len(set(held_out.rollout.sampled.prompts))
    error = (predicted - returns)[mask]
    assert diagnosis.bias.value == pytest.approx(error.mean().item(), rel=1e-5)
    assert diagnosis.advantages.critic.value == pytest.approx(error.square().mean().item(), rel=1e-5)
    lengths = mask.sum(dim=1)
    for each in diagnosis.by_tokens_left:
        low, _, high = each.label.partition("-")
        left = lengths[:, None] - torch.arange(mask.shape[1])
        there = mask & (left >= int(low)) & (left <= int(high or low))
        explained = 1 - (predicted - returns)[there].var(correction=0) / returns[there].var(correction=0)
        assert each.explained_variance.value == pytest.approx(explained.item(), rel=1e-4)
        assert each.tokens == int(there.sum())


def test_metrics_are_named_as_the_table_names_them() -> None:
    diagnosis = diagnosed(*batch())
    names = diagnosis_estimates(diagnosis).keys()
    assert names <= set(KINDS["value_pretraining"].estimates)
    assert {f"explained_variance_length_{tokens}" for tokens in DOUBLING_TOKENS[:4]} <= names
    assert {"explained_variance_tenth_10", "explained_variance_hardest", "rank_correlation"} <= names
    assert diagnosis_metrics(diagnosis).keys() == {
        *KINDS["value_pretraining"].estimates,
        "calibration_error",
    }
    assert uncertainty_of_diagnosis(diagnosis).keys() == names


def test_the_order_of_responses_is_read_half_way_through_each() -> None:
    """Kendall's τ is computed from every pair of responses to a prompt, at token ⌊L/2⌋ of each; at the last token it is
    another.
    """
    values, returns, mask, prompts = batch(7)
    lengths = mask.sum(dim=1).tolist()

    def tau(places: list[int]) -> float:
        agreeing = pairs = 0.0
        for first, second in combinations(range(len(prompts)), 2):
            if prompts[first] == prompts[second]:
                found, predicted = (
                    float(each[first, places[first]] - each[second, places[second]])
                    for each in (returns, values)
                )
                pairs += found != 0
                agreeing += math.copysign(1.0, found) * math.copysign(1.0, predicted) * (found != 0)
        return agreeing / pairs

    measured = diagnosis_metrics(diagnosed(values, returns, mask, prompts))["rank_correlation"]
    assert measured == pytest.approx(tau([length // 2 for length in lengths]))
    assert measured != pytest.approx(tau([length - 1 for length in lengths]))
    assert measured != pytest.approx(tau([0] * len(lengths)))


def test_the_longest_responses_have_the_last_name() -> None:
    mask = torch.ones(2, 2**16, dtype=torch.bool)
    diagnosis = diagnosed(torch.zeros(2, 2**16), torch.randn(2, 2**16), mask, ["a", "b"])
    assert "explained_variance_length_65536" in diagnosis_estimates(diagnosis)


def test_a_gate_on_a_bin_that_no_response_is_in_is_closed() -> None:
    diagnosis = diagnosed(*batch())
    metrics, uncertainty = diagnosis_metrics(diagnosis), uncertainty_of_diagnosis(diagnosis)
    for confidence in (None, 0.9):
        gate = Gate(metric="explained_variance_tokens_left_64_127", at_least=-1e9, confidence=confidence)
        verdict = check_gate(gate, metrics, uncertainty)
        assert not verdict.passed and verdict.measured is None
    present = Gate(metric="explained_variance_tokens_left_2_3", at_least=-1e9)
    assert check_gate(present, metrics, uncertainty).passed


@pytest.mark.parametrize(
    "change",
    [
        lambda v, g, m, p: (v, torch.ones_like(g), m, p),
        lambda v, g, m, p: (torch.zeros_like(v), g, m, p),
        lambda v, g, m, p: (g, g, m, p),
        lambda v, g, m, p: (v, g, m, [f"{row}" for row in range(len(p))]),
        lambda v, g, m, p: (v, g, m, ["one"] * len(p)),
        lambda v, g, m, p: (v[:1], g[:1], m[:1], p[:1]),
        lambda v, g, m, p: (v[:1, :1], g[:1, :1], torch.ones(1, 1).bool(), p[:1]),
    ],
    ids=["equal returns", "constant", "perfect", "alone", "one prompt", "one response", "one token"],
)
def test_there_is_always_a_file_and_never_a_nan(change: Any, tmp_path: Path) -> None:
    diagnosis = diagnosed(*change(*batch(3)))
    write_diagnosis(tmp_path, diagnosis)
    text = (tmp_path / "diagnosis.json").read_text()
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert CriticDiagnosis.model_validate_json(text) == diagnosis
    assert all(each is None or math.isfinite(each) for each in diagnosis_metrics(diagnosis).values())


def test_a_critic_stands_beside_the_batch_s_mean_and_that_of_the_other_responses() -> None:
    """Two prompts have two responses of one token each, with returns 1, 3 and 10, 14. The critic is wrong by 2.

    The batch's mean of 7 leaves squared errors of 36, 16, 9 and 49, whose mean is 27.5. The other response to the
    prompt leaves 4, 4, 16 and 16, whose mean is 10.
    """
    returns = torch.tensor([[1.0], [3.0], [10.0], [14.0]])
    mask = torch.ones(4, 1, dtype=torch.bool)
    found = diagnosed(returns + 2, returns, mask, ["a", "a", "b", "b"]).advantages
    assert found.others_mean is not None and found.ratio is not None
    measured = (found.critic, found.batch_mean, found.others_mean, found.ratio)
    assert [each.value for each in measured] == pytest.approx([4, 27.5, 10, 4 / 27.5])


def test_equal_returns_and_single_responses_leave_numbers_undefined() -> None:
    values, returns, mask, prompts = batch()
    equal = diagnosis_metrics(diagnosed(values, torch.full_like(returns, 0.1), mask, prompts))
    assert {name for name, value in equal.items() if value is not None} == {
        "value_bias",
        "value_mse",
        "others_mean_mse",
        "calibration_error",
    }
    alone = diagnosed(values, returns, mask, [f"{row}" for row in range(len(prompts))])
    assert alone.within_prompts is None and alone.advantages.others_mean is None
    assert alone.orderings == () and alone.by_difficulty == ()
    assert alone.explained_variance.value is not None


def test_the_worst_prompts_are_named_with_the_largest_share_first() -> None:
    returns = torch.zeros(12, 1)
    values = torch.arange(12.0)[:, None]
    diagnosis = diagnosed(values, returns, torch.ones(12, 1).bool(), [f"p{row}" * 200 for row in range(12)])
    assert len(diagnosis.worst_prompts) == 10
    worst = diagnosis.worst_prompts[0]
    assert worst.prompt == ("p11" * 200)[:300]
    assert worst.share == pytest.approx(121 / sum(each**2 for each in range(12)))
    assert [each.squared_error for each in diagnosis.worst_prompts] == [each**2 for each in range(11, 1, -1)]
