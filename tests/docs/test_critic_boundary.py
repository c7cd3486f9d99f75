"""The formulas of docs/critic_boundary/study equal hand-worked cases and plain autograd, and its page equals its data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from docs.critic_boundary.study.gradients import (
    LAST_BLOCK,
    all_gradients,
    last_block_gradients,
    last_block_scores,
    squared_norms,
)
from docs.critic_boundary.study.report import tables_of
from docs.critic_boundary.study.summary import summary
from docs.critic_boundary.study.variance import (
    covariance_trace,
    crossing,
    gradient_moments,
    jackknife_error,
    judge_baseline,
    variance_ratio,
)
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences, collate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "critic_boundary"
TEMPERATURE = 0.7
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}
"""Of float32; a fault in a formula would show in the first digits."""


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    return PolicyModel(LlamaForCausalLM(config).eval())


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    return collate([[1, 3], [1, 4, 5]], [[6, 7, 2], [8, 2]], pad_token_id=0)


def gradients_by_hand(policy: PolicyModel, coefficients: Tensor, names: tuple[str, ...] | None) -> Tensor:
    """Return ∇ Σ c·log softmax(logits / T) for the two sequences one at a time, without padding."""
    policy.zero_grad()
    total = torch.zeros(())
    taken = 0
    for prompt, response in (([1, 3], [6, 7, 2]), ([1, 4, 5], [8, 2])):
        logits = policy.causal_lm(input_ids=torch.tensor([[*prompt, *response]])).logits[0] / TEMPERATURE
        for place, token in enumerate(response):
            logprob = torch.log_softmax(logits[len(prompt) - 1 + place], dim=0)[token]
            total = total + coefficients[taken] * logprob
            taken += 1
    total.backward()
    if names is None:
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    mlp = policy.causal_lm.model.layers[-1].mlp
    return torch.cat([getattr(mlp, name).weight.grad.flatten() for name in names])


def test_gradients_of_the_last_block_are_autograds(policy: PolicyModel, sequences: Sequences) -> None:
    coefficients = torch.randn(3, 5)
    scores = last_block_scores(policy, sequences, temperature=TEMPERATURE)
    found = last_block_gradients(scores, coefficients)
    for row, weights in zip(found, coefficients, strict=True):
        torch.testing.assert_close(row, gradients_by_hand(policy, weights, LAST_BLOCK), **ROUNDING)


def test_squared_norms_are_those_of_each_tokens_own_gradient(
    policy: PolicyModel, sequences: Sequences
) -> None:
    scores = last_block_scores(policy, sequences, temperature=TEMPERATURE)
    expected = [gradients_by_hand(policy, one, LAST_BLOCK).square().sum() for one in torch.eye(5)]
    torch.testing.assert_close(squared_norms(scores), torch.stack(expected), **ROUNDING)


def test_gradients_of_all_parameters_are_autograds(policy: PolicyModel, sequences: Sequences) -> None:
    coefficients = torch.randn(2, 5)
    found = all_gradients(policy, sequences, coefficients, temperature=TEMPERATURE)
    for row, weights in zip(found, coefficients, strict=True):
        torch.testing.assert_close(row, gradients_by_hand(policy, weights, None), **ROUNDING)
    assert all(parameter.requires_grad for parameter in policy.parameters())


def test_trace_and_jackknife_are_those_of_the_gradients_themselves() -> None:
    rng = np.random.default_rng(3)
    above, below = rng.normal(2.0, 3.0, size=(7, 4)), rng.normal(size=(7, 4))
    first, second = (gradient_moments(torch.tensor(each)) for each in (above, below))
    assert covariance_trace(first) == pytest.approx(above.var(axis=0, ddof=1).sum())

    def ratio(rows: list[int]) -> float:
        traces = [each[rows].var(axis=0, ddof=1).sum() for each in (above, below)]
        return float(traces[0] / traces[1])

    assert variance_ratio(first, second) == pytest.approx(ratio(list(range(7))))
    without = np.array([ratio([row for row in range(7) if row != left_out]) for left_out in range(7)])
    error = np.sqrt(6 / 7 * ((without - without.mean()) ** 2).sum())
    assert jackknife_error(first, second) == pytest.approx(error)


def test_a_variance_needs_two_gradients() -> None:
    with pytest.raises(ValueError, match="needs two gradients or more, and here are 1"):
        covariance_trace(gradient_moments(torch.ones(1, 3)))


def test_the_best_critic_can_raise_the_variance_of_the_gradient() -> None:
    """In the page's example half of all tokens follow a slip: their return is −1 and their choice is certain, so their
    score s is 0. The others are right with probability 0.9: s = 0.1 and G = 1, or s = −0.9 and G = −1.

    The best critic predicts −1 and 0.8. Its explained variance is 1 − 0.18 / 0.99, and yet its E[s²·A²] is
    ½·(0.9·0.01·0.2² + 0.1·0.81·1.8²) = 0.1314. With the mean −0.1 as baseline it is only
    ½·(0.9·0.01·1.1² + 0.1·0.81·0.9²) = 0.03825.
    """
    returns = torch.tensor([-1.0] * 1000 + [1.0] * 900 + [-1.0] * 100)
    score = torch.tensor([0.0] * 1000 + [0.1] * 900 + [-0.9] * 100)
    critic = torch.tensor([-1.0] * 1000 + [0.8] * 1000)
    found = judge_baseline(returns - critic, returns, returns - returns.mean(), score.square())
    assert found.explained_variance == pytest.approx(1 - 0.18 / 0.99, abs=1e-6)
    assert found.explained_mse == pytest.approx(1 - 0.18 / 0.99, abs=1e-6)
    assert found.explained_weighted == pytest.approx(1 - 0.1314 / 0.03825, abs=1e-5)
    # one token a rollout: the variance of s·A itself, whose mean is 0.09 with either baseline
    variances = [(score * each).var(correction=0) for each in (returns - critic, returns - returns.mean())]
    assert (variances[0] / variances[1]).item() == pytest.approx(
        (0.1314 - 0.0081) / (0.03825 - 0.0081), rel=1e-4
    )


def test_only_two_of_the_measures_see_a_bias() -> None:
    returns = torch.tensor([1.0, -1.0, 1.0, -1.0])
    values = torch.tensor([0.5, -0.5, 0.5, -0.5]) + 2.0
    found = judge_baseline(returns - values, returns, returns, torch.tensor([1.0, 1.0, 0.0, 0.0]))
    # A = −1.5 and −2.5: variance 0.25, mean square 4.25
    assert found.explained_variance == pytest.approx(0.75)
    assert found.explained_mse == pytest.approx(1 - 4.25)
    assert found.explained_weighted == pytest.approx(1 - 4.25)


def test_a_crossing_lies_on_the_line_between_its_neighbours() -> None:
    assert crossing([0.5, 0.0, -0.5], [0.5, 1.5, 3.0]) == pytest.approx(0.25)
    assert crossing([-0.5, 0.5, 0.0], [3.0, 0.5, 1.5]) == pytest.approx(0.25)
    assert crossing([0.5, 0.0], [1.2, 1.5]) is None


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(PAGE.glob("seed-*.json"))]


def test_the_pages_tables_are_those_of_its_data(measured: list[dict[str, Any]]) -> None:
    page = (PAGE / "README.md").read_text().splitlines()
    written = [line for line in page if line.startswith("|")]
    more = [json.loads(path.read_text()) for path in sorted(PAGE.glob("all-parameters-*.json"))]
    computed = summary(tables_of(measured, more)).splitlines()
    assert len(written) > 30
    assert [line for line in written if line not in computed] == []


def test_the_headline_recomputed_from_the_gradients_moments_alone(measured: list[dict[str, Any]]) -> None:
    """The ratios of variances of the oracle and of the pretrained critic follow by hand from ‖g_r‖² and ⟨g_r, ḡ⟩."""
    page = " ".join((PAGE / "README.md").read_text().split())
    for critic in ("pretrained", "oracle"):
        ratios = []
        for seed in measured:
            [arm] = [arm for arm in seed["arms"] if arm["family"] == "critic" and arm["critic"] == critic]
            above, below = (
                sum(each["squared_norms"]) - sum(each["products"]) for each in (arm, seed["arms"][0])
            )
            ratios.append(above / below)
        half = scipy.stats.t.ppf(0.975, len(ratios) - 1) * scipy.stats.sem(ratios)
        assert f"{np.mean(ratios):.2f} ± {half:.2f}" in page
