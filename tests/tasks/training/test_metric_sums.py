"""Means over micro-batches of unequal size are those of the whole, not means of means."""

import torch

from vantage.algorithms.supervised_loss import token_nll
from vantage.tasks.training.metric_sums import LossSums, MetricSums, read_together


def test_micro_batches_add_up() -> None:
    """Tokens cost 1, 1, 1 and 5 nats: the mean is 2. The mean of the micro-batches' means (1 and 5) would be 3."""
    sums = MetricSums()
    for nll in ([1.0, 1.0, 1.0], [5.0]):
        logprobs = -torch.tensor([nll])
        sums.add(token_nll(logprobs, torch.ones_like(logprobs, dtype=torch.bool), denominator=4.0))
    assert sums.means() == {"nll": 2.0}


def test_what_was_never_counted_is_left_out() -> None:
    sums = MetricSums()
    logprobs = torch.zeros(1, 2)
    sums.add(token_nll(logprobs, torch.zeros_like(logprobs, dtype=torch.bool), denominator=1.0))
    assert sums.means() == {}


def test_losses_add_up_as_python_adds_them() -> None:
    """Each float32 is added exactly in float64; a sum in float32 would differ."""
    losses = [torch.tensor(value) for value in (0.1, 1e8, 0.3, -1e8)]
    sums = LossSums("entropy")
    for loss in losses:
        sums.add("loss", loss.requires_grad_(), 0.5)
    sums.add("loss", torch.tensor(7.0), 0.0)
    by_python = 0.0
    for loss in losses:
        by_python += 0.5 * loss.item()
    assert sums.totals() == {"entropy": 0.0, "loss": by_python}
    assert by_python != float(0.5 * sum(each.detach() for each in losses))


def test_numbers_are_read_in_their_order_whatever_their_type() -> None:
    count = torch.tensor(2**40 + 1)
    assert read_together([count, 0.5, torch.tensor(0.25, dtype=torch.bfloat16)]) == [2**40 + 1, 0.5, 0.25]
    assert read_together([]) == []
