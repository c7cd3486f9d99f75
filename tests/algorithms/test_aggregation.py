import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.aggregation import aggregate, denominator_of

AGGREGATIONS = ["token", "sequence", "sequence_sum", "constant"]

PER_TOKEN = torch.tensor([[1.0, 2.0, 3.0], [10.0, math.nan, math.nan], [math.nan, math.nan, math.nan]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()


@pytest.mark.parametrize(
    ("aggregation", "denominator", "expected"),
    [
        ("token", 4, (1 + 2 + 3 + 10) / 4),
        ("sequence", 2, ((1 + 2 + 3) / 3 + 10 / 1) / 2),
        ("sequence_sum", 2, ((1 + 2 + 3) + 10) / 2),
        ("constant", 3 * 5, (1 + 2 + 3 + 10) / 15),
    ],
)
def test_the_four_aggregations_by_hand(aggregation, denominator, expected):
    assert denominator_of(MASK, aggregation=aggregation, max_length=5) == denominator
    measured = aggregate(PER_TOKEN, MASK, aggregation=aggregation, denominator=denominator)
    assert measured.item() == pytest.approx(expected)
    if aggregation != "constant":
        assert aggregate(PER_TOKEN, MASK, aggregation=aggregation, denominator=None).item() == measured.item()


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), aggregation=st.sampled_from(AGGREGATIONS))
def test_value_and_gradient_are_the_definition(seed, aggregation):
    rng = np.random.default_rng(seed)
    mask = rng.random((rng.integers(1, 6), rng.integers(1, 8))) < 0.6
    mask[0, 0] = True
    per_token = np.where(mask, rng.normal(size=mask.shape), math.nan)
    max_length = mask.shape[1] + 2
    lengths = [sum(row) for row in mask.tolist()]
    num_nonempty = sum(length > 0 for length in lengths)
    weight_of_row = {
        "token": [1 / sum(lengths)] * len(mask),
        "sequence": [1 / (num_nonempty * max(length, 1)) for length in lengths],
        "sequence_sum": [1 / num_nonempty] * len(mask),
        "constant": [1 / (len(mask) * max_length)] * len(mask),
    }[aggregation]
    weights = np.where(mask, np.array(weight_of_row)[:, None], 0.0)

    leaf = torch.tensor(per_token, requires_grad=True)
    denominator = denominator_of(torch.tensor(mask), aggregation=aggregation, max_length=max_length)
    loss = aggregate(leaf, torch.tensor(mask), aggregation=aggregation, denominator=denominator)
    assert loss.item() == pytest.approx(float(np.nansum(weights * per_token)), rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(torch.autograd.grad(loss, leaf)[0].numpy(), weights, rtol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_denominators_of_micro_batches_add_up_also_when_each_is_trimmed(aggregation):
    whole = denominator_of(MASK, aggregation=aggregation, max_length=5)
    parts = [MASK[:1], MASK[1:2, :1], MASK[2:, :1]]
    assert sum(denominator_of(part, aggregation=aggregation, max_length=5) for part in parts) == whole


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_denominator_may_be_a_number_or_a_tensor(aggregation):
    by_int = aggregate(PER_TOKEN, MASK, aggregation=aggregation, denominator=8)
    by_float = aggregate(PER_TOKEN, MASK, aggregation=aggregation, denominator=8.0)
    by_tensor = aggregate(PER_TOKEN, MASK, aggregation=aggregation, denominator=torch.tensor(8))
    assert by_int == by_float == by_tensor
    assert by_tensor.dtype == torch.float32


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_empty_micro_batch_gives_0_and_a_zero_gradient(aggregation):
    leaf = torch.full((2, 3), math.nan, requires_grad=True)
    loss = aggregate(leaf, torch.zeros(2, 3).bool(), aggregation=aggregation, denominator=7)
    assert loss.item() == 0
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], torch.zeros(2, 3))


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum"])
def test_an_empty_minibatch_is_refused(aggregation):
    with pytest.raises(ValueError, match="response_mask has no True element"):
        aggregate(torch.ones(2, 3), torch.zeros(2, 3).bool(), aggregation=aggregation, denominator=None)


@pytest.mark.parametrize("denominator", [0, -3.0, math.nan, torch.tensor(0)])
def test_a_denominator_that_counts_nothing_is_refused(denominator):
    with pytest.raises(ValueError, match=r"denominator=.* is not positive"):
        aggregate(PER_TOKEN, MASK, aggregation="token", denominator=denominator)


def test_constant_is_refused_where_the_maximum_length_is_unknown():
    with pytest.raises(ValueError, match="pass max_length"):
        denominator_of(MASK, aggregation="constant")
    with pytest.raises(ValueError, match="aggregation='constant' needs an explicit denominator"):
        aggregate(PER_TOKEN, MASK, aggregation="constant", denominator=None)
    with pytest.raises(
        ValueError, match="max_length=2 must be ≥ 1 and no less than the longest response, 3 tokens"
    ):
        denominator_of(MASK, aggregation="constant", max_length=2)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="aggregation='mean' is unknown; use one of token, sequence"):
        aggregate(PER_TOKEN, MASK, aggregation="mean", denominator=4)
    with pytest.raises(ValueError, match="aggregation='mean' is unknown"):
        denominator_of(MASK, aggregation="mean")
