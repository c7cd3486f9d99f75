"""Frozen networks in host memory visit the device when they are needed, and only a visit reads their weights."""

import pytest
import torch
from torch import Tensor, nn

from vantage.tasks.training import offloading
from vantage.tasks.training.offloading import offloaded, on_device

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Two names of one weight, a bias, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.scale * self.head(self.embedding(ids))
        return found


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return what came to the device: copies, as if it had a memory of its own."""
    found: list[Tensor] = []

    def on(device: torch.device, weight: Tensor) -> Tensor:
        found.append(weight.clone())
        return found[-1]

    monkeypatch.setattr(offloading, "on", on)
    return found


def test_weights_come_once_for_nested_visits_and_leave_with_the_last(visits: list[Tensor]) -> None:
    network = offloaded(Tied().requires_grad_(False), CPU)
    ids = torch.tensor([[1, 2]])
    at_rest = network.head.weight.data_ptr()
    with on_device(network):
        expected = network(ids)
        with on_device(network):
            assert len(visits) == 2, "the tied weight and the bias"
            assert network.head.weight.data_ptr() == visits[0].data_ptr()
        assert network.head.weight.data_ptr() == visits[0].data_ptr(), "the inner visit ends none"
        assert torch.equal(network(ids), expected)
    assert network.head.weight.data_ptr() == at_rest
    assert network.head.weight is network.embedding.weight
    for gone in visits:
        gone.fill_(torch.nan)  # the device gives the memory to others
    with on_device(network):
        assert torch.equal(network(ids), expected)
    assert len(visits) == 4


def test_outside_a_visit_it_does_not_compute() -> None:
    network = offloaded(Tied().requires_grad_(False), CPU)
    with pytest.raises(AssertionError, match="computes inside on_device alone"):
        network(torch.tensor([[1]]))
    with pytest.raises(RuntimeError, match="in the block"), on_device(network):
        raise RuntimeError("in the block")
    with pytest.raises(AssertionError, match="computes inside on_device alone"):
        network(torch.tensor([[1]]))


def test_a_network_that_shares_its_weights_keeps_them_where_they_are(visits: list[Tensor]) -> None:
    """A stage that samples from the policy that is also its reference loads one set of weights."""
    first, second = Tied().requires_grad_(False), Tied().requires_grad_(False)
    second.embedding.weight = second.head.weight = first.head.weight
    shared = first.head.weight
    offloaded(second, CPU)
    assert first.head.weight is shared is not second.head.weight
    with on_device(second):
        assert first.head.weight.data_ptr() == shared.data_ptr()
        assert torch.equal(second.head.weight, first.head.weight)
    with on_device(first):
        assert len(visits) == 2, "one that is not offloaded is where it was"


def test_weights_in_another_form_are_refused() -> None:
    class InFourBits(nn.Parameter):
        pass

    network = nn.Linear(2, 2)
    network.weight = InFourBits(torch.zeros(2, 2))
    with pytest.raises(
        ValueError, match=r"resources.offload moves plain weights, and weight is a InFourBits"
    ):
        offloaded(network, CPU)
